"""ScriptSpec: a job of kind `ray_train`, a user's own script for Ray Train. Immutable like JobSpec, and as strict.

Owns what the fields may be by themselves, and which kind of job a document is. What a job of kind `train` may be is
`job`'s. Fields of one kind are refused by name in the other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

from shoal_planner.code_spec import CodeSpec
from shoal_planner.errors import InvalidField
from shoal_planner.job import MOST_NAME, JobSpec, job_to_mapping, parse_job
from shoal_planner.labels import check_labels
from shoal_planner.limits import CostLimits, Priority, check_priority
from shoal_planner.ranges import check_range
from shoal_planner.strict import check_document, check_known, read
from shoal_planner.uris import parts_of

Kind = Literal["train", "ray_train"]
_MOST_WORKERS = 100_000
_MOST_KEPT = 1_000_000_000
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")
_NOT_HERE = "is of no use with kind 'ray_train': the script says it itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """What is run: the file `path`, absolute on the nodes or relative to `working_dir`, or the `entrypoint`, a module
    as `python -m` runs it, or `package.module:function`, which is called without arguments.

    What it has around it (`working_dir`, `py_modules`, `pip`, `env`, `secrets`) is as in a CodeSpec.
    """

    path: str | None = None
    entrypoint: str | None = None
    args: tuple[str, ...] = ()
    working_dir: str | None = None
    py_modules: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.entrypoint is None):
            problem = "is given beside script.path: one of the two says what runs"
            if self.path is None:
                problem = "is required where there is no script.path"
            raise InvalidField("entrypoint", self.entrypoint, problem)
        if self.path is not None:
            self._check_path(self.path)
        if self.entrypoint is not None and not _MODULE.fullmatch(self.entrypoint):
            problem = "must be a module, as in package.module, or package.module:function"
            raise InvalidField("entrypoint", self.entrypoint, problem)
        _ = self.code  # which checks itself

    @property
    def code(self) -> CodeSpec:
        """What is around it."""
        return CodeSpec(
            working_dir=self.working_dir, py_modules=self.py_modules, pip=self.pip, env=self.env, secrets=self.secrets
        )

    def _check_path(self, path: str) -> None:
        given = PurePosixPath(path)
        if not path or ".." in given.parts:
            raise InvalidField("path", path, "must be a file, absolute or within script.working_dir")
        if not given.is_absolute() and self.working_dir is None:
            raise InvalidField("path", path, "is relative, and there is no script.working_dir that it could lie in")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSpec:
    """How many workers the script's trainer has, at least and at most, and what of a node each takes (`resources`, as
    Ray names them: CPU, GPU, memory in bytes, or the cluster's own). Without a GPU among them each worker has one
    where the nodes of the cluster offer any, and else none."""

    min: int = 1
    max: int
    resources: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})

    def __post_init__(self) -> None:
        check_range("max", self.max, 1, _MOST_WORKERS)
        check_range("min", self.min, 1, _MOST_WORKERS)
        if self.min > self.max:
            raise InvalidField("min", self.min, f"must be at most max ({self.max})")
        for name, amount in self.resources.items():
            if amount < 0:
                raise InvalidField(f"resources.{name}", amount, "must be zero or more")
        if not any(self.resources.values()):
            raise InvalidField("resources", self.resources, "must take something of a node, or all workers share one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCheckpointSpec:
    """Where Ray Train stores what the script reports: `file:///folder`, which all nodes share, or
    `s3://bucket/prefix`. The newest `keep` checkpoints stay; none: as many as the script says."""

    uri: str
    keep: int | None = None

    def __post_init__(self) -> None:
        if parts_of("uri", self.uri).scheme not in ("file", "s3"):
            raise InvalidField("uri", self.uri, "must begin with file:// or s3://")
        if self.keep is not None:
            check_range("keep", self.keep, 1, _MOST_KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLimitsSpec(CostLimits):
    """Which nodes the job may use, and what that may cost. No `device_types` means every type."""

    device_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """`metric` is which of the reported figures is drawn as the curve and shown as the loss of the job."""

    name: str
    script: ProgramSpec
    workers: WorkersSpec
    checkpoint: ScriptCheckpointSpec
    limits: ScriptLimitsSpec = ScriptLimitsSpec()
    metric: str = "loss"
    priority: Priority = "normal"
    labels: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_priority(self.priority)
        if not self.name or len(self.name) > MOST_NAME or not self.name.isprintable():
            raise InvalidField("name", self.name, f"must be 1 to {MOST_NAME} printable characters")
        check_labels(self.labels)


AnyJob = JobSpec | ScriptSpec


def parse_any_job(value: object) -> AnyJob:
    """The job of either kind in a mapping as it comes from YAML or JSON. Raises InvalidField."""
    if kind_of(value) == "train":
        return parse_job(value)
    document = dict(check_document(value, "job"))
    del document["kind"]
    known = [each.name for each in dataclasses.fields(ScriptSpec)]
    for name in document:
        if name in ("model", "data", "train", "track"):
            raise InvalidField(name, document[name], _NOT_HERE)
    check_known(document, known)
    return read(ScriptSpec, document)


def kind_of(value: object) -> Kind:
    """Which kind of job a document says it is; `train` where it says nothing. Raises InvalidField."""
    said: Any = value.get("kind", "train") if isinstance(value, Mapping) else "train"
    if said not in get_args(Kind):
        raise InvalidField("kind", said, f"must be one of {', '.join(get_args(Kind))}")
    kind: Kind = said
    return kind


def any_job_to_mapping(job: AnyJob) -> dict[str, object]:
    """The inverse of `parse_any_job`: plain JSON values."""
    if isinstance(job, JobSpec):
        return job_to_mapping(job)
    return {"kind": "ray_train", **dataclasses.asdict(job)}
