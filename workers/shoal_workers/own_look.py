"""Looks at a model of a user's own: builds its modules, runs one sample through the first, a block and the last.

Owns what is asked of such modules, and how what they lack is said. Shoal promises that the loss of a sample depends on
neither the plan nor the rank it is computed on; so a module that draws at random when it runs, or changes its buffers,
is refused here, before anything is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shoal_planner.own_model import OwnModule, OwnShape, UnitShape
from shoal_workers.blueprint import Blueprint
from shoal_workers.errors import UserCodeError
from shoal_workers.live import Precision
from shoal_workers.own_modules import Split, described, split_of, take_constants
from shoal_workers.own_rehearsal import rehearse

_SAMPLES = 2  # of a rehearsal: what holds for one alone is seen there
_MOST_DEGREE = 8


def look(module: OwnModule, seed: int, seq_len: int, precision: Precision = "fp32") -> OwnShape:
    """The shape of the model, in fp32 on the host. Raises UserCodeError, and whatever the user's code does."""
    blueprint = Blueprint(module, seed)
    blueprint.check_apart()
    tied = blueprint.tied()
    first, last = blueprint.module(0), blueprint.module(blueprint.num_layers + 1)
    block = blueprint.module(1)
    split = split_of(block)
    blocks = described(block, split)
    for number in range(2, blueprint.num_layers + 1):
        other = blueprint.module(number)
        if described(other, split_of(other)) != blocks:
            problem = f"module {number} ({type(other).__name__}) has other parameters than module 1"
            raise UserCodeError(f"model.entrypoint = {module.entrypoint!r}: {problem}: blocks must be alike")
    tokens_1S = torch.zeros(1, seq_len, dtype=torch.int64)
    x_1SH, first_shape = _passed(first, tokens_1S, "module 0", lambda out: _check_hidden(out, seq_len, "module 0"))
    entering = x_1SH.detach().requires_grad_()

    def check_block(out: Any) -> None:
        if not isinstance(out, Tensor) or out.shape != entering.shape:
            raise UserCodeError(f"module 1 gives {_kind(out)} for {_kind(entering)}: a block gives what it takes")

    y_1SH, block_shape = _passed(block, entering, "module 1", check_block)
    name = f"module {blueprint.num_layers + 1}"
    leaving = y_1SH.detach().requires_grad_()
    logits_1SV, last_shape = _passed(last, leaving, name, lambda out: _check_hidden(out, seq_len, name))
    names = {mine for mine, _ in tied}
    heads = _heads(block, split)
    degrees = (1, *sorted({degree for degree in range(2, _MOST_DEGREE + 1) if heads % degree == 0}))
    again = Blueprint(module, seed)
    for number, one, inner in ((0, first, tokens_1S), (1, block, entering), (blueprint.num_layers + 1, last, leaving)):
        said = f"module {number} of model.entrypoint ({type(one).__name__})"
        _check_repeated(one, again.module(number), said)
        if not any(parameter.requires_grad for parameter in one.parameters()):
            raise UserCodeError(f"{said} has no parameter that is trained")
        several = _several(inner)
        rehearse(one, split_of(one), several, said, degrees if split_of(one).manners else (1,))
        if precision == "bf16":
            _run_in_bf16(one, several)
    cut = [name for name in names if split_of(last).cut_of(name) != "whole"]
    cut += [name for _, name in tied if split_of(first).cut_of(name) != "whole"]
    if cut:
        raise UserCodeError(f"tensor_parallel names {cut[0]!r}, which two modules share: leave it whole")
    return OwnShape(
        layers=blueprint.num_layers,
        hidden=x_1SH.shape[-1],
        vocab=logits_1SV.shape[-1],
        seq_len=seq_len,
        first=first_shape,
        block=block_shape,
        last=UnitShape(
            parameters=described(last, split_of(last), without=names),
            flops=last_shape.flops,
            kept_bytes=last_shape.kept_bytes,
        ),
        tied=tied,
        heads=heads,
    )


def _several(entering: Tensor) -> Tensor:
    """Of that form, for some samples."""
    shape = (_SAMPLES, *entering.shape[1:])
    if not entering.is_floating_point():
        return entering.new_zeros(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def _check_repeated(one: nn.Module, other: nn.Module, said: str) -> None:
    here, there = dict(_values(one)), dict(_values(other))
    changed = [name for name in here if name not in there or not _alike(here[name], there[name])]
    if changed:
        problem = "each time: draw it from the generators of torch, numpy or random"
        raise UserCodeError(f"{said} is built with another {changed[0]!r} {problem}")


def _values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _run_in_bf16(module: nn.Module, entering: Tensor) -> None:
    """As ranks have it; raises what the module does."""
    module = copy.deepcopy(module)
    take_constants(module, entering.device, torch.bfloat16)
    for holder in module.modules():
        for name, parameter in holder._parameters.items():
            if parameter is not None and parameter.requires_grad:
                holder._parameters[name] = nn.Parameter(parameter.to(torch.bfloat16))
    out = module(entering.bfloat16() if entering.is_floating_point() else entering)
    out.sum().backward()


def _heads(block: nn.Module, split: Split) -> int:
    heads: Any = getattr(block, "tensor_parallel_heads", 1)
    if not isinstance(heads, int) or heads < 1:
        problem = "must be a whole number that degrees of tensor parallelism divide"
        raise UserCodeError(f"{type(block).__name__}.tensor_parallel_heads = {heads!r}: {problem}")
    if split.manners and "tensor_parallel_heads" not in dir(block):
        problem = "says tensor_parallel, but not tensor_parallel_heads, which every degree divides"
        raise UserCodeError(f"{type(block).__name__} {problem}")
    return heads


def _passed(module: nn.Module, entering: Tensor, name: str, check: Callable[[Any], None]) -> tuple[Tensor, UnitShape]:
    """What comes out, and the shape of the module."""
    module.train()
    buffers = {key: value.clone() for key, value in module.named_buffers()}
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    own |= {value.untyped_storage().data_ptr() for value in module.buffers()} | {entering.untyped_storage().data_ptr()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        counter = FlopCounterMode(display=False)
        with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out: Any = module(entering)
        check(out)
        torch.manual_seed(2)
        again = module(entering)
    kind = f"{name} of model.entrypoint ({type(module).__name__})"
    if not _alike(out, again):
        problem = "gives something else each time for the same sample: set dropout to 0, and draw nothing at random"
        raise UserCodeError(f"{kind} {problem}")
    # What it has made meanwhile is a cache of its own.
    changed = [key for key, value in module.named_buffers() if key in buffers and not _alike(value, buffers[key])]
    if changed:
        problem = f"changes its buffer {changed[0]!r} when it runs: what is learnt must be a parameter"
        raise UserCodeError(f"{kind} {problem}")
    shape = UnitShape(
        parameters=described(module, split_of(module)),
        flops=float(counter.get_total_flops()),
        kept_bytes=sum(kept.values()),
    )
    return out, shape


def _check_hidden(out: Any, seq_len: int, name: str) -> None:
    if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != (1, seq_len) or not out.is_floating_point():
        raise UserCodeError(f"{name} gives {_kind(out)}: it must give a tensor [samples, {seq_len}, width] of floats")


def _kind(value: Any) -> str:
    return (
        f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )
