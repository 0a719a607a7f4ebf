"""Disks of their own for the nodes of a drill, small ones, so that they can be full, or hang."""

from __future__ import annotations

import errno
import functools
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

_SIZE_BYTES = 64 << 20
_BLOCK = bytes(1 << 20)


class Disks:
    """At these folders; `missing` says why there are none, where this machine does not allow them."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.missing = ""
        self._mounted: list[Path] = []
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            image = folder.with_name(f"{folder.name}.image")
            with image.open("wb") as file:
                file.truncate(_SIZE_BYTES)
            try:
                _run("mkfs.ext4", "-q", "-m", "0", image)
                _run("mount", "-o", "loop", image, folder)
            except OSError as error:
                self.missing = f"no disk of its own: {error}"
                return
            self._mounted.append(folder)

    def close(self) -> None:
        for folder in self._mounted:
            subprocess.run(["fsfreeze", "--unfreeze", folder], check=False, capture_output=True)
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
    return functools.partial(ballast.unlink, missing_ok=True)


def freeze(folder: Path) -> Callable[[], None]:
    """Whoever writes there waits, and cannot even be killed, until what this returns is called."""
    _run("fsfreeze", "--freeze", folder)
    return functools.partial(_run, "fsfreeze", "--unfreeze", folder)


def _run(*command: str | Path) -> None:
    """Raises OSError."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
