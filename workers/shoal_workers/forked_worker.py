"""What raylets of a local cluster start instead of Ray's own worker: it has the worker forked off a nursery
(`shoal_workers.nursery`), stands for it, and ends with it. Where that cannot be (a worker that would find other
modules, or no nursery any more), it becomes the worker itself.

A script, and not imported by anything: it takes 30 ms of a core, so it loads next to nothing. Raylets pass its path;
what it must know is in `SHOAL_NURSERY`.
"""

from __future__ import annotations

import os
import sys

_RAYLET = os.getppid()
del sys.path[0]  # the folder of this script, whose names are not those of top-level modules
_ANSWERED_S = 60.0  # of which the first nursery may take ten to load


def main() -> int:
    import json

    told = json.loads(os.environ["SHOAL_NURSERY"])
    argv = [told["worker"], *sys.argv[1:]]
    kind = {name: value for name, value in os.environ.items() if name.startswith(tuple(told["at_start"]))}
    with open("/proc/self/oom_score_adj") as file:
        score = file.read()
    request = {"argv": argv, "environment": dict(os.environ), "folder": os.getcwd(), "oom_score_adj": score}
    status = _forked(told["socket"], json.dumps([sys.executable, kind]).encode(), json.dumps(request).encode())
    if status is not None:
        return status
    os.execv(sys.executable, [sys.executable, *argv])


def _forked(path: str, kind: bytes, request: bytes) -> int | None:
    """Its exit status, or None if none was forked."""
    import socket

    _die_with_raylet()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
            asked.settimeout(_ANSWERED_S)
            asked.connect(path)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                socket.send_fds(ours, [request], [0, 1, 2])
                socket.send_fds(asked, [kind], [theirs.fileno()])
            if not asked.recv(32):
                return None
            asked.settimeout(None)
            status = asked.recv(32)
            return int(status) % 256 if status else 1
    except OSError:
        return None


def _die_with_raylet() -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != _RAYLET:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
