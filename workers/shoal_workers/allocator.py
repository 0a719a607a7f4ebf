"""What a process that steps does with memory: what tensors have given back stays with it, and what modules have made is
never looked at again.

By default glibc returns large blocks to the kernel, and every step faults them in again, page by page: on a CPU that
takes 2 to 8 per cent of it.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MOST = 2**31 - 1
_SPARE_BYTES = 1 << 26
_PAGE_BYTES = mmap.PAGESIZE
_AT_ONCE_BYTES = 1 << 23  # some milliseconds: whoever does not want it any more waits no longer

# What a process is started with that is to keep its memory. Where others have had threads before `keep_memory` is
# called, each of these has an arena of its own, a new thread gets any of them, and all but the first arena give large
# blocks back whatever they are told.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


def keep_memory() -> None:
    """For processes that step. Early: blocks that are mapped already are not moved. All threads share what there is: an
    epoch has a thread of its own, and else would not get the memory that the one before it has left."""
    with suppress(AttributeError):  # another C library, with ways of its own
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in (
            (_M_ARENA_MAX, 1),
            (_M_MMAP_THRESHOLD, _MOST),
            (_M_TRIM_THRESHOLD, _MOST),
            (_M_TOP_PAD, _SPARE_BYTES),
        ):
            mallopt(option, value)


def keep_modules() -> None:
    """Collections of garbage leave alone what is there now. A full one would walk through some 300,000 objects of
    modules, for 0.2 s in which every other rank waits."""
    gc.freeze()


@contextmanager
def importing() -> Iterator[None]:
    """And while modules are made nothing is looked at either: that is a sixth of the time that torch takes."""
    gc.disable()
    try:
        yield
    finally:
        keep_modules()
        gc.enable()


def return_memory(kept_bytes: int = 0) -> None:
    """After a change of plan: what the state of before took may be more than anything needs from here on. About as much
    as `kept_bytes` may stay with the process."""
    with suppress(AttributeError):
        if _free_bytes() > 2 * kept_bytes:
            ctypes.CDLL(None).malloc_trim(0)


def make_room(num_bytes: int, wanted: Callable[[], bool] = lambda: True) -> None:
    """So much memory lies ready, touched, for what comes next, or as much as there was time for while it was `wanted`:
    a state that is built in memory that is new to the process, or even to the machine, takes ten times as long."""
    room = np.empty(num_bytes, dtype=np.uint8)
    for low in range(0, num_bytes, _AT_ONCE_BYTES):
        if not wanted():
            break
        room[low : low + _AT_ONCE_BYTES : _PAGE_BYTES] = 0  # and all is given back, but not to the kernel


def after_a_loss(used_bytes: int, limit_bytes: int | None, num_nodes: int) -> int:
    """What the state takes that a rank builds when one of so many nodes is lost and the others share its part, as far
    as there is so much beside the state of now, which stays until then; never less than it takes now."""
    more_bytes = used_bytes // (num_nodes - 1) if num_nodes > 1 else 0
    room_bytes = used_bytes if limit_bytes is None else limit_bytes - 2 * used_bytes
    return used_bytes + max(0, min(more_bytes, room_bytes))


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _free_bytes() -> int:
    """What tensors have given back and the process has kept. Raises AttributeError where nobody knows."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _MallInfo
    return int(ask().fordblks)
