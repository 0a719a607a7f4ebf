"""What a process that steps does with memory: what tensors have given back stays with it, and what modules have made is
never looked at again.

By default glibc returns large blocks to the kernel, and every step faults them in again, page by page: on a CPU that
takes 2 to 8 per cent of it.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MOST = 2**31 - 1
_SPARE_BYTES = 1 << 26


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


def return_memory() -> None:
    """After a change of plan: what the state of before took may be more than anything needs from here on."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
