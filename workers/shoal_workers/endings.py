"""What a rank tells of an error that ended its epoch: whose fault it is, and so what may help."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal_planner.architecture import ModelSpec
from shoal_planner.errors import InvalidField
from shoal_recovery.errors import BaseChanged, StoreError
from shoal_workers.errors import (
    DataDiffers,
    DataError,
    DeviceMissing,
    EpochAbandoned,
    OutOfDeviceMemory,
    PeerLost,
    StepRefused,
)
from shoal_workers.fetching import FetchFailed
from shoal_workers.user_code import chain_of, users_own
from shoal_workers.wire import ConnectionClosed

_KNOWN = (
    *(EpochAbandoned, PeerLost, FetchFailed, ConnectionClosed, StoreError, BaseChanged, StepRefused, DataError),
    *(InvalidField, DeviceMissing, OutOfDeviceMemory, torch.OutOfMemoryError),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """As in `rank_messages.Trouble`."""

    problem: str
    fatal: bool = False
    local: bool = False
    code: str = "rank_failed"


def ending_of(error: BaseException, model: ModelSpec, shortage: Callable[[BaseException], str]) -> Ending | None:
    """None where whoever gave the order knows. `shortage` says what a lack of memory is of."""
    # What we raised may have passed through modules of the user's, and come out as something else.
    match next((each for each in chain_of(error) if isinstance(each, _KNOWN)), error):
        case EpochAbandoned():
            return None
        case BaseChanged() as known:
            return Ending(problem=str(known), fatal=True, code="base_changed")  # no plan brings the old one back
        case PeerLost() | FetchFailed() | ConnectionClosed() | StoreError() as known:
            return Ending(problem=str(known))
        case StepRefused() as known:
            return Ending(problem=str(known), fatal=True, code="step_refused")
        case DataDiffers() as known:
            return Ending(problem=str(known), local=True, code="data_broken")
        case DataError() as known:
            return Ending(problem=str(known), fatal=True, code="data_broken")  # it reads the same on every node
        case InvalidField() as known:  # no file, no column, half a file: other nodes may have what this one lacks
            of_data = known.field.startswith("data.")
            return Ending(problem=str(known), local=True, code="data_broken" if of_data else "rank_failed")
        case DeviceMissing() as known:
            return Ending(problem=str(known), local=True)
        case OutOfDeviceMemory() | torch.OutOfMemoryError() as known:
            return Ending(problem=shortage(known), local=True)  # another plan may ask less of this node
    if (theirs := users_own(error, model)) is not None:
        return Ending(problem=theirs, fatal=True, code="user_code_failed")
    # A full disk, or an error of ours: nothing that a peer did. If it is the job's fault it shows on every node; the
    # user must see where.
    lines = "".join(traceback.format_exception(error, limit=8))
    return Ending(problem=f"{type(error).__name__}: {error}\n{lines}", local=True)
