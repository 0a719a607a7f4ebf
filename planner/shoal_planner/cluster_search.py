"""The search on one cluster, with so many copies of the state: rounds, then steps from the best, then proof, and what
is tried beside them.

Owns the order in which the space is looked through; every round of it is counted in templates and drafts, not in
seconds, so that the same arguments give the same plan. What a round knows comes from `columns` (which pipelines are
worth having), `packing` (how many of each), `assembly` (on which devices), `finish` (layers, samples) and, on small
clusters, `exact`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.errors import HostTooSmall, InvalidField, NoPlanFits
from shoal_planner.exact import MOST_DEVICES, is_proven, num_devices, search_exactly
from shoal_planner.finish import Draft, Finisher, Word
from shoal_planner.halving import halve
from shoal_planner.improve import HOPELESS, Improver
from shoal_planner.node_teams import try_node_teams
from shoal_planner.options import group_kinds, usable_nodes
from shoal_planner.overlap_choice import received_ahead, with_sums
from shoal_planner.parts import least_s
from shoal_planner.plainer import ever_fewer, plainer, plainest
from shoal_planner.plan import Plan
from shoal_planner.relief import least_step_s, loosened, with_smaller
from shoal_planner.replan import mend_plan
from shoal_planner.rescue import RoomyCosts, is_pressed, rescue, unburden
from shoal_planner.rounds import Lead, rounds
from shoal_planner.score import by_step, score_with, step_s
from shoal_planner.standing import word_of
from shoal_planner.teams import try_teams
from shoal_planner.ways import Ways, ground_of, ways_of
from shoal_planner.whole_layers import with_whole_layers

# Where the best so far takes so many times the least possible, so many sets of pipelines are tried step by step, on up
# to so many devices.
_TRIES, _TRIED_ON = ((1.6, 1200), (1.35, 400)), 80
_NEAR, _NEAR_TRIES, _NEAR_ON = 1.25, 100, 48  # where it takes less, so many on up to so many devices
_ODD, _ODD_TRIES = 1.05, 200  # where some nodes are hardly worth being a kind, which is where rounds miss most
_FEWEST_TRIES, _TRIES_DEVICES = 400, 28800  # fewer where each takes longer
_PATIENCE = 40  # tries from one of them in a row without success
_QUICKLY, _HURRIED = 8, 2  # so many times fewer where plans are merely compared, and where a job waits
# Where plans have to be eased, which takes longer; as if there were so much memory.
_EASED_TRIES, _EASED_DEVICES, _ROOMY = 150, 3000, 3.0
# From so far on, what is found on parts of the cluster is a start, too: no node must hide what the others can do.
_FAR, _RATHER_FAR, _MOST_KINDS = 1.6, 1.5, 12
_LESS_ROOM = (0.95, 0.85)
_BEYOND = 1.15  # unless what such a part could do at best is not so far below what is known
_FEW_DEVICES = 16  # on no more than these a round is soon followed by steps that find the same
# So many devices such parts may have together, and plainer clusters: that bounds how long it takes to look at them.
_PARTS_DEVICES, _PLAINER_DEVICES = 96, 192
# On more devices than these a proof may take seconds: too long for a job that waits, or for more than so many parts.
_AGAIN, _PROOFS = 6, 2
_TEAMS_AGAIN = 256  # to try teams beside what was made of a running plan takes too long on more
_UNBURDENED = 32  # plans that recompute much and are tried with state on hosts, where there may be much to win
_FINALISTS = 5  # drafts that are scored, of each round
# Rounds that go on after being scouted, and explored; fewer where each is dear.
_KEPT = ((8, (6, 4)), (16, (3, 1)), (256, (4, 3)), (1 << 30, (2, 1)))  # by the number of devices up to which that holds
_KEPT_BRIEFLY = (1, 1)  # where what is found has to bound a proof, or is one of many starts


class Search:
    """Collects scored plans. `late` tells whether the time is over."""

    def __init__(
        self,
        costs: CostModel,
        copies: int,
        late: Callable[[], bool],
        known: dict[object, list[Plan]] | None = None,
        least_s: float = 0.0,
    ) -> None:
        """`known`: what was found on parts of clusters, of this job, by those who look at such parts, too. `least_s`:
        the least possible, if it is to be that of another cluster."""
        self.costs = costs
        self.known = {} if known is None else known
        self.copies = copies
        self.late = late
        self.truncated = False
        self.num_drafts = 0
        self.refusal: NoPlanFits | None = None  # what a device or a host lacks for a plan that was tried
        self.scored: dict[str, Plan] = {}
        self.running: Plan | None = None
        self.mended = False  # whether what was made of the running plan was good enough
        self.finalists: set[str] = set()  # plans that are looked at more closely, whatever else is found
        self._finisher = Finisher(costs, copies)
        self._seen: set[tuple[object, ...]] = set()
        self._proofs = _PROOFS
        self._summed_s = math.inf  # the best with sums of gradients beside the backward, of those that were looked for
        self._least_s = least_s  # the least possible, once it was asked for

    def look(self, *, thorough: bool = True, briefly: bool = True, previous: Plan | None = None) -> None:
        """Everything; what takes long and rarely wins, if `thorough`, and else fewer steps, if `briefly`. A plan that
        runs is mended first, and nothing is searched for where that is good enough; its job waits, so then nothing
        takes long."""
        self.mended = previous is not None and self.mend(previous)
        if previous is None:
            self.run(thorough=thorough, part=_QUICKLY if briefly else 1)
        elif not self.mended:
            mended, self.scored = self.scored, {}  # what is known would make the search give up other ways early
            self.run(thorough=thorough and num_devices(self.costs) <= _AGAIN, part=_HURRIED)
            self.scored = mended | self.scored
        fits = bool(self.scored)
        if self.is_spoilt_by_copies():
            return
        if not self.mended or num_devices(self.costs) <= _TEAMS_AGAIN:
            try_teams(self.costs, self.copies, self.best_s(), self.consider, self._consider_exposed)
            try_node_teams(self.costs, self.copies, self.best_s(), self._consider_closely)
        closely = thorough and previous is None
        if closely and fits and not is_proven(self.costs) and self.is_far(_RATHER_FAR) and not self._may_end():
            self._try_teams_on_plainer()
        if not fits:
            refusal = self.refusal
            rescue(self.costs, self.on_other_devices, self.best_s(), self.consider)
            if closely and self.scored and not is_proven(self.costs) and not self._may_end():
                self._improve_eased()
            if not isinstance(self.refusal, HostTooSmall):  # which fewer copies, or larger hosts, would mend
                self.refusal = refusal
        elif thorough and is_proven(self.costs):
            return  # the proof has state on hosts itself
        elif closely and self.is_far() and not self._may_end():
            # What is found where nothing fits must not be lost where something fits.
            before_s, pressed = self.best_s(), any(map(is_pressed, self.best(_FINALISTS)))
            rescue(self.costs, self.on_other_devices, before_s, self.consider)
            if pressed or self.best_s() < before_s:
                self._unburden_several()
                self._improve_eased()
        else:
            unburden(self.costs, self.best()[0], self.consider)

    def _unburden_several(self) -> None:
        for found in self.best(_UNBURDENED):
            if self._ends():
                return
            if least_step_s(found, self.costs) < self.best_s():
                unburden(self.costs, found, self.consider)

    def is_spoilt_by_copies(self) -> bool:
        """Whether nothing fits, hosts lack room, and there may be fewer copies of the state: then these are what to try
        next, rather than whatever takes long. On few devices all is tried: the best plan with copies is proven."""
        may_be_fewer = self.copies > 0 and self.costs.job.checkpoint.copies == "auto"
        lacking = not self.scored and isinstance(self.refusal, HostTooSmall)
        return may_be_fewer and lacking and num_devices(self.costs) > MOST_DEVICES

    def run(self, *, thorough: bool = True, part: int = _QUICKLY) -> None:
        """All rounds are scouted, fewer explored, and the best ones followed to plans; those are bettered step by step,
        or what is best on a small cluster is proven. Unless `thorough`, that takes a `part` of the steps."""
        nodes = usable_nodes(self.costs.job, self.costs.snapshot)
        # Other schedules are tried on what was found, so for them one good plan is not enough.
        to_prove = thorough and is_proven(self.costs) and self.costs.job.train.schedule == "1f1b"
        followed = self.known.get((self.costs.snapshot, self.copies, False))
        if followed and not to_prove:
            self.scored |= {found.plan_id: found for found in followed}
        else:
            self._follow(nodes, briefly=to_prove)
        if self.truncated:
            return
        if not is_proven(self.costs):
            if thorough:
                self._try_plainer()
                self._try_fewer()
            if thorough and self.is_far() and not self.is_spoilt_by_copies():
                self._try_parts(nodes)
            if thorough and self.scored and self.is_far():
                self._try_less_room()
            self._improve(nodes, 1 if thorough else part)
        elif thorough and self.scored and self.late():
            self.truncated = True
        elif thorough:
            summed = None if self.costs.job.train.overlap == "none" else self._consider_summed
            whole = search_exactly(self.costs, self.copies, self.best_s(), self.consider, summed)
            if to_prove and not whole:
                self._follow(nodes)

    def _follow(self, nodes: tuple[Node, ...], *, briefly: bool = False) -> None:
        looked_at = rounds(group_kinds(nodes, self.costs), self.costs, counted=not briefly)
        leads = [Lead(this, self.costs, self.copies) for this in looked_at]
        kept = next(numbers for limit, numbers in _KEPT if num_devices(self.costs) <= limit)
        kept = _KEPT_BRIEFLY if briefly else kept
        # Groups take little time, and how they begin says little of how they end.
        grouped = [lead for lead in leads if lead.round.groups > 1]
        for lead in grouped:
            lead.scout()
            lead.explore(self.best_s())
        whole = halve([lead for lead in leads if lead.round.groups == 1], (Lead.scout, Lead.explore), kept)
        for lead in itertools.chain(grouped, whole):
            if self.scored and self.late():
                self.truncated = True
                return
            drafts = sorted(self._drafts(lead), key=lambda draft: draft.seconds)
            for draft in drafts[:_FINALISTS]:
                self.consider(self._finisher.plan(draft))

    def best(self, number: int = 1) -> list[Plan]:
        """So many of what was found, the fastest first."""
        return sorted(self.scored.values(), key=by_step)[:number]

    def is_far(self, times: float = _FAR) -> bool:
        """Whether there may be much to win, as the best so far takes more than so many times the least possible, on a
        cluster where looking further does not take long."""
        return num_devices(self.costs) <= _TRIED_ON and self._over() > times

    def may_win(self, others: ClusterSnapshot, by: float = 1.0) -> bool:
        """Whether what a part of the cluster could do at best is so many times as fast as what is known."""
        least_others_s = least_s(usable_nodes(self.costs.job, others), self.costs, self._finisher.sizes)
        return least_others_s * by <= self.best_s()

    def _over(self) -> float:
        """How many times the least possible the best so far takes."""
        return self.best_s() / self.least_s()

    def least_s(self) -> float:
        if not self._least_s:
            nodes = usable_nodes(self.costs.job, self.costs.snapshot)
            self._least_s = least_s(nodes, self.costs, self._finisher.sizes)
        return self._least_s

    def _try_parts(self, nodes: tuple[Node, ...]) -> None:
        """What is found on parts of the cluster."""
        left = _PARTS_DEVICES
        for others in sorted(self._parts(nodes), key=lambda part: part.num_devices):
            if not self.may_win(others, _BEYOND):
                continue
            left -= others.num_devices
            if left < 0 or self._ends():
                return
            self._take(others)

    def _try_plainer(self) -> None:
        """As long as there is something to win, also what is found on plainer clusters."""
        left, enough = _PLAINER_DEVICES, _RATHER_FAR if num_devices(self.costs) > _FEW_DEVICES else _FAR
        for others in plainer(self.costs) if self.scored else ():
            left -= others.num_devices
            if left < 0 or not self.is_far(enough) or self._ends():
                return
            self._take(others, briefly=False)

    def _try_teams_on_plainer(self) -> None:
        """Teams take all nodes, so those of fewer kinds are looked for where there are fewer."""

        def here(found: Plan) -> Plan:
            return dataclasses.replace(found, copies=self.copies)

        for others in plainer(self.costs):
            copies = min(self.copies, len(others.nodes) - 1)
            try_teams(
                CostModel(self.costs.job, others, self.costs.profile),
                copies,
                self.best_s(),
                lambda found: self.consider(here(found)),
                lambda found: self._consider_exposed(here(found)),
            )

    def _try_less_room(self) -> None:
        """What is found on devices with a little less memory fits, too, and is another place to begin."""
        for room in _LESS_ROOM:
            if self._ends():
                return
            for found in self.on_other_devices(RoomyCosts(self.costs, room)):
                self.consider(found)

    def _ends(self) -> bool:
        """Whether the time is over; what is not looked at any more is told."""
        self.truncated = self.truncated or self.late()
        return self.truncated

    def _may_end(self) -> bool:
        """The same, where something was found."""
        return bool(self.scored) and self._ends()

    def _try_fewer(self) -> None:
        """Where nothing fits, what is found on ever fewer kinds of nodes, until something does."""
        for others in ever_fewer(self.costs):
            if self.scored or num_devices(self.costs) > _TRIED_ON:
                return
            self._take(others, briefly=False)

    def _take(self, others: ClusterSnapshot, *, briefly: bool = True) -> None:
        """What is found on a part of the cluster; that is looked for once, whichever cluster it is a part of."""
        copies = min(self.copies, len(others.nodes) - 1)  # nodes that are left out may hold them
        key = (others, copies, briefly)
        if key not in self.known:
            fewer = Search(CostModel(self.costs.job, others, self.costs.profile), copies, self.late)
            proven = is_proven(fewer.costs) and (num_devices(fewer.costs) <= _AGAIN or self._proofs > 0)
            if proven:
                self._proofs -= num_devices(fewer.costs) > _AGAIN
                fewer.run()
            else:
                fewer._follow(usable_nodes(self.costs.job, others), briefly=briefly)
            self.truncated = self.truncated or fewer.truncated
            self.known[key] = list(fewer.scored.values())
        for found in self.known[key]:
            self.consider(dataclasses.replace(found, copies=self.copies))

    def _improve(self, nodes: tuple[Node, ...], part: int) -> None:
        """Step by step from the best plans so far, if there is something to win."""
        if num_devices(self.costs) > _TRIED_ON:
            return
        near = [(_ODD, _ODD_TRIES)] if any(plainest(self.costs)) else []
        near += [(_NEAR, _NEAR_TRIES)] if num_devices(self.costs) <= _NEAR_ON else []
        tries = next((tries // part for least, tries in (*_TRIES, *near) if self._over() > least), 0)
        tries = min(tries, max(_FEWEST_TRIES, _TRIES_DEVICES // num_devices(self.costs)))
        if tries:
            Improver(ground_of(nodes, self.costs), self._judged, tries, _PATIENCE).run(self._starts(), self._may_end)

    def _improve_eased(self) -> None:
        """The same where nothing fits as it is: plans are made as if devices had more memory, and eased. How fast the
        starts are, which fit, says little of how fast they are then."""
        if num_devices(self.costs) > _TRIED_ON or self.costs.job.train.sharding == "none":
            return
        roomy = Finisher(RoomyCosts(self.costs, _ROOMY), self.copies)

        def judged(words: tuple[Word, ...]) -> float:
            draft = roomy.draft(words) if self._enough_devices(words) else None
            sizes = [] if draft is None else list(with_smaller(roomy.plan(draft)))
            few = dict.fromkeys((*range(0, len(sizes), 3), len(sizes) - 1)) if sizes else {}
            return min((fitted_s(sizes[at]) for at in few), default=math.inf)

        def fitted_s(made: Plan) -> float:
            """The first way in which it fits is as good as any."""
            if least_step_s(made, self.costs) >= self.best_s() * _BEYOND:
                return math.inf
            return next(filter(math.isfinite, map(self.consider, loosened(made, self.costs))), math.inf)

        tries = min(_EASED_TRIES, _EASED_DEVICES // num_devices(self.costs))
        ground = ground_of(usable_nodes(self.costs.job, self.costs.snapshot), self.costs)
        Improver(ground, judged, tries, _PATIENCE, hopeless=math.inf).run(self._starts(), self._may_end)

    def _starts(self) -> list[tuple[float, Ways]]:
        return [(step_s(found), ways_of(tuple(map(word_of, found.pipelines)))) for found in self.best(len(self.scored))]

    def _parts(self, nodes: tuple[Node, ...]) -> Iterator[ClusterSnapshot]:
        """The cluster without each kind of node, each zone of it, and a node of each kind."""
        every, kinds = {node.id for node in nodes}, group_kinds(nodes, self.costs)
        zones: dict[str, set[str]] = {}
        for node in nodes:
            zones.setdefault(node.zone, set()).add(node.id)
        kept = [every - set(kind.nodes) for kind in kinds if len(kinds) <= _MOST_KINDS]
        kept += [*zones.values(), *({kind.nodes[0]} for kind in kinds if len(kinds) <= _MOST_KINDS)]
        for some in sorted({tuple(sorted(some)) for some in kept if 0 < len(some) < len(every)}):
            yield self.costs.snapshot.without(node.id for node in self.costs.snapshot.nodes if node.id not in some)

    def on_other_devices(self, costs: CostModel) -> list[Plan]:
        """Of what is found on such devices."""
        found = Search(costs, self.copies, self.late)
        found._follow(usable_nodes(costs.job, costs.snapshot))
        self.truncated = self.truncated or found.truncated
        return found.best(len(found.scored))

    def _judged(self, words: tuple[Word, ...]) -> float:
        if not 0 < len(words) <= self._finisher.batch or not self._enough_devices(words):
            return math.inf
        hopeless_s = self.best_s() * HOPELESS
        least_s = self._finisher.least_sync_s(words)
        if least_s > hopeless_s:
            return least_s
        draft = self._finisher.draft(words, hopeless_s)
        if draft is None or draft.seconds > hopeless_s:
            return math.inf if draft is None else draft.seconds
        return self.consider(self._finisher.plan(draft))

    def mend(self, running: Plan) -> bool:
        """Looks at the running plan and at what can be made of it; whether no search is needed."""
        running = received_ahead(running, self.costs.job)
        self.running = running
        self.consider(running)
        return mend_plan(running, self.costs, self._finisher, self._consider_exposed)

    def consider(self, made: Plan) -> float:
        """Scores a plan, and keeps it if it fits. Its seconds; inf if it does not."""
        scored = self.scored_or_none(made)
        return math.inf if scored is None else step_s(scored)

    def scored_or_none(self, made: Plan) -> Plan | None:
        """The same, and the plan, with what it receives ahead."""
        try:
            scored = score_with(received_ahead(made, self.costs.job), self.costs)
        except (InvalidField, NoPlanFits) as error:  # a previous plan may name nodes that are gone
            if isinstance(error, NoPlanFits) and not isinstance(self.refusal, HostTooSmall):
                self.refusal = error
            return None
        self.scored[scored.plan_id] = scored
        return scored

    def _consider_exposed(self, made: Plan) -> float:
        """With the number of whole layers that is best, too."""
        scored = self.scored_or_none(made)
        if scored is None:
            return math.inf
        _, better = with_whole_layers(scored, self.costs)
        return min(step_s(scored), math.inf if better is scored else self.consider(better))

    def _consider_closely(self, made: Plan) -> float:
        """For those whose seconds say little before it is known what overlaps."""
        scored = self.scored_or_none(made)
        if scored is None:
            return math.inf
        self.finalists.add(scored.plan_id)
        return step_s(scored)

    def _consider_summed(self, made: Plan) -> float:
        """With sums of gradients beside the backward, if that is for it."""
        scored = self.scored_or_none(made)
        if scored is None:
            return math.inf
        seconds = step_s(with_sums(scored, self.costs))
        if seconds < self._summed_s:
            self._summed_s = seconds
            self.finalists.add(scored.plan_id)
        return seconds

    def _drafts(self, lead: Lead) -> Iterator[Draft]:
        for words in lead.words(self.best_s()):
            key = tuple(sorted(self._finisher.key(word) for word in words))
            if key not in self._seen and self._enough_devices(words):
                self._seen.add(key)
                self.num_drafts += 1
                draft = self._finisher.draft(words)
                if draft is not None:
                    yield draft

    def best_s(self) -> float:
        return min((step_s(found) for found in self.scored.values()), default=float("inf"))

    def _enough_devices(self, words: tuple[Word, ...]) -> bool:
        return sum(unit.tp for word in words for unit in word) >= self.costs.job.limits.min_devices
