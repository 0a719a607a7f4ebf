"""What the entrypoint of a user's own model builds: its modules in order, in every process the same.

Everything is drawn from generators that are seeded by the job's seed. Owns the entrypoint's call and what is kept of it
in a process. Does not own what modules say of themselves (`own_modules`).
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from shoal_planner.architecture import ModelSpec
from shoal_planner.own_model import OwnModule
from shoal_workers.errors import UserCodeError

_FEWEST = 3
_KEPT_BYTES = 1 << 28  # of constants
_drawing = threading.RLock()  # generators are the process's
Entry = nn.Module | Callable[[], nn.Module]


class Blueprint:
    """What the entrypoint returned. Raises UserCodeError where that is no model."""

    def __init__(self, module: OwnModule, seed: int) -> None:
        self._seed = seed
        self._where = f"model.entrypoint = {module.entrypoint!r}"
        function = _function(module.entrypoint)
        with _seeded(seed):
            # Also through what it returned: a generator only builds when it is asked.
            self._entries: list[Entry] = list(self._in_order(function(**module.called_with)))
        if len(self._entries) < _FEWEST:
            problem = f"returned {len(self._entries)} modules: it must return the first, one or more blocks, the last"
            raise self._error(problem)

    def _in_order(self, built: Any) -> Iterator[Entry]:
        if isinstance(built, nn.Module) and not isinstance(built, nn.ModuleList | nn.Sequential):
            raise self._error(f"returned one {type(built).__name__}: it must return a list of modules in order")
        try:
            return iter(built)
        except TypeError as error:
            raise self._error(f"returned {_kind(built)}: it must return a list of modules in order") from error

    @property
    def num_layers(self) -> int:
        return len(self._entries) - 2

    def module(self, unit: int) -> nn.Module:
        """Of this unit: the same one each time where the entrypoint returned it, else a new one."""
        entry = self._entries[unit]
        if isinstance(entry, nn.Module):
            return entry
        if not callable(entry):
            raise self._error(
                f"returned {_kind(entry)} at place {unit}: neither a module nor a callable that makes one"
            )
        with _seeded((self._seed * 1_000_003 + unit + 1) % 2**63):
            found = entry()
        if not isinstance(found, nn.Module):
            raise self._error(f"returned a callable at place {unit} that makes {_kind(found)}, which is no module")
        return found

    def tied(self) -> tuple[tuple[str, str], ...]:
        """Parameters of the last module that are the first one's: (its name there, its name in the first)."""
        first, last = self.module(0), self.module(self.num_layers + 1)
        names = {parameter: name for name, parameter in trained(first)}
        return tuple((name, names[parameter]) for name, parameter in trained(last) if parameter in names)

    def check_apart(self) -> None:
        """That units share nothing that is trained, but the last one with the first. Raises UserCodeError."""
        users: dict[nn.Parameter, int] = {}
        for unit, entry in enumerate(self._entries):
            for name, parameter in trained(entry) if isinstance(entry, nn.Module) else ():
                other = users.setdefault(parameter, unit)
                if other != unit and (other, unit) != (0, self.num_layers + 1):
                    problem = f"module {unit} shares its parameter {name!r} with module {other}"
                    raise self._error(f"{problem}: only the last one may, with the first")

    def _error(self, problem: str) -> UserCodeError:
        return UserCodeError(f"{self._where}: {problem}")


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """With their names; one that stands in two places under its first name."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


@dataclass(slots=True)
class _Kept:
    """By unit; so many bytes of constants."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    num_bytes: int = 0


@functools.lru_cache(maxsize=2)  # times are taken with another seed
def _kept(module: OwnModule, seed: int) -> _Kept:
    return _Kept()


class BareModules:
    """Modules as they are built, but without the values of what is trained: a rank has those from elsewhere, and to
    draw them can take longer than all else that a change of plan waits for. What a process has built once it does not
    build for another plan, as far as its constants are few."""

    def __init__(self, model: ModelSpec, seed: int) -> None:
        assert model.module is not None and model.own_shape is not None
        self._module = model.module
        self._seed = seed
        self._blueprint: Blueprint | None = None
        self.num_units = model.layers + 2

    def build_ahead(self, limit_s: float) -> None:
        """As many units as can be kept, and are built in time. Raises what a user's own code does."""
        began_s = time.monotonic()
        for unit in range(self.num_units):
            self.module(unit)
            kept = unit in _kept(self._module, self._seed).modules
            if not kept or time.monotonic() > began_s + limit_s:
                return

    def module(self, unit: int) -> nn.Module:
        """To be copied. Raises UserCodeError."""
        with _drawing:
            kept = _kept(self._module, self._seed)
            if unit in kept.modules:
                return kept.modules[unit]
            if self._blueprint is None:
                self._blueprint = Blueprint(self._module, self._seed)
            module = _without_values(self._blueprint.module(unit))
            num_bytes = kept.num_bytes + _constant_bytes(module)
            if num_bytes <= _KEPT_BYTES:
                kept.modules[unit], kept.num_bytes = module, num_bytes
            return module


def _without_values(module: nn.Module) -> nn.Module:
    bare: dict[int, object] = {id(value): nn.Parameter(value.to("meta")) for _, value in trained(module)}
    return copy.deepcopy(module, bare)


def _constant_bytes(module: nn.Module) -> int:
    constants = (*module.buffers(), *(value for value in module.parameters() if not value.requires_grad))
    return sum(value.nbytes for value in constants)


def _function(entrypoint: str) -> Callable[..., Any]:
    name, _, path = entrypoint.partition(":")
    where = f"model.entrypoint = {entrypoint!r}"
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserCodeError(f"{where}: there is no module {error.name!r} in the job's code") from error
        raise  # something that the user's module wants
    for part in path.split("."):
        if not hasattr(found, part):
            raise UserCodeError(f"{where}: {name} has no {path!r}{_near(found, part)}")
        found = getattr(found, part)
    if not callable(found):
        raise UserCodeError(f"{where}: {path} is {_kind(found)}, which cannot be called")
    return cast(Callable[..., Any], found)


def _near(module: object, name: str) -> str:
    near = difflib.get_close_matches(name, dir(module), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Generators of torch, numpy and random; afterwards they are as they were."""
    with _drawing:
        before, numpys = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        random.setstate(before)
        np.random.set_state(numpys)


def _kind(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
