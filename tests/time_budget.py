"""A budget of time for tests that take minutes each, over several runs.

What has passed on the same sources is left out; what failed comes first, then what was never run; nothing begins that
took longer the last time than is left, or that its mark, `long(seconds=...)`, says will take longer. One line per test
that ended is added to a file, which the next run reads.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNKNOWN_S = 300.0  # what a test is thought to take that never ended before, where its mark says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A test that ran to its end, on what `sources` was then."""

    test: str
    sources: str
    passed: bool
    seconds: float


def read(path: Path) -> dict[str, Ended]:
    """How each test ended last."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {ended.test: ended for ended in (Ended(**json.loads(line)) for line in lines)}


def is_done(ended: Ended | None, sources: str) -> bool:
    return ended is not None and ended.passed and ended.sources == sources


def in_order(tests: Iterable[str], known: Mapping[str, Ended], expected_s: Mapping[str, float]) -> list[str]:
    """Those that failed, those never run, of which the longest would find no time later, and then the others, the
    shortest first, so that most are done."""

    def key(test: str) -> tuple[int, float]:
        ended = known.get(test)
        if ended is None:
            return 1, -expected_s.get(test, UNKNOWN_S)
        return (2, ended.seconds) if ended.passed else (0, ended.seconds)

    return sorted(tests, key=key)


def expected_s(item: pytest.Item) -> float:
    """What its mark says."""
    mark = item.get_closest_marker("long")
    return UNKNOWN_S if mark is None else float(mark.kwargs.get("seconds", UNKNOWN_S))


def sources_of(root: Path, *paths: str) -> str:
    """The same for the same contents of all files that git would commit, or of those among them; empty where there is
    no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = hashlib.sha256()
    for name in sorted(listed.stdout.splitlines()):
        if name.endswith((".py", ".toml")) and (root / name).is_file():
            found.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return found.hexdigest()[:16] if listed.returncode == 0 else ""


class TimeBudget:
    """A plugin of pytest. `clock` in seconds."""

    def __init__(self, path: Path, sources: str, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._sources, self._clock = path, sources, clock
        self._ends_s = clock() + within_s
        self._known = read(path)
        self._taken_s: dict[str, float] = {}
        self._failed: set[str] = set()
        self._left: list[str] = []
        self._num_done = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        done = [test for test in by_id if self._sources and is_done(self._known.get(test), self._sources)]
        self._num_done = len(done)
        if done:
            config.hook.pytest_deselected(items=[by_id.pop(test) for test in done])
        expected = {test: expected_s(item) for test, item in by_id.items()}
        items[:] = [by_id[test] for test in in_order(by_id, self._known, expected)]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        ended = self._known.get(item.nodeid)
        needed_s = expected_s(item) if ended is None else ended.seconds
        if self._clock() + needed_s > self._ends_s:
            self._left.append(item.nodeid)
            pytest.skip(f"would take about {needed_s:.0f} s, and less is left of this run; the same command goes on")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._taken_s[test] = self._taken_s.get(test, 0.0) + report.duration
        if report.failed:
            self._failed.add(test)
        if report.when == "teardown" and test not in self._left:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            passed = test not in self._failed
            ended = Ended(test=test, sources=self._sources, passed=passed, seconds=round(self._taken_s[test], 1))
            with self._path.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(asdict(ended)) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"{self._num_done} tests have passed on these sources before; {len(self._left)} are left for the next run"
        )
