"""How serious a printed line is, by what the line says of itself: pure, as whoever prints has no other way to tell."""

from __future__ import annotations

import re

DEBUG, INFO, WARNING, ERROR = LEVELS = ("debug", "info", "warning", "error")

_WORDS = {
    "debug": DEBUG,
    "trace": DEBUG,
    "info": INFO,
    "notice": INFO,
    "warning": WARNING,
    "warn": WARNING,
    "error": ERROR,
    "critical": ERROR,
    "fatal": ERROR,
    "exception": ERROR,
}
_GLOG = {"I": INFO, "W": WARNING, "E": ERROR, "F": ERROR}
# A time and brackets may stand before the word: "2026-01-31 10:00:00,123 [warning  ] ...", "[rank0]: ERROR: ...".
_SAYS = re.compile(r"^[\W\d_TZ]{0,40}(?:\[?rank\d+\]?\W{0,4})?([A-Za-z]+)(?=[\s\]:|,-])")
_SHORT = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d")
_WARNED = re.compile(r":\d+: \w*Warning: ")
_TRACEBACK = "Traceback (most recent call last):"
_CRASHED = "Fatal Python error:"


class Levels:
    """Of the lines of one file, in order: the lines of a traceback are all as serious as its last."""

    def __init__(self) -> None:
        self._inside = False

    def of(self, line: str) -> str:
        """`debug`, `info`, `warning` or `error`; a line that does not say is `info`."""
        if line.lstrip(" |+-").startswith(_TRACEBACK):
            self._inside = True
            return ERROR
        if self._inside:
            # The lines of a traceback are indented, up to the one that names the error.
            self._inside = line[:1] in (" ", "\t", "|") or not line
            return ERROR
        return level_of(line)


def level_of(line: str) -> str:
    """Of one line by itself."""
    if line.startswith(_CRASHED):
        return ERROR
    if short := _SHORT.match(line):
        return _GLOG[short[1]]
    if _WARNED.search(line):
        return WARNING
    said = _SAYS.match(line)
    return _WORDS.get(said[1].lower(), INFO) if said else INFO
