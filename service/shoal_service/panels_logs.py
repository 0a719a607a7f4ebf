"""What the logs panel of a job shows: the lines that its reader chose, and how to get to others. Reading lines is
log_reading's; static/logs.js adds new ones while somebody follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Query
from sqlalchemy.ext.asyncio import AsyncSession

from shoal_service import jobs, log_reading, log_store
from shoal_service.errors import BadInput, Problem
from shoal_service.log_chunks import LEVELS, Line, Wanted

LINES_IN_PAGE = 40  # beside all other panels, so that pages stay small
LINES_ALONE = 300
_CHARACTERS = 150  # of a line, on average; long ones leave less room for others
_LONGEST = 2_000
_LARGEST = 2**53

Words = Annotated[str, Query(max_length=200)]
Number = Annotated[str, Query(max_length=16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    """What the address of a page asks for, as forms send it: an empty field chooses nothing. `line` is the number from
    which to read, `event` that of the journal entry around which; the newest lines without both. At most `most` lines
    are shown."""

    rank: str = ""
    attempt: str = ""
    node: str = ""
    level: str = ""
    search: str = ""
    event: str = ""
    line: str = ""
    most: int = LINES_IN_PAGE

    def given(self) -> dict[str, str]:
        """What is chosen, by field."""
        values = {name: getattr(self, name) for name in ("rank", "attempt", "node", "level", "search", "event", "line")}
        return {name: value for name, value in values.items() if value}

    def query(self, **changes: str) -> str:
        """As an address has it."""
        return urlencode({name: value for name, value in (self.given() | changes).items() if value})


NEWEST = LogChoice()


def choice(
    rank: Number = "",
    attempt: Number = "",
    node: Words = "",
    level: Words = "",
    search: Words = "",
    event: Number = "",
    line: Number = "",
) -> LogChoice:
    """For routes to depend on."""
    return LogChoice(rank=rank, attempt=attempt, node=node, level=level, search=search, event=event, line=line)


Choice = Annotated[LogChoice, Depends(choice)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLine:
    number: int
    at: str
    line: Line
    text: str
    is_cut: bool


async def logs_panel(session: AsyncSession, job_id: str, chosen: LogChoice) -> dict[str, Any]:
    """`problem` says in words why there is nothing to show, where that is so."""
    view: dict[str, Any] = {"choice": chosen, "levels": LEVELS, "lines": (), "problem": None, "links": {}, "hidden": 0}
    try:
        return view | await _read(session, job_id, chosen)
    except Problem as problem:
        return view | {"problem": problem.detail}


async def _read(session: AsyncSession, job_id: str, chosen: LogChoice) -> dict[str, Any]:
    row = await log_store.get(session, job_id)
    since_s = until_s = None
    if (event := _number(chosen, "event")) is not None:
        since_s, until_s = await log_reading.around(session, job_id, event)
    wanted = Wanted(
        rank=_number(chosen, "rank"),
        node=chosen.node or None,
        attempt=_number(chosen, "attempt"),
        level=_level(chosen.level),
        search=chosen.search or None,
        since_s=since_s,
        until_s=until_s,
    )
    start = _number(chosen, "line")
    await log_reading.check_kept(session, row, wanted, start)
    newest = start is None and event is None
    found = await log_reading.page(session, row, wanted, start, chosen.most if newest else None, chosen.most)
    lines = [_shown(number, line) for number, line in found.lines]
    room = chosen.most * _CHARACTERS
    kept = _fitting(lines[::-1], room)[::-1] if newest else _fitting(lines, room)
    following = found.next_line if len(kept) == len(lines) else kept[-1].number + 1
    links = {}
    if row is not None and row.next_line > row.first_line and (not kept or kept[0].number > row.first_line):
        links["From the first line"] = chosen.query(line=str(row.first_line), event="")
    if not newest:
        if found.more or len(kept) < len(lines):
            links["Go on"] = chosen.query(line=str(following))
        links["Newest lines"] = chosen.query(line="", event="")
    return {
        "lines": kept,
        "links": links,
        "hidden": len(lines) - len(kept),
        "next_line": found.next_line if newest else None,
        "forgotten": None if row is None or not row.forgotten else (row.first_line - 1, row.forgotten),
        "printed": row is not None,
    }


def _number(chosen: LogChoice, name: str) -> int | None:
    text = str(getattr(chosen, name)).strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) > _LARGEST:
        raise BadInput("invalid_field", f"{name} = {text!r}: must be a whole number, zero or more", name)
    return int(text)


def _level(text: str) -> str | None:
    if text and text not in LEVELS:
        raise BadInput("invalid_field", f"level = {text!r}: must be one of {', '.join(LEVELS)}", "level")
    return text or None


def _shown(number: int, line: Line) -> ShownLine:
    cut = len(line.text) > _LONGEST
    return ShownLine(
        number=number,
        at=jobs.rfc3339(line.at_s),
        line=line,
        text=line.text[:_LONGEST] if cut else line.text,
        is_cut=cut,
    )


def _fitting(lines: list[ShownLine], room: int) -> list[ShownLine]:
    """The first of them, at least one, of about so many characters."""
    left = room
    kept: list[ShownLine] = []
    for line in lines:
        left -= len(line.text) + 40
        if left < 0 and kept:
            break
        kept.append(line)
    return kept
