"""Which line of a traceback is the user's own: pure, on the text that Python writes."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>.+)$', re.MULTILINE)
_NOT_OWN = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "/shoal_workers/")
_SENT = re.compile(r".*/_ray_pkg_[0-9a-f]+/")  # where Ray unpacks a working directory
_LONGEST = 500


def own_line(traceback: str) -> str | None:
    """`file:line, in function` of the innermost frame that is no library's; None where there is none."""
    own = [frame for frame in _FRAME.finditer(traceback) if not any(part in frame["file"] for part in _NOT_OWN)]
    return f"{_SENT.sub('', own[-1]['file'])}:{own[-1]['line']}, in {own[-1]['where']}" if own else None


def in_short(traceback: str) -> str:
    """The error in one line, as its last line says it, and where it was raised."""
    lines = [line.strip() for line in traceback.strip().splitlines() if line.strip()]
    said = lines[-1][:_LONGEST] if lines else "no word of why"
    own = own_line(traceback)
    return f"{said} ({own})" if own else said
