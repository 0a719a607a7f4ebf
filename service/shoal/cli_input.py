"""Reads what users hand to the command line: JOB, CLUSTER, MARKET, PLAN, PROFILE and RUNS files, histories of pools.
Every mistake is one sentence that names the file, the field and the value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from shoal.cli_own import seen_here
from shoal_planner.cluster import ClusterSnapshot, DeviceOverride, parse_cluster
from shoal_planner.documents import MalformedDocument, read_document
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.market import Market, parse_market
from shoal_planner.plan import Plan, parse_plan
from shoal_planner.pool_history import PoolHistory, read_history
from shoal_planner.script_spec import AnyJob, parse_any_job

if TYPE_CHECKING:
    from shoal_planner.calibrate import MeasuredRun
    from shoal_planner.profile import Profile

T = TypeVar("T")


class BadUsage(Exception):
    """What was given cannot be used; the command ends with exit status 2."""


def read_job(name: str) -> JobSpec:
    return _read(name, _parse_job)


def _parse_job(value: object) -> JobSpec:
    """A model of Hugging Face's, or of the user's own, is looked at from here. Raises InvalidField."""
    if not _names_hf(value):
        return seen_here(parse_job(value))
    try:
        from shoal_recovery.hf_jobs import with_hf_model

        return parse_job(with_hf_model(value))
    except ModuleNotFoundError as error:
        problem = f"needs {error.name}: install shoal[server] from its wheel"
        raise InvalidField("model.hf", value["model"]["hf"], problem) from error


def _names_hf(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and isinstance(value.get("model"), Mapping) and "hf" in value["model"]


def job_with_model(job: Mapping[str, Any]) -> JobSpec:
    """Of a job as the server shows it. Raises BadUsage for one that runs a script."""
    try:
        return parse_job(job["spec"])
    except InvalidField as error:
        raise BadUsage(f"{job['id']}: {error}") from error


def read_submission(name: str) -> AnyJob | Mapping[str, Any]:
    """A job as it is sent: whoever accepts it looks up a model of Hugging Face's. Raises BadUsage."""
    return _read(name, lambda value: value if _names_hf(value) else parse_any_job(value))


def read_cluster(name: str) -> ClusterSnapshot:
    return _read(name, parse_cluster)


def read_market(name: str) -> Market:
    return _read(name, parse_market)


def read_history_of(pool: str, name: str) -> PoolHistory:
    """What became of the nodes of a pool, in the CSV file `name`. Raises BadUsage."""
    try:
        return read_history(_text(name, name), pool)
    except InvalidField as error:
        raise BadUsage(f"{name}: {error}") from error


def read_plan(name: str) -> Plan:
    return _read(name, parse_plan)


def read_runs(name: str, snapshot: ClusterSnapshot) -> tuple[MeasuredRun, ...]:
    from shoal_planner.measured_documents import parse_runs

    return _read(name, lambda value: parse_runs(value, snapshot))


def read_profile(name: str | None, overrides: Iterable[DeviceOverride], nodes: Iterable[str] | None = None) -> Profile:
    """Empty without a name; for device types that these overrides know, too, and, if they are given, these nodes."""
    from shoal_planner.measured_documents import parse_profile
    from shoal_planner.profile import Profile

    return Profile() if name is None else _read(name, lambda value: parse_profile(value, overrides, nodes))


def _read(name: str, parse: Callable[[object], T]) -> T:
    """The value in the file `name`, or in standard input for `-`. Raises BadUsage."""
    source = "standard input" if name == "-" else name
    try:
        return parse(_document(name, source))
    except MalformedDocument as error:
        raise BadUsage(str(error)) from error
    except InvalidField as error:
        raise BadUsage(f"{source}: {error}") from error


def _document(name: str, source: str) -> Any:
    return read_document(_text(name, source), source)


def _text(name: str, source: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise BadUsage(f"{source}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadUsage(f"{source}: is not text in UTF-8: {error.reason} at byte {error.start}") from error
