"""NCCL, as its own C interface has it: communicators of any ranks, and what passes over them.

Owns the binding alone. Through it, not through torch's process group: that one has no tags either, but a watchdog that
ends the process when a peer is lost, and one queue for both directions of a pair. Calls return when the work is in the
stream, or when the ranks have met; they let other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from contextlib import suppress
from ctypes import POINTER, byref, c_byte, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor

TICKET_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_SUM, _MAX = 0, 2
_PATIENCE_S = 1.0
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_byte * TICKET_BYTES),)


# As nccl.h declares them: a stream and a communicator are pointers, data types and operations are enums.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(_UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, _UniqueId, c_int),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


@functools.cache
def _library() -> Any:
    """The one that torch has loaded, where it is built for CUDA. Raises OSError where there is none."""
    library = ctypes.CDLL("libnccl.so.2")
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
        getattr(library, name).restype = c_int
    library.ncclGetErrorString.argtypes = (c_int,)
    library.ncclGetErrorString.restype = c_char_p
    return library


def version() -> int | None:
    """None where there is no NCCL."""
    with suppress(OSError):
        found = c_int()
        _call("ncclGetVersion", byref(found))
        return found.value
    return None


def new_ticket() -> bytes:
    """With which the ranks of one communicator find each other. This process is the one that they call."""
    ticket = _UniqueId()
    _call("ncclGetUniqueId", byref(ticket))
    return bytes(ticket)


class Communicator:
    """Made when all `size` ranks of it make theirs, on the current device. All methods raise RuntimeError, and after
    `abort`, which any thread may call, they do nothing else."""

    def __init__(self, ticket: bytes, rank: int, size: int) -> None:
        self._handle = c_void_p()
        self._using = threading.Lock()
        self._aborted = False
        _call("ncclCommInitRank", byref(self._handle), size, _UniqueId.from_buffer_copy(ticket), rank)

    def send(self, tensor: Tensor, peer: int, stream: Any) -> None:
        self._use("ncclSend", *_message(tensor), peer, self._handle, stream.cuda_stream)

    def receive(self, tensor: Tensor, peer: int, stream: Any) -> None:
        self._use("ncclRecv", *_message(tensor), peer, self._handle, stream.cuda_stream)

    def all_reduce(self, tensor: Tensor, stream: Any, *, largest: bool) -> None:
        """In place; the sums, or the largest ones."""
        address, count, kind = _message(tensor)
        operation = _MAX if largest else _SUM
        self._use("ncclAllReduce", address, address, count, kind, operation, self._handle, stream.cuda_stream)

    def check(self) -> None:
        """Raises if what is under way has failed. Waits for nobody who is in a call of this communicator."""
        if self._using.acquire(blocking=False):
            try:
                result = c_int()
                self._call("ncclCommGetAsyncError", self._handle, byref(result))
                _check("what was under way", result.value)
            finally:
                self._using.release()

    def abort(self) -> None:
        """Ends what is under way, also in streams, and the communicator with it. Whoever is stuck in a call of it is
        freed by that; whoever is only passing through is waited for."""
        if self._aborted:
            return
        self._aborted = True
        passed = self._using.acquire(timeout=_PATIENCE_S)
        try:
            _call("ncclCommAbort", self._handle)
        finally:
            if passed:
                self._using.release()

    def _use(self, name: str, *arguments: Any) -> None:
        with self._using:
            self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._aborted:
            raise RuntimeError("NCCL: this communicator was aborted")
        _call(name, *arguments)


def _message(tensor: Tensor) -> tuple[int, int, int]:
    assert tensor.is_contiguous(), tensor.shape
    return tensor.data_ptr(), tensor.numel(), _TYPES[tensor.dtype]


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_library(), name)(*arguments))


def _check(what: str, result: int) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        raise RuntimeError(f"NCCL: {what}: {_library().ncclGetErrorString(result).decode()}")
