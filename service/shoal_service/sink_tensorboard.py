"""Event files for TensorBoard, in a local folder or an object store.

A run is a series of files (segments). The position says how many bytes of the newest one count, so what was written and
not heard of is written over, by the same bytes. A generation that begins anew says so in its first file, and readers
drop what they have read before (a session's start). Readers read figures in single precision, as the format has them.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from shoal_recovery.journal import JobState
from shoal_recovery.store import Store, open_store
from shoal_service.sinks import Lost, Opened, Order, Position
from shoal_service.track_feed import Batch, End, Scalars

SEGMENT_BYTES = 1024**2  # in an object store the newest segment is written as a whole each time


class _Segments(Protocol):
    def num_bytes(self, name: str) -> int | None:
        """None where there is no such file."""

    def extend(self, name: str, offset: int, data: bytes) -> None:
        """What stands behind `offset` is replaced. Raises Lost where what should stand before it does not."""


class TensorBoardSink:
    def __init__(self, order: Order, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._order = order
        self._segment_bytes = segment_bytes
        log_dir = str(order.settings["log_dir"])
        self._run = f"{re.sub('[^A-Za-z0-9_-]+', '-', order.name).strip('-') or 'job'}-{order.job_id}"
        self._url = f"{log_dir.rstrip('/')}/{self._run}"
        self._segments = _segments(log_dir)
        self._segment = int(order.position.get("segment", 0)) + order.fresh
        self._num_bytes = 0 if order.fresh else int(order.position["bytes"])
        self._begins = order.fresh

    def open(self) -> Opened:
        if self._num_bytes:
            name = self._name()
            _check_there(name, self._segments.num_bytes(name), self._num_bytes)
        return Opened(position=self._order.position, url=self._url)

    def write(self, batch: Batch) -> Position:
        out = _Events()
        if not self._num_bytes:
            out.version(self._order.created_at_s)
        if self._begins:
            out.begin(self._order)
        for scalars in (*batch.steps, *batch.evaluations):
            out.scalars(scalars)
        for note in batch.notes:
            out.text("shoal/recoveries", note.text, note.step, note.at_s)
        if batch.end is not None:
            out.end(batch.end)
        data = out.bytes()
        self._segments.extend(self._name(), self._num_bytes, data)
        self._num_bytes += len(data)
        self._begins = False
        if self._num_bytes >= self._segment_bytes:
            self._segment, self._num_bytes = self._segment + 1, 0
        return {"generation": self._order.generation, "segment": self._segment, "bytes": self._num_bytes}

    def close(self) -> None:
        pass

    def _name(self) -> str:
        """Readers take files in the order of their names, and know them by a part of it."""
        return f"{self._run}/events.out.tfevents.{int(self._order.created_at_s):010d}.shoal.{self._segment:06d}"


class _Events:
    """Encoded events, in TensorBoard's own framing."""

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._buffer = io.BytesIO()
        self._writer = RecordWriter(self._buffer)

    def bytes(self) -> bytes:
        return self._buffer.getvalue()

    def version(self, at_s: float) -> None:
        self._add(wall_time=at_s, file_version="brain.Event:2")

    def begin(self, order: Order) -> None:
        from tensorboard.plugins.hparams import summary_v2 as hparams

        started = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(wall_time=order.created_at_s, step=0, session_log=started)
        given = hparams.hparams_pb(order.parameters, trial_id=order.job_id, start_time_secs=order.created_at_s)
        self._add(wall_time=order.created_at_s, step=0, summary=given)
        told = f"Shoal job [{order.job_id}]({order.url})" if order.url else f"Shoal job {order.job_id}"
        self.text("shoal/job", told, 0, order.created_at_s)

    def scalars(self, scalars: Scalars) -> None:
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.values.items()]
        self._add(wall_time=scalars.at_s, step=scalars.step, summary=self._summary.Summary(value=values))

    def text(self, tag: str, text: str, step: int, at_s: float) -> None:
        from tensorboard.plugins.text.summary import text_pb

        self._add(wall_time=at_s, step=step, summary=text_pb(tag, text))

    def end(self, end: End) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.Status.Value("STATUS_SUCCESS" if end.state == JobState.SUCCEEDED else "STATUS_FAILURE")
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=end.at_s)
        about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=info))
        ended = self._summary.Summary()
        ended.value.add(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
        self._add(wall_time=end.at_s, step=end.step, summary=ended)
        self.text("shoal/state", f"{end.state}: {end.reason}", end.step, end.at_s)

    def _add(self, **fields: Any) -> None:
        # The same bytes each time: what was written and not heard of is written over while readers read it.
        self._writer.write(self._event.Event(**fields).SerializeToString(deterministic=True))


def _segments(log_dir: str) -> _Segments:
    parts = urlsplit(log_dir)
    return _Folder(Path(unquote(parts.path))) if parts.scheme == "file" else _Objects(open_store(log_dir))


def _check_there(name: str, found: int | None, num_bytes: int) -> None:
    if found is None or found < num_bytes:
        problem = "is not there any more" if found is None else f"has {found} bytes of {num_bytes}"
        raise Lost(f"{name} {problem}")


class _Folder:
    """Files grow in place, so that who has one open sees it grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def num_bytes(self, name: str) -> int | None:
        try:
            return (self._folder / name).stat().st_size
        except FileNotFoundError:
            return None

    def extend(self, name: str, offset: int, data: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            _check_there(name, file.seek(0, os.SEEK_END), offset)
            file.seek(offset)
            file.write(data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


class _Objects:
    """Objects cannot grow: the newest is held here, and written as a whole."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._name = ""
        self._data = b""

    def num_bytes(self, name: str) -> int | None:
        return next((entry.num_bytes for entry in self._store.entries(name) if entry.name == name), None)

    def extend(self, name: str, offset: int, data: bytes) -> None:
        if name != self._name:
            self._name, self._data = name, self._store.read(name, 0, offset) if offset else b""
        self._data = self._data[:offset] + data
        self._store.put(name, self._data)
