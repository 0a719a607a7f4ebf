"""Two nodes with a thin link between them: what is split near to the devices hardly uses it."""

from __future__ import annotations

import pytest

from benchmarks import slow_links


@pytest.mark.long
@pytest.mark.skipif(bool(slow_links.missing()), reason=slow_links.missing() or "namespaces can be made")
def test_three_levels_step_twice_as_often_as_zero_3() -> None:
    """The link decides by far: it is full for most of a step of ZeRO-3, and the margin is that of the bytes on it."""
    runs = slow_links.measure(slow_links.requests(), rounds=1)
    found = slow_links.results(runs)
    assert found["link_share.zero_3"] >= 0.6
    assert found["ratio.three_level_to_zero_3.inside_limited"] >= 2
    zero_3, _, three_level = ([step["loss"] for step in run["steps"]] for run in runs)
    assert three_level == pytest.approx(zero_3, rel=1e-5)
