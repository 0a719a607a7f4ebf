"""What is asked of pools: requests, shortage and back-off, other kinds, money, release; by a scripted cloud."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import InvalidField
from shoal_planner.fleet_wish import Stock, hourly_budget, wish_for
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.provisioning import Act, Patience, PoolMemory, PoolSeen, available, decide_pools
from shoal_planner.rented_pools import RentedPool, parse_pools, pool_of

PATIENCE = Patience(wait_s=120, start_s=900, back_off_s=60, most_back_off_s=600, idle_s=300)
SPOT = {"device": "cpu-1t", "spot": True, "price_per_hour": 0.3, "host_memory_gib": 4}
POOLS = [
    {"name": "spot-a", "max": 3, "zones": ["z1"], "instance_type": "g5.xlarge", "node": SPOT},
    {"name": "spot-b", "max": 3, "zones": ["z2"], "node": {**SPOT, "price_per_hour": 0.4}},
]


class Cloud:
    """Pools of limited capacity, looked at every 10 s."""

    def __init__(self, pools: list[PoolSeen], capacity: dict[str, int]) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.capacity = capacity
        self.memories: Mapping[str, PoolMemory] = {}
        self.now_s = 1000.0
        self.num_made = 0
        self.told: list[Act] = []

    def look(
        self,
        wanted: dict[str, int],
        used: set[str] = frozenset(),
        budget: float = 10.0,
        awaited: dict[str, int] | None = None,
    ) -> list[str]:  # type: ignore[assignment]
        found = decide_pools(
            list(self.pools.values()),
            self.memories,
            wanted,
            used=frozenset(used),
            budget_per_hour=budget,
            patience=PATIENCE,
            now_s=self.now_s,
            awaited=awaited,
        )
        self.memories = found.memories
        self.told.extend(found.acts)
        cost = sum(pool.price_per_hour * found.memories[pool.name].target for pool in self.pools.values())
        least = sum(pool.price_per_hour * pool.least for pool in self.pools.values())
        standing = sum(pool.price_per_hour * len(pool.nodes) for pool in self.pools.values())
        assert cost <= max(budget + least, standing) + 1e-9
        for name, memory in found.memories.items():
            self.obey(name, memory)
        self.now_s += 10
        return [f"{act.kind} {act.count} {act.pool}" for act in found.acts]

    def obey(self, name: str, memory: PoolMemory) -> None:
        pool = self.pools[name]
        nodes = [node for node in pool.nodes if node not in memory.leaving]
        while len(nodes) < min(memory.target, self.capacity[name]):
            nodes.append(f"{name}-{self.num_made}")
            self.num_made += 1
        self.pools[name] = dataclasses.replace(pool, nodes=tuple(sorted(nodes)))

    def nodes(self, name: str) -> set[str]:
        return set(self.pools[name].nodes)


def seen(name: str, price: float = 0.3, least: int = 0, most: int = 4) -> PoolSeen:
    return PoolSeen(name=name, least=least, most=most, price_per_hour=price)


def test_what_is_wished_is_asked_for_once_and_comes() -> None:
    cloud = Cloud([seen("a"), seen("b")], {"a": 4, "b": 4})
    assert cloud.look({"a": 2}) == ["pool_asked 2 a"]
    assert cloud.look({"a": 2}, {"a-0", "a-1"}) == ["nodes_came 2 a"]
    assert cloud.look({"a": 2}, {"a-0", "a-1"}) == []
    assert cloud.look({"a": 3}, {"a-0", "a-1"}) == ["pool_asked 1 a"]


def test_a_short_pool_is_left_alone_ever_longer_and_counts_with_what_it_has() -> None:
    cloud = Cloud([seen("a")], {"a": 1})
    assert cloud.look({"a": 3}) == ["pool_asked 3 a"]
    cloud.look({"a": 3}, {"a-0"})
    pauses = []
    for _ in range(400):
        for line in cloud.look({"a": 3}, {"a-0"}):
            if line.startswith("pool_short"):
                memory = cloud.memories["a"]
                assert (line, memory.target) == ("pool_short 2 a", 1)
                assert available(cloud.pools["a"], memory, cloud.now_s) == 1
                assert available(cloud.pools["a"], memory, memory.not_before_s) == 4
                pauses.append(memory.not_before_s - (cloud.now_s - 10))
    assert pauses[:6] == [60, 120, 240, 480, 600, 600]
    assert "they did not come in 120 s" in next(act.reason for act in cloud.told if act.kind == "pool_short")


def test_what_the_cloud_says_ends_the_waiting_at_once_and_what_it_has_given_is_waited_for() -> None:
    cloud = Cloud([seen("a"), seen("b")], {"a": 0, "b": 0})
    cloud.look({"a": 1, "b": 1})
    cloud.pools["a"] = dataclasses.replace(cloud.pools["a"], problem="InsufficientInstanceCapacity in us-east-1a")
    cloud.pools["b"] = dataclasses.replace(cloud.pools["b"], starting=1)
    assert cloud.look({"a": 1, "b": 1}) == ["pool_short 1 a"]
    assert "InsufficientInstanceCapacity in us-east-1a" in cloud.told[-1].reason
    while cloud.now_s < 1000 + 890:
        assert not any(line.endswith("b") for line in cloud.look({"a": 0, "b": 1}))
    for _ in range(3):
        cloud.look({"b": 1})
    assert "has not joined" in cloud.told[-1].reason and cloud.told[-1].pool == "b"


def test_while_a_pool_cannot_be_reached_nothing_is_concluded_about_it() -> None:
    cloud = Cloud([seen("a"), seen("b")], {"a": 0, "b": 2})
    assert cloud.look({"a": 2}) == ["pool_asked 2 a"]
    booting = dataclasses.replace(cloud.pools["a"], starting=2)
    for why in ("timed out", "status 422", None) * 30:
        cloud.pools["a"] = dataclasses.replace(booting, unreached=why, problem="none in z1" if why else None)
        assert cloud.look({"a": 2}) == []
        memory = cloud.memories["a"]
        assert (memory.target, memory.not_before_s, memory.shortages) == (2, 0, 0)
    cloud.pools["a"] = dataclasses.replace(booting, unreached="timed out")
    assert cloud.look({"a": 3}) == [] and cloud.memories["a"].target == 2, "nobody would hear it"
    assert cloud.look({"a": 1}) == ["pool_withdrawn 1 a"], "what jobs want is known all the same"


def test_time_in_which_nobody_could_ask_a_pool_is_none_that_it_was_waited_for() -> None:
    cloud = Cloud([seen("a", least=1), seen("b")], {"a": 0, "b": 2})
    away = dataclasses.replace(cloud.pools["a"], unreached="no route")
    cloud.pools["a"] = away
    assert cloud.look({"a": 2, "b": 1}) == ["pool_asked 1 b"], "the others are as ever"
    cloud.pools["a"] = seen("a", least=1)
    assert cloud.look({"a": 2, "b": 1}) == ["nodes_came 1 b", "pool_asked 2 a"]
    for since_s in range(10, 60, 10):
        assert cloud.look({"a": 2}, {"b-0"}) == [], since_s
    cloud.pools["a"] = away
    for _ in range(200):
        assert cloud.look({"a": 2}, {"b-0"}) == []
    cloud.pools["a"] = seen("a", least=1)
    told = [cloud.look({"a": 2}, {"b-0"}) for _ in range(7)]
    assert told == [[]] * 6 + [["pool_short 2 a"]]
    assert "they did not come in 120 s" in cloud.told[-1].reason, "a real shortage is one as ever"
    # What has joined meanwhile is known: the nodes themselves have told.
    cloud.now_s = cloud.memories["a"].not_before_s
    cloud.look({"a": 2}, {"b-0"})
    cloud.pools["a"] = dataclasses.replace(away, nodes=("a-0", "a-1"))
    assert cloud.look({"a": 2}, {"b-0"}) == ["nodes_came 2 a"]
    assert cloud.memories["a"].asked_at_s is None and cloud.memories["a"].target == 2


def test_a_pool_that_its_cloud_does_not_offer_has_what_it_has() -> None:
    cloud = Cloud([seen("a")], {"a": 4})
    cloud.look({"a": 1})
    cloud.look({"a": 1}, {"a-0"})
    cloud.pools["a"] = dataclasses.replace(cloud.pools["a"], offered=False)
    assert available(cloud.pools["a"], cloud.memories["a"], cloud.now_s) == 1
    assert cloud.look({"a": 3}, {"a-0"}) == [] and cloud.nodes("a") == {"a-0"}


def test_nodes_that_no_plan_uses_go_and_those_of_a_plan_never_do() -> None:
    cloud = Cloud([seen("a", least=1)], {"a": 4})
    assert cloud.look({"a": 3}) == ["pool_asked 3 a"]
    for _ in range(60):
        cloud.look({"a": 0}, {"a-0", "a-1"})
    assert cloud.nodes("a") == {"a-0", "a-1"}
    for _ in range(60):
        cloud.look({"a": 0})
    assert len(cloud.nodes("a")) == 1, "the pool always has one"
    assert [act.nodes for act in cloud.told if act.kind == "node_released"] == [("a-2",), ("a-0",)]


def test_nodes_that_wait_for_others_of_their_fleet_are_not_idle() -> None:
    cloud = Cloud([seen("a"), seen("b")], {"a": 2, "b": 0})
    for _ in range(11):
        cloud.look({"a": 1, "b": 1}, awaited={"a": 1, "b": 1})
    for _ in range(60):
        cloud.look({"a": 2, "b": 1}, awaited={"a": 2, "b": 1})
    assert len(cloud.nodes("a")) == 2, "b was short twice meanwhile"
    cloud.capacity["b"] = 1
    for _ in range(60):
        cloud.look({"a": 2, "b": 1}, awaited={"a": 2, "b": 1})
    assert not cloud.nodes("a"), "all were there, and nobody used them"


def test_a_node_that_the_plan_leaves_out_is_not_rented_again_at_once() -> None:
    cloud = Cloud([seen("a")], {"a": 4})
    for _ in range(60):
        cloud.look({"a": 2}, {"a-0"})
    assert cloud.nodes("a") == {"a-0"}
    assert [act.kind for act in cloud.told].count("pool_asked") == 1


def test_nothing_is_asked_for_beyond_the_budget_and_what_nobody_uses_makes_room() -> None:
    cloud = Cloud([seen("a", price=1.0), seen("b", price=2.0)], {"a": 4, "b": 4})
    assert cloud.look({"a": 4}, budget=4.0) == ["pool_asked 4 a"]
    used = {"a-0", "a-1"}
    cloud.look({"a": 2, "b": 1}, used, budget=4.0)
    assert cloud.nodes("a") == used, "two that nobody used went for it"
    assert cloud.look({"a": 2, "b": 1}, used, budget=4.0) == ["nodes_went 2 a", "pool_asked 1 b"][1:]
    cloud.look({"a": 2, "b": 2}, used | cloud.nodes("b"), budget=4.0)
    assert len(cloud.nodes("b")) == 1
    cloud = Cloud([seen("a", price=3.0, least=1)], {"a": 4})
    assert cloud.look({}, budget=0.0) == ["pool_asked 1 a"], "what it always has is the operator's business"


def test_requests_that_nobody_needs_any_more_are_taken_back_and_a_lost_node_is_asked_for_again() -> None:
    cloud = Cloud([seen("a")], {"a": 1})
    cloud.look({"a": 2})
    assert cloud.look({"a": 1}, {"a-0"}) == ["nodes_came 1 a", "pool_withdrawn 1 a"]
    cloud.pools["a"] = dataclasses.replace(cloud.pools["a"], nodes=())
    assert cloud.look({"a": 1}) == ["nodes_went 1 a"]
    assert cloud.memories["a"].target == 1


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"name": "Spot", "max": 1, "node": SPOT}, r"pools\[0\].name = 'Spot'"),
        ({"name": "a", "max": 0, "node": SPOT}, r"pools\[0\].max = 0"),
        ({"name": "a", "max": 1, "min": 2, "node": SPOT}, r"pools\[0\].min = 2"),
        ({"name": "a", "max": 1, "node": {"device": "cpu-1t"}}, r"pools\[0\].node.price_per_hour"),
        ({"name": "a", "max": 1, "node": {**SPOT, "device": "A1000"}}, r"pools\[0\].node.device = 'A1000'"),
        ({"name": "a", "max": 1, "node": {**SPOT, "count": 2}}, r"pools\[0\].node.count = 2"),
        ({"name": "a", "max": 1, "node": SPOT, "zone": "z"}, r"pools\[0\].zone = 'z'.*did you mean 'zones'"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_name(entry: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidField, match=problem):
        parse_pools([entry])


def test_a_pools_file_is_read_and_nodes_are_known_by_their_labels() -> None:
    first, second = parse_pools(POOLS)
    assert (first.node.zone, second.node.zone, first.least, first.most) == ("z1", "z2", 0, 3)
    assert pool_of({"shoal.io/pool": "spot-a", "ray.io/node-group": "spot-b"}, (), {"spot-a", "spot-b"}) == "spot-a"
    assert pool_of({"ray.io/node-group": "spot-b"}, ["shoal-pool-spot-a"], {"spot-a", "spot-b"}) == "spot-b"
    assert pool_of({"ray.io/node-group": "headgroup"}, ["CPU"], {"spot-b"}) is None
    assert pool_of({}, {"CPU": 4, "shoal-pool-spot-b": 1}, {"spot-a", "spot-b"}) == "spot-b"
    with pytest.raises(InvalidField, match="two pools have this name"):
        parse_pools([POOLS[0], POOLS[0]])


def wishing_job(**limits: object) -> JobSpec:
    return parse_job(
        {
            "name": "small",
            "model": {"layers": 4, "hidden": 128, "heads": 4, "ffn": 344, "vocab": 256},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": 8, "seq_len": 64, "steps": 2000},
            "checkpoint": {"uri": "file:///store"},
            "limits": {"rent": True, "max_price_per_hour": 0.7, **limits},
        }
    )


def stocks(*counts: int) -> list[Stock]:
    pools: tuple[RentedPool, ...] = parse_pools(POOLS)
    prices = [pool.node.price_per_hour for pool in pools]
    return [Stock(pool=p, available=n, price_per_hour=usd) for p, n, usd in zip(pools, counts, prices, strict=True)]


def test_a_fleet_keeps_to_the_price_and_changes_over_to_what_can_be_had() -> None:
    nowhere = ClusterSnapshot(nodes=())
    prices = {"spot-a": 0.3, "spot-b": 0.4}
    for available_now in ((3, 3), (0, 3)):
        found = wish_for(wishing_job(), stocks(*available_now), nowhere, budget_per_hour=0.7)
        assert 0 < sum(prices[name] * count for name, count in found.counts.items()) <= 0.7
        assert all(count <= available_now[index] for index, count in enumerate(map(found.counts.get, prices)) if count)
    none = wish_for(wishing_job(), stocks(0, 0), nowhere, budget_per_hour=0.7)
    assert not none.counts and "none is available" in none.reason
    poor = wish_for(wishing_job(), stocks(3, 3), nowhere, budget_per_hour=0.1)
    assert not poor.counts and "buys nothing" in poor.reason
    one = wish_for(wishing_job(max_devices=1), stocks(3, 3), nowhere, budget_per_hour=0.7)
    assert sum(one.counts.values()) == 1


def test_who_has_no_money_or_time_left_rents_nothing() -> None:
    job = wishing_job(budget_usd=10)
    assert hourly_budget(job, 0.0, None) == 0.7
    assert hourly_budget(job, 9.9, None) == pytest.approx(0.4)
    assert hourly_budget(job, 10.5, None) == 0
    assert hourly_budget(job, 0.0, 0.1) == 0
    with pytest.raises(InvalidField, match=r"limits.rent = True: needs max_price_per_hour"):
        parse_job(
            {
                "name": "x",
                "model": {"preset": "gpt2"},
                "data": {"uri": "stdlib:"},
                "train": {"global_batch": 8, "seq_len": 64, "steps": 1},
                "limits": {"rent": True},
            }
        )
