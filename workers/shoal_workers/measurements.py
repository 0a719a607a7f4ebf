"""Measured layer times of one job, by device type: which are missing, and the profile made of them. No tensors here."""

from __future__ import annotations

from collections.abc import Iterator

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.job import JobSpec, job_to_mapping
from shoal_planner.profile import LayerTime, Part, Profile
from shoal_workers.messages import Measure, Measured

_SOURCE = "measured on {device} before the job began"


class Measurements:
    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._times: dict[str, tuple[LayerTime, ...]] = {}

    @property
    def profile(self) -> Profile:
        return Profile(layers=tuple(time for device in sorted(self._times) for time in self._times[device]))

    def missing(self, snapshot: ClusterSnapshot) -> Iterator[tuple[Node, Measure]]:
        """One node of every type that was never timed, and what to ask of its first device."""
        asked = set(self._times)
        for node in snapshot.nodes:
            if node.device not in asked:
                asked.add(node.device)
                kind = device_type(node.device, snapshot.overrides)
                yield node, Measure(spec=job_to_mapping(self._spec), num_threads=kind.threads)

    def take(self, device: str, answer: Measured) -> None:
        self._times[device] = tuple(self._time(device, *row) for row in answer.rows)

    def _time(self, device: str, part: Part, samples: int, forward_s: float, backward_s: float) -> LayerTime:
        model = self._spec.model
        return LayerTime(
            device=device,
            tp=1,
            micro_batch=samples,
            seq_len=self._spec.train.seq_len,
            hidden=model.hidden,
            forward_s=forward_s,
            backward_s=backward_s,
            source=_SOURCE.format(device=device),
            part=part,
            precision=self._spec.train.precision,
            heads=model.heads,
            kv_heads=model.num_kv_heads,
            ffn=model.ffn,
            vocab=model.vocab,
        )
