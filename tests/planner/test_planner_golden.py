"""The golden cases of unequal devices (PAPERS 1.7) through `plan()` itself.

24 equal layers of 4 units of state and half a unit of activations per micro-batch in flight, 24 micro-batches, nothing
spent on communication; devices as (layers per time unit, units of memory). The published optimum deals every pipeline
the same number of micro-batches; `plan()` need not, so that it may be better, never worse.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import recount

from shoal_planner.cluster import GIB, ClusterSnapshot, parse_cluster
from shoal_planner.job import JobSpec, ModelSpec, parse_job
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage
from shoal_planner.profile import Profile, profile_from_mapping
from shoal_planner.score import score
from shoal_planner.search import plan

HIDDEN, FFN, LAYERS, BATCH = 2048, 8192, 24, 24
TIME_UNIT_S = 1e4  # so long that latencies and the optimizer do not show
BLOCK_ELEMENTS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
MEMORY_UNIT_BYTES = BLOCK_ELEMENTS * 18 / 4  # weights in two bytes, gradients in four, optimizer state in twelve
MODEL = ModelSpec(layers=LAYERS, hidden=HIDDEN, heads=1, ffn=FFN, vocab=256)
SEQ_LEN = int(MEMORY_UNIT_BYTES / 2 / recount.block_bytes(MODEL, "none", 1, 2))
# Beside state and what is in flight: two buffers of a block, a block at work, ends and borders; and what stays free.
EXTRA_UNITS = 2 * 4 * 4 / 18 + 0.5 + 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`best` and `uniform` are plans as pipelines of (device, layers) of `best_units` and `uniform_units` of time."""

    fast: tuple[int, float, float]
    slow: tuple[int, float, float]
    best: tuple[tuple[tuple[str, int], ...], ...]
    best_units: float
    uniform: tuple[tuple[tuple[str, int], ...], ...]
    uniform_units: float


def pairs(count: int, *stages: tuple[str, int]) -> tuple[tuple[tuple[str, int], ...], ...]:
    return (stages,) * count


CASES = {
    "A": Case(
        fast=(4, 2.0, 80),
        slow=(4, 1.0, 80),
        best=pairs(4, ("fast", 16), ("slow", 8)),
        best_units=56.0,
        uniform=pairs(4, ("fast", 12), ("slow", 12)),
        uniform_units=78.0,
    ),
    "B": Case(
        fast=(2, 2.0, 80),
        slow=(4, 1.0, 80),
        best=pairs(2, ("fast", 12), ("slow", 6), ("slow", 6)),
        best_units=84.0,
        uniform=pairs(2, ("fast", 8), ("slow", 8), ("slow", 8)),
        uniform_units=108.0,
    ),
    "D": Case(
        fast=(2, 2.0, 40),
        slow=(2, 1.0, 96),
        best=pairs(1, ("slow", 4), ("slow", 4), ("fast", 8), ("fast", 8)),
        best_units=108.0,
        uniform=pairs(1, ("slow", 6), ("slow", 6), ("fast", 6), ("fast", 6)),
        uniform_units=156.0,
    ),
}


def make_job() -> JobSpec:
    train = {
        "global_batch": BATCH,
        "seq_len": SEQ_LEN,
        "steps": 1,
        "precision": "bf16",
        **{name: "none" for name in ("sharding", "recompute", "overlap")},
    }
    return parse_job({"name": "golden", "model": dataclasses.asdict(MODEL), "data": {"uri": "stdlib:"}, "train": train})


def make_cluster(case: Case) -> ClusterSnapshot:
    nodes, devices = [], {}
    for name, (count, _, units) in (("fast", case.fast), ("slow", case.slow)):
        nodes.append(
            {
                "name": name,
                "device": name,
                "count": count,
                "inter_gbit_per_s": 1e9,
                "intra_gb_per_s": 1e9,
                "host_memory_gib": 1e6,
            }
        )
        usable = (units + EXTRA_UNITS) * MEMORY_UNIT_BYTES
        memory_gib = (usable / GIB + recount.CONTEXT_GIB) / (1 - recount.FREE_SHARE)
        devices[name] = {"memory_gib": memory_gib, "tflops_bf16": 1, "memory_gb_per_s": 1e8}
    return parse_cluster({"nodes": nodes, "devices": devices})


def make_profile(case: Case) -> Profile:
    """Blocks at the speeds of the case; the ends of the model take no time."""
    block: dict[str, object] = {"part": "block", "heads": 1, "kv_heads": 1, "ffn": FFN}
    ends: list[dict[str, object]] = [{"part": part, "vocab": 256} for part in ("embedding", "head")]
    points = [
        {**part, "device": name, "micro_batch": samples, "forward_s": seconds / 3, "backward_s": seconds * 2 / 3}
        for name, speed in (("fast", case.fast[1]), ("slow", case.slow[1]))
        for samples in (1, 2)
        for part, seconds in ((block, samples * TIME_UNIT_S / speed), *((end, 3e-9) for end in ends))
    ]
    common = {"tp": 1, "seq_len": SEQ_LEN, "hidden": HIDDEN, "precision": "bf16", "source": "golden case"}
    return profile_from_mapping({"layers": [{**common, **point} for point in points]})


def make_plan(shape: tuple[tuple[tuple[str, int], ...], ...]) -> Plan:
    used = {"fast": 0, "slow": 0}
    pipelines = []
    for piece in shape:
        stages, first = [], 0
        for name, count in piece:
            replica = Replica(node=f"{name}-{used[name]}", devices=(0,))
            stages.append(Stage(layers=((first, first + count),), replicas=(replica,)))
            used[name], first = used[name] + 1, first + count
        pipelines.append(Pipeline(micro_batch=1, micro_batches=BATCH // len(shape), stages=tuple(stages)))
    return Plan(pipelines=tuple(pipelines), sharding=Sharding(optimizer="none"))


def units(made: Plan) -> float:
    assert made.prediction is not None
    return made.prediction.step_s / TIME_UNIT_S


@pytest.mark.parametrize("name", CASES)
def test_score_gives_the_golden_times(name: str) -> None:
    case = CASES[name]
    for shape, expected in ((case.best, case.best_units), (case.uniform, case.uniform_units)):
        scored = score(make_plan(shape), make_job(), make_cluster(case), make_profile(case))
        assert units(scored) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_plan_reaches_the_golden_optimum(name: str) -> None:
    case = CASES[name]
    found = plan(make_job(), make_cluster(case), make_profile(case), time_limit_s=600)
    assert not found.truncated
    assert found.plan.sharding.optimizer == "none", "the job holds sharding to none"
    assert units(found.plan) <= case.best_units * (1 + 1e-6)
    assert case.uniform_units / units(found.plan) >= case.uniform_units / case.best_units * (1 - 1e-6)


def test_memory_binds_as_the_cases_say() -> None:
    """Case A: a fast device holds 16 layers as the first of two stages and not 17; case D: 8 as the third of four, not
    9, and the slow devices go first because the fast ones would not hold theirs there."""
    a, d = CASES["A"], CASES["D"]
    for case, shape, fits in (
        (a, pairs(4, ("fast", 16), ("slow", 8)), True),
        (a, pairs(4, ("fast", 17), ("slow", 7)), False),
        (d, pairs(1, ("slow", 4), ("slow", 4), ("fast", 8), ("fast", 8)), True),
        (d, pairs(1, ("slow", 4), ("slow", 3), ("fast", 9), ("fast", 8)), False),
        (d, pairs(1, ("fast", 8), ("fast", 8), ("slow", 4), ("slow", 4)), False),
    ):
        cluster = make_cluster(case)
        used = recount.device_bytes(make_plan(shape), make_job(), cluster)
        over = [name for name, size in used.items() if size > recount.room_bytes(cluster, name.rsplit(":", 1)[0])]
        assert (not over) == fits, shape
