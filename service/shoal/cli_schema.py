"""`shoal schema`: the JSON Schema of what users write, without any server."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer()


class Document(StrEnum):
    JOB = "job"
    CLUSTER = "cluster"
    MARKET = "market"
    PLAN = "plan"


@app.command()
def schema(what: Annotated[Document, typer.Argument(metavar="WHAT", help="job, cluster, market or plan")]) -> None:
    """Print the JSON Schema of a document, for editors."""
    from shoal_planner.cluster_schema import cluster_schema, market_schema
    from shoal_planner.job_schema import job_schema
    from shoal_planner.plan_schema import plan_schema  # which takes a moment to load

    schemas = {
        Document.JOB: job_schema,
        Document.CLUSTER: cluster_schema,
        Document.MARKET: market_schema,
        Document.PLAN: plan_schema,
    }
    print(json.dumps(schemas[what](), indent=2))
