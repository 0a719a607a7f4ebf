"""What can go wrong in the workers.

    Exception
      EpochAbandoned      the exchange of this epoch was abandoned: leave the step, keep the state, wait for orders
      PeerLost            another rank stopped answering in the middle of an exchange
      OutOfDeviceMemory   a buffer would not fit into the memory that this device may use
        OutOfHostMemory   the same of the part of its node's own memory that a rank may use
      StepRefused         a step was voted down: it would have spoilt the weights
      DeviceMissing       a plan asks for a CUDA device that a node does not show
      DataError           what stands in the files that a job is trained on cannot be trained on
        DataDiffers       it is not what the job began with, on this node at least

All cross process borders: positional arguments only, and the message in `__str__`.
"""

from __future__ import annotations


class EpochAbandoned(Exception):
    """The exchange of an epoch was abandoned; what was under way in it did not happen or is torn, as the tag says."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class PeerLost(Exception):
    """An exchange failed although nobody abandoned it: a peer died, or did not answer within the timeout."""

    def __init__(self, epoch: int, during: str, problem: str) -> None:
        super().__init__(epoch, during, problem)
        self.epoch = epoch
        self.during = during
        self.problem = problem

    def __str__(self) -> str:
        return f"epoch {self.epoch}: a peer was lost during {self.during}: {self.problem}"


class OutOfDeviceMemory(Exception):
    """With `what` it would be `need_bytes` in all on `device`, which may use `limit_bytes`. `in_use` is the rest of
    these, by purpose."""

    def __init__(
        self, device: str, need_bytes: int, limit_bytes: int, what: str, in_use: tuple[tuple[str, int], ...] = ()
    ) -> None:
        super().__init__(device, need_bytes, limit_bytes, what, in_use)
        self.device = device
        self.need_bytes = need_bytes
        self.limit_bytes = limit_bytes
        self.what = what
        self.in_use = in_use

    def __str__(self) -> str:
        rest = ", ".join(f"{what} {num_bytes}" for what, num_bytes in self.in_use) or "nothing"
        return (
            f"{self.device} would need {self.need_bytes} bytes with {self.what} (in use: {rest}), "
            f"but may use {self.limit_bytes} bytes"
        )


class OutOfHostMemory(OutOfDeviceMemory):
    """As for the device: what the rank of `device` may use on its host."""

    def __str__(self) -> str:
        return f"on the host, {super().__str__()}"


class StepRefused(Exception):
    """No rank applied `step`; `reason` says why, for people."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(step, reason)
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"step {self.step} was refused: {self.reason}"


class DeviceMissing(Exception):
    """A type of GPU stands on the label of a node that shows so few CUDA devices."""

    def __init__(self, device: str, num_shown: int) -> None:
        super().__init__(device, num_shown)
        self.device = device
        self.num_shown = num_shown

    def __str__(self) -> str:
        said = f"{self.device} is to compute, but its node shows {self.num_shown} CUDA devices"
        if self.num_shown:
            return f"{said}; what its label shoal.io/devices says must be what CUDA_VISIBLE_DEVICES leaves"
        return (
            f"{said}: its torch is one for CPUs, its container was given no GPU, or its label shoal.io/device is "
            "wrong; SHOAL_WORKER_SIMULATE_DEVICES=true has its CPU compute instead"
        )


class DataError(Exception):
    """The content of a file, which is the same wherever it is read. `place` says where in `file`, for people ("line
    17"); `value` is what stands there, as it is to be quoted; `problem` a clause that completes the sentence."""

    def __init__(self, file: str, place: str, value: str, problem: str) -> None:
        super().__init__(file, place, value, problem)
        self.file = file
        self.place = place
        self.value = value
        self.problem = problem

    def __str__(self) -> str:
        return " ".join(part for part in (self.file, self.place) if part) + f": {self.value} {self.problem}"


class UserCodeError(Exception):
    """What a user's own code does or is, and must not: the same wherever it runs. The message is for its writer."""


class DataDiffers(DataError):
    """Files of a node's own, or shared ones as it sees them: another node may have what the job began with."""
