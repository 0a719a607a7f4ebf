"""Reads what was measured from documents: RUNS (plans that ran, and their seconds) and PROFILE.

Owns their form and whether they suit the cluster. Does not own what is made of them (`calibrate`, `profile`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from shoal_planner.calibrate import MeasuredRun
from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot, DeviceOverride
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NotADocument
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.plan import Plan, check_plan, parse_plan
from shoal_planner.profile import Profile, profile_from_mapping, profile_to_mapping
from shoal_planner.score import check_nodes
from shoal_planner.strict import check_document, read

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    plan: dict[str, Any]
    step_s: float
    job: dict[str, Any] | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    runs: tuple[_Run, ...]
    job: dict[str, Any] | None = None


def parse_runs(value: object, snapshot: ClusterSnapshot) -> tuple[MeasuredRun, ...]:
    """The runs in a mapping of the published form; one without a `job` is of the document's. Raises InvalidField, for a
    plan that is not one of its job and of this cluster too. Memory is not looked at: what was measured did fit."""
    check_document(value, "runs")
    document = read(_Runs, value)
    common = None if document.job is None else _within("job", parse_job, document.job)
    models: dict[JobSpec, CostModel] = {}
    return tuple(_run(raw, f"runs[{index}]", common, snapshot, models) for index, raw in enumerate(document.runs))


def _run(
    raw: _Run, path: str, common: JobSpec | None, snapshot: ClusterSnapshot, models: dict[JobSpec, CostModel]
) -> MeasuredRun:
    job = common if raw.job is None else _within(f"{path}.job", parse_job, raw.job)
    if job is None:
        raise InvalidField(f"{path}.job", None, "is required, here or once for all runs")
    plan = _within(f"{path}.plan", parse_plan, raw.plan)
    if job not in models:
        models[job] = CostModel(job, snapshot, Profile())

    def check(plan: Plan) -> None:
        check_plan(plan, job)
        check_nodes(plan, models[job])

    _within(f"{path}.plan", check, plan)
    return _within(path, lambda step_s: MeasuredRun(job=job, plan=plan, step_s=step_s, name=raw.name), raw.step_s)


def parse_profile(value: object, overrides: Iterable[DeviceOverride], nodes: Iterable[str] | None = None) -> Profile:
    """The profile in a mapping of the published form. Raises InvalidField, also for a device type that neither the
    catalogue nor these overrides know, and for a link of a node that is not among `nodes`, if they are given."""
    profile = profile_from_mapping(check_document(value, "profile"))
    given = tuple(overrides)
    devices = {f"layers[{index}]": figure.device for index, figure in enumerate(profile.layers)}
    devices |= {f"updates[{index}]": figure.device for index, figure in enumerate(profile.updates)}
    for path, name in devices.items():
        _within(path, lambda device: device_type(device, given), name)
    if nodes is not None:
        known = frozenset(nodes)
        for index, link in enumerate(profile.links):
            for field in ("from_node", "to_node"):
                if getattr(link, field) not in known:
                    problem = "is not a node of this cluster"
                    raise InvalidField(f"links[{index}].{field}", getattr(link, field), problem)
    return profile


def profile_document(profile: Profile) -> dict[str, object]:
    """What `parse_profile` reads, in plain JSON values. What was not measured is left out, and so are the kinds of
    nodes, which follow from the cluster (`Profile.on`)."""
    return {name: part for name, part in profile_to_mapping(profile).items() if part and name != "kinds"}


def _within(path: str, parse: Callable[[Any], T], value: Mapping[str, Any] | Plan | float | str) -> T:
    """`parse(value)`; the error names the field from the document on."""
    try:
        return parse(value)
    except NotADocument as error:
        raise InvalidField(path, value, error.problem) from error
    except InvalidField as error:
        raise InvalidField(f"{path}.{error.field}", error.value, error.problem) from error
