"""Who writes to a disk that hangs does not wait for ever."""

from __future__ import annotations

import errno
import threading

import pytest
from waiting import eventually

from shoal_recovery.patient_disk import PatientDisk, Progress


def test_what_is_written_or_went_wrong_is_what_the_caller_gets() -> None:
    disk = PatientDisk()
    assert disk.run(lambda progress: "written") == "written"

    def fail(progress: Progress) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        disk.run(fail)


def test_a_write_that_makes_no_progress_is_given_up_and_undone_and_none_begins_meanwhile() -> None:
    disk, gate, undone = PatientDisk(0.1), threading.Event(), list[str]()

    def write(progress: Progress) -> str:
        gate.wait()
        return "late"

    with pytest.raises(OSError, match="the disk hangs") as raised:
        disk.run(write, undo=undone.append)
    assert raised.value.errno == errno.ETIMEDOUT
    begun = []
    with pytest.raises(OSError, match="the disk hangs"):
        disk.run(begun.append)
    assert not begun and not undone
    gate.set()
    eventually(lambda: undone == ["late"])
    eventually(lambda: not any(thread.name == "disk" for thread in threading.enumerate()))
    assert disk.run(lambda progress: "again") == "again"


def test_a_write_that_was_given_up_ends_at_its_next_part() -> None:
    disk, gate, parts = PatientDisk(0.1), threading.Event(), list[int]()

    def write(progress: Progress) -> None:
        for part in range(3):
            gate.wait()
            parts.append(part)
            progress()

    with pytest.raises(OSError, match="hangs"):
        disk.run(write)
    gate.set()
    eventually(lambda: not any(thread.name == "disk" for thread in threading.enumerate()))
    assert parts == [0]


def test_a_write_that_is_slow_is_waited_for() -> None:
    pause = threading.Event()

    def write(progress: Progress) -> str:
        for _ in range(20):
            pause.wait(0.1)
            progress()
        return "written"

    assert PatientDisk(1.0).run(write) == "written"


def test_what_is_to_be_done_soon_is_done_when_the_disk_hangs_no_more() -> None:
    disk, gate, done = PatientDisk(0.1), threading.Event(), list[int]()
    disk.soon(lambda: done.append(0))
    assert done == [0]

    def wait() -> None:
        gate.wait()
        done.append(1)

    disk.soon(wait)
    disk.soon(lambda: done.append(2))
    with pytest.raises(OSError, match="hangs"):
        disk.run(lambda progress: done.append(3))
    assert done == [0]
    gate.set()
    eventually(lambda: done == [0, 1, 2])
