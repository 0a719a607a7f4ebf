"""Kernels that give the same bits each time: torch's switches, on for as long as a run that wants them.

They are the process's, and so are the kernels: whoever else computes in this process meanwhile gets them too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, an operation that has no deterministic kernel raises RuntimeError. Does nothing unless `wanted`."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses matmuls on GPUs without
    memory: Any = torch.utils.deterministic  # whose one attribute lies behind a class of modules
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # nothing is read that was not written
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
