"""A folder as object store whose disk hangs: frozen, as one under a snapshot is, or read where nothing ever comes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.disks import Disks, freeze
from waiting import eventually

from shoal_recovery.errors import StoreUnreachable
from shoal_recovery.patient_disk import PatientDisk
from shoal_recovery.store_directory import DirectoryStore


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mounted"
    disks = Disks([folder])
    if disks.missing:
        pytest.skip(disks.missing)
    yield folder
    disks.close()


def is_quiet() -> bool:
    return not any(thread.name == "disk" for thread in threading.enumerate())


def test_what_cannot_be_written_on_a_disk_that_hangs_is_an_error_and_leaves_nothing(own_disk: Path) -> None:
    store = DirectoryStore(own_disk, disk=PatientDisk(1.0))
    store.put("j/before", b"before")
    thaw = freeze(own_disk)
    try:
        with pytest.raises(StoreUnreachable, match=r"j/now: the disk hangs: nothing has moved for 1 s"):
            store.put("j/now", b"now")
        with pytest.raises(StoreUnreachable, match=r"j/before: the disk hangs"):
            store.read("j/before")
    finally:
        thaw()
    eventually(is_quiet)
    assert store.list("j/") == ("j/before",)
    assert not list((own_disk / ".unfinished").iterdir())
    store.put_new("j/now", b"again")
    assert store.read("j/now") == b"again"


def test_a_read_that_never_ends_is_an_error_and_changes_nothing_later(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it takes somebody who writes
    store, place = DirectoryStore(tmp_path, disk=PatientDisk(0.2)), bytearray(b"mine")
    (tmp_path / "other").write_bytes(b"other")
    with pytest.raises(StoreUnreachable, match="pipe: the disk hangs"):
        store.read_into("pipe", 0, [memoryview(place)])
    with pytest.raises(StoreUnreachable, match="the disk hangs"):
        store.list("")
    with (tmp_path / "pipe").open("wb", buffering=0) as pipe:
        pipe.write(b"late")
    eventually(is_quiet)
    assert place == b"mine"
    assert store.read("other") == b"other"


def test_stores_in_one_folder_share_its_patience(tmp_path: Path) -> None:
    """Each job opens its own again and again; what hangs is the disk."""
    assert DirectoryStore(tmp_path)._disk is DirectoryStore(tmp_path)._disk
    assert DirectoryStore(tmp_path)._disk is not DirectoryStore(tmp_path / "x")._disk
