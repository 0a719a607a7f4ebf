"""What scripts print comes in their journals, and is kept with what ranks print. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal_recovery.journal import Entry
from shoal_recovery.journal_scripts import ScriptFailed, ScriptPrinted, WorkersStarted
from shoal_service.log_chunks import Line
from shoal_service.log_store import Brought

_MOST = 100_000  # lines of one entry
_LATEST_S = 1e11 - 1  # which calendars still know


def printed_by_script(entries: Sequence[Entry], epoch: int) -> Brought:
    """The lines of these entries, of which `epoch` was the one before; numbered so that entries that come again are
    known."""
    return Brought(source="journal", lines=tuple(_lines(entries, epoch)))


def _lines(entries: Sequence[Entry], epoch: int) -> Iterator[tuple[int, Line]]:
    for entry in entries:
        match entry.event:
            case WorkersStarted(epoch=started):
                epoch = started
            case ScriptPrinted(lines=lines, left_out=left_out):
                dropped = (f"{left_out} lines were dropped: they came faster than they are kept",) if left_out else ()
                told = [("warning", text) for text in dropped] + [("info", text) for text in lines]
                yield from _numbered(entry, epoch, None, None, told)
            case ScriptFailed(rank=rank, node=node, traceback=text):
                yield from _numbered(entry, epoch, rank, node, [("error", line) for line in text.splitlines()])
            case _:
                pass


def _numbered(
    entry: Entry, epoch: int, rank: int | None, node: str | None, told: list[tuple[str, str]]
) -> Iterator[tuple[int, Line]]:
    for place, (level, text) in enumerate(told[:_MOST]):
        at_s = min(max(entry.at_s, 0.0), _LATEST_S)
        line = Line(at_s=at_s, level=level, attempt=epoch, rank=rank, node=node or None, text=text)
        yield entry.seq * _MOST + place, line
