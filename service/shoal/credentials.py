"""What `shoal login` keeps: one token for each control plane, and which of them is meant. A file for its owner
alone."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """`tokens` by address of the control plane; `server` is the one that was signed in to last."""

    server: str | None = None
    tokens: dict[str, str] = field(default_factory=dict)

    def with_token(self, server: str, token: str) -> Credentials:
        return Credentials(server=server, tokens={**self.tokens, server: token})

    def without(self, server: str) -> Credentials:
        left = {known: token for known, token in self.tokens.items() if known != server}
        return Credentials(server=None if server == self.server else self.server, tokens=left)


def read_credentials(path: Path) -> Credentials:
    """None of them where there is no file that can be read."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return Credentials(server=found["server"], tokens=dict(found["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Credentials()


def write_credentials(path: Path, credentials: Credentials) -> None:
    """Nobody else may read it at any moment. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"server": credentials.server, "tokens": credentials.tokens}, file)
        new.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
