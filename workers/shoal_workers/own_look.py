"""Looks at a model of a user's own: builds its modules, runs one sample through the first, a block and the last.

Owns what is asked of such modules, and how what they lack is said. Shoal promises that the loss of a sample depends on
neither the plan nor the rank it is computed on; so a module that draws at random when it runs, or changes its buffers,
is refused here, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shoal_planner.own_model import OwnModule, OwnShape, UnitShape
from shoal_workers.errors import UserCodeError
from shoal_workers.own_modules import Blueprint, Split, described, split_of


def look(module: OwnModule, seed: int, seq_len: int) -> OwnShape:
    """The shape of the model, in fp32 on the host. Raises UserCodeError, and whatever the user's code does."""
    blueprint = Blueprint(module, seed)
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
        heads=_heads(block, split),
    )


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
    if not torch.equal(out, again):
        problem = "gives something else each time for the same sample: set dropout to 0, and draw nothing at random"
        raise UserCodeError(f"{kind} {problem}")
    changed = [key for key, value in module.named_buffers() if not torch.equal(value, buffers[key])]
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
