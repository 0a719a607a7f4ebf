"""What a journal says of the nodes of a cluster that its job may use, beside other jobs: its share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChanged:
    """From now on the job plans with these `nodes` alone (None: all that the cluster has), and leaves others. `version`
    counts what it was told."""

    kind: ClassVar[str] = "share_changed"
    version: int
    nodes: tuple[str, ...] | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTaken:
    """Nothing of the job is left on other nodes than those of this version: others may be given to other jobs."""

    kind: ClassVar[str] = "share_taken"
    version: int
    nodes: tuple[str, ...] | None


ShareEvent = ShareChanged | ShareTaken
SHARE_EVENTS: tuple[type[ShareEvent], ...] = (ShareChanged, ShareTaken)
