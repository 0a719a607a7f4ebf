"""`shoal plan` and `shoal score`: the planner on this machine, without any server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shoal.cli_input import BadUsage, read_cluster, read_job, read_plan
from shoal.cli_show import say, show_json, show_plan
from shoal_planner.errors import InvalidField, NoPlanFits

app = typer.Typer()
Job = Annotated[str, typer.Argument(metavar="JOB", help="Job file, YAML or JSON; - is standard input.")]
Cluster = Annotated[str, typer.Option("--cluster", metavar="FILE", help="Cluster file, YAML or JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def plan(
    job: Job,
    cluster: Cluster,
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, and what else was tried.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    time_limit: Annotated[float, typer.Option(min=0.001, help="Longest search, in seconds.")] = 10.0,
) -> None:
    """Find a plan for a job on a cluster: which device runs which layers, on how many samples."""
    # The planner loads numpy; commands that only talk to a server need not wait for it.
    from shoal_planner.answers import plan_answer
    from shoal_planner.explain import explain as explained
    from shoal_planner.search import plan as search

    spec, snapshot = read_job(job), read_cluster(cluster)
    try:
        result = search(spec, snapshot, seed=seed, time_limit_s=time_limit)
    except NoPlanFits as error:
        raise BadUsage(f"no plan of this job fits: {error}") from error
    except InvalidField as error:
        raise BadUsage(f"{cluster}: {error}") from error
    text = explained(result.plan, result.candidates) if explain else None
    _show(plan_answer(result, seed=seed), text, as_json)
    if result.truncated:
        say(f"the search was cut short after {result.search_s:.3g} s; a longer --time-limit may find a better plan")


@app.command()
def score(
    plan_file: Annotated[str, typer.Argument(metavar="PLAN.json", help="Plan file, ours or not.")],
    job: Job,
    cluster: Cluster,
    as_json: AsJson = False,
) -> None:
    """Say what our model predicts for any plan, ours or not."""
    from shoal_planner.plan import plan_to_mapping
    from shoal_planner.score import score as scored

    given, spec, snapshot = read_plan(plan_file), read_job(job), read_cluster(cluster)
    try:
        result = scored(given, spec, snapshot)
    except NoPlanFits as error:
        raise BadUsage(f"{plan_file}: does not fit: {error}") from error
    except InvalidField as error:
        raise BadUsage(f"{plan_file}: {error}") from error
    _show(plan_to_mapping(result), None, as_json)


def _show(answer: dict[str, Any], text: str | None, as_json: bool) -> None:
    if not as_json:
        show_plan(answer)
        if text is not None:
            print(f"\n{text}")
        return
    show_json(answer if text is None else {**answer, "explanation": text})
