"""What is told of an error in a user's own code: its own lines, and none of ours.

An error is the user's where a line of theirs was running, however deep in a library it was raised: what they gave to
that library is theirs to mend. Lines of theirs are all that is neither Shoal's nor Ray's, torch's or Python's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
import traceback

from shoal_workers.errors import UserCodeError

_PACKAGES = ("shoal_planner", "shoal_recovery", "shoal_workers", "torch", "ray")
_SPECS = tuple(importlib.util.find_spec(package) for package in _PACKAGES)
_NOT_THEIRS = tuple(os.path.dirname(os.path.realpath(str(spec.origin))) + os.sep for spec in _SPECS if spec)
_PYTHON = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
_SITE = f"site-packages{os.sep}"
_SENT = re.compile(r".*/_ray_pkg_[0-9a-f]+/")  # where Ray unpacks what it sends


def told(error: BaseException) -> str | None:
    """The error and the user's lines that led to it, innermost last, for the user. None where it is none of theirs."""
    if isinstance(error, UserCodeError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename is not None and _is_theirs(error.filename):
        place = f"{_named(error.filename)}, line {error.lineno}: {(error.text or '').strip()}"
        return f"{type(error).__name__}: {error.msg}\n{place}"
    if not frames:
        return None
    lines = (f"{_named(frame.filename)}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames)
    said = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join((said, *lines))


def _is_theirs(filename: str) -> bool:
    path = os.path.realpath(filename)
    if filename.startswith("<") or path.startswith(_NOT_THEIRS):
        return False
    return not path.startswith(_PYTHON) or _SITE in path.removeprefix(_PYTHON)


def _named(filename: str) -> str:
    return _SENT.sub("", filename)
