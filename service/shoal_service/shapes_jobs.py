"""What answers about jobs look like."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from shoal_service.shapes import At, JobSpec, Plan, State, document, one_of
from shoal_service.shapes_pools import WishedPool

Kind = Literal["train", "ray_train"]
Wish = Annotated[str, one_of("run", "paused", "cancelled")]


class Evaluation(TypedDict):
    """The newest mean loss over held-out tokens; null where it is no finite number."""

    step: int
    loss: float | None
    perplexity: float | None


class Waited(TypedDict):
    """Seconds of one step, over all ranks."""

    mean: float
    most: float


class Exchanges(TypedDict):
    """What ranks exchanged in the newest step: which share of it they waited (on average and at most), for what, and
    what they sent, by link."""

    step: int
    exposed_share: float
    most_exposed_share: float
    waited_s: dict[str, Waited]
    moved_bytes: dict[str, int]


class JobStatus(TypedDict):
    """Ours: `code` is stable for programs, `reason` a sentence for people."""

    state: State
    code: str
    reason: str
    since: At
    step: int
    steps: Annotated[int | None, Field(description="Null where nobody but the job's script knows.")]
    epoch: int
    loss: float | None
    evaluation: Evaluation | None
    plan_id: str | None
    tokens_per_s: float | None
    step_s: float | None
    eta_s: float | None
    recoveries: int
    redone_steps: int
    lost_steps: int
    skipped_steps: int
    store_problem: str | None
    exchanges: Exchanges | None
    last_seq: Annotated[int, Field(description="Of its journal.")]


class Job(TypedDict):
    """`spec` and `wish` are the user's, `status` is ours."""

    id: str
    project: str
    name: str
    kind: Kind
    spec: JobSpec
    wish: Wish
    cluster_id: str | None
    created_at: At
    created_by: Annotated[str | None, Field(description="`admin` or a user's id; null: of before that was kept.")]
    updated_at: At
    status: JobStatus


class ClusterOfJob(TypedDict):
    """What there is to say of the cluster that has a job; `problem` where it is not heard of."""

    id: str
    connected: bool
    heard_of_at: At
    fault_tolerant_head: bool | None
    if_head_dies: str
    problem: str | None


class Tracker(TypedDict):
    """All steps up to `step` stand in the tracker; `complete`: so does the end of the job, and nothing follows."""

    tool: str
    url: str | None
    step: int
    complete: bool
    problem: str | None
    problem_since: At | None


class Share(TypedDict):
    """Which nodes of its cluster the job may use (null: all), and what it waits for. `leaving` are nodes that it still
    uses; null where it has not said yet which it has left."""

    priority: int
    nodes: list[str] | None
    leaving: list[str] | None
    code: str | None
    reason: str | None
    queue_position: int | None
    hold: str | None
    warning: str | None


class JobProblem(TypedDict):
    """Why what `status` says may be old, and what happens next; goes away by itself. `code`: `cluster_silent`."""

    code: str
    since: At
    reason: str


class ListedJob(Job):
    """`problem` where there is one."""

    problem: JobProblem | None


class JobInFull(ListedJob):
    """A job by itself."""

    cluster: ClusterOfJob | None
    trackers: list[Tracker]
    share: Share


class Expected(TypedDict):
    """What all steps take by the plan if nothing happens, and cost in dollars: null where no node has a price."""

    steps: int
    step_s: float
    tokens_per_s: float
    hours: float
    num_nodes: int
    unpriced_nodes: int
    usd_per_hour: float | None
    usd: float | None
    usd_per_million_tokens: float | None


class SpentSums(TypedDict):
    """Dollars so far and now, without nodes that nobody knows the price of."""

    num_jobs: int
    usd: float
    usd_per_hour: float
    unpriced_node_hours: float


class SpentOfProject(SpentSums):
    project: str


class SpentOfPerson(SpentSums):
    """`person` is `admin` or a user's id; null: of jobs that were made before that was kept."""

    person: str | None
    name: str


class Spending(TypedDict):
    num_jobs: int
    not_counted: int
    by_project: list[SpentOfProject]
    by_person: list[SpentOfPerson]


class Foretold(TypedDict):
    """What is worth knowing of the field `param` before anything is spent: a limit that the job is predicted to reach
    before it is done, or what of an imported folder it does not go by; `reason` has the figures."""

    code: str
    param: str
    reason: str


class DryRun(TypedDict):
    """What would come of a job. `plan` and `expected` are null where nobody can tell; `reason` says why. `warnings` say
    which of its limits do not suffice for what is expected, and what of an imported folder it does not go by."""

    dry_run: Literal[True]
    name: str
    kind: Kind
    spec: JobSpec
    cluster_id: str | None
    plan: Plan | None
    expected: Expected | None
    warnings: list[Foretold]
    reason: str


class WishedShare(TypedDict):
    version: int
    nodes: list[str] | None
    reason: str


class Why(TypedDict):
    """Why the control plane lets a job rest."""

    code: str
    words: str


class WishOfControl(TypedDict):
    """What the control plane wants of a job, whatever its user does."""

    share: WishedShare
    why: Why | None


class WishedJob(WishOfControl):
    """As a connector hears of a job."""

    id: str
    spec: JobSpec
    wish: Wish
    last_seq: int
    saves: Annotated[int, Field(description="How often somebody wished its newest step into its store.")]


class WishedDrill(TypedDict):
    id: str
    node: str
    left_s: float


class Wishes(TypedDict):
    """What a cluster is to run. `version` changes with what is wished, not with progress."""

    version: int
    jobs: list[WishedJob]
    drills: list[WishedDrill]
    pools: Annotated[list[WishedPool] | None, Field(description="Null before anything is asked of them.")]


Event = Annotated[dict[str, Any], document("JournalEvent")]


class Events(TypedDict):
    """A page of a journal; the next one is asked for with `after` = `next_after`."""

    items: list[Event]
    next_after: int
    more: bool
    last_seq: int


class LogLine(TypedDict):
    line: int
    at: At
    level: Annotated[str, one_of("debug", "info", "warning", "error")]
    attempt: int
    rank: int | None
    node: str | None
    text: str


class Forgotten(TypedDict):
    lines: int
    reason: str


class LogLines(TypedDict):
    """`forgotten`: how many of the first lines are not kept any more, and why."""

    items: list[LogLine]
    next_cursor: str | None
    forgotten: Forgotten | None
