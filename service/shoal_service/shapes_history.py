"""What answers about the history of a job look like."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from shoal_service.shapes import At, document, one_of

Recovery = Annotated[dict[str, Any], document("Recovery")]
BulkLoss = Annotated[dict[str, Any], document("BulkLoss")]
PlanInForce = Annotated[dict[str, Any], document("PlanInForce")]


class Point(TypedDict):
    """One step of the curve; null is what was no finite number, or what a script does not report."""

    step: int
    epoch: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens_per_s: float | None
    duration_s: float
    skipped: bool
    at: At


class Marker(TypedDict):
    """A change of plan in flight."""

    kind: str
    step: int
    epoch: int
    cause: str
    label: str
    at: At


class EvaluationPoint(TypedDict):
    step: int
    loss: float | None
    perplexity: float | None
    tokens: int
    duration_s: float
    at: At


class Reported(TypedDict):
    """What a script reported, under its own names."""

    step: int
    epoch: int
    metrics: dict[str, Any]
    duration_s: float
    at: At


class Curve(TypedDict):
    """`points` is the branch that counts, `rolled_back` what was done and undone. `thinned`: of old steps only some are
    kept."""

    job_id: str
    points: list[Point]
    rolled_back: list[Point]
    markers: list[Marker]
    evaluations: list[EvaluationPoint]
    reported: list[Reported]
    num_points: int
    num_rolled_back: int
    downsampled: bool
    thinned: bool


class BytesBySource(TypedDict):
    own: int
    node: int
    peer: int
    store: int


class Recoveries(TypedDict):
    """Oldest first, of many the newest; `total` says how many there were."""

    items: list[Recovery]
    total: int
    redone_steps: int
    lost_steps: int
    bytes: BytesBySource


class BulkLosses(TypedDict):
    """The costliest first; `state_bytes` is the whole state."""

    epoch: int | None
    state_bytes: int
    stored_step: int | None
    items: list[BulkLoss]


class CheckpointVerified(TypedDict):
    """`by` manifest: it was read back once it was written, after all shards had come whole; by bytes: a recovery read
    from it, and checksums agreed. `seq` is the journal's entry of that."""

    at: At
    by: Annotated[str, one_of("manifest", "bytes")]
    seq: int


class Checkpoint(TypedDict):
    """Null where the journal does not say. `duration_s`: from the first shard that came to the manifest;
    `held_up_s`: how much sooner the next step would have been done, had it not waited for copies of this state."""

    step: int
    uri: str
    epoch: int | None
    num_bytes: int | None
    committed_at: At | None
    duration_s: float | None
    held_up_s: float | None
    verified: CheckpointVerified | None


class Checkpoints(TypedDict):
    """Newest first; `uri` is null where the job has no store."""

    uri: str | None
    items: list[Checkpoint]


class Attempt(TypedDict):
    """One epoch. `cause` is what it was for, `outcome` what became of it: the cause of the next one, or a state."""

    attempt: Annotated[int, Field(description="The epoch.")]
    seq: int
    cluster_id: str | None
    plan_id: str | None
    cause: str | None
    reason: str | None
    began_at: At
    ended_at: At | None
    outcome: str | None
    from_step: int
    last_step: int
    steps_done: int
    steps_rolled_back: int
    redone_steps: int
    lost_steps: int
    nodes: list[str]


class OnDemandPlan(TypedDict):
    """An estimate: the fewest nodes of one kind, none of them spot, whose plan is predicted to be as fast as the job's
    own plan is (`as_fast`; else the fastest that was found), if nothing happens to them. Steps of the job take
    `measured_by_predicted` times as long as predicted, and so they would there. `usd` is what the job's tokens so far
    would have cost there, at `usd_per_million_tokens`, `saved_usd` how much more that is than was spent; null where
    that is not known. `price_source` says who stated `price_per_hour`, of one node."""

    device: str
    devices: int
    num_nodes: int
    price_per_hour: float
    price_source: str
    usd_per_hour: float
    step_s: float
    tokens_per_s: float
    wanted_tokens_per_s: float
    as_fast: bool
    measured_by_predicted: float
    usd_per_million_tokens: float
    usd: float
    saved_usd: float | None
    compared_at: At
