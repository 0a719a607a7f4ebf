"""All that was measured of one cluster, by whichever job: what its connector tells the control plane.

Kept between jobs, so that a plan of the next one is priced by it before it runs. Any thread may call.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from shoal_planner.cluster import Node
from shoal_planner.profile import Profile, joined, profile_from_mapping
from shoal_recovery.journal import FiguresMeasured

# Of as many layers as so many shapes of models have; the oldest go first.
_MOST_LAYERS = 2000


class ClusterProfile:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._profile = Profile()

    def learn_older(self, older: Profile) -> None:
        """What was known before all that was learnt here."""
        with self._lock:
            self._profile = joined(older, self._profile)

    def learn(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """From entries of a journal, as mappings; learning one twice does no harm."""
        for entry in entries:
            if entry["kind"] == FiguresMeasured.kind:
                newer = profile_from_mapping(entry["profile"])
                with self._lock:
                    self._profile = joined(self._profile, newer)

    def on(self, nodes: Iterable[Node]) -> Profile:
        """For the cluster as it is now."""
        with self._lock:
            profile = self._profile
        return dataclasses.replace(profile, layers=profile.layers[-_MOST_LAYERS:]).on(nodes)
