"""Models of a user's own: their modules in order, as PACKAGE.MODULE:FUNCTION builds them, as units of a stage.

The function returns a list: the module that takes tokens, blocks that are alike, and the module that gives logits. Each
entry is a module, or a callable without arguments that makes one; of callables only those are called whose modules a
rank needs. Everything that is built is drawn from generators that are seeded by the job's seed, so that every process
builds the same. Parameters that take gradients are Shoal's from then on: it cuts, shards and saves them, and gives a
module views of them. What takes none, and buffers, are constants that each rank builds for itself.

A module may say `tensor_parallel`: by the name of an nn.Linear in it "column" (cut by outputs) or "row" (by inputs),
and, if it is a block, `tensor_parallel_heads`, which every degree divides. All else is whole on each rank.

Shapes: B sequences, S positions, H hidden, V vocabulary, I inputs and O outputs of a product on this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_planner.architecture import ModelSpec
from shoal_planner.own_model import Cut, OwnParameter
from shoal_planner.parameters import Parameter, own_prefix
from shoal_workers.blueprint import BareModules, Blueprint, trained
from shoal_workers.errors import UserCodeError
from shoal_workers.tensor_parallel import TensorGroup, enter, leave

Manner = Literal["column", "row"]
_MANNERS = ("column", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How tensor parallelism has the modules inside one: manner by name of an nn.Linear."""

    manners: Mapping[str, Manner]

    def cut_of(self, name: str) -> Cut:
        """Of the parameter of this name."""
        module, _, kind = name.rpartition(".")
        manner = self.manners.get(module)
        return "whole" if manner is None or (manner == "row" and kind == "bias") else manner


def split_of(module: nn.Module) -> Split:
    """What the module says of tensor parallelism. Raises UserCodeError."""
    given: Any = getattr(module, "tensor_parallel", {})
    where = f"{type(module).__name__}.tensor_parallel"
    if not isinstance(given, Mapping):
        raise UserCodeError(f"{where} = {given!r}: must be a mapping of names of nn.Linear to 'column' or 'row'")
    children = dict(module.named_modules())
    for name, manner in given.items():
        if manner not in _MANNERS:
            raise UserCodeError(f"{where}[{name!r}] = {manner!r}: must be 'column' or 'row'")
        if type(children.get(name)) is not nn.Linear:
            raise UserCodeError(f"{where}[{name!r}]: there is no nn.Linear of that name in it")
    return Split(manners=dict(given))


def stored(cut: Cut, value: Tensor) -> Tensor:
    """As it is stored: cut along its first dimension. Its own inverse."""
    return value.t() if cut == "row" else value


class OwnUnits:
    """Modules on a rank, on views of its weights. Use from one thread."""

    def __init__(self, model: ModelSpec, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = model.own_shape
        assert shape is not None
        self._shape = shape
        self._bare = BareModules(model, seed)
        self._device = device
        self._dtype = dtype

    def unit(self, number: int, lookup: Callable[[str], Tensor], group: TensorGroup) -> OwnFirst | OwnBlock | OwnLast:
        """`lookup` gives the rows of a parameter that this rank has. Raises UserCodeError where the module is not as
        it was when it was looked at."""
        module, kind = self._bare.module(number), self._shape.kind(number)
        split = split_of(module)
        tied = {mine: f"first.{theirs}" for mine, theirs in self._shape.tied} if kind == "last" else {}
        known = self._shape.unit(kind).parameters
        found = described(module, split, without=tied)
        if found != known:
            problem = f"has the parameters {_listed(found)}, where {_listed(known)} were there before"
            raise UserCodeError(f"module {number} of model.entrypoint ({type(module).__name__}) {problem}")
        prefix = own_prefix(self._shape, number)
        names = (*(one.name for one in known), *tied)
        weights = {name: lookup(tied.get(name, f"{prefix}{name}")) for name in names}
        module = on_weights(copy.deepcopy(module), split, weights, group)  # others may be given the same one again
        take_constants(module, self._device, self._dtype)
        return _KINDS[kind](module, self._dtype)


def on_weights(module: nn.Module, split: Split, weights: Mapping[str, Tensor], group: TensorGroup) -> nn.Module:
    """The same module on these weights, by name and as a rank of the group has them stored. It is changed itself."""
    places = _places(module)
    for name, manner in split.manners.items():
        _replace(module, name, _ColumnLinear(group) if manner == "column" else _RowLinear(group))
    for name, weight in weights.items():
        for place in places[name]:
            holder, _, leaf = place.rpartition(".")
            module.get_submodule(holder)._parameters[leaf] = cast(nn.Parameter, weight)
    return module.train()


class _Own:
    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        self._dtype = dtype

    def __call__(self, entering: Tensor) -> Tensor:
        given: Tensor = self.module(entering)
        return given.to(self._dtype).contiguous()


class OwnFirst(_Own):
    """Takes tokens [B, S], gives [B, S, H]."""


class OwnBlock(_Own):
    """Takes [B, S, H], gives the same."""


class OwnLast(_Own):
    """Takes [B, S, H]; the module gives logits [B, S, V], and this their summed cross entropy, in fp32. Targets below
    zero are ignored."""

    def __call__(self, entering: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        assert targets_BS is not None
        logits_TV = self.module(entering).flatten(0, 1).float()
        targets_T = targets_BS.flatten()
        return F.cross_entropy(logits_TV, targets_T.masked_fill(targets_T < 0, -100), reduction="sum")


_KINDS: Mapping[str, type[OwnFirst | OwnBlock | OwnLast]] = {"first": OwnFirst, "block": OwnBlock, "last": OwnLast}


class OwnValues:
    """The values that modules are built with; of callables one unit is kept at a time."""

    def __init__(self, model: ModelSpec, seed: int) -> None:
        assert model.module is not None and model.own_shape is not None
        self._shape = model.own_shape
        self._blueprint = Blueprint(model.module, seed)
        self._unit = -1
        self._values: dict[str, Tensor] = {}

    def __call__(self, parameter: Parameter, first: int, last: int) -> Tensor:
        """Elements [first, last) of the flattened parameter as it is stored, fp32 on the host."""
        unit = parameter.units[0]
        if unit != self._unit:
            prefix, module = own_prefix(self._shape, unit), self._blueprint.module(unit)
            split = split_of(module)
            self._values = {
                f"{prefix}{name}": stored(split.cut_of(name), value.detach()).float().reshape(-1)
                for name, value in trained(module)
            }
            self._unit = unit
        return self._values[parameter.fqn][first:last]


class _ColumnLinear(nn.Module):
    """Outputs O of all, for inputs that are whole."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(enter(x, self._group), self.weight, self.bias)


class _RowLinear(_ColumnLinear):
    """Whole outputs, for inputs I of all; the weight is [I, O]."""

    def forward(self, x: Tensor) -> Tensor:
        out = leave(x @ self.weight, self._group)
        return out if self.bias is None else out + self.bias


def described(module: nn.Module, split: Split, without: Container[str] = ()) -> tuple[OwnParameter, ...]:
    """What is trained of a module, but for these names."""
    return tuple(
        OwnParameter(name=name, shape=tuple(stored(split.cut_of(name), value).shape), cut=split.cut_of(name))
        for name, value in trained(module)
        if name not in without
    )


def _places(module: nn.Module) -> dict[str, list[str]]:
    """Of each trained parameter all names under which it stands in the module."""
    known = {parameter: name for name, parameter in trained(module)}
    found: dict[str, list[str]] = {name: [] for name in known.values()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in known:
            found[known[parameter]].append(name)
    return found


def take_constants(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """To where the module computes, buffers and parameters that are not trained; what is floating in its precision, as
    `Module.to` has it."""

    def taken(value: Tensor) -> Tensor:
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    for holder in module.modules():
        for name, value in holder._buffers.items():
            holder._buffers[name] = None if value is None else taken(value)
        for name, parameter in holder._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                holder._parameters[name] = nn.Parameter(taken(parameter), requires_grad=False)


def _listed(parameters: Sequence[OwnParameter]) -> str:
    return ", ".join(f"{one.name} {list(one.shape)}" for one in parameters) or "none"


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    """Wherever it stands."""
    old = module.get_submodule(name)
    for place in [place for place, each in module.named_modules(remove_duplicate=False) if each is old]:
        parent, _, last = place.rpartition(".")
        module.get_submodule(parent).add_module(last, new)
