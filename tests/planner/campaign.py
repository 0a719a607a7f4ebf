"""Campaigns over random clusters: what must hold of every plan, seed by seed, and what did not.

    python tests/planner/campaign.py oracle|units|memory|tight|model|monotone|overlapping|larger|slow --seeds A-B
        [--out DIR]

prints each seed that failed, counts, and the CPU seconds of `plan()`. With --out, what failed is written there as
JSON. Owns the judgements; instances are drawn in `random_clusters`, brute force is in `oracle`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import math
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import recount
from oracle import best_plan, draw_countable, num_copies
from random_clusters import (
    CHANGES,
    Instance,
    draw_any,
    draw_large,
    draw_small,
    log_uniform,
    slow_device,
    with_more_aspects,
)
from random_plans import random_plan

from shoal_planner.cluster import ClusterSnapshot, snapshot_to_mapping
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.overlap import AHEAD, NOTHING, Overlap
from shoal_planner.plan import Plan, Sharding
from shoal_planner.profile import Profile
from shoal_planner.score import score
from shoal_planner.search import PlanResult, plan

# Far above what any of these searches takes: an answer that hangs on the clock would be no answer.
TIME_LIMIT_S = 600.0
# A job at its submission waits as long at most for a plan: what is cut short until then is a plan that users get, too.
LEAST_LIMIT_S, USERS_LIMIT_S, WHOLE_EVERY = 0.1, 10.0, 40
STRICT = 1e-9
LARGER = 0.01
# Of these, so many plans are brute-forced at most.
MOST_PLANS = 12_000


@dataclass(slots=True, kw_only=True)
class Tally:
    """What one seed came to. `failures` are sentences, `repros` their instances as JSON."""

    seed: int
    failures: list[str] = field(default_factory=list)
    repros: list[str] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    num_checked: int = 0
    num_without: int = 0
    num_truncated: int = 0
    num_brute: int = 0
    brute_s: float = 0.0

    def fail(self, problem: str, instance: Instance, other: ClusterSnapshot | None = None) -> None:
        self.failures.append(problem)
        entry = {"problem": problem, **json.loads(instance.repro())}
        if other is not None:
            entry["changed"] = snapshot_to_mapping(other)
        self.repros.append(json.dumps(entry))

    def plan(
        self,
        instance: Instance,
        cluster: ClusterSnapshot | None = None,
        *,
        one_replica: bool = False,
        limit_s: float = TIME_LIMIT_S,
    ) -> PlanResult | None:
        """None: no plan fits. With a limit that is shorter than searches take, it may be cut short."""
        held = _one_replica_option() if one_replica else {}
        started_s = time.process_time()
        try:
            # Processor seconds, so that a seed ends at about the same point whatever runs beside it.
            limit: dict[str, Any] = {"time_limit_s": limit_s, "clock": time.process_time}
            found = plan(instance.job, cluster or instance.cluster, Profile(), **limit, **held)
        except NoPlanFits:
            self.num_without += 1
            return None
        finally:
            self.cpu_s.append(time.process_time() - started_s)
        self.num_truncated += found.truncated
        if found.truncated and limit_s == TIME_LIMIT_S:
            self.fail(f"truncated within {TIME_LIMIT_S:g} s", instance, cluster)
        return found


def step_s(result: PlanResult | None) -> float:
    return math.inf if result is None else predicted_s(result.plan)


def predicted_s(made: Plan) -> float:
    assert made.prediction is not None
    return made.prediction.step_s


# --- judgements ------------------------------------------------------------------------------------------------------


def judge_oracle(seed: int, limit: int = MOST_PLANS) -> Tally:
    """Up to 4 devices: equal to the best of all plans."""
    return _compare(seed, draw_countable(seed, limit), one_replica=False)


def judge_units(seed: int, limit: int = MOST_PLANS) -> Tally:
    """Up to 6 devices: equal to the best of all plans with one replica per stage, unless it uses more replicas and is
    faster still."""
    return _compare(seed, draw_countable(seed, limit, most_devices=6, one_replica=True), one_replica=True)


def _compare(seed: int, instance: Instance, *, one_replica: bool) -> Tally:
    tally = Tally(seed=seed, num_checked=1)
    started_s = time.process_time()
    best = best_plan(instance, one_replica=one_replica)
    tally.num_brute, tally.brute_s = best.num_plans, time.process_time() - started_s
    found = tally.plan(instance, one_replica=one_replica)
    ours_s, train = step_s(found), instance.job.train
    shown = f" (sharding {train.sharding}, recompute {train.recompute}){_shown(best.plan)}"
    problem = (
        f"the best of {best.num_plans}: {_ratio(best.step_s, ours_s)}{shown}{_shown(found.plan if found else None)}"
    )
    if ours_s > best.step_s * (1 + STRICT):
        tally.fail(f"worse than {problem}", instance)
    elif ours_s < best.step_s * (1 - STRICT) and not _wider(found, one_replica=one_replica):
        tally.fail(f"better than {problem}", instance)
    if found is not None:
        _judge_plan(tally, instance, found)
    return tally


def _one_replica_option() -> dict[str, Any]:
    """The search's own option that holds stages to one replica, if it has one."""
    return {"max_replicas": 1} if "max_replicas" in inspect.signature(plan).parameters else {}


def _wider(found: PlanResult | None, *, one_replica: bool) -> bool:
    """Whether the plan lies outside of what was enumerated."""
    assert found is not None
    stages = [stage for pipeline in found.plan.pipelines for stage in pipeline.stages]
    return (
        found.plan.sharding.gradients != "none"
        or found.plan.overlap not in (NOTHING, AHEAD)
        or any(stage.overrides or stage.recompute == "selective" for stage in stages)
        or any(replica.state_share != 1 or not replica.samples for stage in stages for replica in stage.replicas)
        or (one_replica and any(len(stage.replicas) > 1 for stage in stages))
    )


def judge_memory(seed: int, most_devices: int = 64) -> Tally:
    """Any number of devices: the plan passes `score` and a recount of the memory of each device and host. One search of
    so many is whole, however long it takes, and the others end wherever a limit of seconds finds them; every other one
    is of a job with any schedule, on nodes of any kind."""
    instance = draw_any(seed, most_devices)
    if seed % 2:
        instance = with_more_aspects(instance)
    tally = Tally(seed=seed, num_checked=1)
    users_s = log_uniform(random.Random(f"limit {seed}"), LEAST_LIMIT_S, USERS_LIMIT_S)
    found = tally.plan(instance, limit_s=users_s if seed % WHOLE_EVERY else TIME_LIMIT_S)
    if found is not None:
        _judge_plan(tally, instance, found)
    return tally


def judge_tight(seed: int, most_devices: int = 32) -> Tally:
    """As `memory`, on devices with so little of it that many plans keep state on hosts or share it unevenly."""
    drawn = draw_large(seed, most_devices=most_devices)
    rng = random.Random(f"tight {seed}")
    overrides = tuple(
        dataclasses.replace(entry, memory_bytes=int(entry.memory_bytes * rng.uniform(0.25, 0.9)))
        for entry in drawn.cluster.overrides
        if entry.memory_bytes is not None
    )
    instance = dataclasses.replace(drawn, cluster=dataclasses.replace(drawn.cluster, overrides=overrides))
    tally = Tally(seed=seed, num_checked=1)
    found = tally.plan(instance)
    if found is not None:
        _judge_plan(tally, instance, found)
    return tally


def _judge_plan(tally: Tally, instance: Instance, found: PlanResult) -> None:
    """What must hold of any plan."""
    job, made = instance.job, found.plan
    again = score(made, job, instance.cluster, Profile())
    if again.prediction != made.prediction:
        tally.fail(f"score says {again.prediction}, plan() said {made.prediction}", instance)
    turned = dataclasses.replace(made, pipelines=made.pipelines[::-1])
    turned_s = predicted_s(score(turned, job, instance.cluster, Profile()))
    if not math.isclose(turned_s, predicted_s(made), rel_tol=1e-12):
        what = f"{predicted_s(made)} s, and {turned_s} s with the pipelines in the opposite order"
        tally.fail(f"{what}{_shown(made)}", instance)
    stages = [stage for pipeline in made.pipelines for stage in pipeline.stages]
    if job.train.sharding == "none" and made.sharding != Sharding(optimizer="none"):
        tally.fail(f"has {made.sharding}, and the job holds sharding to none", instance)
    if job.train.recompute == "none" and any(
        sum(stage.recomputed().values()) > stage.recomputed()["none"] for stage in stages
    ):
        tally.fail("recomputes, and the job holds recompute to none", instance)
    _judge_memory(tally, instance, made)


def _judge_memory(tally: Tally, instance: Instance, made: Plan) -> None:
    job, cluster = instance.job, instance.cluster
    assert made.prediction is not None
    predicted = dict(made.prediction.memory_bytes)
    for device, used in recount.device_bytes(made, job, cluster).items():
        room = recount.room_bytes(cluster, device.rsplit(":", 1)[0])
        if used > room * (1 + STRICT):
            tally.fail(f"{device} needs {used:.6g} bytes of {room:.6g}{_shown(made)}", instance)
        if not math.isclose(used, predicted.get(device, math.nan), rel_tol=1e-6):
            tally.fail(f"{device}: predicted {predicted.get(device)} bytes, recounted {used}{_shown(made)}", instance)
    for node, kept in recount.host_bytes(made, job, cluster).items():
        if kept > cluster.node(node).host_memory_bytes * (1 + STRICT):
            room = cluster.node(node).host_memory_bytes
            tally.fail(f"host of {node} needs {kept:.6g} bytes of {room:.6g}{_shown(made)}", instance)


def judge_monotone(seed: int, most_devices: int = 8, changes: int = len(CHANGES)) -> Tally:
    """At most 8 devices: each change for the better leaves the plan as fast at least."""
    return judge_changes(seed, draw_small(seed, most_devices), changes, STRICT)


def judge_overlapping(seed: int, most_devices: int = 8, changes: int = len(CHANGES)) -> Tally:
    """As `monotone`, of jobs that let exchanges go on beside computing, as jobs do that say nothing."""
    drawn = draw_small(seed, most_devices)
    train = dataclasses.replace(drawn.job.train, overlap="auto")
    return judge_changes(
        seed, dataclasses.replace(drawn, job=dataclasses.replace(drawn.job, train=train)), changes, STRICT
    )


def judge_larger(seed: int, most_devices: int = 64, changes: int = len(CHANGES)) -> Tally:
    """9 to 64 devices, as many clusters of 9 to 24 as of 24 to 64: no change for the better costs more than a
    hundredth."""
    return judge_changes(seed, draw_any(seed, most_devices, 9), changes, LARGER)


def judge_changes(seed: int, instance: Instance, changes: int, tolerance: float) -> Tally:
    """So many kinds of change, from another one on with each seed."""
    tally = Tally(seed=seed)
    before = tally.plan(instance)
    kinds = list(CHANGES)
    for kind in (kinds[seed % len(kinds) :] + kinds)[:changes]:
        what, cluster = CHANGES[kind](instance)
        _no_worse(tally, f"{kind}: {what}", instance, cluster, before, tolerance)
    return tally


def judge_slow(seed: int, most_devices: int = 64) -> Tally:
    """A device of a tenth of the speed never makes the plan slower; two of three clusters are small."""
    return judge_slow_device(seed, draw_any(seed, most_devices, 9) if seed % 3 == 0 else draw_small(seed))


def judge_slow_device(seed: int, instance: Instance) -> Tally:
    tally = Tally(seed=seed)
    what, cluster = slow_device(instance)
    _no_worse(tally, f"slow: {what}", instance, cluster, tally.plan(instance), STRICT)
    return tally


def _no_worse(
    tally: Tally,
    what: str,
    instance: Instance,
    cluster: ClusterSnapshot,
    before: PlanResult | None,
    tolerance: float,
) -> None:
    tally.num_checked += 1
    after = tally.plan(instance, cluster)
    if before is None or _gained_a_copy(before, after, instance):
        return
    if step_s(after) > step_s(before) * (1 + tolerance):
        again_s = scored_s(before.plan, instance, cluster)
        blame = "score" if again_s > step_s(before) * (1 + STRICT) else "search"
        problem = f"{blame}: {what}: {_ratio(step_s(before), step_s(after))}; the same plan there: {again_s:.9g} s"
        shown = _shown(before.plan) + _shown(after.plan if after else None)
        tally.fail(problem + shown, instance, cluster)


def _gained_a_copy(before: PlanResult, after: PlanResult | None, instance: Instance) -> bool:
    """Hosts had no room for copies of the state and now have: such plans are not compared by seconds."""
    wanted = num_copies(instance.job, instance.cluster)
    return after is not None and before.plan.copies < min(wanted, after.plan.copies)


def judge_model(seed: int, limit: int = 30) -> Tally:
    """Up to 8 devices, any plan, whatever of it overlaps: on a better cluster the same plan takes no longer and still
    fits, the order of its pipelines does not matter, and its memory is what a recount says. What fails here no search
    can make good."""
    instance, rng = draw_small(seed), random.Random(f"model {seed}")
    tally = Tally(seed=seed)
    changed = [(kind, *change(instance)) for kind, change in (*CHANGES.items(), ("slow", slow_device))]
    for made in (_overlapping(rng, random_plan(rng, instance)) for _ in range(limit)):
        before_s = scored_s(made, instance, instance.cluster)
        if math.isinf(before_s):
            continue
        _judge_memory(tally, instance, score(made, instance.job, instance.cluster, Profile()))
        turned = dataclasses.replace(made, pipelines=made.pipelines[::-1])
        if not math.isclose(turned_s := scored_s(turned, instance, instance.cluster), before_s, rel_tol=1e-12):
            tally.fail(f"order: {_ratio(before_s, turned_s)}{_shown(made)}", instance)
        for kind, what, cluster in changed:
            tally.num_checked += 1
            after_s = scored_s(made, instance, cluster)
            if after_s > before_s * (1 + STRICT):
                tally.fail(f"{kind}: {what}: {_ratio(before_s, after_s)}{_shown(made)}", instance, cluster)
    return tally


def _overlapping(rng: random.Random, made: Plan) -> Plan:
    """With anything on that may go on beside computing, or nothing."""
    shares = made.sharding.weights != "none" or made.sharding.gradients != "none"
    overlap = Overlap(
        stages=rng.random() < 0.5,
        shards=shares and rng.random() < 0.5,
        gradients=made.sharding.gradients == "none" and rng.random() < 0.5,
        tensor_chunks=rng.choice((1, 1, 2, 8)),
    )
    try:
        return dataclasses.replace(made, overlap=overlap)
    except InvalidField:  # something else of the plan allows no chunks
        return made


def scored_s(made: Plan, instance: Instance, cluster: ClusterSnapshot) -> float:
    """Seconds of this plan there, with as many copies as plans there have; inf if it does not fit."""
    copied = dataclasses.replace(made, copies=num_copies(instance.job, cluster))
    try:
        return predicted_s(score(copied, instance.job, cluster, Profile()))
    except NoPlanFits:
        return math.inf


def _ratio(before_s: float, after_s: float) -> str:
    share = f"{100 * (after_s / before_s - 1):+.4g} %" if math.isfinite(after_s + before_s) else "one does not fit"
    return f"{before_s:.9g} -> {after_s:.9g} s ({share})"


def _shown(made: Plan | None) -> str:
    return "" if made is None else f"\n    {json.dumps(compact(made))}"


def compact(made: Plan) -> dict[str, object]:
    """A plan in one short line: micro-batches x size, then stages as layers, recomputation and replicas."""
    return {
        "sharding": "/".join((made.sharding.weights, made.sharding.gradients, made.sharding.optimizer)),
        "pipelines": [
            [
                f"{pipeline.micro_batches}x{pipeline.micro_batch}",
                *(
                    f"{stage.first}-{stage.last} {stage.recompute} "
                    + " ".join(f"{r.node}:{','.join(map(str, r.devices))}*{r.samples}" for r in stage.replicas)
                    for stage in pipeline.stages
                ),
            ]
            for pipeline in made.pipelines
        ],
    }


# --- runs ------------------------------------------------------------------------------------------------------------

JUDGES: dict[str, Callable[[int], Tally]] = {
    "oracle": judge_oracle,
    "units": judge_units,
    "memory": judge_memory,
    "tight": judge_tight,
    "model": judge_model,
    "monotone": judge_monotone,
    "overlapping": judge_overlapping,
    "larger": judge_larger,
    "slow": judge_slow,
}


def run(name: str, seeds: Iterable[int], processes: int = 2, **options: int) -> list[Tally]:
    """The tallies of these seeds, in order. A crash is a failure of its seed."""
    judge = functools.partial(_judged, name, options)
    if processes == 1:
        return [judge(seed) for seed in seeds]
    # Fresh processes: a test run may have threads, which a fork would not survive.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(judge, seeds, chunksize=4))


def _judged(name: str, options: dict[str, int], seed: int) -> Tally:
    try:
        return JUDGES[name](seed, **options)
    except Exception:  # whatever went wrong is this seed's result; the other seeds go on
        return Tally(seed=seed, failures=[traceback.format_exc()], repros=[json.dumps({"seed": seed})])


def summary(name: str, tallies: list[Tally]) -> str:
    """Counts, and each failure with its seed."""
    cpu_s = sorted(second for tally in tallies for second in tally.cpu_s)
    failed = [tally for tally in tallies if tally.failures]
    lines = [f"{name} {tally.seed}: {problem}" for tally in failed for problem in tally.failures]
    mean_s = sum(cpu_s) / max(1, len(cpu_s))
    lines.append(
        f"{name}: {len(tallies)} seeds, {sum(tally.num_checked for tally in tallies)} checks, {len(failed)} seeds "
        f"failed; {len(cpu_s)} plans of {mean_s:.3g} s CPU in the mean, {cpu_s[-1] if cpu_s else 0:.3g} s at most"
        f"; {sum(tally.num_without for tally in tallies)} without a plan, "
        f"{sum(tally.num_truncated for tally in tallies)} cut short"
    )
    if brute := sum(tally.num_brute for tally in tallies):
        lines.append(f"    {brute} plans by brute force in {sum(tally.brute_s for tally in tallies):.3g} s")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=sorted(JUDGES))
    parser.add_argument("--seeds", default="0-99", help="a seed, or the first and the last as A-B")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=int, help="oracle, units and model: so many plans at most")
    parser.add_argument("--most-devices", type=int, help="the other campaigns: at most so many devices")
    parser.add_argument("--changes", type=int, help="monotone and larger: so many kinds of change to each cluster")
    parser.add_argument("--out", type=Path, help="a folder for what failed, as JSON")
    given = parser.parse_args(arguments)
    first, _, last = given.seeds.partition("-")
    options = {
        name: value for name in ("limit", "most_devices", "changes") if (value := getattr(given, name)) is not None
    }
    tallies = run(given.campaign, range(int(first), int(last or first) + 1), given.processes, **options)
    sys.stdout.write(summary(given.campaign, tallies) + "\n")
    if given.out:
        _write(given.out, given.campaign, tallies)
    return int(any(tally.failures for tally in tallies))


def _write(folder: Path, name: str, tallies: list[Tally]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for tally in tallies:
        for number, repro in enumerate(tally.repros):
            (folder / f"{name}-{tally.seed}-{number}.json").write_text(repro + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
