"""What raylets of a local cluster start instead of Ray's own worker: it has the worker forked off its node's nursery
(`shoal_workers.nursery`) and stands for it, and ends with it. Where that cannot be (a worker with an environment of its
own, or no nursery any more), it becomes the worker itself.

A script, and not imported by anything: it takes 30 ms of a core, so it loads next to nothing. Raylets pass its path;
what it must know is in `SHOAL_NURSERY`.
"""

from __future__ import annotations

import os
import sys

del sys.path[0]  # the folder of this script, whose names are not those of top-level modules


def main() -> int:
    import json

    told = json.loads(os.environ["SHOAL_NURSERY"])
    argv = [told["worker"], *sys.argv[1:]]
    request = {"python": sys.executable, "argv": argv, "environment": dict(os.environ), "folder": os.getcwd()}
    status = _forked(told["socket"], json.dumps(request).encode())
    if status is not None:
        return status
    os.execv(sys.executable, [sys.executable, *argv])


def _forked(path: str, request: bytes) -> int | None:
    """Its exit status, or None if none was forked."""
    import socket

    _die_with_parent()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
            asked.connect(path)
            socket.send_fds(asked, [request], [0, 1, 2])
            if not asked.recv(32):
                return None
            status = asked.recv(32)
            return int(status) % 256 if status else 1
    except OSError:
        return None


def _die_with_parent() -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
