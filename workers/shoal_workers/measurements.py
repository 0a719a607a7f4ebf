"""What of a job is still to be timed on a device, and an answer as figures of the Profile. Pure; no tensors here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import DeviceOverride, Node
from shoal_planner.job import JobSpec, job_to_mapping
from shoal_planner.parameters import degrees_of
from shoal_planner.profile import LayerTime, Part, Profile, UpdateRate
from shoal_workers.messages import Measure, Measured

_MOST_DEGREES = 3  # of tensor parallelism that are timed, as the job waits for it


def untimed(spec: JobSpec, profile: Profile, nodes: Iterable[Node]) -> Iterator[Node]:
    """Of every device type on which no block of this job was timed, the node with the most devices."""
    asked: set[str] = set()
    for node in sorted(nodes, key=lambda node: -node.devices):
        if node.device not in asked and not is_timed(spec, profile, node.device):
            asked.add(node.device)
            yield node


def is_timed(spec: JobSpec, profile: Profile, device: str) -> bool:
    return bool(profile.points("block", device, spec.train.precision, spec.model, spec.train.seq_len))


def order(spec: JobSpec, node: Node, overrides: tuple[DeviceOverride, ...]) -> Measure:
    """What to ask of a device of this node."""
    degrees = [tp for tp in degrees_of(spec.model, node.devices) if tp > 1]
    threads = device_type(node.device, overrides).threads
    return Measure(spec=job_to_mapping(spec), num_threads=threads, degrees=_spread(degrees))


def _spread(degrees: list[int]) -> list[int]:
    """Of many the ends and what is in between: for the others the nearest of them stands."""
    if len(degrees) <= _MOST_DEGREES:
        return degrees
    return sorted({degrees[place * (len(degrees) - 1) // (_MOST_DEGREES - 1)] for place in range(_MOST_DEGREES)})


def figures(spec: JobSpec, device: str, answer: Measured, source: str) -> Profile:
    """`source` says when and where it was measured."""

    def layer(part: Part, samples: int, forward_s: float, backward_s: float, tp: int = 1) -> LayerTime:
        return LayerTime(
            device=device,
            tp=tp,
            exchanges=tp == 1,
            micro_batch=samples,
            seq_len=spec.train.seq_len,
            hidden=spec.model.hidden,
            forward_s=forward_s,
            backward_s=backward_s,
            source=source,
            part=part,
            precision=spec.train.precision,
            heads=spec.model.heads,
            kv_heads=spec.model.num_kv_heads,
            head_dim=spec.model.head_size,
            block_options=spec.model.block_options,
            trains=spec.model.trains,
            ffn=spec.model.ffn,
            vocab=spec.model.vocab,
        )

    return Profile(
        layers=tuple(layer(*row) for row in answer.rows),
        updates=(UpdateRate(device=device, elements_per_s=answer.updates_per_s, source=source),),
    )
