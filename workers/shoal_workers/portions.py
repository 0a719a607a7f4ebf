"""Spans by the portions that a stage cuts its units into (`shoal_planner.slices`). Owns nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_planner.slices import UNCUT, Slicing, cuts
from shoal_recovery.state import Span

Cutter = Callable[[Span], Iterator[tuple[int, Span]]]
"""What of a span belongs to each portion, with the number of the portion, in the order of elements."""


def cutter(model: ModelSpec, slicing: Slicing) -> Cutter:
    if slicing == UNCUT:
        return lambda span: iter(((0, span),))
    known = {parameter.fqn: cuts(model, parameter, slicing) for parameter in parameters(model)}

    def cut(span: Span) -> Iterator[tuple[int, Span]]:
        for number, low, high in known[span.fqn]:
            first, last = max(low, span.first), min(high, span.last)
            if first < last:
                yield number, Span(fqn=span.fqn, first=first, last=last)

    return cut
