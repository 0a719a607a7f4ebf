"""Processes that are forked from one that has loaded what they need, which takes seconds otherwise.

Each process of tests has one such server, whatever it starts first, so it loads what any of them needs.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_LOADED = ["shoal_workers.agent", "shoal_workers.rank", "shoal_service.app", "shoal_service.server"]


def forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context
