"""Tensors in the buffers of the wire: what comes out is what went in, as closely as the bits allow."""

from __future__ import annotations

import pytest
import torch
from engine_runs import job

from shoal_recovery.state import Span
from shoal_workers.forms import Blocks, Form, Plain, decode, encode

MODEL = job().model
MATRIX, VECTOR = "layers.0.mlp.up.weight", "layers.0.mlp_norm.weight"
SPANS = (
    Span(fqn=VECTOR, first=0, last=64),
    Span(fqn=MATRIX, first=3, last=5004),
    Span(fqn=MATRIX, first=9000, last=9031),
)


@pytest.mark.parametrize(("bits", "largest", "block"), [(8, 127, 2048), (4, 7, 512)])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 5001])
def test_the_error_of_a_block_is_half_of_a_step_at_most(bits: int, largest: int, block: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator) * torch.logspace(-6, 6, count)
    scale, code = encode(x, bits)
    assert code.dtype == torch.uint8
    assert len(code) == -(-count * bits // 8)
    assert len(scale) == -(-count // block)
    error = (decode(scale, code, count, bits) - x).abs()
    for some, its in zip(x.split(block), error.split(block), strict=True):
        assert its.max() <= some.abs().max() / (2 * largest) * (1 + 1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(bits: int) -> None:
    scale, code = encode(torch.zeros(600), bits)
    assert not decode(scale, code, 600, bits).any()
    for wrong in (float("inf"), float("nan")):
        x = torch.ones(1000)
        x[900] = wrong
        assert not decode(*encode(x, bits), 1000, bits).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_vectors_and_small_spans_fall_back(bits: int | None, dtype: torch.dtype) -> None:
    whole = {span: torch.randn(span.numel).to(dtype) for span in SPANS}
    form: Form = Plain(dtype) if bits is None else Blocks(bits, dtype, MODEL)  # type: ignore[arg-type]
    packed = form.pack(SPANS, whole.__getitem__)
    assert (len(packed), packed.dtype) == form.size(SPANS)
    found = dict(form.unpack(packed, SPANS))
    assert tuple(found) == SPANS
    for span in (SPANS[0], SPANS[2]):
        assert torch.equal(found[span], whole[span])
    if bits is None:
        assert torch.equal(found[SPANS[1]], whole[SPANS[1]])
    else:
        coded = whole[SPANS[1]].float()
        half = 0.5 / (127 if bits == 8 else 7)
        assert (found[SPANS[1]] - coded).abs().max() <= half * coded.abs().max() * 1.001


def test_what_does_not_last_is_copied() -> None:
    only = (Span(fqn=VECTOR, first=0, last=64),)
    memory = torch.ones(64)
    kept, lent = (Plain(torch.float32, lasting=lasting).pack(only, lambda span: memory) for lasting in (False, True))
    memory.zero_()
    assert kept.all() and not lent.any()
