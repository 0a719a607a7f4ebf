"""Lists that are shown once, or anew until somebody has seen enough."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.cli_show import show_json

Watched = Annotated[bool, typer.Option("-w", "--watch", help="Show it anew every two seconds, until Ctrl-C.")]
_EVERY_S = 2.0


def show_list(
    ask: Callable[[], Sequence[Any]], show: Callable[[Sequence[Any]], None], *, as_json: bool, watch: bool
) -> None:
    """Raises typer.BadParameter for a program that wants to watch: it is told one object."""
    if as_json and watch:
        raise typer.BadParameter("--watch is for people: leave out one of --watch and --json")
    while True:
        found = ask()
        if as_json:
            show_json({"items": found})
            return
        if watch and sys.stdout.isatty():
            Console().clear()
        show(found)
        if not watch:
            return
        sys.stdout.flush()
        time.sleep(_EVERY_S)
