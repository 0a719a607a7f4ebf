"""The tables. Owns columns and keys; what they mean together is status.py, journal.py, clusters.py and auth.py.

Times are wall-clock seconds (`_at_s`), for display and expiry; durations in seconds come from those who measured them.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, LargeBinary, String, Text, UniqueConstraint, false
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """All tables; migrations must produce exactly these (a test compares them)."""


class JobRow(Base):
    """One job: the user's wish, and what its journal says so far (`version` counts every change of the row, `saves` how
    often a checkpoint was asked for). `created_by`: `admin` or the id of a user (null: made before that was kept)."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
        Index("ix_jobs_project_id", "project_id", "id"),
        Index("ix_jobs_state_id", "state", "id"),
        Index("ix_jobs_cluster_state", "cluster_id", "state"),
        Index("ix_jobs_state_since", "state", "since_at_s"),
        Index("ix_jobs_project_state", "project_id", "state"),
        Index("ix_jobs_queue", "cluster_id", "state", "project_id", "created_at_s", "id"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(40), server_default="default")
    name: Mapped[str] = mapped_column(String(100))
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    wish: Mapped[str] = mapped_column(String(20))
    cluster_id: Mapped[str | None] = mapped_column(String(80))
    idempotency_key: Mapped[str | None] = mapped_column(String(200))
    body_hash: Mapped[str] = mapped_column(String(64))
    created_at_s: Mapped[float] = mapped_column(Float)
    created_by: Mapped[str | None] = mapped_column(String(40))
    updated_at_s: Mapped[float] = mapped_column(Float)
    version: Mapped[int]
    state: Mapped[str] = mapped_column(String(20))
    state_code: Mapped[str] = mapped_column(String(80))
    reason: Mapped[str] = mapped_column(Text)
    since_at_s: Mapped[float] = mapped_column(Float)
    last_seq: Mapped[int]
    step: Mapped[int]
    epoch: Mapped[int]
    loss: Mapped[float | None] = mapped_column(Float)
    eval_step: Mapped[int | None]
    eval_loss: Mapped[float | None] = mapped_column(Float)
    eval_s: Mapped[float | None] = mapped_column(Float)
    exchanges: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    step_s: Mapped[float | None] = mapped_column(Float)
    tokens_per_s: Mapped[float | None] = mapped_column(Float)
    plan_id: Mapped[str | None] = mapped_column(String(40))
    plan_seq: Mapped[int | None]
    num_recoveries: Mapped[int]
    redone_steps: Mapped[int]
    lost_steps: Mapped[int]
    skipped_steps: Mapped[int] = mapped_column(server_default="0")
    store_problem: Mapped[str | None] = mapped_column(Text)
    saves: Mapped[int] = mapped_column(server_default="0")
    # What its retention has taken: the journal up to this number, and most points of its curve.
    forgotten_seq: Mapped[int] = mapped_column(server_default="0")
    is_thinned: Mapped[bool] = mapped_column(server_default=false())


class JournalRow(Base):
    """One entry of a job's journal, as its supervisor wrote it. `payload` are the fields of its kind.

    Append-only: triggers refuse changes, and deletions of what is newer than the job's `forgotten_seq`.
    """

    __tablename__ = "journal"
    __table_args__ = (Index("ix_journal_job_kind_seq", "job_id", "kind", "seq"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at_s: Mapped[float] = mapped_column(Float)
    kind: Mapped[str] = mapped_column(String(40))
    payload: Mapped[dict[str, Any]] = mapped_column(JSON)


class StepRow(Base):
    """One point of the loss curve. Rolled-back points stay; `loss` is null where it was not a finite number. `skipped`
    ones brought no update. `stalled_s` of `duration_s` were waited for the safety of the step before (null: not told).

    Keyed by the journal's `seq`, since a step may be done once in each of several epochs.
    """

    __tablename__ = "step_points"
    __table_args__ = (Index("ix_step_points_job_live_step", "job_id", "rolled_back", "step"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    step: Mapped[int]
    at_s: Mapped[float] = mapped_column(Float)
    loss: Mapped[float | None] = mapped_column(Float)
    grad_norm: Mapped[float | None] = mapped_column(Float)
    lr: Mapped[float | None] = mapped_column(Float)
    tokens: Mapped[int]
    duration_s: Mapped[float] = mapped_column(Float)
    rolled_back: Mapped[bool]
    skipped: Mapped[bool] = mapped_column(server_default=false())
    stalled_s: Mapped[float | None] = mapped_column(Float)


class TrackerRow(Base):
    """How far a job's metrics are with one of its trackers, and who writes them (`holder`, until `lease_until_s`).

    All up to `step`, whose journal number is `step_seq`, was written, and evaluations and recoveries up to the
    journal's `seq`. `position` is what the writer must be told to go on from there. A higher `generation` began anew,
    because what was written does not count any more. `problem`: why the tracker takes nothing at present.
    """

    __tablename__ = "trackers"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    tool: Mapped[str] = mapped_column(String(20), primary_key=True)
    generation: Mapped[int]
    step: Mapped[int]
    step_seq: Mapped[int]
    seq: Mapped[int]
    position: Mapped[dict[str, Any]] = mapped_column(JSON)
    url: Mapped[str | None] = mapped_column(Text)
    problem: Mapped[str | None] = mapped_column(Text)
    problem_since_s: Mapped[float | None] = mapped_column(Float)
    complete: Mapped[bool] = mapped_column(index=True)
    holder: Mapped[str | None] = mapped_column(String(200))
    lease_until_s: Mapped[float] = mapped_column(Float)


class LogRow(Base):
    """What a job printed, as a whole: its lines are numbered from 1 as they come, and those before `first_line` are
    `forgotten`, for that reason. `num_bytes` of text are kept."""

    __tablename__ = "logs"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    next_line: Mapped[int] = mapped_column(BigInteger)
    first_line: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    forgotten: Mapped[str | None] = mapped_column(Text)


class LogSourceRow(Base):
    """How far the lines of a source are stored, which may bring them again: one life of the agent of a node."""

    __tablename__ = "log_sources"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    source: Mapped[str] = mapped_column(String(120), primary_key=True)
    last_number: Mapped[int] = mapped_column(BigInteger)


class LogChunkRow(Base):
    """Lines that follow each other, compressed, and what is common to them: so most chunks need not be opened to know
    that nothing in them is looked for. `worst` is the place of the most serious level."""

    __tablename__ = "log_chunks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    first_line: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    num_lines: Mapped[int]
    num_bytes: Mapped[int]
    first_at_s: Mapped[float] = mapped_column(Float)
    last_at_s: Mapped[float] = mapped_column(Float, index=True)
    first_attempt: Mapped[int]
    last_attempt: Mapped[int]
    worst: Mapped[int]
    content: Mapped[bytes] = mapped_column(LargeBinary)


class ShareRow(Base):
    """Which nodes of its cluster a job may use. `version` counts what it was told: `nodes` (null: all that there are
    and will be), for `reason`. `held` is what it may still be using, which is more until its supervisor has confirmed
    this version. `code` and `position` (in the queue) say how it stands beside other jobs. `hold` and `hold_words` say
    why the control plane itself lets the job rest, or go for a while; `warning` what is about to run out. `limited`: it
    has a budget or a deadline."""

    __tablename__ = "shares"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    priority: Mapped[int] = mapped_column(index=True)
    limited: Mapped[bool] = mapped_column(index=True)
    version: Mapped[int]
    nodes: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    held: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    reason: Mapped[str] = mapped_column(Text)
    code: Mapped[str] = mapped_column(String(80))
    position: Mapped[int | None]
    hold: Mapped[str | None] = mapped_column(String(80))
    hold_words: Mapped[str] = mapped_column(Text)
    warning: Mapped[str | None] = mapped_column(Text)


class ClusterRow(Base):
    """A cluster that came to us: who speaks for it until when, what it consists of, what was measured there, which of
    its nodes are to be told that they go away (`drills`), whether what its head knows outlives the head (None: not
    told), and when each node was last heard and by whom (`signs`)."""

    __tablename__ = "clusters"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    holder: Mapped[str] = mapped_column(String(200))
    lease_until_s: Mapped[float] = mapped_column(Float)
    snapshot: Mapped[dict[str, Any]] = mapped_column(JSON)
    profile: Mapped[dict[str, Any]] = mapped_column(JSON)
    fault_tolerant_head: Mapped[bool | None]
    drills: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    signs: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    updated_at_s: Mapped[float] = mapped_column(Float)


class SecretRow(Base):
    """A sign-in code or a browser session, and whose it is (`subject`, as principals have it). Only its SHA-256 is
    kept; `used_at_s` ends a code for good."""

    __tablename__ = "secrets"

    hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    purpose: Mapped[str] = mapped_column(String(20))
    subject: Mapped[str] = mapped_column(String(40), server_default="admin")
    created_at_s: Mapped[float] = mapped_column(Float)
    expires_at_s: Mapped[float] = mapped_column(Float, index=True)
    used_at_s: Mapped[float | None] = mapped_column(Float)


class CurveRow(Base):
    """What a curve keeps of the steps from `bucket * width` on, `width` of them: the points with the lowest and the
    highest loss (null where none is a number) of the branch that counts, and how many there are.

    Written when the job is through with all of them, dropped when it does one of them again (`curve_levels.py`).
    """

    __tablename__ = "curve_buckets"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    width: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    low_seq: Mapped[int]
    low_loss: Mapped[float | None] = mapped_column(Float)
    high_seq: Mapped[int]
    high_loss: Mapped[float | None] = mapped_column(Float)
    num_points: Mapped[int]


class DutyRow(Base):
    """Something that one replica of this server does for all: who, until `lease_until_s`."""

    __tablename__ = "duties"

    name: Mapped[str] = mapped_column(String(120), primary_key=True)
    holder: Mapped[str | None] = mapped_column(String(200))
    lease_until_s: Mapped[float] = mapped_column(Float)


class KeyRow(Base):
    """What was answered to a post with an Idempotency-Key, other than of a job, for a while. `asked` is the SHA-256 of
    the request; without `answer` that had a secret, and `target` is what came of it."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(String(120), primary_key=True)
    asked: Mapped[str] = mapped_column(String(64))
    target: Mapped[str | None] = mapped_column(String(200))
    status: Mapped[int]
    answer: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    created_at_s: Mapped[float] = mapped_column(Float, index=True)
