"""The table of drills. What a cluster is told of them stands with the cluster; owns columns and keys alone."""

from __future__ import annotations

from sqlalchemy import Float, String
from sqlalchemy.orm import Mapped, mapped_column

from shoal_service.models import Base


class DrillRow(Base):
    """A drill that was asked for, by whom (`admin`, or a user's id), and when; kept when it is over."""

    __tablename__ = "drills"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    cluster_id: Mapped[str] = mapped_column(String(80))
    node: Mapped[str] = mapped_column(String(200))
    at_s: Mapped[float] = mapped_column(Float)
    ends_at_s: Mapped[float] = mapped_column(Float)
    created_by: Mapped[str] = mapped_column(String(40))
