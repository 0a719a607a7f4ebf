"""Who is a straggler and who is not: noise, uneven devices, hiccups, what slows all, what goes and comes again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import pytest

from shoal_planner.cluster import DeviceRef
from shoal_recovery.stragglers import Finding, PaceRules, Paces

STEP_S = 0.5
RULES = PaceRules()
Truth = Callable[[int], Mapping[str, float]]  # by step, what was predicted times this each device takes


def device(name: str) -> DeviceRef:
    node, _, index = name.partition(":")
    return DeviceRef(node=node, index=int(index or 0))


class Watched:
    """A job whose findings become known, as the journal does it."""

    def __init__(self, rules: PaceRules = RULES, *, noise: float = 0.1) -> None:
        self.paces = Paces(rules)
        self.slow: dict[str, float] = {}
        self.times: Counter[str] = Counter()
        self.found: list[tuple[int, Finding]] = []
        self.step = 0
        self._noise = noise
        self._rng = random.Random(1)

    def see(self, steps: int, truth: Mapping[str, float] | Truth, step_s: float = STEP_S) -> list[Finding]:
        known = len(self.found)
        for _ in range(steps):
            self.step += 1
            now = truth(self.step) if callable(truth) else truth
            ratios = {device(name): ratio * self._rng.lognormvariate(0, self._noise) for name, ratio in now.items()}
            for finding in self.paces.add(ratios, step_s, self.slow, self.times):
                self._note(finding)
        return [finding for _, finding in self.found[known:]]

    def _note(self, finding: Finding) -> None:
        self.found.append((self.step, finding))
        if finding.slowdown > 1:
            self.slow[finding.node] = finding.slowdown
            self.times[finding.node] += 1
        else:
            del self.slow[finding.node]


def nodes(findings: Iterable[Finding]) -> list[str]:
    return [finding.node for finding in findings]


@pytest.mark.parametrize(
    "truth",
    [
        {"a": 1.0, "b": 1.0, "c": 1.0},
        {"a": 1.4, "b": 1.0, "c": 0.8},  # the prediction is so far off
        {"a": 0.5, "b": 0.5},
        {"a:0": 1.0, "a:1": 1.1, "b:0": 1.3},
        {"a": 7.0},
    ],
    ids=str,
)
def test_nobody_is_blamed_for_noise_nor_for_what_the_prediction_does_not_know(truth: Mapping[str, float]) -> None:
    watched = Watched(noise=0.15)
    assert watched.see(400, truth) == []
    watched.paces.begin()
    assert watched.see(400, truth) == []


def test_a_node_that_becomes_slow_is_found_once_and_by_how_much() -> None:
    watched = Watched()
    watched.see(20, {"a": 1.3, "b": 1.0, "c": 1.0})
    (finding,) = watched.see(30, {"a": 1.3, "b": 2.2, "c": 1.0})
    assert finding.node == "b" and finding.device == "b:0"
    assert finding.slowdown == pytest.approx(2.2 / 1.15, rel=0.15), "a and c have a middle, too"
    at = watched.found[0][0]
    assert at - 20 <= 2 * RULES.least_steps


def test_the_slowest_device_of_a_node_is_named_and_two_are_enough_to_tell() -> None:
    watched = Watched()
    watched.see(16, {"a:0": 1.0, "a:1": 1.0, "b:0": 1.0})
    (finding,) = watched.see(16, {"a:0": 1.0, "a:1": 3.0, "b:0": 1.0})
    assert (finding.node, finding.device) == ("a", "a:1")
    assert finding.slowdown == pytest.approx(3.0, rel=0.2)


def test_one_that_is_alone_is_compared_with_its_own_earlier_steps() -> None:
    watched = Watched()
    assert watched.see(40, {"a": 3.0}) == []
    (finding,) = watched.see(20, {"a": 6.0})
    assert finding.slowdown == pytest.approx(2.0, rel=0.15)
    (finding,) = watched.see(60, {"a": 3.0})
    assert finding == Finding(node="a", slowdown=1.0, device="a:0")


def test_one_that_was_alone_and_slow_stays_so_beside_others_whatever_the_prediction_was_worth() -> None:
    watched = Watched()
    watched.see(40, {"a": 3.0})
    assert nodes(watched.see(40, {"a": 6.0})) == ["a"]
    watched.paces.begin()
    assert watched.see(400, {"a": 6.0, "b": 3.0, "c": 3.0}) == []
    assert watched.slow.keys() == {"a"}


def test_who_is_slow_from_the_start_is_found_where_no_prediction_is_so_far_off() -> None:
    assert nodes(Watched().see(10, {"a": 1.0, "b": 2.8, "c": 1.0})) == ["b"]
    assert Watched().see(200, {"a": 1.0, "b": 1.9, "c": 1.0}) == []


def test_what_slows_all_alike_is_nobodys_fault() -> None:
    watched = Watched()
    watched.see(20, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert watched.see(100, {"a": 4.0, "b": 4.0, "c": 4.0}) == []


@pytest.mark.parametrize("every", [3, 9, 50])
def test_hiccups_are_no_straggler(every: int) -> None:
    """One step in three is ten times as long: that is costly, but no other plan would help."""
    watched = Watched()
    assert watched.see(400, lambda step: {"a": 1.0, "b": 10.0 if step % every == 0 else 1.0, "c": 1.0}) == []


def test_short_steps_are_watched_for_as_long() -> None:
    watched = Watched()
    watched.see(400, {"a": 1.0, "b": 1.0}, step_s=0.01)
    assert watched.see(150, {"a": 1.0, "b": 3.0}, step_s=0.01) == [], "a second and a half"
    assert nodes(watched.see(250, {"a": 1.0, "b": 3.0}, step_s=0.01)) == ["b"]


def test_a_straggler_that_recovers_is_believed_later_each_time_and_nobody_else_is_blamed() -> None:
    watched = Watched()
    watched.see(16, {"a": 1.0, "b": 1.0})
    waits = []
    for _ in range(3):
        assert nodes(watched.see(24, {"a": 1.0, "b": 2.0})) == ["b"]
        watched.paces.begin()  # another plan for it
        assert watched.see(24, {"a": 1.0, "b": 2.0}) == []
        since = watched.step
        (finding,) = watched.see(200, {"a": 1.0, "b": 1.0})
        assert finding == Finding(node="b", slowdown=1.0, device="b:0")
        waits.append((watched.found[-1][0] - since) * STEP_S)
        watched.paces.begin()
        assert watched.see(24, {"a": 1.0, "b": 1.0}) == []
    for wait_s, patience_s in zip(waits, (10, 20, 40), strict=True):
        assert patience_s <= wait_s <= patience_s + 10
    assert RULES.patience_s(1000) == RULES.longest_calm_s


def test_one_that_comes_and_goes_stays_what_it_is() -> None:
    watched = Watched()
    watched.see(16, {"a": 1.0, "b": 1.0, "c": 1.0})
    watched.see(400, lambda step: {"a": 1.0, "b": 2.0 if step // 16 % 2 else 1.0, "c": 1.0})
    assert nodes(finding for _, finding in watched.found) == ["b"]


def test_one_that_becomes_slower_still_or_less_slow_is_told_again() -> None:
    watched = Watched()
    watched.see(16, {"a": 1.0, "b": 1.0, "c": 1.0})
    slowdowns = []
    for slowdown in (2.0, 5.0, 2.2):
        watched.see(100, {"a": 1.0, "b": slowdown, "c": 1.0})
        slowdowns.append(watched.found[-1][1].slowdown)
    assert slowdowns == [pytest.approx(2.0, rel=0.1), pytest.approx(5.0, rel=0.1), pytest.approx(2.2, rel=0.1)]
    assert len(watched.found) == 3


def test_a_second_one_is_measured_against_those_that_are_sound() -> None:
    watched = Watched()
    watched.see(16, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert nodes(watched.see(24, {"a": 1.0, "b": 3.0, "c": 1.0})) == ["b"]
    assert nodes(watched.see(24, {"a": 1.0, "b": 3.0, "c": 3.0})) == ["c"]
    assert watched.see(100, {"a": 1.0, "b": 3.0, "c": 3.0}) == []
    watched.see(200, {"a": 9.0, "b": 3.0, "c": 3.0})
    assert watched.slow == {"a": pytest.approx(3.0, rel=0.1)}, "only how nodes compare is known"
