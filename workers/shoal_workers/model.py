"""A decoder-only transformer in units, each of which computes on the rows that one rank holds.

Owns the arithmetic. Does not own the parameters: a unit asks for them by name and finds them in their stored shapes
(`shoal_planner.parameters`), cut for this rank, and perhaps in slices that come one after the other (`sliced`).

Shapes: B sequences, S positions, T = B * S tokens, H hidden, N heads and K key-value heads of this rank, D head size,
F inner rows of this rank, V vocabulary rows of this rank, C = N * D or K * D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import Parameter, frozen, parameters
from shoal_planner.plan import Recompute
from shoal_planner.slices import UNCUT, Slicing, cuts
from shoal_workers.adapting import Lookup as Lookup
from shoal_workers.adapting import adapted
from shoal_workers.attention import attend
from shoal_workers.borders import Borders
from shoal_workers.chunked import summed_product
from shoal_workers.compiling import Way, as_written
from shoal_workers.fewer_passes import layer_norm, rms_norm
from shoal_workers.own_modules import OwnBlock, OwnFirst, OwnLast, OwnUnits
from shoal_workers.products import AddProduct, AtOnce, Products, PutOff
from shoal_workers.remaking import Making, Remaking, keeping
from shoal_workers.rotary import Rotary
from shoal_workers.sliced import BiasRows, Gate, Slice, added, each, rows_of
from shoal_workers.tensor_parallel import TensorGroup, cross_entropy_sum, embed, enter, leave, nothing

Gates = Callable[[int], Sequence[Gate]]  # of the slices of a unit
_NORM_VECTORS = {"rms": ("weight",), "layer": ("weight", "bias")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters as one rank has them: matrices in the slices that its stage cuts them into."""

    model: ModelSpec
    lookup: Lookup
    group: TensorGroup
    slicing: Slicing = UNCUT
    gates: Gates = lambda unit: ()

    def vectors(self, *fqns: str) -> tuple[Tensor, ...]:
        return tuple(map(self.lookup, fqns))

    def norm(self, name: str) -> tuple[Tensor, ...]:
        """What a norm of this name is called with."""
        return self.vectors(*(f"{name}.{kind}" for kind in _NORM_VECTORS[self.model.norm]))

    def slices(self, unit: int, *fqns: str, biases: Sequence[str] = ()) -> tuple[Slice, ...]:
        """Of an operator of this unit: each has its rows of all its matrices, and of the biases of the first ones."""
        first_of = _find(self.model, fqns[0])
        low, high = first_of.interval(self.group.rank, self.group.size)
        added = self.vectors(*biases)
        if self.slicing == UNCUT:
            whole = tuple(BiasRows(vector, range(len(vector))) for vector in added)
            return (Slice(weights=self.vectors(*fqns), first_row=low // first_of.shape[1], biases=whole),)
        gates, found, firsts = self.gates(unit), list[Slice](), [0] * len(added)
        for cut in cuts(self.model, first_of, self.slicing):
            if low <= cut.first and cut.last <= high:
                weights = tuple(self.lookup(fqn, cut.number) for fqn in fqns)
                rows = [range(first, first + len(weight)) for first, weight in zip(firsts, weights, strict=False)]
                firsts = [part.stop for part in rows]
                bias_rows = tuple(BiasRows(vector, part) for vector, part in zip(added, rows, strict=True))
                first_row, gate = cut.first // first_of.shape[1], gates[cut.number - 1]
                found.append(Slice(weights=weights, first_row=first_row, gate=gate, biases=bias_rows))
        return tuple(found)


class Embedding:
    """Of tokens, and of their positions where these are learned. Of a weight in slices the gradients go to
    `add_rows`."""

    def __init__(self, weights: Weights, add_rows: AddProduct | None = None) -> None:
        self._slices = weights.slices(0, "embedding.weight")
        self._positions = weights.vectors(*(("positions.weight",) if weights.model.learned_positions else ()))
        self._group = weights.group
        self._add_rows = add_rows

    def __call__(self, tokens_BS: Tensor, borders: Borders | None = None) -> Tensor:
        x_BSH = self._rows(tokens_BS)
        for positions_PH in self._positions:
            if borders is None:
                x_BSH = x_BSH + positions_PH[: x_BSH.shape[1]]
            else:
                x_BSH = x_BSH + F.embedding(borders.positions_BS, positions_PH)
        return x_BSH

    def _rows(self, tokens_BS: Tensor) -> Tensor:
        if self._add_rows is None or self._slices[0].gate is None:
            (one,) = self._slices
            return embed(tokens_BS, one.weights[0], one.first_row, self._group)
        turn = torch.zeros(0, device=tokens_BS.device, requires_grad=True)
        rows = partial(rows_of, tokens_BS=tokens_BS, add_rows=self._add_rows)
        return leave(added(turn, self._slices, rows), self._group)


class Block:
    """Attention and MLP, each behind a norm and around a residual. Norms and activation functions are made by
    `make`, as they cost little and their results are large; products with weights by `products`. `beside` is done while
    the group sums gradients of what enters."""

    def __init__(
        self,
        model: ModelSpec,
        layer: int,
        weights: Weights,
        rotary: Rotary | None,
        make: Making,
        products: Products,
        beside: Callable[[], None] = nothing,
        way: Way = as_written,
    ) -> None:
        prefix = f"layers.{layer}"
        self._norm = norm_of(model, way)
        self._head_norm = partial(way(rms_norm), eps=model.norm_eps)
        self._head_size = model.head_size
        self._window = model.window_of(layer)
        self._group = weights.group
        self._rotary = rotary
        self._make = make
        self._products = products
        self._beside = beside
        self._attention_norm = weights.norm(f"{prefix}.attention_norm")
        self._mlp_norm = weights.norm(f"{prefix}.mlp_norm")

        def operator(kind: str, *names: str, biased: Sequence[str]) -> tuple[Slice, ...]:
            weight_names = (f"{prefix}.{kind}.{name}.weight" for name in names)
            return weights.slices(layer + 1, *weight_names, biases=[f"{prefix}.{kind}.{name}.bias" for name in biased])

        inner = ("gate", "up") if model.gated_mlp else ("up",)
        self._attention = operator("attention", *"qkvo", biased="qkv" if model.qkv_bias else ())
        self._mlp = operator("mlp", *inner, "down", biased=inner if model.mlp_bias else ())
        self._activation = way(_ACTIVATIONS[model.gated_mlp, model.activation])
        self._out_bias = weights.vectors(*([f"{prefix}.attention.o.bias"] if model.out_bias else ()))
        self._down_bias = weights.vectors(*([f"{prefix}.mlp.down.bias"] if model.mlp_bias else ()))
        normed = ("q", "k") if model.qk_norm else ()
        self._head_norms = weights.vectors(*(f"{prefix}.attention.{name}_norm.weight" for name in normed))

    def __call__(self, x_BSH: Tensor, borders: Borders | None = None) -> Tensor:
        with self._make(self._norm, x_BSH, *self._attention_norm) as normed_BSH:
            # Each rank's heads have a part of the gradients of these.
            norms_2D = enter(torch.stack(self._head_norms), self._group) if self._head_norms else None
            mix = partial(self._mix, norms_2D=norms_2D, borders=borders)
            x_BSH = x_BSH + self._by_all(normed_BSH, self._attention, mix, self._out_bias)
        with self._make(self._norm, x_BSH, *self._mlp_norm) as normed_BSH:
            return x_BSH + self._by_all(normed_BSH, self._mlp, self._feed, self._down_bias)

    def _by_all(
        self,
        x_BSH: Tensor,
        slices: Sequence[Slice],
        compute: Callable[[Tensor, Slice], Tensor],
        biases: tuple[Tensor, ...],
    ) -> Tensor:
        out_BSH = added(enter(x_BSH, self._group, self._beside), slices, compute)
        out_BSH = out_BSH if slices[0].gate is None else leave(out_BSH, self._group)
        for bias_H in biases:
            out_BSH = out_BSH + bias_H
        return out_BSH

    def _last(self, x: Tensor, weight_IO: Tensor, one: Slice) -> Tensor:
        """The last product of an operator, summed over the group unless there are more slices of it."""
        if one.gate is not None:
            return self._products.matmul(x, weight_IO)
        if self._group.overlaps:
            out = summed_product(x, weight_IO, self._group, self._products.add)
        else:
            out = leave(self._products.matmul(x, weight_IO), self._group)
        beside = self._products.beside(x, weight_IO)
        return out if beside is None else out + beside

    def _mix(self, x_BSH: Tensor, one: Slice, norms_2D: Tensor | None, borders: Borders | None) -> Tensor:
        *qkv, o = one.weights
        q_BSND, k_BSKD, v_BSKD = map(self._heads, self._products.linear(x_BSH, tuple(qkv), one.bias_rows()))
        if norms_2D is not None:
            q_BSND, k_BSKD = self._head_norm(q_BSND, norms_2D[0]), self._head_norm(k_BSKD, norms_2D[1])
        q_BNSD, k_BKSD, v_BKSD = (heads.transpose(1, 2) for heads in (q_BSND, k_BSKD, v_BSKD))
        if self._rotary is not None:
            q_BNSD, k_BKSD = self._rotary(q_BNSD, borders), self._rotary(k_BKSD, borders)
        return self._last(attend(q_BNSD, k_BKSD, v_BKSD, self._window, borders), o, one)

    def _heads(self, heads_BSC: Tensor) -> Tensor:
        return heads_BSC.view(*heads_BSC.shape[:2], -1, self._head_size)

    def _feed(self, x_BSH: Tensor, one: Slice) -> Tensor:
        *inner, down_FH = one.weights
        with self._make(self._activation, *self._products.linear(x_BSH, tuple(inner), one.bias_rows())) as inner_BSF:
            return self._last(inner_BSF, down_FH, one)


class Head:
    """Final norm, and the summed cross entropy of the vocabulary's logits."""

    def __init__(self, model: ModelSpec, weights: Weights, products: Products, way: Way = as_written) -> None:
        self._norm_vectors = weights.norm("final_norm")
        name = "embedding.weight" if model.tie_embeddings else "head.weight"
        self._slices = weights.slices(model.layers + 1, name)
        self._norm = norm_of(model, way)
        self._group = weights.group
        self._products = products

    def logits(self, x_BSH: Tensor) -> Tensor:
        """Where the head is whole."""
        (one,) = self._slices
        (logits_BSV,) = self._products.linear(self._norm(x_BSH, *self._norm_vectors), one.weights)
        return logits_BSV

    def __call__(self, x_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        x_TH = enter(self._norm(x_BSH, *self._norm_vectors), self._group).flatten(0, 1)
        slices_TV = each(x_TH, self._slices, lambda x_TH, one: self._products.linear(x_TH, one.weights)[0])
        return cross_entropy_sum(slices_TV, targets_BS.flatten(), [one.first_row for one in self._slices], self._group)


Compute = Embedding | Block | Head | OwnFirst | OwnBlock | OwnLast


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit of the model as a rank runs it; the last one needs the targets too, and gives the summed loss. Where
    there are `borders`, blocks keep to documents. `lasting` are the tensors that are there whether it runs or not:
    weights, tables. `remaking` if it recomputes selectively, `put_off` if gradients of its weights are."""

    number: int
    compute: Compute
    lasting: tuple[Tensor, ...]
    recompute: Recompute
    remaking: Remaking | None
    put_off: PutOff | None

    @property
    def takes_tokens(self) -> bool:
        return isinstance(self.compute, Embedding | OwnFirst)

    @property
    def gives_loss(self) -> bool:
        return isinstance(self.compute, Head | OwnLast)

    def __call__(self, entering: Tensor, targets_BS: Tensor | None, borders: Borders | None = None) -> Tensor:
        if isinstance(self.compute, Embedding | Block):
            return self.compute(entering, borders)
        if not isinstance(self.compute, Head | OwnLast):
            return self.compute(entering)
        assert targets_BS is not None
        return self.compute(entering, targets_BS)


class Builder:
    """Builds the units that a rank runs. What is given holds for all of them; with `split`, the backward of blocks is
    in two parts, and the gradients of weights are the second. `way` is that of small functions. All units are `own`
    where the model is a user's."""

    def __init__(
        self,
        weights: Weights,
        seq_len: int,
        device: torch.device,
        add_product: AddProduct,
        add_rows: AddProduct,
        *,
        split: bool = False,
        way: Way = as_written,
        own: OwnUnits | None = None,
    ) -> None:
        self._model = weights.model
        self._way = way
        self._weights = weights
        self._rotary = rotary_of(weights.model, seq_len, device, way)
        self._add_product = add_product
        self._add_rows = add_rows
        self._split = split
        self._own = own

    def unit(self, number: int, recompute: Recompute) -> Unit:
        lasting = [] if self._rotary is None else [self._rotary.cos_SD, self._rotary.sin_SD]
        is_block = 0 < number <= self._model.layers
        remaking = Remaking() if recompute == "selective" else None
        put_off = PutOff(self._add_product) if self._split and is_block else None

        def lookup(fqn: str, number: int = 0) -> Tensor:
            lasting.append(self._weights.lookup(fqn, number))
            return lasting[-1]

        compute: Compute
        weights = replace(self._weights, lookup=lookup)
        if self._own is not None:
            compute = self._own.unit(number, lookup, weights.group)
            lasting += [*compute.module.parameters(), *compute.module.buffers()]
        elif number == 0:
            compute = Embedding(weights, self._add_rows)
        elif is_block:
            products, beside = self._products(weights, number, put_off)
            ways = (remaking or keeping, products, beside, self._way)
            compute = Block(self._model, number - 1, weights, self._rotary, *ways)
        else:
            compute = Head(self._model, weights, self._products(weights, None, None)[0], self._way)
        return Unit(
            number=number,
            compute=compute,
            lasting=tuple(lasting),
            recompute=recompute,
            remaking=remaking,
            put_off=put_off,
        )

    def _products(
        self, weights: Weights, block: int | None, put_off: PutOff | None
    ) -> tuple[Products, Callable[[], None]]:
        """Of a block or the head, and what a backward does while the group sums."""
        if self._model.lora is not None:
            layer = None if block is None else block - 1
            return adapted(self._model, layer, weights.lookup, weights.group), nothing
        if put_off is not None:
            return put_off, nothing
        if block is None or not self._weights.group.overlaps:  # units in slices sum in one go
            return AtOnce(self._add_product), nothing
        later = PutOff(self._add_product)
        return later, later.add_left


def norm_of(model: ModelSpec, way: Way = as_written) -> Callable[..., Tensor]:
    """Of the residual stream; after that it takes the vectors of the norm."""
    return partial(way(rms_norm if model.norm == "rms" else layer_norm), eps=model.norm_eps)


def rotary_of(model: ModelSpec, seq_len: int, device: torch.device, way: Way = as_written) -> Rotary | None:
    """None where positions are learned, or are not ours."""
    ours = model.learned_positions is None and model.module is None
    return Rotary(model, seq_len, device, way) if ours else None


def _silu_gated(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    return F.silu(gate_BSF) * up_BSF


def _gelu_gated(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    return F.gelu(gate_BSF) * up_BSF


def _gelu_tanh_gated(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    return _gelu_tanh(gate_BSF) * up_BSF


def _gelu_tanh(x_BSF: Tensor) -> Tensor:
    return F.gelu(x_BSF, approximate="tanh")


# Named functions, as each is compiled once.
_ACTIVATIONS: Mapping[tuple[bool, str | None], Callable[..., Tensor]] = {
    (True, "silu"): _silu_gated,
    (True, "gelu"): _gelu_gated,
    (True, "gelu_tanh"): _gelu_tanh_gated,
    (False, "silu"): F.silu,
    (False, "gelu"): F.gelu,
    (False, "gelu_tanh"): _gelu_tanh,
}


def _find(model: ModelSpec, fqn: str) -> Parameter:
    return next(parameter for parameter in (*frozen(model), *parameters(model)) if parameter.fqn == fqn)
