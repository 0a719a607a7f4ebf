"""Disks of their own for the nodes of a drill, small ones, so that they can be full."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

_SIZE = "64m"
_BLOCK = bytes(1 << 20)


class Disks:
    """At these folders; `missing` says why there are none, where this machine does not allow them."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.missing = ""
        self._mounted: list[Path] = []
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "drill", folder]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                self.missing = f"no disk of its own: {done.stderr.strip()}"
                return
            self._mounted.append(folder)

    def close(self) -> None:
        for folder in self._mounted:
            subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)


def fill(folder: Path) -> Callable[[], None]:
    """Nothing more can be written there; what makes room again."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(_BLOCK)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
    return lambda: ballast.unlink(missing_ok=True)
