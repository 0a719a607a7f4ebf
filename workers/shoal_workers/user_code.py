"""What is told of an error in a user's own code: its own lines, and none of ours.

An error is the user's where a line of theirs was running, however deep in a library it was raised: what they gave to
that library is theirs to mend. Lines of theirs are those of the job's code, and of packages that it calls: whatever is
neither Shoal's nor Ray's, torch's or Python's, and was not called by Shoal itself. What a node or device cannot do is
no error of theirs, wherever it is raised: another node may. An error of the system is such a one by its number, or
where their lines called ours again; a connection, file or time limit of their own is theirs.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping

import torch

from shoal_planner.architecture import ModelSpec
from shoal_workers.errors import UserCodeError

_FAMILIAR = ("torch", "ray")
_OURS = ("shoal_planner", "shoal_recovery", "shoal_workers")
_CALLS_THEM = ("blueprint.py", "own_modules.py", "own_look.py", "own_rehearsal.py")
_PYTHON = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
_SITE = f"site-packages{os.sep}"
_SENT = re.compile(r".*/_ray_pkg_[0-9a-f]+/")  # where Ray unpacks what it sends
# Where ours was running: files that are not there are the code's affair; other errors of a system are the node's.
_OF_FILES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
# Whoever was running: a disk that is full, fails or cannot be written, and tables of the system that are full.
_OF_MACHINES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
)
_OF_DEVICES = ("CUDA error", "CUBLAS_STATUS", "cuDNN error", "CUDNN_STATUS", "NCCL error", "can't allocate memory")


def check_secrets(secrets: Mapping[str, str]) -> None:
    """Raises UserCodeError where this node does not have what the code is to find in its environment."""
    missing = [held_as for name, held_as in secrets.items() if not os.environ.get(name)]
    if missing:
        raise UserCodeError(f"secrets: node {platform.node()} has no environment variable {', '.join(missing)}")


def users_own(error: BaseException, model: ModelSpec) -> str | None:
    """As `told`, of a model that may be no module of the user's: then nothing is theirs."""
    return None if model.module is None else told(error)


def told(error: BaseException) -> str | None:
    """The error and the user's lines that led to it, innermost last, for the user. None where it is none of theirs."""
    if isinstance(error, UserCodeError):
        return str(error)
    if _is_of_the_node(error):
        return None
    said = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError) and error.filename is not None and _is_foreign(error.filename):
        place = f"{_named(error.filename)}, line {error.lineno}: {(error.text or '').strip()}"
        return f"{type(error).__name__}: {error.msg}\n{place}"
    lines = [
        f"{_named(frame.filename)}, line {frame.lineno}, in {frame.name}: {frame.line}"
        for frame, is_theirs in _told_apart(error)
        if is_theirs
    ]
    return "\n".join((said, *lines)) if lines else None


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from or while that was handled."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _told_apart(error: BaseException) -> Iterator[tuple[traceback.FrameSummary, bool]]:
    """Frames of ours, and of theirs (True), innermost last. A library that we called for ourselves is neither, even on
    a path that torch or Python calls."""
    called_by_us = True
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_in(frame.filename, _OURS):
            called_by_us = os.path.basename(frame.filename) not in _CALLS_THEM
            yield frame, False
        elif _is_foreign(frame.filename) and (not called_by_us or _SITE not in os.path.realpath(frame.filename)):
            called_by_us = False
            yield frame, True


def _is_of_the_node(error: BaseException) -> bool:
    if isinstance(error, torch.AcceleratorError):
        return True
    if isinstance(error, OSError) and error.errno in _OF_MACHINES:
        return True
    if isinstance(error, OSError | MemoryError):
        return not isinstance(error, _OF_FILES) and not _ended_in_theirs(error)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_DEVICES)


def _ended_in_theirs(error: BaseException) -> bool:
    """Whether the innermost of their lines and ours is one of theirs."""
    return ([False] + [is_theirs for _, is_theirs in _told_apart(error)])[-1]


def _is_foreign(filename: str) -> bool:
    path = os.path.realpath(filename)
    if filename.startswith("<") or _is_in(filename, (*_OURS, *_FAMILIAR)):
        return False
    return not path.startswith(_PYTHON) or _SITE in path.removeprefix(_PYTHON)


def _is_in(filename: str, packages: tuple[str, ...]) -> bool:
    path = os.path.realpath(filename)
    return any(path.startswith(_FOLDERS[package]) for package in packages if package in _FOLDERS)


def _folders() -> Iterator[tuple[str, str]]:
    for package in (*_OURS, *_FAMILIAR):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield package, os.path.dirname(os.path.realpath(spec.origin)) + os.sep


_FOLDERS = dict(_folders())


def _named(filename: str) -> str:
    return _SENT.sub("", filename)
