"""One contract for every object store: a folder, two real S3 servers, and a quick one in this process."""

from __future__ import annotations

import errno
import os
import threading
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import new_place

from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreConflict, StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.store import Store, open_store
from shoal_recovery.store_directory import DirectoryStore


@pytest.fixture(params=["directory", "seaweedfs", "rclone", "moto"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "directory":
            return open_store((tmp_path / "a store").as_uri())
        case "seaweedfs":
            return open_store(request.getfixturevalue("s3_uri"))
        case other:
            request.getfixturevalue(f"{other}_environment")
            return open_store(new_place())


def test_what_is_put_is_read(store: Store) -> None:
    store.put("a/b.bin", b"0123456789")
    assert store.read("a/b.bin") == b"0123456789"
    assert store.read("a/b.bin", 4) == b"456789"
    store.put("a/b.bin", memoryview(bytearray(b"replaced")))
    assert store.read("a/b.bin") == b"replaced"


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 1), (0, 10), (3, 4), (9, 1), (5, 0)])
def test_a_range_is_read_exactly(store: Store, offset: int, num_bytes: int) -> None:
    store.put("range", b"0123456789")
    assert store.read("range", offset, num_bytes) == b"0123456789"[offset : offset + num_bytes]
    place = bytearray(num_bytes)
    store.read_into("range", offset, [memoryview(place)[:1], memoryview(place)[1:]])
    assert place == b"0123456789"[offset : offset + num_bytes]


@pytest.mark.parametrize(("offset", "num_bytes"), [(8, 5), (50, 2)])
def test_a_range_beyond_the_end_is_an_error(store: Store, offset: int, num_bytes: int) -> None:
    store.put("range", b"0123456789")
    with pytest.raises(StoreError, match="range"):
        store.read("range", offset, num_bytes)
    with pytest.raises(StoreError, match="range"):
        store.read_into("range", offset, [memoryview(bytearray(1)), memoryview(bytearray(num_bytes - 1))])


def test_an_object_larger_than_one_part(store: Store) -> None:
    """S3 sends it in three parts, from where it lies."""
    data = bytearray(os.urandom(1 << 20)) * 40
    store.put("large", memoryview(data))
    assert store.read("large", (16 << 20) - 3, 7) == data[(16 << 20) - 3 : (16 << 20) + 4]
    assert store.read("large") == data


def test_a_new_object_is_written_once(store: Store) -> None:
    store.put_new("m/1.json", b"first")
    with pytest.raises(StoreConflict, match=r"m/1\.json is already there"):
        store.put_new("m/1.json", b"second")
    with pytest.raises(StoreConflict):
        store.put_new("m/1.json", b"first")
    assert store.read("m/1.json") == b"first"
    store.put("m/2.json", b"put")
    with pytest.raises(StoreConflict):
        store.put_new("m/2.json", b"new")


def test_of_many_writers_one_wins(store: Store) -> None:
    begin = threading.Barrier(6)

    def write(number: int) -> bool:
        begin.wait(10)
        try:
            store.put_new("contested", b"writer %d" % number)
        except StoreConflict:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(write, range(6)))
    assert sum(won) == 1
    assert store.read("contested") == b"writer %d" % won.index(True)


def test_list_and_delete(store: Store) -> None:
    assert store.list("") == ()
    assert store.list("job_1/") == ()
    for name in ("job_1/s/2", "job_1/s/10", "job_1/manifest", "job_2/s/1", "job_10/s/1"):
        store.put(name, b"x")
    assert store.list("job_1/") == ("job_1/manifest", "job_1/s/10", "job_1/s/2")
    assert store.list("job_1/s/1") == ("job_1/s/10",)
    assert store.list("job_1") == ("job_1/manifest", "job_1/s/10", "job_1/s/2", "job_10/s/1")
    store.delete("job_1/s/2")
    store.delete("job_1/s/2")
    assert store.list("job_1/s/") == ("job_1/s/10",)
    with pytest.raises(StoreError, match="job_1/s/2 is not there"):
        store.read("job_1/s/2")


def test_only_what_was_listed_is_deleted(store: Store) -> None:
    store.put("j/one", b"first")
    (listed,) = store.entries("j/one")
    store.delete_listed(listed)
    assert store.list("j/") == ()
    store.delete_listed(listed)
    store.put("j/one", b"second")
    store.delete_listed(listed)
    assert store.read("j/one") == b"second"
    (listed,) = store.entries("j/one")
    store.delete_listed(listed)
    assert store.list("j/") == ()


def test_nothing_is_unfinished(store: Store) -> None:
    store.put("whole", b"x")
    assert store.unfinished("") == ()
    store.abandon("whole")
    assert store.read("whole") == b"x"


def test_check_writable_leaves_nothing(store: Store) -> None:
    store.check_writable()
    assert store.list("") == ()


@pytest.mark.parametrize("name", ["", "/a", "a//b", "../a", "a/../b", "a b", "a/", ".hidden", "a/.b", "a\nb"])
def test_names_that_could_lead_elsewhere_are_refused(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="object name"):
        store.put(name, b"x")


def test_many_threads_write_and_delete_side_by_side(store: Store) -> None:
    """Above all in a folder, where the last delete removes the folder that the next write needs."""

    def write(number: int) -> None:
        store.put(f"busy/{number % 4}/{number}", b"%d" % number)
        store.delete(f"busy/{number % 4}/{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(40)))
    assert store.list("busy/") == ()


@pytest.mark.parametrize(
    "uri", ["", "/tmp/x", "ftp://x/y", "file://host/x", "file:relative", "file://", "s3://", "s3:///x"]
)
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(InvalidField):
        open_store(uri)


class TestDirectory:
    def test_a_killed_write_is_not_seen_and_swept_later(self, tmp_path: Path) -> None:
        store = DirectoryStore(tmp_path)
        store.put("a/b", b"x")
        for name, age_s in (("old", 200_000.0), ("young", 0.0)):
            left = tmp_path / ".unfinished" / name
            left.write_bytes(b"half")
            os.utime(left, (left.stat().st_mtime - age_s,) * 2)
        assert store.list("") == ("a/b",)
        store.check_writable()
        assert [path.name for path in (tmp_path / ".unfinished").iterdir()] == ["young"]

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        store = open_store((tmp_path / "file" / "store").as_uri())
        with pytest.raises(StoreError, match=r"file/store.*not a directory"):
            store.check_writable()
        with pytest.raises(StoreError, match="not a directory"):
            store.list("")

    def test_a_folder_in_the_way_is_not_taken_for_another_writer(self, tmp_path: Path) -> None:
        store = DirectoryStore(tmp_path)
        store.put("a", b"x")
        with pytest.raises(StoreError) as error:
            store.put("a/b", b"x")
        assert not isinstance(error.value, StoreConflict)

    def test_a_folder_removed_at_the_last_moment_is_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A `delete` takes an empty folder away while a `put` is about to move its object there."""
        store, replace, interferences = DirectoryStore(tmp_path), os.replace, iter([True, True, False])

        def interfere(source: Path, target: Path) -> None:
            if next(interferences):
                target.parent.rmdir()
            replace(source, target)

        monkeypatch.setattr(os, "replace", interfere)
        store.put("a/b", b"x")
        assert store.read("a/b") == b"x"
        interferences = iter([True] * 3)
        with pytest.raises(StoreError, match="c/d is not there"):
            store.put("c/d", b"x")

    def test_a_file_system_without_hard_links_is_found_out_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Shards can be written there, and no manifest ever."""

        def refusing(number: int) -> Callable[[Path, Path], None]:
            def refuse(source: Path, target: Path) -> None:
                raise OSError(number, os.strerror(number))

            return refuse

        store = DirectoryStore(tmp_path)
        for number in (errno.EPERM, errno.EOPNOTSUPP):
            monkeypatch.setattr(os, "link", refusing(number))
            with pytest.raises(StoreRefused, match="makes no hard links"):
                store.check_writable()
        monkeypatch.setattr(os, "link", refusing(errno.EIO))
        with pytest.raises(StoreUnreachable, match="input/output error") as error:
            store.check_writable()
        assert not isinstance(error.value, StoreRefused), "it may pass"
        assert store.list("") == ()

    def test_a_file_system_whose_links_replace_is_found_out_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "link", os.replace)
        with pytest.raises(StoreRefused, match="replaces an object"):
            DirectoryStore(tmp_path).check_writable()
        assert DirectoryStore(tmp_path).list("") == ()

    def test_percent_signs_in_the_uri(self, tmp_path: Path) -> None:
        folder = tmp_path / "a b%c"
        open_store(f"file://{urllib.parse.quote(str(folder))}").put("x", b"1")
        assert (folder / "x").read_bytes() == b"1"
