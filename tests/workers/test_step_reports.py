"""What an agent keeps of what ranks said of steps: the newest, whatever becomes of the agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal_workers.step_reports import _MOST, Report, StepReports


def report(step: int) -> Report:
    return {"epoch": 1, "step": step, "loss": 1 / step}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    reports = StepReports(tmp_path)
    for step in range(1, 5 * _MOST):
        reports.add("job", [report(step)])
        reports.add("job", [report(step)])
    found = reports.after("job", 1, 0)
    assert found == StepReports(tmp_path).after("job", 1, 0)
    assert _MOST <= len(found) <= 2 * _MOST
    assert found == [report(step) for step in range(5 * _MOST - len(found), 5 * _MOST)]
    assert (tmp_path / "job" / "steps.jsonl").read_text().count("\n") == len(found)


def test_a_line_that_was_broken_off_is_not_there(tmp_path: Path) -> None:
    StepReports(tmp_path).add("job", [report(1), report(2)])
    path = tmp_path / "job" / "steps.jsonl"
    path.write_text(path.read_text()[:-5])
    again = StepReports(tmp_path)
    assert again.after("job", 1, 0) == [report(1)]
    again.add("job", [report(3)])
    assert StepReports(tmp_path).after("job", 1, 0) == [report(1), report(3)]


def test_what_is_not_as_it_was_written_is_not_there(tmp_path: Path) -> None:
    StepReports(tmp_path).add("job", [report(step) for step in range(1, 40)])
    path = tmp_path / "job" / "steps.jsonl"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x41
    path.write_bytes(content)
    found = StepReports(tmp_path).after("job", 1, 0)
    assert len(found) in (37, 38)  # a spoilt end of a line spoils two
    assert all(one == report(one["step"]) for one in found)


@pytest.mark.parametrize("nonsense", [{}, {"epoch": 1}, {"epoch": "1", "step": 2}, {"epoch": 1, "step": None}, [1, 2]])
def test_what_says_nothing_is_left_out(tmp_path: Path, nonsense: Any) -> None:
    reports = StepReports(tmp_path)
    reports.add("job", [report(1), nonsense, report(2)])
    assert reports.after("job", 1, 0) == StepReports(tmp_path).after("job", 1, 0) == [report(1), report(2)]


def test_only_those_of_an_epoch_are_told(tmp_path: Path) -> None:
    reports = StepReports(tmp_path)
    reports.add("job", [report(1), {**report(2), "epoch": 2}, report(2)])
    assert reports.after("job", 2, 0) == [{**report(2), "epoch": 2}]


def test_of_evaluations_that_after_the_step_itself_is_told_too(tmp_path: Path) -> None:
    reports = StepReports(tmp_path)
    evaluations = [{**report(step), "kind": "EvaluationDone"} for step in (1, 2, 3)]
    reports.add("job", [report(1), evaluations[0], report(2), evaluations[1], report(3), evaluations[2]])
    for found in (reports, StepReports(tmp_path)):
        assert found.after("job", 1, 2) == [evaluations[1], report(3), evaluations[2]]


def test_what_cannot_be_written_is_still_told(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file where the folder of the job should be")
    reports = StepReports(tmp_path)
    reports.add("job", [report(1)])
    assert reports.after("job", 1, 0) == [report(1)]
