"""How the chunks of a pipeline's stages cover its layers: chunk 0 of all stages in order, then chunk 1 of all, ...

Owns the rules of it and their errors. Does not own which chunks a stage gets (`reschedule`) nor when they run
(`orders`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_planner.errors import InvalidField

Chunk = tuple[int, int]  # blocks [first, last)
Chunks = tuple[Chunk, ...]


def check_chunks(layers: Chunks) -> None:
    """Of one stage. Raises InvalidField."""
    if not layers:
        raise InvalidField("layers", [], "must have at least one chunk [first, last)")
    reached = 0
    for first, last in layers:
        if not 0 <= first <= last:
            raise InvalidField("layers", _plain(layers), "must hold chunks [first, last) with 0 <= first <= last")
        if first < reached:
            raise InvalidField("layers", _plain(layers), "must be chunks in ascending order that do not overlap")
        reached = last


def check_cover(stages: Sequence[Chunks]) -> None:
    """Of a pipeline: every layer once, in the order in which a micro-batch meets the chunks. Raises InvalidField."""
    count, end = len(stages[0]), len(stages) - 1
    for index, layers in enumerate(stages):
        if len(layers) != count:
            problem = f"must be as many chunks as in stage 0 ({count}): the stages of a pipeline have the same number"
            raise InvalidField(f"stages[{index}].layers", _plain(layers), problem)
    if count > 1 and not end:
        problem = "must be one chunk: a pipeline of one stage has no other to take turns with"
        raise InvalidField("stages[0].layers", _plain(stages[0]), problem)
    expected = 0
    for chunk in range(count):
        for index, layers in enumerate(stages):
            first, last = layers[chunk]
            if first != expected:
                where = f"must begin at layer {expected}" if count == 1 else f"chunk {chunk} must begin at {expected}"
                problem = f"{where}: a pipeline covers every layer once, in order"
                raise InvalidField(f"stages[{index}].layers", _plain(layers), problem)
            expected = last
            if first == last and (chunk, index) != (0, 0) and (chunk, index) != (count - 1, end):
                problem = "must hold a layer: only the first and the last stage may hold none"
                if count > 1:
                    problem += f", in their first and last chunk; chunk {chunk} holds none"
                raise InvalidField(f"stages[{index}].layers", _plain(layers), problem)


def _plain(layers: Chunks) -> list[list[int]]:
    return [list(chunk) for chunk in layers]
