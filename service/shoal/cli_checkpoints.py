"""`shoal checkpoints` and `shoal export`: what of a job stands in its object store, and its weights for other tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli_input import BadUsage, job_with_model
from shoal.cli_plan import AsJson
from shoal.cli_show import say, show_json, table
from shoal.cli_storages import place_of
from shoal.client import Client
from shoal.errors import ShoalError
from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_recovery.errors import StoreError

if TYPE_CHECKING:
    from shoal_recovery.store import Store

app = typer.Typer()


@app.command()
def checkpoints(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="A job's id, as in job_01J...")], as_json: AsJson = False
) -> None:
    """List a job's checkpoints, newest first."""
    with Client() as client:
        found = client.checkpoints(job_id)
    if as_json:
        show_json(found)
    elif found["items"]:
        columns = ("STEP", "EPOCH", "COMMITTED", "MB", "TOOK", "HELD UP", "VERIFIED", "MANIFEST")
        rows = (
            (
                one["step"],
                one["epoch"],
                one["committed_at"] and one["committed_at"][:19],
                one["num_bytes"] and one["num_bytes"] / 1e6,
                one["duration_s"] and f"{one['duration_s']:.2f} s",
                None if one["held_up_s"] is None else f"{one['held_up_s'] * 1e3:.0f} ms",
                _verified(one["verified"]),
                one["uri"],
            )
            for one in found["items"]
        )
        table(columns, rows)
    else:
        say(f"{job_id} has no checkpoints yet" if found["uri"] else f"{job_id} has no checkpoint.uri")


def _verified(found: Mapping[str, Any] | None) -> str | None:
    """Manifests are read back as they are committed."""
    if found is None:
        return None
    if found["by"] == "manifest":
        return "manifest"
    return f"bytes, {found['at'][:16].replace('T', ' ')}"


@app.command()
def export(
    what: Annotated[str, typer.Argument(metavar="ID", help="A job's id, or STORE-URI/ID where no server is asked.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write to.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="Which checkpoint (default: the newest).")] = None,
    format_: Annotated[
        Literal["hf", "peft"],
        typer.Option("--format", help="hf: a Hugging Face folder, adapters merged; peft: adapters alone."),
    ] = "hf",
    as_json: AsJson = False,
) -> None:
    """Write the weights of a checkpoint for other tools. Needs access to the job's object store from here."""
    try:
        from shoal.export_hf import export_hf
        from shoal.export_peft import export_peft
        from shoal_recovery.checkpoints import load_manifest, load_model
        from shoal_recovery.store import open_store
    except ModuleNotFoundError as error:
        raise BadUsage(f"'shoal export' needs {error.name}: install shoal[server] from its wheel") from error
    uri, job_id, model, seq_len = _found(what)
    try:
        store = open_store(uri)
        chosen = _step(store, job_id, step)
        model = model or load_model(store, job_id, chosen)
        manifest = load_manifest(store, job_id, chosen)
        if format_ == "peft":
            written = export_peft(store, manifest, model, out)
        else:
            written = export_hf(store, manifest, model, seq_len, out)
    except InvalidField as error:
        raise BadUsage(str(error)) from error
    except (StoreError, OSError) as error:
        raise ShoalError(str(error)) from error
    if as_json:
        show_json({"job": job_id, "step": chosen, "files": [str(path) for path in written]})
    else:
        print(f"step {chosen} of {job_id}: {', '.join(map(str, written))}")


def _found(what: str) -> tuple[str, str, ModelSpec | None, int | None]:
    """Store and id of the job; model and length of its sequences where a server knows them."""
    if "://" in what:
        uri, _, job_id = what.rstrip("/").rpartition("/")
        return uri, job_id, None, None
    with Client() as client:
        job = client.get(what)
        spec, place = job_with_model(job), place_of(client, job)
    if place is None:
        raise BadUsage(f"{what} has no checkpoint.uri, so nothing of it is stored")
    return place, what, spec.model, spec.train.seq_len


def _step(store: Store, job_id: str, wanted: int | None) -> int:
    from shoal_recovery.checkpoints import list_manifests
    from shoal_recovery.first_weights import NONE_YET

    there = list_manifests(store, job_id)
    if not there:
        raise BadUsage(f"{store.uri} has no checkpoint of {job_id}; {NONE_YET}")
    if wanted is not None and wanted not in there:
        raise BadUsage(f"--step {wanted}: {store.uri} has steps {', '.join(map(str, there))} of {job_id}")
    return there[0] if wanted is None else wanted
