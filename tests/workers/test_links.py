"""What links cost: real probes between real agents, and which pairs of a large cluster are probed."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

from agents import running_agents

from shoal_planner.cluster import GIB, Node
from shoal_planner.profile import Profile, link_kind
from shoal_workers import messages as m
from shoal_workers.links import Pair, Site, Survey, neighbours, representatives, survey


def site(name: str, *, zone: str = "z", device: str = "T4", devices: int = 1, host: str = "", port: int = 1) -> Site:
    node = Node(
        id=name,
        device=device,
        devices=devices,
        host_memory_bytes=GIB,
        intra_bytes_per_s=1e10,
        inter_bytes_per_s=1e9,
        zone=zone,
    )
    return Site(node=node, address=(host or name, port))


def named(pairs: tuple[Pair, ...]) -> list[tuple[str, str]]:
    return [(pair.here.node.id, pair.there.node.id) for pair in pairs]


# --- real probes ---


def test_a_probe_is_counted_at_both_ends_and_ends_in_time(tmp_path: Path) -> None:
    with running_agents(tmp_path, "a", "b") as (here, there):
        host, port = there.address
        found = here.ask(m.ProbeLink(host=host, port=port, limit_s=0.2))
        assert isinstance(found, m.LinkProbed)
        assert 0 < found.latency_s < 0.1
        assert 1e6 < found.bytes_per_s < 1e12
        assert found.num_bytes == found.received_bytes >= 1 << 18
        there.close()
        refused = here.ask(m.ProbeLink(host=host, port=port, limit_s=0.2))
        assert isinstance(refused, m.Done)
        assert refused.problem is not None
        assert f"{host}:{port}" in refused.problem
        assert here.inventory() == (), "and the agent serves on"


def test_links_of_a_small_cluster_are_found_within_a_second(tmp_path: Path) -> None:
    """Four nodes on one machine, one of them with two devices: a figure for each two kinds, and within that node."""
    with running_agents(tmp_path, "a", "b", "c", "d") as agents:
        sites = [
            site(agent.node, devices=2 if agent.node == "a" else 1, host=agent.address[0], port=agent.address[1])
            for agent in agents
        ]
        found = survey(sites, Profile(), 1.0, "here and now", thorough=True)
        assert found.duration_s < 3.0, "a second, and a machine that does other things"
        assert found.num_bytes == found.received_bytes > 0
        profile = found.profile.on(each.node for each in sites)
        for here, there in (("a", "a"), ("a", "d"), ("d", "a"), ("b", "c"), ("b", "d")):
            figure = profile.link(here, there)
            assert figure is not None, (here, there)
            assert figure.source.startswith("here and now")
        assert profile.link("b", "b") is None, "it has but one device"
        again = survey(sites, found.profile, 1.0, "again", thorough=True)
        assert again.num_bytes == again.num_pairs == 0


# --- which pairs ---


class Wires:
    """Answers of pairs, by their nodes; watches which machines are busy at once. Pairs of one machine take
    an eighth of a second."""

    def __init__(self, slow: frozenset[frozenset[str]] = frozenset(), silent: frozenset[str] = frozenset()) -> None:
        self.now_s = 0.0
        self._slow = slow
        self._silent = silent
        self._lock = threading.Lock()
        self._busy: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []

    def clock(self) -> float:
        return self.now_s

    def probe(self, pair: Pair, limit_s: float) -> m.LinkProbed | None:
        assert 0 < limit_s <= 0.1
        with self._lock:
            assert not any(self._busy[host] for host in pair.hosts)
            self._busy.update(pair.hosts)
            ids = pair.here.node.id, pair.there.node.id
            self.asked.append(ids)
        rate = 1e8 if frozenset(ids) in self._slow else 1e9
        with self._lock:
            self._busy.subtract(pair.hosts)
            self.now_s += 0.125 if pair.here.address[0] == pair.there.address[0] else 0.0
        if self._silent & set(ids):
            return None
        return m.LinkProbed(latency_s=1e-4, bytes_per_s=rate, num_bytes=10, received_bytes=10)

    def survey(self, sites: list[Site], known: Profile | None = None, *, thorough: bool = True) -> Survey:
        return survey(sites, known or Profile(), 1.0, "wires", thorough=thorough, probe=self.probe, clock=self.clock)


def test_few_pairs_stand_for_their_kinds() -> None:
    sites = [
        site(f"{device}-{i:03d}", zone=z, device=device) for device in ("A", "B") for z in "xy" for i in range(300)
    ]
    sites = [site(f"{each.node.zone}{each.node.id}", zone=each.node.zone, device=each.node.device) for each in sites]
    pairs = representatives(sites, Profile())
    assert len(pairs) == 2 * (4 + 6), "two for each of four kinds and for each two of them"
    assert len(neighbours(sites)) == len(sites)
    wires = Wires()
    found = wires.survey(sites)
    assert len(wires.asked) == found.num_pairs <= len(sites) + len(pairs)
    assert len(found.profile.kind_links) == 10
    assert not found.profile.links


def test_parts_of_one_machine_say_nothing_of_the_network() -> None:
    def part(name: str, device: str, machine: str) -> Site:
        made = site(name, device=device)
        return replace(made, node=replace(made.node, host=machine))

    boxes = [part(f"{kind}-{number}", kind, f"box-{number}") for kind in ("T4", "L4") for number in range(3)]
    pairs = {frozenset(pair) for pair in named(representatives(boxes, Profile()))}
    assert pairs == {
        frozenset(pair)
        for pair in (
            *(("T4-0", "T4-1"), ("T4-2", "T4-1")),
            *(("L4-0", "L4-1"), ("L4-2", "L4-1")),
            *(("L4-0", "T4-1"), ("L4-2", "T4-1")),
        )
    }
    alone = boxes[::3]
    assert representatives(alone, Profile()) == neighbours(alone) == ()
    assert all(pair.here.node.host != pair.there.node.host for pair in neighbours(boxes))


def test_two_nodes_and_one() -> None:
    assert representatives([site("a")], Profile()) == ()
    assert named(representatives([site("b"), site("a")], Profile())) == [("a", "b")]
    assert named(neighbours([site("b"), site("a")])) == [("a", "b")]
    assert named(representatives([site("a", devices=4)], Profile())) == [("a", "a")]


def test_a_pair_that_falls_behind_its_kind_twice_has_its_own_figure() -> None:
    sites = [site(name) for name in "abcdef"]
    found = Wires(slow=frozenset({frozenset("cd")})).survey(sites)
    assert [(figure.from_node, figure.to_node, figure.bytes_per_s) for figure in found.profile.links] == [
        ("c", "d", 1e8)
    ]
    assert [figure.bytes_per_s for figure in found.profile.kind_links] == [1e9]


def test_nobody_is_waited_for_and_the_time_is_kept() -> None:
    """On one machine pairs are probed one after the other, the representatives first."""
    alone = Wires(silent=frozenset("b"))
    found = alone.survey([site("a"), site("b"), site("c", zone="y")])
    kinds = {(figure.from_kind, figure.to_kind) for figure in found.profile.kind_links}
    assert kinds == {(link_kind(site("c", zone="y").node), link_kind(site("a").node))}
    crowded = Wires()
    sites = [site(f"n{index:02d}", zone=str(index % 3), host="127.0.0.1") for index in range(30)]
    found = crowded.survey(sites)
    assert found.num_pairs == len(crowded.asked) == 8
    assert crowded.now_s == 1.0


def test_only_kinds_that_are_new_are_probed_beside_a_job() -> None:
    old = [site(name) for name in "abcd"]
    known = Wires().survey(old).profile
    wires = Wires()
    found = wires.survey([*old, site("new", zone="y")], known, thorough=False)
    assert wires.asked == [("a", "new"), ("d", "new")]
    assert len(found.profile.kind_links) == 1
