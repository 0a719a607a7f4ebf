"""`shoal calibrate`: fits the cost model to steps that were measured, without any server."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli_input import BadUsage, read_cluster, read_runs
from shoal.cli_plan import AsJson, Cluster, ProfileFile, known_costs, write
from shoal.cli_show import say, show_json, table
from shoal_planner.errors import InvalidField

if TYPE_CHECKING:
    from shoal_planner.calibrate import MeasuredRun
    from shoal_planner.cluster import ClusterSnapshot
    from shoal_planner.profile import Profile

app = typer.Typer()


@app.command()
def calibrate(
    runs: Annotated[str, typer.Argument(metavar="RUNS", help="Runs file: plans, and the seconds of a step of each.")],
    cluster: Cluster,
    profile: ProfileFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PROFILE", help="Write there what --profile reads.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the cost model to measured steps of any plans on a cluster: five runs are enough."""
    from shoal_planner.calibrate import calibrate as fit
    from shoal_planner.measured_documents import profile_document

    snapshot = read_cluster(cluster)
    measured = read_runs(runs, snapshot)
    if not measured:
        raise BadUsage(f"{runs}: {InvalidField('runs', [], 'must have at least one entry')}")
    before = dataclasses.replace(known_costs(measured[0].job, snapshot, cluster, profile).profile, calibration=None)
    found = dataclasses.replace(before, calibration=fit(measured, snapshot, before))
    answer = {"profile": profile_document(found), **_comparison(measured, snapshot, before, found)}
    if out is not None:
        write(out, json.dumps(answer["profile"], indent=1) + "\n", "--out")
    if as_json:
        show_json(answer)
    else:
        _show(answer)
    if answer["errors"]["from_others"] is None:
        say("one run shows how slow the cluster is, hardly why: whether other plans are predicted better is unknown")
    elif answer["errors"]["from_others"] > answer["errors"]["before"]:
        say("these runs do not predict each other better than the catalogue does: measure others before relying on it")


def _comparison(
    runs: tuple[MeasuredRun, ...], snapshot: ClusterSnapshot, before: Profile, after: Profile
) -> dict[str, Any]:
    """Measured and predicted seconds of each run; `errors` are means, as shares."""
    from shoal_planner.calibrate import cross_predicted_s, predicted_s

    cross = cross_predicted_s(runs, snapshot, before) if len(runs) > 1 else (None,) * len(runs)
    columns = {
        "before": predicted_s(runs, snapshot, before),
        "after": predicted_s(runs, snapshot, after),
        "from_others": cross,
    }
    entries = [
        {
            "name": run.name or f"runs[{index}]",
            "measured_s": run.step_s,
            **{f"{name}_s": seconds[index] for name, seconds in columns.items()},
        }
        for index, run in enumerate(runs)
    ]
    return {"runs": entries, "errors": {name: _error(runs, seconds) for name, seconds in columns.items()}}


def _error(runs: tuple[MeasuredRun, ...], seconds: tuple[float | None, ...]) -> float | None:
    pairs = zip(runs, seconds, strict=True)
    known = [abs(guess / run.step_s - 1) for run, guess in pairs if guess is not None]
    return statistics.fmean(known) if known else None


def _show(answer: dict[str, Any]) -> None:
    table(
        ("RUN", "MEASURED S", "CATALOGUE S", "CALIBRATED S", "FROM THE OTHERS S"),
        (
            (run["name"], run["measured_s"], run["before_s"], run["after_s"], run["from_others_s"])
            for run in answer["runs"]
        ),
    )
    said = answer["errors"]
    cross = "" if said["from_others"] is None else f", {said['from_others']:.1%} where the others predict each run"
    print(f"mean error: {said['before']:.1%} before, {said['after']:.1%} after{cross}")
    calibration = answer["profile"]["calibration"]
    factors = ", ".join(f"{name} {value:.3g}" for name, value in calibration.items() if name not in ("source", "error"))
    print(f"factors: {factors}")
