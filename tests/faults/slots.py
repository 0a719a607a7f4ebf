"""What nodes keep of a job in memory, as a drill sees it: when it is written, and with bits of it spoilt."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def written(folders: Iterable[Path]) -> object:
    """Differs as soon as another slot is sealed: seals come and go as slots are written."""
    found = []
    for folder in folders:
        for path in sorted(folder.glob("*.seal?")):
            with contextlib.suppress(FileNotFoundError):
                found.append((path, path.stat().st_mtime_ns))
    return found


def spoil(folder: Path, pick: int) -> None:
    """A bit of each slot that is sealed: of what is being written no sum is known yet."""
    for seal in folder.glob("*.seal?"):
        with seal.with_name(seal.name.replace("seal", "slot")).open("r+b") as slot:
            slot.seek(pick * 97 % os.fstat(slot.fileno()).st_size)
            bits = slot.read(1)
            slot.seek(-1, os.SEEK_CUR)
            slot.write(bytes([bits[0] ^ 1 << pick % 8]))
