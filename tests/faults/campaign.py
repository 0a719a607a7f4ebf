"""Runs drills and files what came of them: one line of JSON each, so that a run that was broken off goes on where it
stopped, and a summary of all. Owns grounds, which are reused, and stores."""

from __future__ import annotations

import argparse as some_text
import functools
import itertools
import json
import shutil
import statistics
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from faults.drills import KINDS, Drill, Kind, Moment, draw
from faults.judging import Blow, judge
from faults.playing import NO_GOAL, Ground, Played, play
from faults.process_ground import ProcessGround
from faults.ray_ground import RayGround
from faults.references import Reference, reference
from faults.stored import Stored, check_stored
from faults.stores import Stores
from servers import ProgramMissing
from time_budget import ROOT, sources_of

from shoal_planner.job import JobSpec
from shoal_recovery.journal import Entry, PlanAdopted, StepDone, entry_to_mapping
from shoal_recovery.store import open_store

Line = dict[str, Any]
_LONGEST_S = 240.0  # of one drill, if nothing goes wrong
_PLAYED = ("planner", "recovery", "service", "workers", "tests/faults", ":(glob)tests/*.py", "pyproject.toml")


class Campaign:
    """`out` gets `drills.jsonl`, `summary.json`, cached references, and the story of each drill."""

    def __init__(self, out: Path, say: Callable[[str], None]) -> None:
        self._out = out
        self._say = say
        self._lines = out / "drills.jsonl"
        out.mkdir(parents=True, exist_ok=True)

    def run(self, seeds: range, least_faults: int, steps: int | None, within_s: float) -> list[Line]:
        """The lines of these seeds, those of earlier runs of the same sources among them, and of the next ones until so
        many faults have fallen on Ray; without those that would not end in time."""
        known = {line["seed"]: line for line in self._known() if line.get("sources") == _sources()}
        found: list[Line] = []
        ends_s = time.monotonic() + within_s
        with tempfile.TemporaryDirectory(prefix="drills-") as folder:
            grounds = _Grounds(Path(folder))
            try:
                for seed in itertools.count(seeds.start):
                    if seed >= seeds.stop and _on_ray(found) >= least_faults:
                        break
                    if seed not in known and time.monotonic() + _LONGEST_S > ends_s:
                        self._say(f"no time is left for seed {seed}; the same command goes on there")
                        break
                    found.append(known.get(seed) or self._file(self._one(grounds, draw(seed, steps))))
                    self._sum_up(found)
            finally:
                grounds.close()
        return found

    def _file(self, line: Line) -> Line:
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._say(_shown(line))
        return line

    def _sum_up(self, lines: Sequence[Line]) -> None:
        (self._out / "summary.json").write_text(json.dumps(summary(lines), indent=1) + "\n", encoding="utf-8")

    def _known(self) -> list[Line]:
        if not self._lines.exists():
            return []
        return [json.loads(line) for line in self._lines.read_text(encoding="utf-8").splitlines() if line.endswith("}")]

    def _one(self, grounds: _Grounds, drill: Drill) -> Line:
        began_s = time.monotonic()
        line: Line = {
            "seed": drill.seed,
            "commit": _commit(),
            "sources": _sources(),
            "level": drill.level,
            "nodes": drill.nodes,
            "store": drill.store,
            "copies": drill.copies,
            "plans": "random" if drill.random_plans else "searched",
            "blows": [],
            "left_out": [],
        }
        try:
            job = grounds.job(drill)
            expected = reference(job, self._out / "references")
            prepared_s = time.monotonic()
            played = play(grounds.ground(drill), drill, job)
            stored = grounds.stored(job, expected, played)
            line |= self._judged(drill, job, expected, played, stored)
            line |= {"seconds": time.monotonic() - prepared_s}
        except ProgramMissing:
            raise  # no drill could be played, and so none would ever be enough
        except Exception:  # whatever went wrong is this drill's result; the others go on
            line |= {"problems": [traceback.format_exc()], "seconds": time.monotonic() - began_s}
        if line["problems"]:
            grounds.drop(drill)
        return line

    def _judged(self, drill: Drill, job: JobSpec, expected: Reference, played: Played, stored: Stored | None) -> Line:
        found = judge(
            played.entries,
            model=job.model,
            steps=job.train.steps,
            batch=job.train.global_batch,
            losses=expected.losses,
            blows=played.blows,
            paces=played.paces,
            stored=job.checkpoint.uri is not None,
        )
        problems = [played.stuck] if played.stuck is not None else list(found.problems)
        problems += () if stored is None else stored.problems
        _write_story(self._out / f"story-{drill.seed}.txt", drill, played, problems)
        return {
            "blows": [_row(blow) for blow in played.blows],
            "left_out": [list(entry) for entry in played.left_out],
            "problems": problems,
            "plan_ids": sorted({e.event.plan_id for e in played.entries if isinstance(e.event, PlanAdopted)}),
            "recoveries": found.recoveries,
            "held": found.held,
            "redone": found.redone,
            "stragglers_found": found.found,
            "worst": found.worst,
            "worst_stored": 0.0 if stored is None else stored.worst,
            "recovery_s": [round(second, 3) for second in found.recovery_s],
        }


class _Grounds:
    """One of each level at a time: drills in a row share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[str, ProcessGround | RayGround]] = {}
        self._made = 0
        self._text = folder / "text"
        self._text.write_bytes(Path(some_text.__file__).read_bytes())

    @functools.cached_property
    def _stores(self) -> Stores:
        """Started with the first drill: all may have been played before."""
        return Stores(self._folder)

    def job(self, drill: Drill) -> JobSpec:
        return drill.job(self._text.as_uri(), self._stores.place(drill))

    def ground(self, drill: Drill) -> Ground:
        if drill.level in self._open and self._open[drill.level][0] != drill.nodes:
            self.drop(drill)
        if drill.level not in self._open:
            self._made += 1
            folder = self._folder / f"{drill.nodes}-{self._made}"
            made: ProcessGround | RayGround
            made = (
                RayGround(folder, self._stores)
                if drill.level == "ray"
                else ProcessGround(drill.nodes, folder, self._stores)
            )
            self._open[drill.level] = (drill.nodes, made)
        return self._open[drill.level][1]

    def stored(self, job: JobSpec, expected: Reference, played: Played) -> Stored | None:
        """None of a job that stored nothing, or that did not come to its end."""
        if job.checkpoint.uri is None or played.stuck is not None:
            return None
        store, spoilt = open_store(job.checkpoint.uri), self._stores.spoilt(played.kept_as)
        return check_stored(store, played.kept_as, played.entries, expected.state, job.train.steps, spoilt)

    def drop(self, drill: Drill) -> None:
        """What is left of a drill that failed is nothing for the next one."""
        if drill.level in self._open:
            self._open.pop(drill.level)[1].close()

    def close(self) -> None:
        for _, ground in self._open.values():
            ground.close()
        if "_stores" in self.__dict__:
            self._stores.close()


# --- what came of it ---


def summary(lines: Sequence[Line]) -> Mapping[str, Any]:
    blows = [blow for line in lines for blow in line["blows"]]
    kinds = Counter(blow["kind"] for blow in blows)
    recovery_s = sorted(second for line in lines for second in line.get("recovery_s", ()))
    return {
        "commit": _commit(),
        "drills": len(lines),
        "drills_failed": [line["seed"] for line in lines if line["problems"]],
        "faults": len(blows),
        "faults_by_kind": dict(sorted(kinds.items())),
        "faults_by_moment": dict(sorted(Counter(blow["moment"] for blow in blows).items())),
        "faults_on_ray": _on_ray(lines),
        "drills_on_ray": sum(line["level"] == "ray" for line in lines),
        "faults_by_kind_on_ray": dict(sorted(_kinds(lines, "ray").items())),
        "plans": len({plan for line in lines for plan in line.get("plan_ids", ())}),
        "recoveries": sum(line.get("recoveries", 0) for line in lines),
        "recoveries_with_a_copy_left": sum(line.get("held", 0) for line in lines),
        "steps_redone_of_these": sum(line.get("redone", 0) for line in lines),
        "stragglers_found": sum(line.get("stragglers_found", 0) for line in lines),
        "largest_difference_of_a_loss": max((line.get("worst", 0.0) for line in lines), default=0.0),
        "largest_difference_of_a_last_checkpoint": max((line.get("worst_stored", 0.0) for line in lines), default=0.0),
        "recovery_s_median": statistics.median(recovery_s) if recovery_s else None,
        "seconds": round(sum(line["seconds"] for line in lines), 1),
        "left_out": dict(Counter(f"{kind}: {why}" for line in lines for kind, why in line["left_out"])),
        "never_fell": _never_fell(lines),
    }


def _never_fell(lines: Sequence[Line]) -> list[str]:
    """Kinds, but for what these machines do not allow, and moments that no blow fell in."""
    moments = {blow["moment"] for line in lines for blow in line["blows"]}
    found = [f"none in {moment}" for moment in Moment if moment not in moments]
    for level, possible in KINDS.items():
        left_out = {
            kind for line in lines if line["level"] == level for kind, why in line["left_out"] if why != NO_GOAL
        }
        found += [f"{kind} on {level}" for kind in set(possible) - _kinds(lines, level).keys() - left_out]
    return sorted(found)


def _kinds(lines: Sequence[Line], level: str) -> Counter[Kind]:
    return Counter(Kind(blow["kind"]) for line in lines if line["level"] == level for blow in line["blows"])


def _on_ray(lines: Sequence[Line]) -> int:
    return _kinds(lines, "ray").total()


def _shown(line: Line) -> str:
    what = ", ".join(f"{blow['kind']} in {blow['moment']}" for blow in line["blows"])
    end = "; ".join(str(problem) for problem in line["problems"]) or "well"
    return f"{line['seed']:4d} {line['level']}/{line['nodes']} {line['seconds']:5.1f} s: {what} -> {end[-600:]}"


def _row(blow: Blow) -> Line:
    return {"kind": blow.kind, "moment": blow.moment, "nodes": list(blow.nodes), "step": blow.step}


def _write_story(path: Path, drill: Drill, played: Played, problems: Sequence[str]) -> None:
    lines = [*problems, str(drill), *map(str, played.blows)]
    blows = list(played.blows)
    for entry in played.entries:
        while blows and blows[0].at_s <= entry.at_s:
            lines.append(f"{blows[0].at_s % 1000:8.3f} >>> {blows[0].kind} {blows[0].nodes}")
            blows.pop(0)
        lines.append(_told(entry))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _told(entry: Entry) -> str:
    event = entry.event
    if isinstance(event, StepDone):
        return f"{entry.at_s % 1000:8.3f} step {event.epoch}/{event.step} {event.loss:.6f}"
    said = {key: value for key, value in entry_to_mapping(entry).items() if key not in ("seq", "at_s", "snapshot")}
    return f"{entry.at_s % 1000:8.3f} {json.dumps(said)[:1500]}"


@functools.cache
def _sources() -> str:
    """The same for the same product and the same drills, as this process has loaded them."""
    return sources_of(ROOT, *_PLAYED) or _commit()


@functools.cache
def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
