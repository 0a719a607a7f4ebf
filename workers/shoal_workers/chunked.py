"""Products whose results tensor parallelism sums, in chunks of rows: each is summed while the next one is computed.

After Flux (Chang et al. 2024), which fuses the two on GPUs at the grain of tiles. A row of a product has the same bits
whichever rows are computed with it, as long as there are several, so chunks change none. Owns this order alone: when
gradients of the weights are multiplied is up to `products`, where the sums of a backward hide to `enter`.

Shapes: T tokens, I inputs of this rank, O outputs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shoal_workers.exchange import Pending
from shoal_workers.products import AddProduct
from shoal_workers.tensor_parallel import Reducer, TensorGroup

_LEAST_ROWS = 16  # fewer have kernels of their own, with other bits, and are no work to hide anything behind


def summed_product(x: Tensor, weight_IO: Tensor, group: TensorGroup, add_product: AddProduct) -> Tensor:
    """x @ weight over this rank's inputs, summed over the ranks of the group; whole on every rank. The gradient of the
    weight goes to `add_product`."""
    return cast(Tensor, _SummedProduct.apply(x, (weight_IO,), group, add_product))  # type: ignore[no-untyped-call]


# The weight comes in a tuple, which autograd does not look into, as in `products`.


class _SummedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Tensor], group: TensorGroup, add_product: AddProduct) -> Tensor:
        (ctx.weight_IO,), ctx.add_product = weights, add_product
        ctx.save_for_backward(x)
        out_TO = _in_chunks(x.flatten(0, -2), weights[0], group.reducer, group.chunks)
        return out_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        slope_TO = gradients[0].flatten(0, -2)
        ctx.add_product(ctx.weight_IO, x.flatten(0, -2), slope_TO)
        return (slope_TO @ ctx.weight_IO.t()).view(x.shape), None, None, None


def _in_chunks(x_TI: Tensor, weight_IO: Tensor, reducer: Reducer, chunks: int) -> Tensor:
    out_TO = x_TI.new_empty(len(x_TI), weight_IO.shape[1])
    count = max(1, min(chunks, len(x_TI) // _LEAST_ROWS))
    before: Pending | None = None
    for rows, part in zip(x_TI.tensor_split(count), out_TO.tensor_split(count), strict=True):
        torch.mm(rows, weight_IO, out=part)
        started = reducer.start_all_reduce_sum(part)
        if before is not None:
            before.wait()
        before = started
    assert before is not None
    before.wait()
    return out_TO
