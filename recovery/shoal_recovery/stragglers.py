"""Which nodes are stragglers: up, and markedly slower than they should be. Pure: seconds of steps in, findings out.

What a device should take is what its plan predicts for it at full speed. Where all take longer alike, that is the fault
of the prediction: so a node is compared with the middle of the others, or, if it is alone, with its own earlier steps.
Owns when a difference is believed. What to do about it is decided by who weighs plans.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_planner.cluster import DeviceRef

Step = Mapping[DeviceRef, float]  # how many times what was predicted for it each device computed
_MOST = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceRules:
    """A node is `slow` times slower than it should be, or slower still, in three quarters of the steps of a window to
    be a straggler, and no more than `fit` times to be none any more. A window is `least_steps` and `least_s` long.

    Predictions of one node against others are good to `trusted`: what a node differs by when an epoch begins, up to
    that, is no slowness but how it always is. That one is no straggler any more is believed after `calm_s`, twice that
    after each time that it was one before, up to `longest_calm_s`: what comes and goes is not to change plans for ever.
    """

    slow: float = 1.5
    fit: float = 1.25
    trusted: float = 1.5
    least_steps: int = 8
    least_s: float = 2.0
    calm_s: float = 10.0
    longest_calm_s: float = 3600.0

    def patience_s(self, times: int) -> float:
        """Before a node that was a straggler so many times counts as none."""
        return min(self.calm_s * 2.0 ** min(max(times, 1) - 1, 20), self.longest_calm_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The node is `slowdown` times slower than it should be, 1.0 if not at all (any more). `device` is its slowest."""

    node: str
    slowdown: float
    device: str


class Paces:
    """Of one job. `slow` is what is known of stragglers, by how many times they are slower, and `times` how often each
    node has been found to be one."""

    def __init__(self, rules: PaceRules) -> None:
        self.rules = rules
        self._window: list[tuple[Step, float]] = []
        self._usual: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._calm_s: dict[str, float] = {}
        self._alone = False

    def begin(self) -> None:
        """Another epoch: its first window says how nodes compare when nothing is amiss."""
        if not self._alone:  # what its steps are of their prediction says nothing of how it compares with others
            self._before |= self._usual
        self._window, self._usual = [], {}

    def add(
        self, step: Step, duration_s: float, slow: Mapping[str, float], times: Mapping[str, int]
    ) -> tuple[Finding, ...]:
        """One step of all devices, which took so long; what is new, at the end of a window."""
        self._window.append((step, duration_s))
        window_s = sum(seconds for _, seconds in self._window)
        if len(self._window) < self.rules.least_steps or window_s < self.rules.least_s:
            return ()
        steps, self._window = [step for step, _ in self._window], []
        self._alone = len({device.node for device in steps[0]}) == 1
        found = []
        for node, ratios in compared(steps, slow).items():
            if node not in self._usual:
                self._usual[node] = self._settled(node, statistics.median(ratios), slow)
            slowdown = self._judged(node, [ratio / self._usual[node] for ratio in ratios], window_s, slow, times)
            if slowdown is not None:
                found.append(Finding(node=node, slowdown=slowdown, device=str(_slowest(node, steps))))
        return tuple(found)

    def _settled(self, node: str, ratio: float, slow: Mapping[str, float]) -> float:
        """How the node compares when nothing is amiss. Of a known straggler that is what it was before."""
        if self._alone:
            return ratio / slow.get(node, 1.0)
        if node in slow:
            return self._before.get(node, 1.0)
        return min(max(ratio, 1 / self.rules.trusted), self.rules.trusted)

    def _judged(
        self, node: str, ratios: Sequence[float], window_s: float, slow: Mapping[str, float], times: Mapping[str, int]
    ) -> float | None:
        """How many times slower it is from now on, if that is another figure than is known."""
        least, middle, most = statistics.quantiles(ratios, n=4)
        known, slowdown = slow.get(node, 1.0), round(min(middle, _MOST), 2)
        if least >= known * self.rules.slow:
            self._calm_s.pop(node, None)
            return slowdown
        if node not in slow or most > max(known / self.rules.slow, self.rules.fit):
            self._calm_s.pop(node, None)
            return None
        calm_s = self._calm_s[node] = self._calm_s.get(node, 0.0) + window_s
        if calm_s < self.rules.patience_s(times.get(node, 0)):
            return None
        del self._calm_s[node]
        return slowdown if middle > self.rules.fit else 1.0


def compared(steps: Sequence[Step], slow: Mapping[str, float]) -> dict[str, list[float]]:
    """By node, how many times slower than the middle of the others it was in each step, by its slowest device; of one
    that is alone as it is. Known stragglers are no measure for others, so one that has none but these is left out."""
    found: dict[str, list[float]] = {}
    for step in steps:
        paces: dict[str, float] = {}
        for device, ratio in step.items():
            paces[device.node] = max(ratio, paces.get(device.node, 0.0))
        sound = sorted(pace for node, pace in paces.items() if node not in slow)
        for node, pace in paces.items():
            measure = _middle(sound, None if node in slow else pace) if len(paces) > 1 else 1.0
            if measure:
                found.setdefault(node, []).append(pace / measure)
    return found


def _middle(ordered: list[float], without: float | None) -> float | None:
    """The median of these, one of them left out; None without any."""
    rest = list(ordered)
    if without is not None:
        rest.remove(without)
    return statistics.median(rest) if rest else None


def _slowest(node: str, steps: Sequence[Step]) -> DeviceRef:
    mine = [device for device in steps[0] if device.node == node]
    return max(mine, key=lambda device: statistics.median(step[device] for step in steps))
