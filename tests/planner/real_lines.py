"""Plans of one replica per stage as they come, and what each pipeline really takes in them: what bounds are judged by.

Pipelines and who runs beside whom come from `shapes`, which shares nothing with `crews`; seconds are those that the
exact search expects of a plan, and `score` confirms (test_planner_exact). Owns drawing and counting, no judging.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from random_clusters import Instance, draw_small

from shoal_planner.costs import CostModel
from shoal_planner.crew_search import CrewSearch
from shoal_planner.crews import Crew, Lines
from shoal_planner.options import Floats, Ints, tp_degrees, usable_nodes
from shoal_planner.plan import Plan
from shoal_planner.profile import LinkFigure, Profile
from shoal_planner.shape_exchange import Shape, placed_on
from shoal_planner.shapes import Bounds, Cell, Chain, Slots, chains, frames

MOST_DEVICES = 4
_MOST_ROWS = 24  # layers of a pipeline that are tried, and of each of the others together with them
_MOST_SHAPES = 12


def draw(seed: int) -> Instance:
    """At most four devices, ten layers and ten samples."""
    instance = draw_small(seed, MOST_DEVICES)
    model = dataclasses.replace(instance.job.model, layers=min(instance.job.model.layers, 10))
    train = dataclasses.replace(instance.job.train, global_batch=min(instance.job.train.global_batch, 10))
    return dataclasses.replace(instance, job=dataclasses.replace(instance.job, model=model, train=train))


def measured(instance: Instance, seed: int) -> Profile:
    """Links within and between nodes as if measured: of any rate, whatever the interfaces should do."""
    rng = random.Random(f"links {seed}")
    nodes = [node.id for node in instance.cluster.nodes]
    pairs = itertools.combinations_with_replacement(nodes, 2)
    return Profile(
        links=tuple(
            LinkFigure(
                from_node=here,
                to_node=there,
                latency_s=rng.choice((0.0, 1e-6, 1e-3)),
                bytes_per_s=10 ** rng.uniform(7, 12),
                source="drawn",
            )
            for here, there in pairs
        )
    )


def lone(line: Chain) -> Lines:
    """This pipeline alone."""
    cells = tuple(cell for (cell,) in line.stages)
    return Lines(slots=line.slots, cells=cells, orders=np.arange(len(cells))[None])


def search_of(instance: Instance, profile: Profile, away: float = 0.0) -> CrewSearch:
    """One that has looked for nothing yet; `away`: with so much of the optimizer's state on hosts."""

    def unwanted(made: Plan) -> float:
        raise AssertionError(f"bounds score no plan: {made}")

    costs = CostModel(instance.job, instance.cluster, profile)
    copies = min(1, len(instance.cluster.nodes) - 1)
    return CrewSearch(costs, copies, usable_nodes(instance.job, instance.cluster), unwanted, away)


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """A pipeline beside others, itself as a line of the crew with this number; some of its layers [K, S], the seconds
    that it runs [K, B+1], and those that come after all pipelines [K] with the best of some layers of the others."""

    shape: Shape
    place: int
    number: int
    line: Chain
    layers: Ints
    running_s: Floats
    after_s: Floats

    @property
    def count(self) -> int:
        return len(self.shape)

    @property
    def seconds(self) -> Floats:
        """[K, B+1]: of the step, if the others are as quick."""
        return self.running_s + self.after_s[:, None]


def reals(search: CrewSearch, seed: int) -> Iterator[Real]:
    """All pipelines of some shapes."""
    rng = random.Random(f"shapes {seed}")
    numbers = {_key(crew): number for number, crew in enumerate(search.crews)}
    for shape in _shapes(search, rng):
        rows = [_some(rng, search.times.rows(len(placed.chain.stages)), len(shape)) for placed in shape]
        after = search.exchanges.after(shape, rows)
        after_s = np.where(after.lacking, math.inf, after.seconds)
        for p, placed in enumerate(shape):
            others = tuple(q for q in range(len(shape)) if q != p)
            table = search.times.row_table(placed.chain, search.exchanges.held(shape, p), rows[p])
            line = line_of(placed.chain)
            yield Real(
                shape=shape,
                place=p,
                number=numbers[_key(crew_of(line))],
                line=line,
                layers=rows[p],
                running_s=table,
                after_s=after_s.min(axis=others),
            )


def _shapes(search: CrewSearch, rng: random.Random) -> list[Shape]:
    """Half of one pipeline and half of several, as far as there are any."""
    rooms, batch = search._rooms, search.times.batch
    degrees = tp_degrees(search.costs, MOST_DEVICES)
    some = chains(rooms, Bounds(degrees, search.times.num_layers + 2, 1))
    framed = list(frames(list(some), rooms, min(MOST_DEVICES, batch)))
    one = [frame for frame in framed if len(frame) == 1]
    several = [frame for frame in framed if len(frame) > 1]
    drawn = [rng.choice(few) for few in (one, several) if few for _ in range(_MOST_SHAPES // 2)]
    return [
        tuple(
            placed_on(rng.choice(some[slots]), tuple(search._nodes[node].id for node in nodes))
            for slots, nodes in frame
        )
        for frame in drawn
    ]


def _some(rng: random.Random, rows: Ints, count: int) -> Ints:
    most = _MOST_ROWS if count < 3 else _MOST_ROWS // 4
    return rows if len(rows) <= most else rows[sorted(rng.sample(range(len(rows)), most))]


def crew_of(line: Chain) -> Crew:
    cells = sorted((cell for (cell,) in line.stages), key=lambda cell: (cell.slot, -cell.tp))
    return Crew(slots=line.slots, cells=tuple(cells))


def line_of(chain: Chain) -> Chain:
    """With its slots in the order of a crew: by kind, devices and degrees, equal ones as they come up."""
    splits = [
        sorted((cell.tp for (cell,) in chain.stages if cell.slot == slot), reverse=True)
        for slot in range(len(chain.slots))
    ]
    seen = list(dict.fromkeys(cell.slot for (cell,) in chain.stages))
    order = sorted(seen, key=lambda slot: (chain.slots[slot], splits[slot]))
    names = {slot: name for name, slot in enumerate(order)}
    stages = tuple((Cell(names[cell.slot], cell.tp),) for (cell,) in chain.stages)
    return Chain(slots=tuple(chain.slots[slot] for slot in order), stages=stages)


def _key(crew: Crew) -> tuple[Slots, tuple[Cell, ...]]:
    return crew.slots, crew.cells
