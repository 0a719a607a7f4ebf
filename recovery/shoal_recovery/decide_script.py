"""What to do with a job of kind `ray_train`: pure, values in, one decision with its reason out.

Ray Train starts the workers of a script anew by itself, from the checkpoint that the script has reported last. What is
decided here is what it cannot know: where script and workers may run, when they leave a node before it goes, whether
what failed was the user's or was lost with a node, and when the script itself has to be started somewhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_recovery.evidence import names
from shoal_recovery.journal import AT_REST, JobState

START_WAIT_S = 60.0
TRIES = 3  # of a script that is lost each time before it has reported anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node that answers and may be used: `slots` workers fit there. `spot`: it may be taken away any time; `doomed`:
    it is to go away. The `head` computes nothing, and no cluster outlives it."""

    node: str
    slots: int
    spot: bool = False
    doomed: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The script's process is over: with this `exit` status, or it was `lost`, as far as is known `with_node`. `code`
    and `problem` are for programs and people, where it failed."""

    exit: int | None
    code: str = ""
    problem: str = ""
    lost: bool = False
    with_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSeen:
    """`expected` are all nodes that the cluster has for the job, ready or not; `gone` those of the script or of its
    workers that are lost, each with the evidence, and not written down yet. `script` is where the script was started,
    None where it is not, `launches` how often it was, and `ended` how its process ended. `steps` were reported since it
    was started there."""

    state: JobState
    places: tuple[Place, ...]
    expected: frozenset[str]
    min_workers: int
    in_state_s: float
    cancel_wanted: bool = False
    pause_wanted: bool = False
    why_paused: tuple[str, str] = ("paused_by_user", "on request")
    gone: tuple[tuple[str, str], ...] = ()
    script: str | None = None
    launches: int = 0
    ended: Ended | None = None
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOn:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The script is to be started on `node`."""

    node: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteLoss:
    """`nodes` are lost, each with the evidence. `script`: the script was on one of them."""

    nodes: tuple[tuple[str, str], ...]
    script: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """There is no room; what is left waits."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The job is over, or rests: whatever runs of it ends, then this is its state."""

    state: JobState
    code: str
    reason: str


ScriptDecision = KeepOn | Launch | NoteLoss | Await | Finish


def decide_script(seen: ScriptSeen) -> ScriptDecision:
    """The newest wish of the user first; then what is lost, then what has ended, then what is to be started."""
    if seen.state in AT_REST:
        return KeepOn()
    if seen.cancel_wanted:
        return Finish(state=JobState.CANCELLED, code="cancelled_by_user", reason="Cancelled on request.")
    if seen.pause_wanted:
        code, why = seen.why_paused
        reason = f"Paused {why}; it goes on from its newest checkpoint."
        return Finish(state=JobState.PAUSED, code=code, reason=reason)
    if seen.gone:
        return _loss(seen)
    if seen.ended is not None:
        return _ended(seen, seen.ended)
    if seen.script is None:
        return _start(seen)
    if seen.state is JobState.RECOVERING and room(seen.places) < seen.min_workers:
        return Await(reason=_no_room(seen))
    return KeepOn()


def room(places: tuple[Place, ...]) -> int:
    """How many workers fit where they may be."""
    return sum(slots for slots in usable(places, 0).values())


def usable(places: tuple[Place, ...], min_workers: int) -> dict[str, int]:
    """Where workers may be started, and how many. On nodes that are to go away only where too few others are left."""
    staying = {place.node: place.slots for place in places if place.slots and not place.doomed and not place.head}
    if sum(staying.values()) >= min_workers:
        return staying
    return {place.node: place.slots for place in places if place.slots and not place.head}


def leaves(places: tuple[Place, ...], workers: frozenset[str], min_workers: int) -> frozenset[str]:
    """Of the nodes of the workers, those that they are to leave: they are to go away, and enough others are left."""
    doomed = frozenset(place.node for place in places if place.doomed)
    return (workers & doomed) - usable(places, min_workers).keys()


def may_grow(step: int, stored: int) -> bool:
    """Whether more workers may be taken in, which are all started anew: where that undoes nothing that was reported,
    and the script is one that stores what it has."""
    return 0 < step == stored


def size(slots: Mapping[str, int], min_workers: int, max_workers: int) -> int | None:
    """How many workers to start; None: too few fit."""
    fit = min(sum(slots.values()), max_workers)
    return fit if fit >= min_workers else None


def seat(places: tuple[Place, ...]) -> str | None:
    """Where the script itself runs best: where it is least likely to be taken away, and on the head only where
    everything else is."""
    order = sorted(
        (place.doomed, place.spot and not place.head, place.head, place.node)
        for place in places
        if place.slots or place.head
    )
    return order[0][-1] if order else None


def _loss(seen: ScriptSeen) -> NoteLoss:
    evidence = "; ".join(f"{node}: {why}" for node, why in seen.gone)
    with_script = seen.script in {node for node, _ in seen.gone}
    goes_on = "The script is started anew elsewhere" if with_script else "Its workers are started anew"
    reason = f"Lost {names(node for node, _ in seen.gone)} ({evidence}). {goes_on}, from the newest checkpoint."
    return NoteLoss(nodes=seen.gone, script=with_script, reason=reason)


def _ended(seen: ScriptSeen, ended: Ended) -> ScriptDecision:
    if ended.lost and (ended.with_node or seen.steps or seen.launches < TRIES):
        return _start(seen, why=ended.problem)
    if ended.exit == 0:
        return Finish(state=JobState.SUCCEEDED, code="finished", reason="The script has ended.")
    return Finish(state=JobState.FAILED, code=ended.code or "script_failed", reason=ended.problem)


def _start(seen: ScriptSeen, why: str = "") -> ScriptDecision:
    ready = frozenset(place.node for place in seen.places)
    all_there = bool(seen.expected) and ready >= seen.expected
    if seen.state is JobState.STARTING and not all_there and seen.in_state_s < START_WAIT_S:
        return KeepOn()
    node = seat(seen.places)
    if node is None or sum(usable(seen.places, seen.min_workers).values()) < seen.min_workers:
        return Await(reason=_no_room(seen)) if all_there or seen.in_state_s >= START_WAIT_S else KeepOn()
    if not seen.launches:
        return Launch(node=node, code="started", reason=f"The script is started on {node}.")
    again = f"{why} " if why else ""
    return Launch(node=node, code="started_again", reason=f"{again}The script is started again, on {node}.")


def _no_room(seen: ScriptSeen) -> str:
    fit = sum(usable(seen.places, seen.min_workers).values())
    there = names(place.node for place in seen.places)
    return f"Waiting for nodes: {seen.min_workers} workers are needed (workers.min), and {fit} fit on {there}."
