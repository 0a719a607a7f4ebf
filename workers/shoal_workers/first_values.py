"""What a training begins with: drawn from its seed, or read from where the job says. Each rank asks for what it
holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal_planner.job import JobSpec
from shoal_planner.parameters import Parameter, parameters
from shoal_recovery.first_weights import ReadWeights, open_adapters, open_weights
from shoal_workers.initial import initial_values
from shoal_workers.own_modules import OwnValues

FirstValues = Callable[[Parameter, int, int], Tensor]
"""Elements [first, last) of a flattened parameter, fp32 on the host."""


def first_values(job: JobSpec) -> FirstValues:
    """Of what is trained, and of what is frozen. Raises, and what it answers does, as `open_weights`; of modules of the
    user's own what these raise."""
    if job.train.init_from is None and job.model.module is not None:
        return OwnValues(job.model, job.train.seed)

    def drawn(parameter: Parameter, first: int, last: int) -> Tensor:
        return initial_values(parameter, job.model, job.train.seed, first, last)

    if job.train.init_from is None:
        return drawn
    read = open_weights(job.train.init_from, job.train.init_step, job.model)
    if job.model.lora is None:
        return _tensors_of(read)
    adapters = frozenset(parameter.fqn for parameter in parameters(job.model))
    kept = open_adapters(job.train.init_from, job.train.init_step, job.model)
    begun, frozen = drawn if kept is None else _tensors_of(kept), _tensors_of(read)

    def found(parameter: Parameter, first: int, last: int) -> Tensor:
        return (begun if parameter.fqn in adapters else frozen)(parameter, first, last)

    return found


def _tensors_of(read: ReadWeights) -> FirstValues:
    return lambda parameter, first, last: torch.from_numpy(read(parameter, first, last))
