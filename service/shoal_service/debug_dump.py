"""What helps somebody else to find out what is wrong with a job, in one file and without secrets: gathers it from the
database, redacts every text of it, and packs it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import json
import platform
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service import attempts, clusters, jobs, journal, log_store, shares, trackers
from shoal_service.auth import admin_token
from shoal_service.curve import curve
from shoal_service.log_chunks import Line, Wanted
from shoal_service.models import JobRow
from shoal_service.redaction import Redactor
from shoal_service.settings import Settings, secrets_held

_EVENTS = 5_000
_LINES = 5_000
_POINTS = 500
_ATTEMPTS = 200
_PACKAGES = ("shoal", "fastapi", "starlette", "pydantic", "sqlalchemy", "alembic", "uvicorn", "numpy", "boto3")
_ABOUT = """What a Shoal control plane knows of {job}, at {at}.

job.json        what its user wants (spec), how it stands (status), its share of its cluster, its trackers
events.jsonl    its journal, plans included: the newest {events} entries
attempts.json   its epochs, newest first
metrics.json    its curve, thinned to {points} points
logs.txt        what it printed: the newest {lines} lines
cluster.json    its cluster, with nodes and all that was measured there
settings.json   how this control plane is set up, where whoever asked administers it
versions.json   what it runs

Secrets that the control plane knows, and what looks like one, stand here as [redacted]. What a job printed may hide
some in another form: look through logs.txt before you pass this on.
"""


async def gather(session: AsyncSession, job_id: str, settings: Settings, *, with_settings: bool) -> dict[str, Any]:
    """The content of each file: text, or plain JSON values. Raises NotFound."""
    row = await jobs.get(session, job_id)
    share = shares.resource(await shares.of_job(session, job_id))
    tracked = await trackers.of_job(session, job_id)
    entries = await journal.entries_after(session, job_id, max(row.last_seq - _EVENTS, 0), _EVENTS)
    about = {"job": job_id, "events": _EVENTS, "lines": _LINES, "points": _POINTS}
    return {
        "README.txt": _ABOUT.format(at=jobs.rfc3339(row.updated_at_s), **about),
        "job.json": {**jobs.resource(row), "share": share, "trackers": tracked},
        "events.jsonl": [journal.event_resource(entry) for entry in entries],
        "attempts.json": await attempts.read(session, job_id, row.state, None, _ATTEMPTS),
        "metrics.json": await curve(session, job_id, _POINTS),
        "logs.txt": await _printed(session, job_id),
        "cluster.json": await _cluster(session, row),
        "settings.json": settings.model_dump(mode="json") if with_settings else "only for administrators of the server",
        "versions.json": _versions(),
    }


def packed(files: Mapping[str, Any], secrets: Iterable[str]) -> bytes:
    """A ZIP archive of these, every text redacted."""
    redactor, made = Redactor(secrets), io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, _written(name, content, redactor))
    return made.getvalue()


async def dump(session: AsyncSession, job_id: str, settings: Settings, *, with_settings: bool) -> bytes:
    files = await gather(session, job_id, settings, with_settings=with_settings)
    return await asyncio.to_thread(packed, files, known_secrets(settings))


def known_secrets(settings: Settings) -> frozenset[str]:
    """Of the process: what must be in no dump. Passwords within addresses are found by their form."""
    oidc = settings.oidc_client_secret
    return secrets_held() | {admin_token(settings.data_path)} | ({oidc.get_secret_value()} if oidc else set())


def _written(name: str, content: Any, redactor: Redactor) -> str:
    if isinstance(content, str):
        return redactor.text(content)
    clean = redactor.value(content)
    if name.endswith(".jsonl"):
        return "".join(json.dumps(line) + "\n" for line in clean)
    return json.dumps(clean, indent=1)


async def _printed(session: AsyncSession, job_id: str) -> str:
    row = await log_store.get(session, job_id)
    if row is None:
        return "it has printed nothing\n"
    page = await log_store.newest(session, row, Wanted(), _LINES)
    return "".join(f"{_said(line)}\n" for _, line in page.lines)


def _said(line: Line) -> str:
    who = (line.node or "script") if line.rank is None else f"{line.node} rank {line.rank}"
    return f"{jobs.rfc3339(line.at_s)} {who} attempt {line.attempt} {line.level}: {line.text}"


async def _cluster(session: AsyncSession, row: JobRow) -> dict[str, Any] | None:
    if row.cluster_id is None:
        return None
    found = await clusters.get(session, row.cluster_id)
    return {**clusters.resource(found), "snapshot": found.snapshot, "profile": found.profile}


def _versions() -> dict[str, Any]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": found}
