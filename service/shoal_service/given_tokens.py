"""Tokens that the operator gives this server in files, as Kubernetes mounts a Secret: of connectors and of scrapers, so
that clusters and Prometheus are known from the first start on. They stand in no table: who takes a file away, and
starts the server anew, has revoked its token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from shoal_service.access import ADMINISTRATOR, Kind, Principal
from shoal_service.exposure import is_guessable
from shoal_service.identity import sha256

_METRICS = "metrics"
_CONNECTOR = re.compile(r"connector-([A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)")


def given_principals(folder: Path | None) -> Mapping[str, Principal]:
    """By the hash of the token: who it is. Each file of the folder holds one token, and is called `metrics`, or
    `connector-` and the id of a cluster; hidden ones are left out (Kubernetes keeps its own beside them). Raises
    ValueError, naming the file, for any other one, for a token that can be guessed, and for one that is given twice."""
    found: dict[str, Principal] = {}
    if folder is None:
        return found
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        texts = [(path, path.read_text(encoding="ascii").strip()) for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"tokens_dir = {str(folder)!r}: cannot be read ({error})") from None
    for path, token in texts:
        principal = _principal(path)
        if is_guessable(token):
            raise ValueError(f"{path}: holds a token that can be guessed; take 32 random characters or more")
        if sha256(token) in found:
            raise ValueError(f"{path}: holds the same token as another file; each needs one of its own")
        found[sha256(token)] = principal
    return found


def _principal(path: Path) -> Principal:
    plain = dataclasses.replace(ADMINISTRATOR, subject=f"given:{path.name}", name=path.name, server_admin=False)
    if path.name == _METRICS:
        return dataclasses.replace(plain, kind=Kind.METRICS)
    cluster = _CONNECTOR.fullmatch(path.name)
    if cluster is None:
        raise ValueError(f"{path}: must be called 'metrics', or 'connector-' and the id of a cluster")
    return dataclasses.replace(plain, kind=Kind.CONNECTOR, cluster_id=cluster[1])
