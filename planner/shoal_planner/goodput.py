"""Training steps that a plan is expected to get done on nodes that are taken away now and then.

Owns the expectation: what keeping state costs a step, what an interruption costs, how often state is lost with all its
copies, and so how many copies pay. Does not own rates (`preemption`) nor step times (`score`).

Interruptions come as a Poisson process of rate r. Steps of s seconds are done one after the other; an interruption
loses the step in flight and d done steps, and is followed by a recovery of R seconds, which begins again if it is
interrupted itself. By renewal, the expected steps per second are

    r exp(-r (R + d s)) / (exp(r s) - 1)

which is 1/s for r = 0, about (1/s) (1 - r (R + d s + s/2)) for a small r, and never negative. The same formula with
checkpoints for steps holds for the rarer losses of state with all its copies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.errors import InvalidField
from shoal_planner.holding import Keeping, held_state, placed
from shoal_planner.job import JobSpec
from shoal_planner.memory import OPTIMIZER_BYTES, snapshot_bytes
from shoal_planner.parameters import num_parameters
from shoal_planner.placement import Placement
from shoal_planner.plan import Plan, Prediction
from shoal_planner.pool_history import HOUR_S
from shoal_planner.pools import PoolNode, interruptions_per_h
from shoal_planner.ranges import check_ranges

MOST_COPIES = 3
# Of options whose goodput differs by less than the figures are sure, the one nearest to the usual number: a copy that
# costs nothing is kept even where hardly anything is lost.
COPIES_SHARE = 0.001
_MUCH_UNDONE = 0.5  # of the throughput: who then has no object store is told what one would save


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFigures:
    """What recoveries take. `fixed_s`: noticing, planning and meeting again. `replacement_s`: until another node has
    come for one that was lost. `device_bytes_per_s`: from a device into its host's memory."""

    fixed_s: float = 2.0
    replacement_s: float = 300.0
    store_bytes_per_s: float = 250e6
    device_bytes_per_s: float = 10e9

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {
                "fixed_s": (0, 1e6),
                "replacement_s": (0, 1e7),
                "store_bytes_per_s": (1e-3, 1e18),
                "device_bytes_per_s": (1e-3, 1e18),
            },
        )


DEFAULT_FIGURES = RecoveryFigures()
_NOTHING = Keeping()


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """`step_s` includes what copies add to a step, on average; `share` is of the plan's throughput without losses and
    copies.

    `rollbacks_per_h` are losses of state with all its copies, after which only the object store helps. For copies that
    the plan keeps live on other nodes nothing is sent: `network_bytes_per_parameter` is what all nodes together send.
    """

    tokens_per_s: float
    share: float
    copies: int
    network_bytes_per_parameter: float
    step_s: float
    recovery_s: float
    redone_steps: float
    interruptions_per_h: float
    rollbacks_per_h: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesChoice:
    """`options` are all numbers of copies that were compared, fewest first; what protects less than may be chosen is
    among them to be told."""

    best: Goodput
    options: tuple[Goodput, ...]
    reason: str

    def ranked(self) -> tuple[Goodput, ...]:
        """The best, then what else there is, for where it does not fit after all: without any copy comes last."""
        others = (option for option in self.options if option is not self.best)
        return self.best, *sorted(others, key=lambda option: (not option.copies, -option.tokens_per_s))

    def reason_of(self, option: Goodput) -> str:
        """For the best, or for what is left where those before it do not fit."""
        if option is self.best:
            return self.reason
        what = f"with {_name(option.copies)}" if option.copies else "without copies"
        why = f"as hosts have no room for {_name(self.best.copies)} beside what else the plan keeps there"
        return f"{what}, {why}, {_left(option)}"


def steps_per_s(step_s: float, interruptions_per_s: float, recovery_s: float, redone_steps: float) -> float:
    """The formula on top of this file."""
    rate = interruptions_per_s
    if rate * step_s > 500:  # a step is never done
        return 0.0
    done = rate / math.expm1(rate * step_s) if rate * step_s > 1e-12 else 1 / step_s
    return done * math.exp(-rate * (recovery_s + redone_steps * step_s))


def expected_goodput(
    plan: Plan,
    job: JobSpec,
    snapshot: ClusterSnapshot,
    pools: Mapping[str, PoolNode],
    *,
    copies: int,
    figures: RecoveryFigures = DEFAULT_FIGURES,
    into: Mapping[str, float] | None = None,
) -> Goodput:
    """What a scored plan gets done if each state stands on so many other nodes. By node id: `pools`, and the bytes per
    second that come `into` a node, where more is known of them than what its interfaces carry.

    Nodes that the plan leaves unused keep copies for others; their own losses interrupt nothing. Raises InvalidField if
    a node has no pool, or there are too few nodes for the copies.
    """
    return _Fleet(plan, job, snapshot, pools, figures, into).goodput(copies)


def choose_copies(
    plan: Plan,
    job: JobSpec,
    snapshot: ClusterSnapshot,
    pools: Mapping[str, PoolNode],
    *,
    figures: RecoveryFigures = DEFAULT_FIGURES,
    into: Mapping[str, float] | None = None,
) -> CopiesChoice:
    """The number of copies with the highest expected goodput, of those that the hosts have room for: at least one where
    nodes can be lost, as a safe step is not given up for speed unless the user says so.

    Where the job states a number, it is the only one compared. `into` is what it is in `expected_goodput`, and
    InvalidField is raised as there.
    """
    fleet = _Fleet(plan, job, snapshot, pools, figures, into)
    asked = job.checkpoint.copies
    wanted = range(min(MOST_COPIES, len(fleet.nodes) - 1) + 1) if asked == "auto" else (asked,)
    options = tuple(fleet.goodput(copies) for copies in wanted if copies == min(wanted) or fleet.fits(copies))
    can_be_lost = options[0].interruptions_per_h > 0
    allowed = [option for option in options if option.copies or not can_be_lost] or options
    most = max(option.tokens_per_s for option in allowed)
    near = [option for option in allowed if option.tokens_per_s >= most * (1 - COPIES_SHARE)]
    usual = job.checkpoint.num_copies
    best = min(near, key=lambda option: (abs(option.copies - usual), option.copies))
    lacking = ""
    if asked == "auto" and can_be_lost and not best.copies:
        lacking = "as there is no other node for one" if len(fleet.nodes) == 1 else "as hosts have no room for one"
    reason = _reason(best, options, fleet.prediction.step_s, lacking)
    if job.checkpoint.uri is None and best.share < _MUCH_UNDONE:
        reason += "; without checkpoint.uri a loss of state with all its copies undoes the whole job"
    return CopiesChoice(best=best, options=options, reason=reason)


class _Fleet:
    """What does not depend on the number of copies."""

    def __init__(
        self,
        plan: Plan,
        job: JobSpec,
        snapshot: ClusterSnapshot,
        pools: Mapping[str, PoolNode],
        figures: RecoveryFigures,
        into: Mapping[str, float] | None,
    ) -> None:
        assert plan.prediction is not None, "a plan is scored before its goodput is asked for"
        self.prediction: Prediction = plan.prediction
        self.job = job
        self.figures = figures
        self.nodes: tuple[Node, ...] = snapshot.nodes
        for node in self.nodes:
            if node.id not in pools:
                raise InvalidField("pools", sorted(pools), f"must say to which pool {node.id} belongs")
        self.pools = pools
        self.into = into or {node.id: node.inter_bytes_per_s * node.nics for node in self.nodes}
        self.held = held_state(plan, job)
        self.owned = {node.id: 0.0 for node in self.nodes}
        for held in self.held:
            self.owned[held.home] += held.elements
        self._placed: dict[int, tuple[Placement, dict[str, Keeping]]] = {}
        self.users = tuple(node for node in self.nodes if self.owned[node.id])
        self.rates = {pools[node.id].pool: pools[node.id].rate for node in self.nodes}

    def goodput(self, copies: int) -> Goodput:
        if copies >= len(self.nodes):
            problem = f"each copy needs another node, and there are {len(self.nodes)}"
            raise InvalidField("copies", copies, problem)
        keep_s = self._keep_s(copies)
        terms, every = self.prediction.terms, self.job.checkpoint.protect_every
        kept_step_s = max(self.prediction.step_s, terms.gradient_s + terms.pipeline_s + keep_s)
        step_s = (kept_step_s + (every - 1) * self.prediction.step_s) / every
        # A done step is redone if its state was not yet kept everywhere, or never was to be.
        redone = min(1.0, keep_s / kept_step_s) + (every - 1) / 2
        recovery_s = self.figures.fixed_s + self._move_s()
        per_h = interruptions_per_h(self.pools[node.id] for node in self.users)
        rollbacks_per_h = self._rollbacks_per_h(copies, recovery_s + step_s)
        done = steps_per_s(step_s, per_h / HOUR_S, recovery_s, redone)
        share = done * self._kept_share(rollbacks_per_h, done) * self._capacity() * self.prediction.step_s
        return Goodput(
            tokens_per_s=share * self.job.train.tokens_per_step / self.prediction.step_s,
            share=share,
            copies=copies,
            network_bytes_per_parameter=self._network_bytes_per_parameter(copies),
            step_s=step_s,
            recovery_s=recovery_s,
            redone_steps=redone,
            interruptions_per_h=per_h,
            rollbacks_per_h=rollbacks_per_h,
        )

    def fits(self, copies: int) -> bool:
        """Whether every host has room for the snapshots that it would keep."""
        kept = self._kept(copies)
        return all(
            snapshot_bytes(kept[node.id].kept) <= node.host_memory_bytes for node in self.nodes if node.id in kept
        )

    def _kept(self, copies: int) -> dict[str, Keeping]:
        return self._placement(copies)[1]

    def _placement(self, copies: int) -> tuple[Placement, dict[str, Keeping]]:
        if copies not in self._placed:
            self._placed[copies] = placed(self.held, self.nodes, copies)
        return self._placed[copies]

    def _network_bytes_per_parameter(self, copies: int) -> float:
        """That all nodes together send in each step, on average."""
        sent = sum(node.sent for node in self._kept(copies).values())
        return OPTIMIZER_BYTES * sent / num_parameters(self.job.model) / self.job.checkpoint.protect_every

    def _keep_s(self, copies: int) -> float:
        """From the end of a step until its state is kept on every node that shall have it. Nodes send and receive at
        the same time; what owners mirror only leaves their devices."""
        kept = self._kept(copies)

        def node_s(node: Node) -> float:
            mine = kept.get(node.id, _NOTHING)
            wire_s = max(mine.sent, mine.received) / self.into[node.id]
            return max(wire_s, (mine.vouched + mine.mirrored) / node.devices / self.figures.device_bytes_per_s)

        return OPTIMIZER_BYTES * max(map(node_s, self.nodes))

    def _move_s(self) -> float:
        """A re-plan gives most nodes other layers: each fetches as much state as it holds."""
        return max(self.owned[node.id] * OPTIMIZER_BYTES / self.into[node.id] for node in self.nodes)

    def _capacity(self) -> float:
        """The share of the nodes that is there, those that await a replacement left out."""
        wait_h = self.figures.replacement_s / HOUR_S
        present = (1 / (1 + self.pools[node.id].rate.per_node_h * wait_h) for node in self.users)
        return sum(present) / len(self.users)

    def _rollbacks_per_h(self, copies: int, window_s: float) -> float:
        """Losses of a node's state and of all its copies: in one shock of their pool, or one after the other before
        what was lost has been copied again."""
        placement, _ = self._placement(copies)
        found = ((held.home, placement.copies(held.home, held.owners)) for held in self.held if held.elements)
        groups = {frozenset((home, *others.live, *others.sent)) for home, others in found}
        together: defaultdict[str, list[int]] = defaultdict(list)
        apart_per_h = 0.0
        for group in sorted(groups, key=sorted):
            pools = {self.pools[node_id].pool for node_id in group}
            if len(pools) == 1:
                together[pools.pop()].append(len(group))
            if len(group) > 1:
                apart_per_h += self._one_after_another_per_h(group, window_s)
        return apart_per_h + sum(self.rates[pool].any_lost_per_h(tuple(sizes)) for pool, sizes in together.items())

    def _one_after_another_per_h(self, group: frozenset[str], window_s: float) -> float:
        rates = [self.pools[node_id].rate.per_node_h for node_id in sorted(group)]
        follow = [-math.expm1(-rate * window_s / HOUR_S) for rate in rates]
        return sum(rate * math.prod(follow[:index] + follow[index + 1 :]) for index, rate in enumerate(rates))

    def _kept_share(self, rollbacks_per_h: float, steps_done_per_s: float) -> float:
        """Of the steps that are done, those that no rollback undoes. Without a store the whole job is at stake."""
        if not steps_done_per_s:
            return 0.0
        checkpoint = self.job.checkpoint
        at_stake = self.job.train.steps if checkpoint.uri is None else min(checkpoint.every_steps, self.job.train.steps)
        interval_s = at_stake / steps_done_per_s
        whole_bytes = sum(self.owned.values()) * OPTIMIZER_BYTES
        restart_s = self.figures.fixed_s
        if checkpoint.uri is not None:
            restart_s += whole_bytes / len(self.users) / self.figures.store_bytes_per_s
        return interval_s * steps_per_s(interval_s, rollbacks_per_h / HOUR_S, restart_s, 0.0)


def _left(option: Goodput) -> str:
    return f"{option.interruptions_per_h:.3g} interruptions an hour leave {option.share:.1%} of the throughput"


def _reason(best: Goodput, options: tuple[Goodput, ...], plain_step_s: float, lacking: str) -> str:
    """`lacking`: why there is no copy, where there was to be one."""
    losses = f"{best.interruptions_per_h:.3g} interruptions an hour"
    slower = best.step_s / plain_step_s - 1
    name, several = _name(best.copies), best.copies > 1
    cost = f"make{'' if several else 's'} a step {slower:.1%} longer"
    if slower < 0.0005:
        cost = f"hide{'' if several else 's'} beside the step"
    if best.copies and not best.network_bytes_per_parameter:
        cost = f"cost{'' if several else 's'} no network, as the plan keeps the state live on other nodes,"
    text = f"{name} {cost} and, with {losses}, keep{'' if several else 's'} {best.share:.1%} of the throughput"
    if best.copies == 0:
        text = f"without copies, {f'{lacking}, ' if lacking else ''}{_left(best)}"
    others = [f"{option.share:.1%} with {_name(option.copies)}" for option in options if option is not best]
    text = f"{text}; it would be {', '.join(others)}" if others else text
    if best.copies and max(options, key=lambda option: option.tokens_per_s).copies == 0:
        text = f"{text}; no copy, which would keep no step safe, is planned only where checkpoint.copies is 0"
    return text


def _name(copies: int) -> str:
    return {0: "no copy", 1: "one copy"}.get(copies, f"{copies} copies")
