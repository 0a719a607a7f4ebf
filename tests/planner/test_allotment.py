"""Shares of a cluster: who gets which nodes, by examples and for all clusters and queues that hypothesis thinks of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.allotment import Allotment, Contender, allot
from shoal_planner.cluster import GIB, Node


def make_node(name: str, devices: int = 1, *, device: str = "cpu-1t", price: float = 0.0, leaves: bool = False) -> Node:
    return Node(
        id=name,
        device=device,
        devices=devices,
        host_memory_bytes=GIB,
        intra_bytes_per_s=1e9,
        inter_bytes_per_s=1e9,
        price_per_hour=price,
        reclaim_at_s=1.0 if leaves else None,
    )


class Needs:
    """Each job runs on any nodes that together have so many devices, of its types where it has some."""

    def __init__(
        self, nodes: Mapping[str, Node], least: Mapping[str, int], types: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self._nodes, self._least, self._types = nodes, least, types or {}

    def __call__(self, job: str, nodes: frozenset[str]) -> bool:
        types = self._types.get(job)
        usable = [self._nodes[node] for node in nodes if not types or self._nodes[node].device in types]
        return bool(usable) and sum(node.devices for node in usable) >= self._least[job]


class World:
    """A cluster and its jobs, which obey at once."""

    def __init__(self, nodes: list[Node], jobs: list[Contender], least: Mapping[str, int]) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.jobs = {job.id: job for job in jobs}
        self.least = dict(least)

    def fits(self) -> Needs:
        return Needs(self.nodes, self.least, {name: job.device_types for name, job in self.jobs.items()})

    def look(self) -> dict[str, Allotment]:
        found = allot(list(self.jobs.values()), list(self.nodes.values()), self.fits())
        return {each.job: each for each in found}

    def grant(self) -> dict[str, Allotment]:
        """Everybody is told."""
        found = self.look()
        for job in self.jobs.values():
            grant = found[job.id].grant
            uses = (job.uses | grant) if job.begun else grant
            self.jobs[job.id] = dataclasses.replace(job, share=grant, uses=uses)
        return found

    def obey(self) -> None:
        """Who is told begins, or leaves what is not its own any more, if it runs; who is preempted is gone."""
        fits = self.fits()
        for job in self.jobs.values():
            uses = job.share if not job.begun or fits(job.id, job.share) else job.uses | job.share
            self.jobs[job.id] = dataclasses.replace(job, begun=job.begun or bool(job.share), uses=uses, plan=job.share)

    def turn(self) -> None:
        found = self.grant()
        for each in found.values():
            if each.preempted_by:
                gone = self.jobs[each.job]
                self.jobs[each.job] = dataclasses.replace(gone, share=frozenset(), uses=frozenset(), begun=False)
        self.obey()

    def settle(self) -> dict[str, set[str]]:
        for _ in range(2 * len(self.jobs) + 6):
            before = dict(self.jobs)
            self.turn()
            if self.jobs == before:
                return self.shares
        raise AssertionError(f"nodes are moved for ever: {self.shares}")

    def __repr__(self) -> str:
        nodes = ", ".join(f"{node.id} {node.devices} x {node.device}" for node in self.nodes.values())
        return "\n".join([nodes, *map(str, self.jobs.values()), str(self.least)])

    @property
    def shares(self) -> dict[str, set[str]]:
        return {job.id: set(job.share) for job in self.jobs.values()}

    def add(self, job: Contender, least: int) -> None:
        self.jobs[job.id] = job
        self.least[job.id] = least

    def end(self, job: str) -> None:
        del self.jobs[job]


def cluster(count: int) -> list[Node]:
    return [make_node(f"n{index}") for index in range(count)]


def job(name: str, at_s: float = 0.0, **given: object) -> Contender:
    return Contender(id=name, created_at_s=at_s, **given)  # type: ignore[arg-type]


def sizes(world: World) -> dict[str, int]:
    return {name: len(share) for name, share in world.shares.items()}


def test_one_job_has_the_cluster_and_a_second_one_gets_half() -> None:
    world = World(cluster(4), [job("a")], {"a": 1})
    world.settle()
    assert sizes(world) == {"a": 4}
    world.add(job("b", 1.0), 2)
    found = world.grant()
    assert found["b"].grant == frozenset(), "a node was given away that somebody uses"
    assert found["b"].waits_for == ("a",) and found["b"].position == 1
    assert len(found["a"].grant) == 2
    world.obey()
    world.settle()
    assert sizes(world) == {"a": 2, "b": 2}
    world.end("b")
    world.settle()
    assert sizes(world) == {"a": 4}, "it did not grow back"


def test_a_job_gets_its_least_or_nothing() -> None:
    world = World(cluster(3), [job("a"), job("b", 1.0)], {"a": 2, "b": 2})
    world.settle()
    assert sizes(world) == {"a": 3, "b": 0}
    assert world.look()["b"].position == 1


def test_a_higher_priority_shrinks_a_lower_one_before_it_ends_it() -> None:
    world = World(cluster(4), [job("low", yields=True)], {"low": 1})
    world.settle()
    world.add(job("high", 1.0, priority=100), 2)
    found = world.look()
    assert found["low"].preempted_by is None
    world.settle()
    assert sizes(world) == {"low": 1, "high": 3}, "the higher priority grows first"
    world.least["high"] = 4
    assert world.look()["low"].preempted_by == "high"
    world.settle()
    assert sizes(world) == {"low": 0, "high": 4}
    world.end("high")
    world.settle()
    assert sizes(world) == {"low": 4}


def test_a_job_without_a_store_never_goes_entirely() -> None:
    world = World(cluster(3), [job("low")], {"low": 2})
    world.settle()
    world.add(job("high", 1.0, priority=100), 2)
    world.settle()
    assert sizes(world)["high"] == 0
    assert sizes(world)["low"] >= 2
    found = world.look()
    assert (found["high"].position, found["low"].preempted_by) == (1, None)


def test_an_equal_priority_is_never_preempted() -> None:
    world = World(cluster(3), [job("a", yields=True)], {"a": 2})
    world.settle()
    world.add(job("b", 1.0), 2)
    world.settle()
    assert sizes(world) == {"a": 3, "b": 0}


def test_projects_share_and_not_jobs() -> None:
    jobs = [job(f"a{index}", index, project="a") for index in range(3)] + [job("b", 9.0, project="b")]
    world = World(cluster(8), jobs, dict.fromkeys(["a0", "a1", "a2", "b"], 1))
    world.settle()
    assert sizes(world)["b"] == 4
    waiting = [job(f"a{index}", index, project="a") for index in range(3)] + [job("b", 9.0, project="b")]
    world = World(cluster(2), waiting, dict.fromkeys(["a0", "a1", "a2", "b"], 1))
    world.settle()
    assert sizes(world) == {"a0": 1, "a1": 0, "a2": 0, "b": 1}


def test_nobody_overtakes_a_job_that_the_cluster_could_run() -> None:
    world = World(cluster(4), [job("a", 0.0)], {"a": 2})
    world.settle()
    world.add(job("large", 1.0), 4)
    world.add(job("small", 2.0), 1)
    world.add(job("never", 0.5), 9)
    world.settle()
    found = world.look()
    assert sizes(world) == {"a": 4, "large": 0, "small": 0, "never": 0}
    assert found["small"].behind == "large"
    assert found["never"].never_fits and not found["large"].never_fits
    world.end("a")
    world.settle()
    assert sizes(world) == {"large": 4, "small": 0, "never": 0}


def test_a_limit_of_price_that_is_in_the_way_is_told_with_what_the_cheapest_would_cost() -> None:
    """Cheap nodes that do not suffice by themselves do not hide the dear one that does."""
    nodes = [make_node(f"n{index}", price=1.0) for index in range(3)]
    nodes.append(make_node("big", 8, price=3.5))
    world = World(nodes, [job("a", max_price_per_hour=3.0)], {"a": 4})
    found = world.look()["a"]
    assert found.never_fits and found.least_price_per_hour == 3.5
    world = World(nodes, [job("a", max_price_per_hour=3.5)], {"a": 4})
    world.settle()
    assert world.shares["a"] == {"big"}
    world = World(nodes, [job("a", max_price_per_hour=4.5)], {"a": 9})
    world.settle()
    assert world.shares["a"] == {"big", "n0"}
    nowhere = World(nodes, [job("a", max_price_per_hour=3.0)], {"a": 99}).look()["a"]
    assert nowhere.never_fits and nowhere.least_price_per_hour is None


def test_a_job_that_is_too_dear_holds_up_nobody() -> None:
    nodes = [make_node(f"n{index}", price=1.0) for index in range(2)]
    world = World(nodes, [job("dear", 0.0, max_price_per_hour=0.5), job("b", 1.0)], {"dear": 1, "b": 2})
    world.settle()
    assert sizes(world) == {"dear": 0, "b": 2}


def test_limits_of_devices_types_and_price() -> None:
    nodes = [make_node(f"n{index}", price=1.0) for index in range(3)]
    nodes.append(make_node("dear", device="A100-80G", price=9.0))
    world = World(nodes, [job("a", max_devices=2)], {"a": 1})
    world.settle()
    assert sizes(world) == {"a": 2}
    world = World(nodes, [job("a", max_price_per_hour=2.5)], {"a": 1})
    world.settle()
    assert sizes(world) == {"a": 2}
    world = World(nodes, [job("a", device_types=("A100-80G",))], {"a": 1})
    world.settle()
    assert world.shares == {"a": {"dear"}}
    world.jobs["a"] = dataclasses.replace(world.jobs["a"], device_types=())
    world.settle()
    assert sizes(world) == {"a": 4}
    world.jobs["a"] = dataclasses.replace(world.jobs["a"], max_price_per_hour=3.0)
    world.settle()
    assert world.shares == {"a": {"n0", "n1", "n2"}}, "a limit that was lowered was not kept"


@pytest.mark.parametrize("yields", [True, False])
@pytest.mark.parametrize(
    ("there", "share", "least"),
    [("n0 n1", "n0 n1", 1), ("n0 n1", "", 1), ("n0 n1 t0", "n0 n1 t0", 2), ("n0 n1 t0", "t0", 2)],
    ids=["all lost", "all lost while it left the rest", "too few left", "too few left while it left the rest"],
)
def test_who_cannot_run_does_not_keep_from_others_what_it_cannot_use(
    there: str, share: str, least: int, yields: bool
) -> None:
    """Alone it was given all there is; of that what it may use is gone. Without a store its state has nowhere to go."""
    nodes = [make_node(name, device="T4" if name[0] == "t" else "cpu-1t") for name in there.split()]
    has, uses = frozenset(share.split()), frozenset(node.id for node in nodes)
    picky = job("picky", device_types=("T4",), share=has, uses=uses, begun=True, yields=yields)
    world = World(nodes, [picky, job("other", 1.0)], {"picky": least, "other": 2})
    found = world.look()
    assert found["picky"].preempted_by == ("other" if yields else None)
    assert not found["other"].grant
    world.settle()
    assert len(world.shares["other"]) >= 2 * yields
    assert yields or not world.shares["other"]


@pytest.mark.parametrize("most", [None, 1, 2])
def test_what_a_job_cannot_use_does_not_count_against_its_limits(most: int | None) -> None:
    nodes = [make_node("n0"), make_node("n1"), make_node("t0", device="T4")]
    had = frozenset({"n0", "n1"})
    world = World(
        nodes, [job("picky", device_types=("T4",), share=had, uses=had, begun=True, max_devices=most)], {"picky": 1}
    )
    assert world.look()["picky"].target == {"t0"}


def test_nodes_that_are_to_go_away_are_given_to_nobody() -> None:
    nodes = [make_node("stays"), make_node("goes", leaves=True)]
    world = World(nodes, [job("a")], {"a": 1})
    world.settle()
    assert world.shares == {"a": {"stays"}}
    had = job("a", share=frozenset({"goes", "stays"}), begun=True)
    assert World(nodes, [had], {"a": 1}).look()["a"].grant == {"goes", "stays"}


def test_a_share_that_was_given_stays_until_somebody_has_begun() -> None:
    world = World(cluster(4), [job("a")], {"a": 1})
    world.grant()
    world.add(job("b", 1.0, priority=100), 4)
    assert len(world.look()["a"].grant) == 4, "nobody knows whether it is about to begin there"
    world.obey()
    assert len(world.look()["a"].grant) == 4 and world.look()["b"].waits_for == ()
    world.jobs["a"] = dataclasses.replace(world.jobs["a"], yields=True)
    assert world.look()["a"].preempted_by == "b"


@pytest.mark.parametrize("devices", [1, 8])
def test_a_move_has_to_make_shares_more_equal(devices: int) -> None:
    nodes = [make_node("n0"), make_node("n1", devices)]
    one = job("a", share=frozenset({"n0"}), uses=frozenset({"n0"}), begun=True)
    other = job("b", 1.0, share=frozenset({"n1"}), uses=frozenset({"n1"}), begun=True)
    world = World(nodes, [one, other], {"a": 1, "b": 1})
    world.settle()
    assert world.shares == {"a": {"n0"}, "b": {"n1"}}


# --- whatever the cluster and the queue ---


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes = [
        make_node(
            f"n{index}",
            draw(st.sampled_from([1, 1, 2, 4, 8])),
            device=draw(st.sampled_from(["cpu-1t", "T4"])),
            price=draw(st.sampled_from([0.0, 1.0, 3.0])),
            leaves=draw(st.booleans()) and index > 2,
        )
        for index in range(draw(st.integers(1, 8)))
    ]
    left = [node.id for node in nodes]
    jobs, least = [], {}
    for index in range(draw(st.integers(1, 6))):
        share = frozenset(draw(st.lists(st.sampled_from(left), unique=True))) if left else frozenset()
        left = [node for node in left if node not in share]
        begun = bool(share) and draw(st.booleans())
        more = draw(st.lists(st.sampled_from(left), unique=True)) if left and begun else ()
        uses = share.union(more)
        left = [node for node in left if node not in uses]
        jobs.append(
            Contender(
                id=f"job{index}",
                project=draw(st.sampled_from(["p", "q", "r"])),
                priority=draw(st.sampled_from([-100, 0, 0, 100])),
                created_at_s=float(draw(st.integers(0, 3))),
                share=share,
                uses=uses,
                plan=uses,
                begun=begun,
                wants=draw(st.sampled_from([True, True, True, False])) or not begun,
                yields=draw(st.booleans()),
                device_types=draw(st.sampled_from([(), (), ("T4",)])),
                max_devices=draw(st.sampled_from([None, None, 2, 6])),
                max_price_per_hour=draw(st.sampled_from([None, None, 3.0])),
            )
        )
        least[f"job{index}"] = draw(st.integers(1, 12))
    return World(nodes, jobs, least)


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_no_node_is_ever_with_two_jobs(world: World) -> None:
    """Neither what they are to have nor what they are told, nor what one is told and another still uses."""
    found = world.look()
    for name, each in found.items():
        for other, theirs in found.items():
            if name == other:
                continue
            assert not each.target & theirs.target
            assert not each.grant & theirs.grant
            assert not (each.grant - world.jobs[name].share) & world.jobs[other].uses


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_least_limits_and_priorities_are_kept(world: World) -> None:
    found, needs = world.look(), Needs(world.nodes, world.least)
    for name, each in found.items():
        contender = world.jobs[name]
        new = each.grant - contender.share
        if not contender.begun and not contender.share:
            assert not each.grant or needs(name, each.grant), "it was begun without its least"
        for node in new:
            assert not contender.device_types or world.nodes[node].device in contender.device_types
            assert world.nodes[node].reclaim_at_s is None
        if new and contender.max_devices is not None and len(each.target) > 1:
            assert sum(world.nodes[node].devices for node in each.target) <= contender.max_devices
        if new and contender.max_price_per_hour is not None and each.target > contender.share:
            assert sum(world.nodes[node].price_per_hour for node in each.target - contender.share) <= 3.0
        if contender.begun and contender.wants and needs(name, contender.share) and not needs(name, each.target):
            types = contender.device_types or ("cpu-1t", "T4")
            if needs(name, frozenset(node for node in contender.share if world.nodes[node].device in types)):
                assert each.preempted_by is not None, "it lost its least, and nobody says to whom"
        if each.preempted_by is not None:
            ran = world.fits()(name, contender.share)
            assert not ran or world.jobs[each.preempted_by].priority > contender.priority
            assert contender.yields and contender.begun
            assert each.grant == contender.share, "it has to keep its nodes until its state is safe"


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_the_same_again_changes_nothing(world: World) -> None:
    """It does not depend on the order of its arguments, and comes to rest."""
    found = world.look()
    again = World(list(reversed(world.nodes.values())), list(reversed(world.jobs.values())), world.least)
    assert again.look() == found
    for name in [name for name, contender in world.jobs.items() if not contender.wants]:
        world.end(name)
    settled = world.settle()
    world.turn()
    assert world.shares == settled


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_who_waits_waits_for_a_reason(world: World) -> None:
    """Once all is at rest: no job waits whose least is there among what nobody has and what lower priorities hold, but
    for what is used by who cannot run and has no store."""
    for name in [name for name, contender in world.jobs.items() if not contender.wants]:
        world.end(name)
    world.settle()
    found, needs = world.look(), Needs(world.nodes, world.least)
    stuck = [o for o in world.jobs.values() if not o.yields and not world.fits()(o.id, o.share)]
    taken = frozenset[str]().union(*world.shares.values(), *(o.uses for o in stuck))
    for name, each in found.items():
        contender = world.jobs[name]
        if each.position != 1 or contender.max_devices or contender.max_price_per_hour or contender.share:
            continue
        lower = [o for o in world.jobs.values() if o.priority < contender.priority and o.yields]
        room = (world.nodes.keys() - taken).union(*(other.share for other in lower))
        usable = frozenset(
            node
            for node in room
            if world.nodes[node].reclaim_at_s is None
            and (not contender.device_types or world.nodes[node].device in contender.device_types)
        )
        assert not needs(name, usable), each
