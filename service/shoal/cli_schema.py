"""`shoal schema`: the JSON Schema of what users write, without any server."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from shoal_planner.job_schema import job_schema

app = typer.Typer()


class Document(StrEnum):
    JOB = "job"


@app.command()
def schema(what: Annotated[Document, typer.Argument(metavar="WHAT", help="job")]) -> None:
    """Print the JSON Schema of a document, for editors."""
    assert what is Document.JOB
    print(json.dumps(job_schema(), indent=2))
