"""Work in a thread beside a run, on the device that the run computes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from shoal_workers.devices import current

T = TypeVar("T")


def beside(work: Callable[[], T], device: torch.device) -> Future[T]:
    """Its result, or what it raised, when that is asked for. Nobody waits for the thread: whoever ends the run must
    wake it, too."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            with current(device):
                found.set_result(work())
        except BaseException as error:  # whoever asks for the result gets it
            found.set_exception(error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return found
