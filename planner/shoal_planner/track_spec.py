"""TrackSpec: which trackers a job's metrics go to, as its user names them.

Keys and passwords have no place in a job: each tool finds its own in the environment of the control plane, which writes
to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal_planner.errors import InvalidField
from shoal_planner.uris import parts_of

Tool = Literal["tensorboard", "mlflow", "wandb"]
_MLFLOW_SCHEMES = ("http", "https", "sqlite", "databricks")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoardSpec:
    """Event files of the job lie in a folder of its own in `log_dir`: `file:///folder`, on the machine of the control
    plane, or `s3://bucket/prefix`."""

    log_dir: str

    def __post_init__(self) -> None:
        parts = parts_of("log_dir", self.log_dir)
        if parts.scheme not in ("file", "s3"):
            raise InvalidField("log_dir", self.log_dir, "must begin with file:// or s3://")
        if parts.scheme == "file" and (parts.netloc not in ("", "localhost") or not parts.path.startswith("/")):
            raise InvalidField("log_dir", self.log_dir, "must name an absolute folder: file:///folder")
        if parts.scheme == "s3" and not parts.netloc:
            raise InvalidField("log_dir", self.log_dir, "must name a bucket: s3://bucket/prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSpec:
    """`run_name` is the job's name unless it is said."""

    tracking_uri: str
    experiment_name: str = "Default"
    run_name: str | None = None

    def __post_init__(self) -> None:
        parts = parts_of("tracking_uri", self.tracking_uri)
        if self.tracking_uri != "databricks" and parts.scheme not in _MLFLOW_SCHEMES:
            problem = "must be http(s)://..., databricks, databricks://PROFILE or sqlite:////file"
            raise InvalidField("tracking_uri", self.tracking_uri, problem)
        if parts.password is not None or (parts.username is not None and parts.scheme in ("http", "https")):
            # Not what was given: it is shown to whoever sees the answer.
            problem = (
                "must not carry credentials: MLFLOW_TRACKING_USERNAME and _PASSWORD, or _TOKEN, of the control plane"
            )
            raise InvalidField("tracking_uri", f"{parts.scheme}://...@{parts.hostname}", problem)
        if parts.scheme == "sqlite" and not (parts.netloc == "" and parts.path.startswith("//")):
            raise InvalidField("tracking_uri", self.tracking_uri, "must name an absolute file: sqlite:////file")
        _check_text("experiment_name", self.experiment_name)
        _check_text("run_name", self.run_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSpec:
    """`entity` is the one of the control plane's key unless it is said, `name` the job's. `dir` is where files lie on
    the machine of the control plane, by default in its data folder; with `mode: offline` they are all there is, for
    `wandb sync`."""

    project: str
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"
    dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("project", "entity", "name"):
            _check_text(name, getattr(self, name))
        for character in "/\\#?%:":
            if character in self.project:
                raise InvalidField("project", self.project, f"must not contain {character!r}")
        if self.dir is not None and not self.dir.startswith("/"):
            raise InvalidField("dir", self.dir, "must be an absolute path on the machine of the control plane")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSpec:
    """None of them, or any."""

    tensorboard: TensorBoardSpec | None = None
    mlflow: MlflowSpec | None = None
    wandb: WandbSpec | None = None

    def chosen(self) -> Iterator[tuple[Tool, TensorBoardSpec | MlflowSpec | WandbSpec]]:
        if self.tensorboard is not None:
            yield "tensorboard", self.tensorboard
        if self.mlflow is not None:
            yield "mlflow", self.mlflow
        if self.wandb is not None:
            yield "wandb", self.wandb


UNTRACKED = TrackSpec()


def _check_text(name: str, value: str | None) -> None:
    if value is not None and not (0 < len(value) <= 100 and value.isprintable()):
        raise InvalidField(name, value, "must be 1 to 100 printable characters")
