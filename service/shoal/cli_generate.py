"""`shoal generate`: what a model goes on with, to look at what it has learnt."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli_input import BadUsage, job_with_model
from shoal.cli_plan import AsJson
from shoal.cli_show import say, show_json
from shoal.cli_storages import place_of
from shoal.client import Client
from shoal.errors import ShoalError

app = typer.Typer()
_BAD_INPUT = 2


@app.command()
def generate(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="A job's id, STORE-URI/ID, or a Hugging Face folder (path or URI).")
    ],
    prompt: Annotated[str, typer.Option(help="The text to go on with.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most so many.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    step: Annotated[int | None, typer.Option(metavar="N", help="Which checkpoint (default: the newest).")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="bytes, or a tokenizer's file or folder (default: the job's, or what is beside the weights).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let a model go on with a text, on this machine. Needs access to its weights from here, and memory for them."""
    order = _order(what, tokenizer) | {
        "asked": what,
        "step": step,
        "prompt": prompt,
        "count": tokens,
        "temperature": temperature,
        "seed": seed,
    }
    text, found, notes = "", list[int](), list[str]()
    for line in _lines(order):
        found, notes = line.get("tokens", found), line.get("notes", notes)
        text += line.get("text", "")
        if not as_json and "text" in line:
            print(line["text"], end="", flush=True)
    if as_json:
        show_json({"prompt": prompt, "text": text, "tokens": found})
    else:
        print()
    for note in notes:
        say(note)


def _order(what: str, tokenizer: str | None) -> dict[str, Any]:
    """Where the weights are, and how text becomes tokens; None: as what is beside them says. Where earlier versions
    left nothing there, the job's tokenizer is what is left."""
    folder, unknown = Path(what), {"jobs_tokenizer": None}
    if "://" in what or folder.is_dir():
        return {"uri": what if "://" in what else folder.resolve().as_uri(), "tokenizer": tokenizer} | unknown
    if "/" in what:
        raise BadUsage(f"{what}: there is no such folder")
    with Client() as client:
        job = client.get(what)
        spec, place = job_with_model(job), place_of(client, job)
    if place is None:
        raise BadUsage(f"{what} has no checkpoint.uri, so nothing of it is stored")
    return {"uri": f"{place.rstrip('/')}/{what}", "tokenizer": tokenizer, "jobs_tokenizer": spec.data.tokenizer}


def _lines(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Raises BadUsage, ShoalError."""
    with subprocess.Popen(
        [sys.executable, "-m", "shoal_workers.generating"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdin.write(json.dumps(order))
        child.stdin.close()
        for line in child.stdout:
            yield json.loads(line)
        said = child.stderr.read().strip()
        if child.wait():
            problem = said.splitlines()[-1] if said else f"it ended with exit status {child.returncode}"
            raise (BadUsage if child.returncode == _BAD_INPUT else ShoalError)(problem)
