"""The table of what jobs would cost on nodes that are all alike and on demand. What it means is comparison.py's."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Float, ForeignKey, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from shoal_service.models import Base


class ComparisonRow(Base):
    """Of the plan of a job that stands in its journal at `plan_seq`, with the `offers` that there were (a digest). Null
    in `found`: nothing was, for `reason`."""

    __tablename__ = "comparisons"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    plan_seq: Mapped[int]
    offers: Mapped[str] = mapped_column(String(64))
    at_s: Mapped[float] = mapped_column(Float)
    found: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    reason: Mapped[str] = mapped_column(Text)
