"""The tables of pools of nodes that can be had and given back. What they mean together is pools.py's."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Float, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from shoal_service.models import Base


class PoolRow(Base):
    """One pool of a cluster: what its connector said of it last (`about`, at `seen_at_s`), what is asked of it and was
    so far (`memory`, `provisioning.PoolMemory`; null: nothing was decided yet), what one of its nodes costs in an hour
    by whom (null: as the POOLS file says), why its cloud offers none at all (null: nobody says so), and how many nodes
    were asked for, came, did not, and were given back."""

    __tablename__ = "pools"

    cluster_id: Mapped[str] = mapped_column(String(80), primary_key=True)
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    about: Mapped[dict[str, Any]] = mapped_column(JSON)
    seen_at_s: Mapped[float] = mapped_column(Float)
    memory: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    price_per_hour: Mapped[float | None] = mapped_column(Float)
    price_source: Mapped[str | None] = mapped_column(String(40))
    price_at_s: Mapped[float | None] = mapped_column(Float)
    not_offered: Mapped[str | None] = mapped_column(Text)
    num_asked: Mapped[int]
    num_came: Mapped[int]
    num_short: Mapped[int]
    num_released: Mapped[int]


class PoolEventRow(Base):
    """Something that was asked of a pool, or came of it; `job_id` is the first job that it is for."""

    __tablename__ = "pool_events"
    __table_args__ = (Index("ix_pool_events_cluster_id", "cluster_id", "id"), Index("ix_pool_events_job_id", "job_id"))

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    cluster_id: Mapped[str] = mapped_column(String(80))
    job_id: Mapped[str | None] = mapped_column(String(40))
    pool: Mapped[str] = mapped_column(String(40))
    at_s: Mapped[float] = mapped_column(Float, index=True)
    kind: Mapped[str] = mapped_column(String(40))
    count: Mapped[int]
    reason: Mapped[str] = mapped_column(Text)
    nodes: Mapped[list[str]] = mapped_column(JSON)


class RentalRow(Base):
    """A machine of a pool for a time: from when it starts (`node` is null until it has joined), at one price, on the
    account of one job (null: on nobody's), until it goes or one of these changes."""

    __tablename__ = "rentals"
    __table_args__ = (Index("ix_rentals_cluster_id", "cluster_id", "until_at_s"), Index("ix_rentals_job_id", "job_id"))

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    cluster_id: Mapped[str] = mapped_column(String(80))
    pool: Mapped[str] = mapped_column(String(40))
    node: Mapped[str | None] = mapped_column(String(80))
    job_id: Mapped[str | None] = mapped_column(String(40))
    device: Mapped[str] = mapped_column(String(80))
    devices: Mapped[int]
    spot: Mapped[bool]
    price_per_hour: Mapped[float] = mapped_column(Float)
    since_at_s: Mapped[float] = mapped_column(Float)
    until_at_s: Mapped[float | None] = mapped_column(Float)
