"""Where the ranks of an epoch find each other: what they leave with the agent that their order names."""

from __future__ import annotations

import threading


class MeetingPlace:
    """Keys that ranks of one epoch leave for each other. Any thread."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def forget(self, prefix: str) -> None:
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}

    def get(self, key: str, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)
