"""What processes print, from their files to whoever keeps it: nothing is lost by deaths, nothing told twice, and what
there is no room for is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from process_cluster import ProcessCluster
from supervised import supervised, tiny_job
from waiting import eventually

from shoal_workers import messages as m
from shoal_workers.control_plane import ControlPlaneDown
from shoal_workers.log_courier import LogCourier
from shoal_workers.log_levels import Levels, level_of
from shoal_workers.log_output import FileName, ended_by
from shoal_workers.log_spool import LogSpool
from shoal_workers.roster import ask

PRINTS = """
import os, signal, sys
from pathlib import Path
from shoal_workers.log_output import LogFile, Output

output = Output(LogFile(Path(sys.argv[1]), large_bytes=4096))
output.take()
print("before any epoch")
output.turn_to(3, 1)
print("WARNING: the disk is slow", file=sys.stderr)
os.system("echo of a child")
print(chr(27) + "[31mred" + chr(27) + "[0m", end="\\r10%\\r90%\\n")
for number in range(200):
    print(f"line {number:03d} " + "x" * 60)
output.turn_to(4, 0)
try:
    1 / 0
except ZeroDivisionError:
    import traceback
    traceback.print_exc()
sys.stdout.write("the last words")
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def spool(folder: Path, **limits: int) -> LogSpool:
    return LogSpool(folder, **{"limit_bytes": 2**20, **limits})


def read(found: LogSpool, after: int = 0, have: int = 0, max_bytes: int = 2**20) -> list[list[Any]]:
    return found.read(m.ReadLogs(life=found.life, after=after, have=have, max_bytes=max_bytes, wait_s=0.0))


def run(folder: Path) -> None:
    assert subprocess.run([sys.executable, "-c", PRINTS, str(folder)]).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("all is well", "info"),
        ("information is not a level", "info"),
        ("2026-11-23 04:33:10 [warning  ] node dropped                 node=a", "warning"),
        ("2026-11-23 04:33:10,123 ERROR root: no", "error"),
        ("DEBUG:root:hm", "debug"),
        ("[rank3]: Error: of a rank", "error"),
        ("W1123 04:33:10.123456 140 x.cpp:12] slow", "warning"),
        ("/code/model.py:12: UserWarning: deprecated", "warning"),
        ("Fatal Python error: Segmentation fault", "error"),
        ("", "info"),
    ],
)
def test_a_line_is_as_serious_as_it_says(line: str, level: str) -> None:
    assert level_of(line) == level


def test_all_lines_of_a_traceback_are_errors() -> None:
    lines = [
        "one",
        "Traceback (most recent call last):",
        '  File "model.py", line 3, in forward',
        "    x / 0",
        "ZeroDivisionError: no",
        "two",
    ]
    levels = Levels()
    assert [levels.of(line) for line in lines] == ["info", *["error"] * 4, "info"]


def test_the_last_words_of_a_process_that_was_killed_arrive_with_its_epochs(tmp_path: Path) -> None:
    run(tmp_path / "logs" / "job_1")
    found = spool(tmp_path / "logs")
    found.look()
    rows = eventually(
        lambda: (found.look(), [row for row in read(found) if row[-1] == "the last words"] and read(found))[1]
    )
    assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
    told = {row[6]: (row[1], row[3], row[4], row[5]) for row in rows}
    assert told["before any epoch"] == ("job_1", "info", 0, None)
    assert told["WARNING: the disk is slow"] == ("job_1", "warning", 3, 1)
    assert told["of a child"] == ("job_1", "info", 3, 1)
    assert "90%" in told and not any("red" in text for text in told)
    assert [row[6][:8] for row in rows if row[6].startswith("line ")] == [f"line {n:03d}" for n in range(200)]
    assert told["ZeroDivisionError: division by zero"] == ("job_1", "error", 4, 0)
    assert told["the last words"] == ("job_1", "info", 4, 0)
    assert rows[-1][6] == "the last words"


def test_an_agent_that_comes_back_goes_on_where_lines_are_not_kept_yet(tmp_path: Path) -> None:
    run(tmp_path / "job_1")
    first = spool(tmp_path)
    first.look()
    rows = read(first)
    kept = rows[len(rows) // 2]
    assert read(first, after=rows[-1][0], have=kept[0]) == []
    first.look()
    second = spool(tmp_path)
    second.look()
    assert second.life != first.life
    assert read(second)[0][6] == rows[len(rows) // 2 + 1][6]


def test_what_there_is_no_room_for_is_dropped_and_counted_oldest_first(tmp_path: Path) -> None:
    folder = tmp_path / "job_1"
    folder.mkdir()
    for number in (1, 2, 3):
        path = folder / str(FileName(1, 0, os.getpid(), number))
        path.write_text("".join(f"{number} {line:04d}\n" for line in range(1000)))
        os.utime(path, (number, number))
    found = spool(tmp_path, limit_bytes=8_000, kept_bytes=1)
    found.look()
    rows = read(found)
    # A block of the first is read whatever its size; of the others one fits.
    assert [row[6] for row in rows[-1:]] == [
        "1000 lines were dropped: nobody fetched them, and there is no room for more"
    ]
    assert rows[-1][3] == "warning"
    assert read(found, after=rows[-1][0], have=rows[-1][0]) == []
    found.look()
    assert [row[6] for row in read(found, after=rows[-1][0])][:1] == ["3 0000"]


CRASHES = """
import ctypes, os, signal, sys
from pathlib import Path
from shoal_workers.log_output import LogFile, Output

output = Output(LogFile(Path(sys.argv[1])))
output.take()
print("Fatal Python error: Bus error, as somebody prints it", file=sys.stderr)
output.turn_to(3, 1)
print("no word of it: Fatal Python error: Bus error", file=sys.stderr)
exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("crash", "ended"),
    [
        ("ctypes.string_at(0)", "SIGSEGV"),
        ("import threading; t = threading.Thread(target=ctypes.string_at, args=(0,)); t.start(); t.join()", "SIGSEGV"),
        ("ctypes.CDLL(None).abort()", "SIGABRT"),
        ("ctypes.pythonapi.Py_FatalError(b'no')", "SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGFPE)", "SIGFPE"),
        ("os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("os._exit(1)", None),
    ],
)
def test_native_code_that_crashes_leaves_the_name_of_its_signal(tmp_path: Path, crash: str, ended: str | None) -> None:
    folder = tmp_path / "job_1"
    process = subprocess.Popen([sys.executable, "-c", CRASHES, str(folder), crash])
    status = process.wait(60.0)
    assert ended_by(folder, process.pid) == ended
    assert status == (-signal.Signals[ended] if ended else status) != 0
    assert ended_by(folder, process.pid + 1) is ended_by(tmp_path / "job_2", process.pid) is None


class Desk:
    """Where lines go; nobody is there until it opens."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.rows: dict[str, dict[tuple[str, str], list[list[Any]]]] = {}

    def bring_logs(self, job: str, sources: list[dict[str, Any]]) -> None:
        if not self.open.is_set():
            raise ControlPlaneDown("nobody is here")
        for source in sources:
            mine = self.rows.setdefault(job, {}).setdefault((source["node"], source["life"]), [])
            last = mine[-1][0] if mine else 0
            mine.extend(row for row in source["lines"] if row[0] > last)

    def texts(self, job: str, node: str) -> list[str]:
        return [row[-1] for (name, _), rows in self.rows.get(job, {}).items() if name == node for row in rows]


def test_lines_outlive_their_ranks_agents_and_nodes(tmp_path: Path) -> None:
    """A node is lost while the control plane is away: what it had told stands afterwards."""
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1)})
    desk = Desk()
    courier = LogCourier(cluster, desk, lambda: True)
    threading.Thread(target=courier.bring, daemon=True).start()
    spec = tiny_job("stdlib:", steps=100_000)
    try:
        with supervised(cluster, "job_1", spec) as running:
            running.reaches(2)
            courier.look()
            files = {name: sorted((tmp_path / name / "disk" / "logs" / "job_1").glob("*.log"))[-1] for name in "ab"}
            for name, path in files.items():
                with path.open("a") as file:
                    file.write(f"ERROR: said on {name}\n")
            eventually(lambda: courier.under_way("b"), 30)
            cluster.kill_node("b")
            desk.open.set()
            for name in files:
                eventually(lambda name=name: f"ERROR: said on {name}" in desk.texts("job_1", name), 30)
            rows = [row for (name, _), rows in desk.rows["job_1"].items() if name == "b" for row in rows]
            (said,) = [row for row in rows if row[-1] == "ERROR: said on b"]
            printer = FileName.read(files["b"].name)
            assert printer is not None
            assert said[2:5] == ["error", printer.epoch, printer.rank]
            cluster.kill_agent("a")
            eventually(lambda: ask(cluster.agent(cluster.nodes()[0]), m.GetEpoch(job="job_1"), 5.0), 30)

            def told_again() -> bool:
                courier.look()
                with files["a"].open("a") as file:
                    file.write("after the agent came back\n")
                return "after the agent came back" in desk.texts("job_1", "a")

            eventually(told_again, 30)
    finally:
        courier.close()
        cluster.close()
