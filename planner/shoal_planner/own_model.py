"""OwnModule: a model that is a user's own code, and what was found when a worker looked at it.

The planner never runs that code. A worker builds the modules once, and tells their shape; from then on a model of one's
own is planned, sharded and recovered by its parameters like any other. Until then its shape is None, and nothing can be
planned. Does not own the modules themselves (`shoal_workers.own_modules`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal_planner.errors import InvalidField
from shoal_planner.ranges import check_range

# How tensor parallelism has a parameter: whole on every rank, or in rows of how it is stored. A "column" weight is cut
# by its outputs and stored as it is, a "row" weight by its inputs and stored transposed.
Cut = Literal["whole", "column", "row"]
UNIT_KINDS = ("first", "block", "last")
_ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnParameter:
    """By the name that its module gives it, in its stored shape, which is what Shoal cuts and shards."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShape:
    """One module: its parameters, the operations of one sample's forward through matrix products, and the bytes that
    autograd keeps of one sample until the backward."""

    parameters: tuple[OwnParameter, ...]
    flops: float
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnShape:
    """`hidden` is the width of what passes from module to module, `vocab` that of the logits. All blocks are alike.
    `tied` are parameters of the last module that are the first one's: (its name there, its name in the first).
    `heads`: degrees of tensor parallelism must divide it. Operations and bytes are those at `seq_len`."""

    layers: int
    hidden: int
    vocab: int
    seq_len: int
    first: UnitShape
    block: UnitShape
    last: UnitShape
    tied: tuple[tuple[str, str], ...] = ()
    heads: int = 1

    def __post_init__(self) -> None:
        for name, most in (("layers", 2000), ("hidden", 2**18), ("vocab", 2**24), ("heads", 2**14)):
            check_range(name, getattr(self, name), 1, most)

    def kind(self, unit: int) -> str:
        """Of the unit of this number."""
        return "first" if unit == 0 else "last" if unit > self.layers else "block"

    def unit(self, kind: str) -> UnitShape:
        found: UnitShape = getattr(self, kind)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModule:
    """`entrypoint` is PACKAGE.MODULE:FUNCTION; `arguments`, a JSON mapping as text, are what it is called with."""

    entrypoint: str
    arguments: str = "{}"
    shape: OwnShape | None = None

    def __post_init__(self) -> None:
        if not _ENTRYPOINT.fullmatch(self.entrypoint):
            problem = "must be a module and a function in it, as in 'package.module:build'"
            raise InvalidField("entrypoint", self.entrypoint, problem)

    @property
    def called_with(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.arguments)
        return found


def own_model(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of a model as jobs have it, of one that says its `entrypoint`, and perhaps `arguments` for it. What
    else a model may say, its modules say themselves. Raises InvalidField."""
    if "entrypoint" not in document:
        return document
    for name, value in document.items():
        if name not in ("entrypoint", "arguments"):
            raise InvalidField(f"model.{name}", value, "is what model.entrypoint builds: leave it out")
    given = document.get("arguments") or {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise InvalidField("model.arguments", given, "must be a mapping of names of arguments to values")
    if not isinstance(document["entrypoint"], str):
        raise InvalidField("model.entrypoint", document["entrypoint"], "must be text, as in 'package.module:build'")
    module = {"entrypoint": document["entrypoint"], "arguments": json.dumps(given, sort_keys=True)}
    return _sizes(OwnShape(layers=1, hidden=2, vocab=1, seq_len=1, first=_NONE, block=_NONE, last=_NONE)) | {
        "module": module
    }


def seen_model(module: Mapping[str, Any], shape: OwnShape) -> Mapping[str, Any]:
    """The mapping of this model once its shape is known; `module` as in the one before."""
    return _sizes(shape) | {"module": {**module, "shape": dataclasses.asdict(shape)}}


def with_seen_model(job: Mapping[str, Any], model: Mapping[str, Any], packages: Sequence[str]) -> dict[str, Any]:
    """The mapping of a job once this model, of `seen_model`, was found in code that was sent as these packages."""
    return {**job, "model": dict(model), "code": {**(job.get("code") or {}), "packages": list(packages)}}


def unseen(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of a job without anything that only Shoal says of a user's own modules: as it is submitted, perhaps
    from the document of another job."""
    found = dict(job)
    if isinstance(found.get("code"), Mapping):
        found["code"] = {name: value for name, value in found["code"].items() if name != "packages"}
    model = found.get("model")
    if isinstance(model, Mapping) and "module" in model and model["module"] is None:
        found["model"] = {name: value for name, value in model.items() if name != "module"}
    elif isinstance(model, Mapping) and isinstance(model.get("module"), Mapping):
        module = model["module"]
        found["model"] = {"entrypoint": module.get("entrypoint"), "arguments": _arguments(module.get("arguments"))}
    return found


def _arguments(text: object) -> object:
    try:
        return json.loads(str(text))
    except ValueError:
        return text


_NONE = UnitShape(parameters=(), flops=0.0, kept_bytes=0)


def _sizes(shape: OwnShape) -> dict[str, Any]:
    """In the words of a ModelSpec: what its parts are named there says nothing of the modules' insides."""
    return {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "head_dim": 2,
        "ffn": shape.hidden,
        "vocab": shape.vocab,
        "tie_embeddings": bool(shape.tied),
    }
