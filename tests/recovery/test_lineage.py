"""Which state belongs to the history that counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_recovery.lineage import counts


def test_what_an_epoch_did_beyond_the_start_of_a_later_one_is_void() -> None:
    starts = {1: 0, 2: 5, 3: 4}
    assert counts(1, 4, starts)
    assert not counts(1, 5, starts)  # epoch 2 kept it, epoch 3 went back behind it
    assert counts(2, 4, starts)
    assert not counts(2, 5, starts)
    assert counts(3, 100, starts)


def test_an_epoch_that_nobody_knows_of_counts_as_any_other() -> None:
    assert counts(7, 3, {})
    assert counts(4, 9, {1: 0, 2: 5})
    assert not counts(0, 9, {1: 0, 2: 5})


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=8))
def test_every_step_that_counts_was_done_by_the_last_epoch_that_did_it(history: list[tuple[int, int]]) -> None:
    """A story of epochs: each goes back by so many steps, then does so many. What is left is what counts."""
    starts, does, done = {}, {}, {}
    reached = 0
    for epoch, (back, ahead) in enumerate(history, start=1):
        starts[epoch] = max(0, reached - back)
        reached = starts[epoch] + ahead
        does[epoch] = range(starts[epoch] + 1, reached + 1)
        done = {step: by for step, by in done.items() if step <= starts[epoch]} | dict.fromkeys(does[epoch], epoch)
    for epoch, steps in does.items():
        for step in steps:
            assert counts(epoch, step, starts) == (done.get(step) == epoch), (epoch, step)
