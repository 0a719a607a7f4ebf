"""The tables of webhooks. Owns columns and keys; what they mean together is webhooks.py's and outbox.py's.

Times are wall-clock seconds (`_at_s`).
"""

from __future__ import annotations

from sqlalchemy import JSON, Float, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from shoal_service.models import Base


class WebhookRow(Base):
    """An address that is told of what happens to the jobs of a project, or of all (`project_id` null), in one of the
    forms of told_words.py. Its secret is made of `nonce` and a key that is not in the database; `secret_hash` tells
    whether that still gives the same one. Until `old_until_s` the secret of `old_nonce`, the one before, signs as well.
    """

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"), index=True)
    url: Mapped[str] = mapped_column(Text)
    form: Mapped[str] = mapped_column(String(10))
    events: Mapped[list[str]] = mapped_column(JSON)
    enabled: Mapped[bool]
    nonce: Mapped[str] = mapped_column(String(64))
    secret_hash: Mapped[str] = mapped_column(String(64))
    old_nonce: Mapped[str | None] = mapped_column(String(64))
    old_until_s: Mapped[float | None] = mapped_column(Float)
    created_by: Mapped[str] = mapped_column(String(40))
    created_at_s: Mapped[float] = mapped_column(Float)
    problem: Mapped[str | None] = mapped_column(Text)


class DeliveryRow(Base):
    """Something that a webhook is to be told, once for each `cause`: written with what happened, in one transaction.
    Tried again from `next_at_s` on while it is `pending`; then it is `delivered`, or `failed` for good."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("webhook_id", "cause", name="uq_webhook_deliveries_cause"),
        Index("ix_webhook_deliveries_state_next", "state", "next_at_s"),
        Index("ix_webhook_deliveries_webhook_id", "webhook_id", "id"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event: Mapped[str] = mapped_column(String(40))
    cause: Mapped[str] = mapped_column(String(200))
    job_id: Mapped[str | None] = mapped_column(String(40))
    body: Mapped[str] = mapped_column(Text)
    created_at_s: Mapped[float] = mapped_column(Float)
    state: Mapped[str] = mapped_column(String(20))
    num_attempts: Mapped[int]
    next_at_s: Mapped[float] = mapped_column(Float)
    last_at_s: Mapped[float | None] = mapped_column(Float)
    status: Mapped[int | None]
    problem: Mapped[str | None] = mapped_column(Text)
