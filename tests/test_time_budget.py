"""Long tests over several runs: what is left out, what comes first, and what does not begin any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from time_budget import Ended, in_order, is_done, read, sources_of

TESTS = """
import os, pytest
def test_passes(): assert True
def test_fails(): assert "MENDED" in os.environ
"""
MARKED = """
import pytest
pytestmark = pytest.mark.long
def test_of_any_length(): assert True
@pytest.mark.long(seconds=1500)
def test_of_a_known_length(): assert True
"""


def ended(test: str, *, passed: bool = True, seconds: float = 1.0, sources: str = "a") -> Ended:
    return Ended(test=test, sources=sources, passed=passed, seconds=seconds)


def test_what_failed_comes_first_then_what_is_new_then_the_shortest() -> None:
    known = {e.test: e for e in (ended("slow", seconds=9), ended("quick"), ended("failed", passed=False, seconds=50))}
    assert in_order(["slow", "new", "quick", "failed"], known, {}) == ["failed", "new", "quick", "slow"]
    assert in_order(["new", "slow", "marked", "short"], known, {"marked": 4000, "short": 5}) == [
        "marked",
        "new",
        "short",
        "slow",
    ]


def test_only_what_passed_on_the_same_sources_is_done() -> None:
    assert is_done(ended("t"), "a")
    assert not is_done(ended("t"), "b") and not is_done(ended("t", passed=False), "a") and not is_done(None, "a")


def test_sources_change_with_a_file_that_is_not_committed_yet(tmp_path: Path) -> None:
    assert sources_of(tmp_path) == ""
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "one.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    before, other = sources_of(tmp_path), sources_of(tmp_path, "other.py")
    (tmp_path / "one.py").write_text("2")
    assert before != sources_of(tmp_path)
    assert other == sources_of(tmp_path, "other.py") != ""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_two.py").write_text(TESTS)
    return tmp_path


def run(checkout: Path, within: str, *files: str, **environment: str) -> str:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(checkout), "--within", within]
    done = subprocess.run(
        [*command, "--ended", str(checkout / "ended.jsonl"), "-rs", *(files or ("test_two.py",))],
        cwd=checkout,
        env={"PYTHONPATH": here, "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_run_goes_on_where_the_last_one_ended(checkout: Path) -> None:
    assert "1 failed, 1 passed" in run(checkout, "60")
    assert {test: e.passed for test, e in read(checkout / "ended.jsonl").items()} == {
        "test_two.py::test_passes": True,
        "test_two.py::test_fails": False,
    }
    said = run(checkout, "60", MENDED="1")
    assert "1 passed, 1 deselected" in said and "1 tests have passed on these sources before" in said
    assert "2 deselected" in run(checkout, "60", MENDED="1")


def test_nothing_begins_that_would_not_end_in_time(checkout: Path) -> None:
    said = run(checkout, "1")
    assert "2 skipped" in said and "would take about 300 s" in said and "2 are left for the next run" in said
    assert not (checkout / "ended.jsonl").exists()


def test_a_mark_says_how_long_a_test_takes_that_never_ran(checkout: Path) -> None:
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers =\n  long: as here\n")
    (checkout / "test_marked.py").write_text(MARKED)
    said = run(checkout, "24", "test_marked.py")
    assert "1 passed, 1 skipped" in said and "would take about 1500 s" in said
    assert "1 passed, 1 deselected" in run(checkout, "26", "test_marked.py"), "that of a known length has time now"
