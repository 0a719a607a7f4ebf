"""What the best of five public planners found for recorded settings is beaten, under our model and a plain one."""

from __future__ import annotations

import pytest

from benchmarks.planner import Report, peers, rescores
from benchmarks.planner_cases import DEFAULT_PATH

pytestmark = [
    pytest.mark.long,  # processor minutes
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not DEFAULT_PATH.exists(), reason="the recorded settings are not there"),
]

# How many times as fast as the best of the peers, in the geometric mean and each; and how far above the least possible.
MEAN_GAIN, PLAIN_MEAN_GAIN, PLAIN_LEAST_GAIN = 1.3, 1.2, 0.99
MOST_OVER_BOUND = {"ah-odd-6.7b": 1.15, "sc-64": 1.15, "ah-3types-6.7b": 1.22, "sc-1024": 1.31}


def reported(part: str) -> Report:
    return Report(only=frozenset({part}), cases=DEFAULT_PATH, repeat=1, table=False)


def test_every_peer_is_beaten_under_our_model() -> None:
    report = reported("peers")
    peers(report)
    gains = {name: gain for name, gain in report.results.items() if name.startswith("gain.peers.")}
    assert len(gains) > 5
    assert {name: gain for name, gain in gains.items() if gain is None or not gain > 1} == {}
    mean = report.results["gain.peers"]
    assert mean is not None and mean >= MEAN_GAIN


def test_no_peer_is_ahead_under_the_plain_model() -> None:
    report = reported("rescore")
    rescores(report)
    gains = {name: gain for name, gain in report.results.items() if name.startswith("rescore_gain.")}
    assert len(gains) > 5
    assert {name: gain for name, gain in gains.items() if gain is None or gain < PLAIN_LEAST_GAIN} == {}
    mean = report.results["rescore_gain"]
    assert mean is not None and mean >= PLAIN_MEAN_GAIN
    for setting, most in MOST_OVER_BOUND.items():
        over = report.results[f"rescore_over_bound.{setting}"]
        assert over is not None and over <= most, setting
