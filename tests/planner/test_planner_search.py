"""The search against exhaustive enumeration, the golden cases, and what it must never do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.candidates import Pricer, Unit
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.deal import deal, least_time
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.explain import explain
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.layouts import arrangements, form_units, layouts
from shoal_planner.memory import held_elements, stage_memory, usable_bytes
from shoal_planner.plan import Pipeline, Plan, Replica, Stage, check_plan
from shoal_planner.profile import LinkFigure, Profile
from shoal_planner.schedule import programs, prove
from shoal_planner.score import score
from shoal_planner.search import Search, plan, step_s
from shoal_planner.split import StageCost, pipeline_seconds, split_layers

MIB_PER_GIB = 1024


def make_job(
    *,
    layers: int = 8,
    batch: int = 16,
    heads: int = 8,
    precision: str = "fp32",
    tie: bool = True,
    seq_len: int = 128,
    hidden: int = 256,
    vocab: int = 256,
    limits: dict[str, object] | None = None,
    copies: int | str = "auto",
) -> JobSpec:
    return parse_job(
        {
            "name": "quickstart",
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "kv_heads": heads // 2,
                "ffn": hidden * 43 // 16,
                "vocab": vocab,
                "tie_embeddings": tie,
            },
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": batch, "seq_len": seq_len, "steps": 60, "precision": precision},
            "limits": limits or {},
            "checkpoint": {"copies": copies},
        }
    )


def make_cluster(*nodes: tuple[str, str, int, int], memory_mib: dict[str, float], **figures: float) -> ClusterSnapshot:
    """Nodes as (name, device, count, devices); each device type with this much memory."""
    return parse_cluster(
        {
            "nodes": [
                {"name": name, "device": device, "count": count, "devices": devices, **figures}
                for name, device, count, devices in nodes
            ],
            "devices": {name: {"memory_gib": mib / MIB_PER_GIB} for name, mib in memory_mib.items()},
        }
    )


EMBEDDED = make_cluster(
    ("big", "cpu-2t", 1, 1), ("small", "cpu-1t", 4, 1), memory_mib={"cpu-2t": 512, "cpu-1t": 90}, host_memory_gib=2
)


def checked(found: Plan, job: JobSpec, cluster: ClusterSnapshot, profile: Profile | None = None) -> None:
    """All that must hold of any plan."""
    check_plan(found, job)
    prove(programs(found, job.model))
    again = score(found, job, cluster, profile)
    assert again.prediction == found.prediction
    assert found.prediction is not None
    costs = CostModel(job, cluster, profile or Profile())
    for name, used in found.prediction.memory_bytes:
        assert used <= usable_bytes(costs.device(name.rsplit(":", 1)[0]))
    terms = found.prediction.terms
    total = sum(getattr(terms, name) for name in terms.__dataclass_fields__)
    assert math.isclose(total, found.prediction.step_s, rel_tol=1e-9)
    assert min(getattr(terms, name) for name in terms.__dataclass_fields__) >= 0
    assert found.reason.endswith(".")


# --- the split of layers ---------------------------------------------------------------------------------------------


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def brute_split(stages: tuple[StageCost, ...], num_layers: int, micro_batches: int) -> float:
    best = math.inf
    for counts in compositions(num_layers, len(stages)):
        fits = True
        for index, (stage, count) in enumerate(zip(stages, counts, strict=True)):
            flight = min(len(stages) - index, micro_batches)
            used = stage.fixed_bytes + count * stage.layer_bytes
            used += flight * (stage.flight_fixed_bytes + count * stage.flight_layer_bytes)
            fits = fits and used <= stage.capacity_bytes and count >= stage.least
        if fits:
            layers = np.array([counts])
            best = min(best, float(pipeline_seconds(stages, layers, np.array([micro_batches]))[0]))
    return best


stage_costs = st.builds(
    StageCost,
    per_layer_s=st.integers(1, 9).map(float),
    fixed_s=st.integers(0, 5).map(float),
    sync_per_layer_s=st.integers(0, 9).map(float),
    sync_fixed_s=st.integers(0, 9).map(float),
    capacity_bytes=st.integers(0, 60).map(float),
    layer_bytes=st.integers(0, 5).map(float),
    fixed_bytes=st.integers(0, 9).map(float),
    flight_layer_bytes=st.integers(0, 3).map(float),
    flight_fixed_bytes=st.integers(0, 2).map(float),
    least=st.integers(0, 1),
)


@settings(deadline=None, max_examples=300)
@given(stages=st.lists(stage_costs, min_size=1, max_size=4).map(tuple), num_layers=st.integers(1, 7))
def test_the_split_equals_exhaustive_enumeration(stages: tuple[StageCost, ...], num_layers: int) -> None:
    numbers = np.array([1, 2, 5])
    found = split_layers(stages, num_layers, numbers)
    for index, number in enumerate(numbers):
        assert found.seconds[index] == pytest.approx(brute_split(stages, num_layers, int(number)))
        if np.isfinite(found.seconds[index]):
            assert found.layers[index].sum() == num_layers


# --- the golden cases of unequal pipelines ---------------------------------------------------------------------------

GOLDEN = {
    "A": ([(2.0, 80)] * 4 + [(1.0, 80)] * 4, 56.0),
    "B": ([(2.0, 80)] * 2 + [(1.0, 80)] * 4, 84.0),
    "D": ([(2.0, 40)] * 2 + [(1.0, 96)] * 2, 108.0),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_a_golden_case_is_reproduced(case: str) -> None:
    """24 layers of 4 GB and 0.5 GB per micro-batch in flight; 24 micro-batches, the same number for each pipeline."""
    devices, optimum = GOLDEN[case]
    kinds = sorted(set(devices))
    units = tuple(
        sorted(
            Unit(kind=kinds.index(device), node=f"n-{number}", devices=(0,)) for number, device in enumerate(devices)
        )
    )
    times: dict[tuple[tuple[int, ...], int], float] = {}
    best = math.inf
    for words in arrangements(units, len(devices), set()):
        if 24 % len(words) or max(map(len, words)) > 5:
            continue
        keys = [(tuple(unit.kind for unit in word), 24 // len(words)) for word in words]
        for key in keys:
            if key not in times:
                stages = tuple(
                    StageCost(
                        per_layer_s=1 / kinds[kind][0],
                        capacity_bytes=kinds[kind][1],
                        layer_bytes=4,
                        flight_layer_bytes=0.5,
                    )
                    for kind in key[0]
                )
                times[key] = float(split_layers(stages, 24, np.array([key[1]])).seconds[0])
        best = min(best, max(times[key] for key in keys))
    assert best == optimum


# --- dealing samples -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(
        st.lists(st.one_of(st.integers(1, 9), st.just(math.inf)), min_size=6, max_size=6), min_size=1, max_size=3
    )
)
def test_dealing_equals_exhaustive_enumeration(rows: list[list[float]]) -> None:
    tables = tuple(np.array([math.inf, *row], dtype=np.float64) for row in rows)
    best = math.inf
    for counts in itertools.product(range(1, 7), repeat=len(rows)):
        if sum(counts) == 6:
            best = min(best, max(float(table[count]) for table, count in zip(tables, counts, strict=True)))
    found = deal(tables, 6)
    assert least_time(tables, 6) <= best
    if found is None:
        assert best == math.inf
    else:
        assert found[0] == best
        assert sum(found[1]) == 6
        assert max(table[count] for table, count in zip(tables, found[1], strict=True)) <= best


# --- the exact search ------------------------------------------------------------------------------------------------


def set_partitions(items: tuple[Unit, ...]) -> Iterator[list[list[Unit]]]:
    if not items:
        yield []
        return
    for partition in set_partitions(items[1:]):
        yield [[items[0]], *partition]
        for index, block in enumerate(partition):
            yield [*partition[:index], [items[0], *block], *partition[index + 1 :]]


def brute_force(costs: CostModel) -> float:
    """The least time over every use of the devices: units, groups, orders, layers, micro-batches, shares."""
    job, pricer = costs.job, Pricer(costs)
    best = math.inf
    cuts = [list(_all_cuts(node.devices)) for node in costs.snapshot.nodes]
    for choice in itertools.product(*cuts):
        units = form_units(zip(costs.snapshot.nodes, choice, strict=True), costs.profile, KINDS)
        if any(job.model.num_kv_heads % unit.tp for unit in units):
            continue
        for size in range(1, len(units) + 1):
            for used in itertools.combinations(units, size):
                for partition in set_partitions(used):
                    best = min(best, _best_partition(partition, pricer, costs))
    return best


KINDS: dict[object, int] = {}


def _all_cuts(devices: int) -> Iterator[tuple[int, ...]]:
    for counts in itertools.product(range(devices + 1), repeat=devices):
        if sum((tp + 1) * count for tp, count in enumerate(counts)) == devices:
            yield tuple(tp + 1 for tp, count in enumerate(counts) for _ in range(count))


def _best_partition(partition: list[list[Unit]], pricer: Pricer, costs: CostModel) -> float:
    batch = costs.job.train.global_batch
    tables = [
        [math.inf, *(_best_pipeline(tuple(block), n, len(partition), pricer, costs) for n in range(1, batch + 1))]
        for block in partition
    ]
    best = math.inf
    for counts in itertools.product(range(1, batch + 1), repeat=len(partition)):
        if sum(counts) == batch:
            best = min(best, max(table[count] for table, count in zip(tables, counts, strict=True)))
    return best


_PIPELINES: dict[tuple[object, ...], float] = {}


def _best_pipeline(block: tuple[Unit, ...], samples: int, pipelines: int, pricer: Pricer, costs: CostModel) -> float:
    key = (id(costs), tuple(sorted((u.kind, u.node) for u in block)), samples, pipelines)
    if key not in _PIPELINES:
        _PIPELINES[key] = min(
            _split_by_hand(word, size, samples // size, pipelines, pricer, costs)
            for word in itertools.permutations(block)
            for size in range(1, samples + 1)
            if samples % size == 0
        )
    return _PIPELINES[key]


def _split_by_hand(
    word: tuple[Unit, ...], size: int, micro_batches: int, pipelines: int, pricer: Pricer, costs: CostModel
) -> float:
    """Every composition of the layers, each stage's memory asked of the memory model itself."""
    model, train = costs.job.model, costs.job.train
    stages = pricer.stages(word, pipelines, size)
    best = math.inf
    for counts in compositions(model.layers, len(word)):
        if any(count == 0 for count in counts[1:-1]) or (len(word) == 1 and counts[0] == 0):
            continue
        fits = True
        for index, (unit, count) in enumerate(zip(word, counts, strict=True)):
            ends = {"embedding": index == 0, "head": index == len(word) - 1}
            memory = stage_memory(
                model,
                train.seq_len,
                train.precision,
                tp=unit.tp,
                samples=size,
                in_flight=min(len(word) - index, micro_batches),
                layers=count,
                **ends,
                owned=held_elements(model, unit.tp, count, **ends) / pipelines,
            )
            fits = fits and memory.total <= usable_bytes(costs.device(unit.node))
        if fits:
            seconds = pipeline_seconds(stages, np.array([counts]), np.array([micro_batches]))
            best = min(best, float(seconds[0]))
    return best


SMALL = {
    "three kinds": make_cluster(
        ("a", "cpu-2t", 1, 1), ("b", "cpu-1t", 1, 1), ("c", "slow", 1, 1), memory_mib={"cpu-2t": 60, "cpu-1t": 40}
    ),
    "two pairs": make_cluster(("a", "cpu-2t", 1, 2), ("b", "cpu-1t", 1, 2), memory_mib={"cpu-2t": 50, "cpu-1t": 30}),
    "equal nodes": make_cluster(("a", "cpu-2t", 1, 1), ("b", "cpu-1t", 3, 1), memory_mib={"cpu-2t": 80, "cpu-1t": 30}),
    "gpus": make_cluster(("a", "T4", 1, 2), ("b", "L4", 2, 1), memory_mib={}),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("layers", "batch"), [(4, 4), (3, 5)])
def test_the_search_equals_brute_force(name: str, layers: int, batch: int) -> None:
    cluster = SMALL[name]
    if name == "three kinds":
        cluster = parse_cluster(
            {
                "nodes": [{"name": node.id[0], "device": node.device} for node in cluster.nodes],
                "devices": {
                    "cpu-2t": {"memory_gib": 60 / MIB_PER_GIB},
                    "cpu-1t": {"memory_gib": 40 / MIB_PER_GIB},
                    "slow": {"memory_gib": 0.2, "tflops_fp32": 0.03, "threads": 1},
                },
            }
        )
    job = make_job(layers=layers, batch=batch)
    costs = CostModel(job, cluster, Profile())
    search = Search(costs, 0, 0, lambda: False)
    search.run()
    expected = brute_force(costs)
    assert search.best()[0].seconds == pytest.approx(expected, rel=1e-9)
    checked(plan(job, cluster).plan, job, cluster)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSnapshot:
    kinds = ["cpu-1t", "cpu-2t", "T4"]
    nodes = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(1, 2)), min_size=1, max_size=3))
    return make_cluster(
        *((f"n{index}", device, 1, devices) for index, (device, devices) in enumerate(nodes)),
        memory_mib={kind: draw(st.sampled_from([20, 40, 90, 300])) for kind in kinds[:2]},
        host_memory_gib=draw(st.sampled_from([0.1, 1])),
        inter_gbit_per_s=draw(st.sampled_from([0.1, 10])),
    )


@settings(deadline=None, max_examples=25)
@given(
    cluster=clusters(),
    layers=st.integers(1, 6),
    batch=st.integers(1, 9),
    tie=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
)
def test_every_plan_found_holds_what_it_must(
    cluster: ClusterSnapshot, layers: int, batch: int, tie: bool, precision: str
) -> None:
    job = make_job(layers=layers, batch=batch, tie=tie, precision=precision)
    try:
        result = plan(job, cluster)
    except NoPlanFits as error:
        assert len(str(error)) > 20
        return
    checked(result.plan, job, cluster)
    assert not result.truncated
    assert result.candidates[0][1] <= step_s(result.plan) * 1.0001


# --- the embedded cluster --------------------------------------------------------------------------------------------


def test_the_embedded_cluster_gets_an_asymmetric_plan() -> None:
    job = make_job()
    result = plan(job, EMBEDDED)
    depths = sorted(len(pipeline.stages) for pipeline in result.plan.pipelines)
    assert depths == [1, 2, 2]
    assert result.plan.copies == 1
    assert len({pipeline.samples for pipeline in result.plan.pipelines}) > 1
    checked(result.plan, job, EMBEDDED)
    assert "cpu-1t cannot hold the whole model alone" in result.plan.reason
    text = explain(result.plan, result.candidates)
    assert "layers 0-8 on big-0:0" in text
    assert "best candidates:" in text


@pytest.mark.parametrize("lost", [node.id for node in EMBEDDED.nodes])
def test_after_the_loss_of_any_node_a_plan_remains(lost: str) -> None:
    job = make_job()
    before = plan(job, EMBEDDED).plan
    rest = EMBEDDED.without([lost])
    after = plan(job, rest, previous=before)
    checked(after.plan, job, rest)
    assert all(ref.node != lost for ref in after.plan.devices())


def test_the_same_arguments_give_the_same_plan() -> None:
    assert plan(make_job(), EMBEDDED, seed=3).plan == plan(make_job(), EMBEDDED, seed=3).plan


def test_a_hardly_slower_plan_is_kept() -> None:
    job = make_job()
    first = plan(job, EMBEDDED)
    assert plan(job, EMBEDDED, previous=first.plan).plan.plan_id == first.plan.plan_id
    # Another order of equal nodes costs the same; what the nodes already hold decides.
    turned = {"small-0": "small-3", "small-3": "small-0"}
    previous = Plan(
        pipelines=tuple(
            Pipeline(
                micro_batch=pipeline.micro_batch,
                micro_batches=pipeline.micro_batches,
                stages=tuple(
                    Stage(
                        layers=stage.layers,
                        replicas=tuple(
                            Replica(
                                node=turned.get(replica.node, replica.node),
                                devices=replica.devices,
                                samples=replica.samples,
                            )
                            for replica in stage.replicas
                        ),
                    )
                    for stage in pipeline.stages
                ),
            )
            for pipeline in first.plan.pipelines
        )
    )
    assert previous.plan_id != first.plan.plan_id
    assert plan(job, EMBEDDED, previous=previous).plan.plan_id == previous.plan_id


def test_nodes_with_measured_links_are_told_apart() -> None:
    slow = tuple(
        LinkFigure(from_node="small-0", to_node=other, latency_s=0.5, bytes_per_s=1e6, source="measured")
        for other in ("small-1", "small-2", "small-3", "big-0")
    )
    job = make_job()
    result = plan(job, EMBEDDED, Profile(links=slow))
    checked(result.plan, job, EMBEDDED, Profile(links=slow))
    assert "small-0:0" in result.plan.unused
    assert "stay unused: every plan tried" in result.plan.reason


# --- limits ----------------------------------------------------------------------------------------------------------


def test_device_types_and_least_devices_are_kept() -> None:
    job = make_job(limits={"device_types": ["cpu-1t"], "min_devices": 3})
    found = plan(job, EMBEDDED).plan
    assert "big-0:0" in found.unused
    assert len(found.devices()) >= 3
    assert "limits.device_types leaves them out" in found.reason


@pytest.mark.parametrize(
    ("job", "cluster", "message"),
    [
        (make_job(hidden=1024), EMBEDDED, r"needs \d+\.\d (MiB|GiB) on \S+, which has \d+"),
        (make_job(limits={"device_types": ["A100-80G"]}), EMBEDDED, "limits.device_types allows A100-80G; the cluster"),
        (make_job(limits={"min_devices": 9}), EMBEDDED, "limits.min_devices is 9; the cluster has 5 devices"),
        (make_job(), EMBEDDED.without([node.id for node in EMBEDDED.nodes]), "the cluster has no nodes"),
        (make_job(copies=5), EMBEDDED, "checkpoint.copies = 5 needs 6 nodes, and the cluster has 5"),
        (
            make_job(),
            parse_cluster(
                {
                    "nodes": [
                        {"name": "a", "device": "cpu-2t", "host_memory_gib": 0.1},
                        {"name": "b", "device": "cpu-1t", "host_memory_gib": 9},
                    ],
                    "devices": {"cpu-1t": {"memory_gib": 0.003}},
                }
            ),
            "on the host of a-0 for snapshots, which has 102.4",
        ),
        (
            make_job(layers=64, heads=2),
            make_cluster(("a", "cpu-2t", 2, 1), memory_mib={}, host_memory_gib=0.1),
            "snapshots of the model need",
        ),
        (
            make_job(layers=7),
            make_cluster(
                ("a", "cpu-2t", 1, 1), ("b", "cpu-1t", 1, 1), memory_mib={"cpu-2t": 90, "cpu-1t": 3}, host_memory_gib=9
            ),
            "needs .* on b-0, which has 3",
        ),
        (
            make_job(layers=2, vocab=60000),
            make_cluster(("a", "cpu-2t", 2, 1), memory_mib={"cpu-2t": 128}, host_memory_gib=9),
            "the head alone needs .* on a-0, which has 128",
        ),
        (
            make_job(layers=2, vocab=20000, hidden=64, tie=False),
            make_cluster(("a", "cpu-2t", 1, 1), ("b", "cpu-1t", 1, 1), memory_mib={"cpu-2t": 74, "cpu-1t": 4}),
            "every device could hold an even share of the layers, but",
        ),
    ],
    ids=["memory", "types", "devices", "empty", "copies", "host", "all hosts", "small device", "head", "ends"],
)
def test_what_does_not_fit_is_named(job: JobSpec, cluster: ClusterSnapshot, message: str) -> None:
    with pytest.raises(NoPlanFits, match=message):
        plan(job, cluster)


def test_copies_follow_the_number_of_nodes() -> None:
    one = make_cluster(("a", "cpu-2t", 1, 1), memory_mib={})
    assert plan(make_job(), one).plan.copies == 0
    assert plan(make_job(copies=2), EMBEDDED).plan.copies == 2


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(InvalidField, match="did you mean 'A100-80G'"):
        plan(make_job(), make_cluster(("a", "A100-80", 1, 1), memory_mib={}))


def test_tensor_parallelism_divides_heads() -> None:
    fast = make_cluster(("a", "T4", 1, 3), memory_mib={"T4": 1500}, intra_gb_per_s=300)
    found = plan(make_job(heads=8, batch=1, hidden=1024, precision="bf16"), fast).plan
    assert all(place.tp in (1, 2, 4) for place in found.places())


def test_a_search_that_runs_out_of_time_says_so() -> None:
    ticks = itertools.count()
    result = plan(make_job(), EMBEDDED, time_limit_s=20, clock=lambda: float(next(ticks)))
    assert result.truncated
    checked(result.plan, make_job(), EMBEDDED)


# --- large clusters --------------------------------------------------------------------------------------------------

LARGE = parse_cluster(
    {
        "nodes": [
            {
                "name": "a",
                "device": "A100-80G",
                "host_memory_gib": 512,
                "devices": 8,
                "count": 3,
                "intra_gb_per_s": 300,
                "inter_gbit_per_s": 100,
            },
            {
                "name": "l",
                "device": "L40S",
                "host_memory_gib": 512,
                "devices": 8,
                "count": 3,
                "intra_gb_per_s": 20,
                "inter_gbit_per_s": 50,
            },
            {
                "name": "t",
                "device": "T4",
                "host_memory_gib": 512,
                "devices": 4,
                "count": 4,
                "intra_gb_per_s": 12,
                "inter_gbit_per_s": 25,
            },
        ]
    }
)


def large_job(batch: int = 128) -> JobSpec:
    return make_job(layers=32, batch=batch, heads=32, hidden=4096, seq_len=1024, precision="bf16", tie=False)


def test_sixty_four_devices_of_three_types_are_planned() -> None:
    job = large_job()
    result = plan(job, LARGE, time_limit_s=60)
    assert LARGE.num_devices == 64
    checked(result.plan, job, LARGE)
    assert not result.truncated
    others = [node.id for node in LARGE.nodes if node.device != "A100-80G"]
    assert step_s(result.plan) < step_s(plan(job, LARGE.without(others), time_limit_s=60).plan)


def test_layouts_of_equal_nodes_come_in_one_order() -> None:
    cluster = make_cluster(("a", "T4", 2, 2), memory_mib={})
    found = list(layouts(cluster.nodes, (1, 2), Profile(), {}))
    assert sorted(sorted(unit.tp for unit in units) for units in found) == [[1, 1, 1, 1], [1, 1, 2], [2, 2]]
