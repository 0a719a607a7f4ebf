"""A decoder-only transformer of the Llama family, in units, each of which computes on the rows that one rank holds.

Owns the arithmetic. Does not own the parameters: a unit asks for them by name and finds them in their stored shapes
(`shoal_planner.parameters`), cut for this rank.

Shapes: B sequences, S positions, T = B * S tokens, H hidden, N heads and K key-value heads of this rank, D head size,
F inner rows of this rank, V vocabulary rows of this rank, C = N * D or K * D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import Parameter, parameters
from shoal_planner.plan import Recompute
from shoal_workers.chunked import summed_product
from shoal_workers.products import AddProduct, AtOnce, Products, PutOff
from shoal_workers.remaking import Making, Remaking, keeping
from shoal_workers.tensor_parallel import TensorGroup, cross_entropy_sum, embed, enter, leave, nothing

Lookup = Callable[[str], Tensor]


class Rotary:
    """Rotary positions for sequences of one length: pairs are (i, i + D/2)."""

    def __init__(self, model: ModelSpec, seq_len: int, device: torch.device) -> None:
        half = model.head_dim // 2
        rates = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), rates).repeat(1, 2)
        self.cos_SD = angles.cos().float().to(device)
        self.sin_SD = angles.sin().float().to(device)

    def __call__(self, x_BNSD: Tensor) -> Tensor:
        low, high = x_BNSD.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        return (x_BNSD * self.cos_SD + turned * self.sin_SD).to(x_BNSD.dtype)


class Embedding:
    def __init__(self, model: ModelSpec, lookup: Lookup, group: TensorGroup) -> None:
        self._weight_VH = lookup("embedding.weight")
        self._first_row = _first_row(model, "embedding.weight", group)
        self._group = group

    def __call__(self, tokens_BS: Tensor) -> Tensor:
        return embed(tokens_BS, self._weight_VH, self._first_row, self._group)


class Block:
    """Attention and MLP, each behind a norm and around a residual. Norms and activation functions are made by
    `make`, as they cost little and their results are large; products with weights by `products`. `beside` is done while
    the group sums gradients of what enters."""

    def __init__(
        self,
        model: ModelSpec,
        layer: int,
        lookup: Lookup,
        group: TensorGroup,
        rotary: Rotary,
        make: Making,
        products: Products,
        beside: Callable[[], None] = nothing,
    ) -> None:
        prefix = f"layers.{layer}"
        self._norm = partial(_norm, eps=model.norm_eps)
        self._head_dim = model.head_dim
        self._group = group
        self._rotary = rotary
        self._make = make
        self._products = products
        self._beside = beside
        self._attention_norm_H = lookup(f"{prefix}.attention_norm.weight")
        self._qkv = tuple(lookup(f"{prefix}.attention.{name}.weight") for name in "qkv")
        self._o = lookup(f"{prefix}.attention.o.weight")
        self._mlp_norm_H = lookup(f"{prefix}.mlp_norm.weight")
        self._activation = _gated if model.gated_mlp else F.gelu
        inner = ("gate", "up") if model.gated_mlp else ("up",)
        self._inner = tuple(lookup(f"{prefix}.mlp.{name}.weight") for name in inner)
        self._down_FH = lookup(f"{prefix}.mlp.down.weight")

    def __call__(self, x_BSH: Tensor) -> Tensor:
        with self._make(self._norm, x_BSH, self._attention_norm_H) as normed_BSH:
            x_BSH = x_BSH + self._attention(normed_BSH)
        with self._make(self._norm, x_BSH, self._mlp_norm_H) as normed_BSH:
            return x_BSH + self._mlp(normed_BSH)

    def _attention(self, x_BSH: Tensor) -> Tensor:
        x_BSH = enter(x_BSH, self._group, self._beside)
        q_BNSD, k_BKSD, v_BKSD = map(self._heads, self._products.linear(x_BSH, self._qkv))
        q_BNSD, k_BKSD = self._rotary(q_BNSD), self._rotary(k_BKSD)
        grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
        mixed_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped)
        return self._summed(mixed_BNSD.transpose(1, 2).flatten(2), self._o)

    def _summed(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        if self._group.overlaps:
            return summed_product(x, weight_IO, self._group, self._products.add)
        return leave(self._products.matmul(x, weight_IO), self._group)

    def _heads(self, heads_BSC: Tensor) -> Tensor:
        return heads_BSC.view(*heads_BSC.shape[:2], -1, self._head_dim).transpose(1, 2)

    def _mlp(self, x_BSH: Tensor) -> Tensor:
        x_BSH = enter(x_BSH, self._group, self._beside)
        with self._make(self._activation, *self._products.linear(x_BSH, self._inner)) as inner_BSF:
            return self._summed(inner_BSF, self._down_FH)


class Head:
    """Final norm, and the summed cross entropy of the vocabulary's logits."""

    def __init__(self, model: ModelSpec, lookup: Lookup, group: TensorGroup) -> None:
        fqn = "embedding.weight" if model.tie_embeddings else "head.weight"
        self._norm_H = lookup("final_norm.weight")
        self._weight_VH = lookup(fqn)
        self._first_row = _first_row(model, fqn, group)
        self._eps = model.norm_eps
        self._group = group

    def __call__(self, x_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        x_TH = enter(_norm(x_BSH, self._norm_H, self._eps), self._group).flatten(0, 1)
        return cross_entropy_sum(F.linear(x_TH, self._weight_VH), targets_BS.flatten(), self._first_row, self._group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit of the model as a rank runs it; the last one needs the targets too, and gives the summed loss. `lasting`
    are the tensors that are there whether it runs or not: weights, tables. `remaking` if it recomputes selectively,
    `put_off` if gradients of its weights are."""

    number: int
    compute: Embedding | Block | Head
    lasting: tuple[Tensor, ...]
    recompute: Recompute
    remaking: Remaking | None
    put_off: PutOff | None

    @property
    def takes_tokens(self) -> bool:
        return isinstance(self.compute, Embedding)

    @property
    def gives_loss(self) -> bool:
        return isinstance(self.compute, Head)

    def __call__(self, entering: Tensor, targets_BS: Tensor | None) -> Tensor:
        if not isinstance(self.compute, Head):
            return self.compute(entering)
        assert targets_BS is not None
        return self.compute(entering, targets_BS)


class Builder:
    """Builds the units that a rank runs. What is given holds for all of them; with `split`, the backward of blocks is
    in two parts, and the gradients of weights are the second."""

    def __init__(
        self,
        model: ModelSpec,
        lookup: Lookup,
        group: TensorGroup,
        seq_len: int,
        device: torch.device,
        add_product: AddProduct,
        *,
        split: bool = False,
    ) -> None:
        self._model = model
        self._lookup = lookup
        self._group = group
        self._rotary = Rotary(model, seq_len, device)
        self._add_product = add_product
        self._split = split

    def unit(self, number: int, recompute: Recompute) -> Unit:
        lasting = [self._rotary.cos_SD, self._rotary.sin_SD]
        is_block = 0 < number <= self._model.layers
        remaking = Remaking() if recompute == "selective" else None
        put_off = PutOff(self._add_product) if self._split and is_block else None

        def lookup(fqn: str) -> Tensor:
            lasting.append(self._lookup(fqn))
            return lasting[-1]

        compute: Embedding | Block | Head
        if number == 0:
            compute = Embedding(self._model, lookup, self._group)
        elif is_block:
            products, beside = self._products(put_off)
            ways = (remaking or keeping, products, beside)
            compute = Block(self._model, number - 1, lookup, self._group, self._rotary, *ways)
        else:
            compute = Head(self._model, lookup, self._group)
        return Unit(
            number=number,
            compute=compute,
            lasting=tuple(lasting),
            recompute=recompute,
            remaking=remaking,
            put_off=put_off,
        )

    def _products(self, put_off: PutOff | None) -> tuple[Products, Callable[[], None]]:
        """And what a backward does while the group sums."""
        if put_off is not None:
            return put_off, nothing
        if not self._group.overlaps:
            return AtOnce(self._add_product), nothing
        later = PutOff(self._add_product)
        return later, later.add_left


def _norm(x_BSH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_BSH, weight_H.shape, weight_H, eps)


def _gated(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    return F.silu(gate_BSF) * up_BSF


def _first_row(model: ModelSpec, fqn: str, group: TensorGroup) -> int:
    """The first row of the vocabulary that this rank holds."""
    parameter = _find(model, fqn)
    return parameter.interval(group.rank, group.size)[0] // parameter.shape[1]


def _find(model: ModelSpec, fqn: str) -> Parameter:
    return next(parameter for parameter in parameters(model) if parameter.fqn == fqn)
