"""`shoal plan` and `shoal score`: the planner on this machine, without any server; or, without a cluster file, that of
the control plane."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli_explain import show_explanation
from shoal.cli_input import BadUsage, read_cluster, read_job, read_plan, read_profile, read_submission
from shoal.cli_show import calibrated_by, say, show_json, show_plan
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_planner.script_spec import ScriptSpec

if TYPE_CHECKING:
    from shoal_planner.costs import CostModel
    from shoal_planner.profile import Profile

app = typer.Typer()
Job = Annotated[str, typer.Argument(metavar="JOB", help="Job file, YAML or JSON; - is standard input.")]
Cluster = Annotated[str, typer.Option("--cluster", metavar="FILE", help="Cluster file, YAML or JSON.")]
ProfileFile = Annotated[
    str | None, typer.Option("--profile", metavar="FILE", help="What was measured, as shoal calibrate writes it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Say why: other candidates, what binds, what more devices would bring.")
]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the plan there as a picture.")]
Timeline = Annotated[
    Path | None, typer.Option("--timeline", metavar="FILE", help="Write there what each stage does when in one step.")
]


@app.command()
def plan(
    job: Job,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="FILE", help="Cluster file (default: the connected cluster).")
    ] = None,
    profile: ProfileFile = None,
    as_json: AsJson = False,
    explain: Explain = False,
    svg: Svg = None,
    timeline: Timeline = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    time_limit: Annotated[float, typer.Option(min=0.001, help="Longest search, in seconds.")] = 10.0,
) -> None:
    """Find a plan for a job on a cluster: which device runs which layers, on how many samples."""
    # The planner loads numpy; commands that only talk to a server need not wait for it.
    from shoal_planner.alone import plan_alone, share_of
    from shoal_planner.answers import plan_answer
    from shoal_planner.costs import CostModel
    from shoal_planner.explanation import explanation_to_mapping
    from shoal_planner.marginals import explain_fully

    if cluster is None:
        given = {"--profile": profile, "--explain": explain, "--svg": svg, "--timeline": timeline}
        _plan_there(job, seed, [name for name, value in given.items() if value], as_json)
        return
    spec, snapshot = read_job(job), read_cluster(cluster)
    costs = known_costs(spec, snapshot, cluster, profile)
    try:
        result = plan_alone(spec, snapshot, costs.profile, seed=seed, time_limit_s=time_limit)
        costs = CostModel(spec, share_of(spec, snapshot, costs.profile, time_limit), costs.profile)
    except NoPlanFits as error:
        raise BadUsage(f"no plan of this job fits: {error}") from error
    except InvalidField as error:
        raise BadUsage(f"{cluster}: {error}") from error
    _draw(result.plan, costs, svg, timeline)
    answer = plan_answer(result, seed=seed)
    if explain:
        found = explain_fully(result.plan, costs, result.finalists, seed=seed, time_limit_s=time_limit)
        answer["explanation"] = explanation_to_mapping(found)
    _show(answer, costs.profile, profile, as_json)
    if result.truncated:
        say(f"the search was cut short after {result.search_s:.3g} s; a longer --time-limit may find a better plan")


def _plan_there(job: str, seed: int, unusable: list[str], as_json: bool) -> None:
    """By the control plane, for the largest cluster that is connected, with what was measured there."""
    from shoal.client import Client

    if unusable:
        raise BadUsage(f"{unusable[0]} needs --cluster: without it the control plane plans for the connected cluster")
    spec = read_submission(job)
    if isinstance(spec, ScriptSpec):
        raise BadUsage(f"{job}: kind = 'ray_train': there is no plan of such a job: Ray Train spreads its workers")
    with Client() as client:
        answer = client.preview(spec, seed=seed)
    (show_json if as_json else show_plan)(answer)


@app.command()
def score(
    plan_file: Annotated[str, typer.Argument(metavar="PLAN.json", help="Plan file, ours or not.")],
    job: Job,
    cluster: Cluster,
    profile: ProfileFile = None,
    as_json: AsJson = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where the time goes, what binds, what is left out.")
    ] = False,
    svg: Svg = None,
    timeline: Timeline = None,
) -> None:
    """Say what our model predicts for any plan, ours or not."""
    from shoal_planner.explanation import explanation, explanation_to_mapping
    from shoal_planner.lasting import Losses, expected_to_mapping
    from shoal_planner.left_out import left_out
    from shoal_planner.moving import UNKNOWN
    from shoal_planner.plan import plan_to_mapping
    from shoal_planner.score import score_with

    given, spec, snapshot = read_plan(plan_file), read_job(job), read_cluster(cluster)
    costs = known_costs(spec, snapshot, cluster, profile)
    try:
        result = score_with(given, costs)
    except NoPlanFits as error:
        raise BadUsage(f"{plan_file}: does not fit: {error}") from error
    except InvalidField as error:
        raise BadUsage(f"{plan_file}: {error}") from error
    _draw(result, costs, svg, timeline)
    answer = plan_to_mapping(result)
    answer["goodput"] = expected_to_mapping(Losses(costs, UNKNOWN).expected(result))
    if explain:
        found = dataclasses.replace(explanation(result, costs), left_out=left_out(result, costs))
        answer["explanation"] = explanation_to_mapping(found)
    _show(answer, costs.profile, profile, as_json)


def known_costs(job: JobSpec, snapshot: ClusterSnapshot, cluster: str, profile: str | None) -> CostModel:
    """With what the file `profile` says, if there is one. Raises BadUsage, naming a node, for a device type that nobody
    knows."""
    from shoal_planner.costs import CostModel

    measured = read_profile(profile, snapshot.overrides, (node.id for node in snapshot.nodes))
    costs = CostModel(job, snapshot, measured.on(snapshot.nodes))
    for node in snapshot.nodes:
        try:
            costs.device(node.id)
        except InvalidField as error:
            where = f"node {node.id}: " if error.field == "device" else ""
            raise BadUsage(f"{cluster}: {where}{error}") from error
    return costs


def _draw(plan: Plan, costs: CostModel, svg: Path | None, timeline: Path | None) -> None:
    from shoal_planner.picture import plan_svg
    from shoal_planner.picture_timeline import timeline_svg

    if timeline is not None:
        try:
            drawn = timeline_svg(plan, costs)
        except InvalidField as error:
            raise BadUsage(f"--timeline: {error}") from error
        write(timeline, drawn, "--timeline")
    if svg is not None:
        write(svg, plan_svg(plan, costs.snapshot), "--svg")


def write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadUsage(f"{option} {path}: cannot be written: {error.strerror or error}") from error


def _show(answer: dict[str, Any], profile: Profile, file: str | None, as_json: bool) -> None:
    if file is not None:
        answer["profile"] = profile_answer(profile, file)
    if as_json:
        show_json(answer)
        return
    show_plan(answer)
    if file is not None:
        print(calibrated_by(answer["profile"]))
    if "explanation" in answer:
        show_explanation(answer["explanation"], answer["goodput"])


def profile_answer(profile: Profile, file: str) -> dict[str, Any]:
    """Where the figures came from: the file, and the factors that it has, if it has any."""
    calibration = profile.calibration
    return {"file": file, "calibration": None if calibration is None else dataclasses.asdict(calibration)}
