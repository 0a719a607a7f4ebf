"""The tables of those who watch from outside. Owns columns and keys; what they mean together is job_totals.py's."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from shoal_service.models import Base


class JobTotalsRow(Base):
    """What a job's journal up to `seq` adds up to (`job_figures.Figures`), and the nodes that it has
    (`job_figures.Held`), which is kept apart since it is larger and changes less often. `trace_from` is the number of
    the first recovery of which no trace was sent yet."""

    __tablename__ = "job_totals"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int]
    figures: Mapped[dict[str, Any]] = mapped_column(JSON)
    held: Mapped[dict[str, Any]] = mapped_column(JSON)
    trace_from: Mapped[int | None] = mapped_column(index=True)
