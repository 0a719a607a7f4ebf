"""`shoal debug-dump`: what helps somebody else to find out what is wrong with a job, as one file without secrets."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli_complete import JobId
from shoal.cli_input import BadUsage
from shoal.cli_show import say, show_json
from shoal.client import Client

app = typer.Typer()


@app.command("debug-dump")
def debug_dump(
    job_id: JobId,
    out: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Where to (default ID-debug.zip).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write spec, plans, events, attempts, logs, curve, cluster and versions of a job into a ZIP file, without
    secrets."""
    with Client() as client:
        made = client.debug_dump(job_id)
    path = out or Path(f"{job_id}-debug.zip")
    try:
        path.write_bytes(made)
    except OSError as error:
        raise BadUsage(f"{path}: cannot be written: {error.strerror or error}") from error
    names = zipfile.ZipFile(io.BytesIO(made)).namelist()
    if as_json:
        show_json({"file": str(path), "num_bytes": len(made), "files": names})
        return
    print(path)
    say(f"{len(made) / 1e3:,.0f} KB: {', '.join(names)}; look through logs.txt before you pass it on")
