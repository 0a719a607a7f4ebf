"""What the planner finds, against the plans of others, and what it costs: processor seconds of a first call.

    python -m benchmarks.planner [--json] [--only cases,cpu,...] [--cases PATH] [--repeat N]

Parts: `peers` and `rescore` (the recorded settings, with everything and held to the plain model), `cases` (both, as a
table), `families` (uniform, compute- and memory-proportional plans on mixed clusters), `cpu`, `replan`, and `variety`,
which runs only if it is named (processor seconds over what is allowed, on clusters drawn by seed). A name of a setting
or a size after a colon holds a part to it: `--only cases:sc-64,cpu:1024,variety:v25`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.baselines import FAMILIES, best
from benchmarks.planner_cases import DEFAULT_PATH, Flavour, Setting, cluster, job, load, peer_plan
from benchmarks.planner_child import Call, measured
from benchmarks.planner_clusters import MIXED, SIZES
from benchmarks.planner_variety import bar_s, num_devices, variety
from benchmarks.reporting import answer
from benchmarks.rescore import lower_bound_s, rescore
from shoal_planner.cluster import parse_cluster
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import parse_job
from shoal_planner.plan import parse_plan, plan_to_mapping
from shoal_planner.score import score

PARTS = ("peers", "rescore", "families", "cpu", "replan")
REPEAT = 3
REPLANNED = "1024"  # the size whose re-planning `replan` measures, unless a name asks for others


@dataclass(slots=True, kw_only=True)
class Report:
    """What was asked for, and what has come out so far."""

    only: frozenset[str]
    cases: Path
    repeat: int
    table: bool
    results: dict[str, float | None] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)

    def wanted(self, part: str, name: str) -> bool:
        """Whether this part is to run for this setting or size."""
        return part in self.only or f"{part}:{name}" in self.only

    def settings(self, part: str) -> tuple[Setting, ...]:
        """The recorded settings of this part; the file is needed only if there is one."""
        if not any(entry.partition(":")[0] == part for entry in self.only):
            return ()
        return tuple(setting for setting in load(self.cases) if self.wanted(part, setting.id))


def main() -> None:
    report = _arguments()
    peers(report)
    rescores(report)
    families(report)
    cpu(report)
    replan(report)
    various(report)
    if not report.table:
        answer("planner", report.results, report.runs)


def _arguments() -> Report:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description="The planner against others.")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, each perhaps PART:NAME, with commas between")
    parser.add_argument("--cases", type=Path, default=DEFAULT_PATH, help="the recorded settings")
    parser.add_argument(
        "--repeat", type=int, default=REPEAT, help="calls per processor time, of which the median counts"
    )
    given = parser.parse_args()
    entries = frozenset(given.only.split(","))
    for entry in entries:
        if entry.partition(":")[0] not in (*PARTS, "cases", "variety"):
            parser.error(f"--only {entry}: known parts are cases, variety, {', '.join(PARTS)}")
    table = any(entry.partition(":")[0] == "cases" for entry in entries)
    for part in ("peers", "rescore"):
        entries |= {part + entry.removeprefix("cases") for entry in entries if entry.partition(":")[0] == "cases"}
    return Report(only=entries, cases=given.cases, repeat=given.repeat, table=table and not given.json)


def peers(report: Report) -> None:
    """Both plans under `shoal score`: the recorded peer's seconds over ours."""
    settings = report.settings("peers")
    if not settings:
        return
    _say(report, f"{'shoal score':16s} {'ours_s':>9s} {'peer_s':>9s} {'gain':>7s} {'cpu_s':>8s}  plan")
    gains: dict[str, float | None] = {}
    missing = False
    for setting in settings:
        call = _call(setting, "full")
        peer_s, recompute, why = peer_score(setting)
        ours_s = step_s(call)
        missing = missing or ours_s is None
        gains[setting.id] = peer_s / ours_s if ours_s is not None and peer_s is not None else None
        report.runs[f"gain.peers.{setting.id}"] = {
            "ours_s": ours_s,
            "peer_s": peer_s,
            "peer_recompute": recompute,
            **_notes(call, peer=why),
        }
        _say(
            report,
            f"{setting.id:16s} {_f(ours_s, 9)} {_f(peer_s, 9)} {_f(gains[setting.id], 7)} {call.cpu_s:8.2f}  "
            f"{brief(call)}{' | peer: ' + why if why else ''}",
        )
    _put(report, "gain.peers", gains, missing=missing)


def peer_score(setting: Setting) -> tuple[float | None, str, str]:
    """Seconds of the recorded plan under our model, with the recomputation it got, or None and the reason.

    A plan that does not fit as recorded gets a second chance with full recomputation: its planner presumed less memory
    per activation than we measured."""
    spec, snapshot = parse_job(job(setting, "full")), parse_cluster(cluster(setting, "full"))
    document, why = peer_plan(setting), ""
    for recompute in ("as recorded", "full"):
        if recompute == "full":
            for pipeline in document["pipelines"]:
                for stage in pipeline["stages"]:
                    stage["recompute"] = "full"
        try:
            found = score(parse_plan(document), spec, snapshot).prediction
        except (InvalidField, NoPlanFits) as error:
            why = why or str(error)
        else:
            assert found is not None
            return found.step_s, recompute, why
    return None, "", why


def rescores(report: Report) -> None:
    """Both plans under the plain model: the recorded peer's seconds over ours, and ours over the lower bound."""
    settings = report.settings("rescore")
    if not settings:
        return
    head = f"{'ours_s':>9s} {'peer_s':>9s} {'bound_s':>9s} {'gain':>7s} {'/bound':>7s} {'memory':>6s} {'cpu_s':>8s}"
    _say(report, f"{'plain re-score':16s} {head}  plan")
    gains: dict[str, float | None] = {}
    over: dict[str, float | None] = {}
    for setting in settings:
        call, bound_s = _call(setting, "plain"), lower_bound_s(setting)
        found = None if call.plan is None else rescore(parse_plan(call.plan), setting)
        fitting_s = found.seconds if found is not None and found.fits else None
        gains[setting.id] = setting.peer_rescored_s / fitting_s if fitting_s else None
        over[setting.id] = fitting_s / bound_s if fitting_s else None
        share = None if found is None else found.memory_share
        report.runs[f"rescore_gain.{setting.id}"] = {
            "ours_s": None if found is None else found.seconds,
            "peer_s": setting.peer_rescored_s,
            "bound_s": bound_s,
            "memory_share": share,
            **_notes(call),
        }
        _say(
            report,
            f"{setting.id:16s} {_f(None if found is None else found.seconds, 9)} {setting.peer_rescored_s:9.4f} "
            f"{bound_s:9.4f} {_f(gains[setting.id], 7)} {_f(over[setting.id], 7)} {_f(share, 6)} {call.cpu_s:8.2f}  "
            f"{brief(call)}",
        )
    _put(report, "rescore_gain", gains, missing=None in gains.values())
    report.results |= {f"rescore_over_bound.{name}": value for name, value in over.items()}


def families(report: Report) -> None:
    """The seconds of the best plan of each family over ours, on mixed clusters."""
    grounds = [ground for ground in MIXED if report.wanted("families", ground.name)]
    if not grounds:
        return
    head = "".join(f" {name.removesuffix('_proportional'):>9s}" for name in FAMILIES)
    _say(report, f"{'mixed cluster':18s} {'ours_s':>9s}{head} {'cpu_s':>8s}  plan")
    gains: dict[str, dict[str, float | None]] = {family: {} for family in FAMILIES}
    missing = False
    for ground in grounds:
        call = measured(ground.job, ground.cluster)
        ours_s = step_s(call)
        missing = missing or ours_s is None
        spec, snapshot = parse_job(ground.job), parse_cluster(ground.cluster)
        line = ""
        for family in FAMILIES:
            found = best(family, spec, snapshot)
            gains[family][ground.name] = (
                found.step_s / ours_s if found.step_s is not None and ours_s is not None else None
            )
            report.runs[f"gain.{family}.{ground.name}"] = {
                "ours_s": ours_s,
                "family_s": found.step_s,
                "tried": found.num_tried,
                "error": found.why,
                "plan": None if found.plan is None else plan_to_mapping(found.plan),
            }
            line += f" {_f(found.step_s, 9)}"
        report.runs[f"families.{ground.name}"] = _notes(call)
        _say(report, f"{ground.name:18s} {_f(ours_s, 9)}{line} {call.cpu_s:8.2f}  {brief(call)}")
    for family in FAMILIES:
        _put(report, f"gain.{family}", gains[family], missing=missing)


def cpu(report: Report) -> None:
    """Processor seconds of a first call, by number of devices."""
    for ground in SIZES:
        if report.wanted("cpu", ground.name):
            calls = [measured(ground.job, ground.cluster) for _ in range(report.repeat)]
            _put_cpu(report, f"cpu_s.{ground.name}", calls)


def replan(report: Report) -> None:
    """Processor seconds of a first call after one node is lost, with the plan that ran until then. Lost is the first
    by name of the nodes that the plan uses, so that the loss concerns it."""
    for ground in SIZES:
        if not (
            report.wanted("replan", ground.name) if ground.name == REPLANNED else f"replan:{ground.name}" in report.only
        ):
            continue
        before = measured(ground.job, ground.cluster)
        if before.plan is None:
            _put_cpu(report, f"replan_cpu_s.{ground.name}", [before])
            continue
        lost = min(replica["node"] for replica in _replicas(before.plan))
        calls = [
            measured(ground.job, ground.cluster, previous=before.plan, without=(lost,)) for _ in range(report.repeat)
        ]
        _put_cpu(report, f"replan_cpu_s.{ground.name}", calls)
        report.runs[f"replan_cpu_s.{ground.name}.before"] = {**_notes(before), "plan": None, "lost": lost}


def various(report: Report) -> None:
    """Processor seconds of a first call on clusters of every usual make, over what is allowed: the median and the
    worst, of all and by number of devices."""
    over: dict[int, list[float]] = {}
    for ground in variety():
        if not report.wanted("variety", ground.name):
            continue
        call, devices = measured(ground.job, ground.cluster), num_devices(ground)
        over.setdefault(devices, []).append(call.cpu_s / bar_s(devices))
        report.runs[f"variety.{ground.name}"] = {
            **_notes(call),
            "plan": None,
            "devices": devices,
            "step_s": step_s(call),
        }
        _say(report, f"{ground.name:6s} {devices:5d} {call.cpu_s:8.2f} {over[devices][-1]:6.2f}  {brief(call)}")
    every = [ratio for ratios in over.values() for ratio in ratios]
    for name, ratios in (("", every), *((f"{devices}.", over[devices]) for devices in sorted(over))):
        if ratios:
            report.results[f"cpu_s.variety.{name}median_over_bar"] = statistics.median(ratios)
            report.results[f"cpu_s.variety.{name}worst_over_bar"] = max(ratios)


def _call(setting: Setting, flavour: Flavour) -> Call:
    return measured(job(setting, flavour), cluster(setting, flavour))


def _notes(call: Call, **others: str) -> dict[str, object]:
    notes = {"cpu_s": call.cpu_s, "truncated": call.truncated, "candidates": call.num_candidates, "error": call.error}
    return {**notes, **{f"{name}_error": text for name, text in others.items()}, "plan": call.plan}


def _put(report: Report, name: str, gains: Mapping[str, float | None], *, missing: bool) -> None:
    """One result per setting, and the geometric mean of those where the other's plan fits. Where one of ours is
    `missing` there is no mean: leaving it out would flatter us."""
    report.results |= {f"{name}.{setting}": value for setting, value in gains.items()}
    report.results[name] = None if missing else geometric_mean(gains.values())


def _put_cpu(report: Report, name: str, calls: list[Call]) -> None:
    """The median; None where a call found no plan or was cut short, for then it did not do its work."""
    whole = all(call.plan is not None and not call.truncated for call in calls)
    median_s = statistics.median(call.cpu_s for call in calls)
    report.results[name] = median_s if whole else None
    # Without the plans: those of thousands of devices would be most of the output.
    report.runs[name] = [{**_notes(call), "plan": None, "step_s": step_s(call)} for call in calls]
    last = calls[-1]
    _say(
        report, f"{name:22s} {median_s:8.3f}  step {_f(step_s(last), 9)}{'' if whole else ' CUT SHORT'}  {brief(last)}"
    )


def step_s(call: Call) -> float | None:
    """Predicted seconds of the plan, if there is one."""
    return None if call.plan is None else float(call.plan["predicted"]["step_s"])


def _replicas(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for pipeline in plan["pipelines"]:
        for stage in pipeline["stages"]:
            yield from stage["replicas"]


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there, or None."""
    present = [value for value in values if value is not None]
    return math.exp(math.fsum(map(math.log, present)) / len(present)) if present else None


def brief(call: Call) -> str:
    """The plan in a line: like pipelines once, with stages as blocks@node type(replicas x tp)."""
    if call.plan is None:
        return f"no plan: {call.error}"
    texts: dict[str, int] = {}
    for pipeline in call.plan["pipelines"]:
        text = f"{pipeline['micro_batch']}x{pipeline['micro_batches']} " + ">".join(map(_stage, pipeline["stages"]))
        texts[text] = texts.get(text, 0) + 1
    line = "; ".join(f"{count}*[{text}]" for text, count in texts.items())
    unused = len(call.plan.get("unused", ()))
    return f"{line[:200]}{'...' if len(line) > 200 else ''}{f' unused {unused}' if unused else ''}"


def _stage(stage: Mapping[str, Any]) -> str:
    blocks = sum(last - first for first, last in stage["layers"])
    again = {"full": "R", "selective": "r"}.get(stage.get("recompute", "none"), "")
    again += f"+{len(stage['overrides'])}ov" if stage.get("overrides") else ""
    first = stage["replicas"][0]
    kinds = "+".join(sorted({replica["node"].rpartition(".")[0] or replica["node"] for replica in stage["replicas"]}))
    count = f"{len(stage['replicas'])}x" if len(stage["replicas"]) > 1 else ""
    return f"{blocks}{again}@{kinds}({count}{first['tp']})"


def _f(value: float | None, width: int) -> str:
    return f"{'-':>{width}s}" if value is None else f"{value:{width}.{max(2, width - 5)}f}"


def _say(report: Report, line: str) -> None:
    print(line, flush=True, file=sys.stdout if report.table else sys.stderr)


if __name__ == "__main__":
    main()
