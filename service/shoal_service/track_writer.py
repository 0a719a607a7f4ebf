"""The process that writes to one tracker of one job: `python -m shoal_service.track_writer PARENT-PID WHERE`.

Libraries of trackers hang, crash, print and keep state of a process; here they can do none of that to the control
plane. It is told what to do line by line on standard input, answers line by line on standard output, and ends with its
parent. WHERE is `anywhere`, or `public`: then no connection to a private network is made, whatever a name says it is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import IO, Any, assert_never

from shoal_planner.strict import read
from shoal_service.guarded_http import connect_to_public_alone
from shoal_service.sink_mlflow import MlflowSink
from shoal_service.sink_tensorboard import TensorBoardSink
from shoal_service.sink_wandb import WandbSink
from shoal_service.sinks import Lost, Order, Sink
from shoal_service.track_feed import Batch

_PR_SET_PDEATHSIG = 1
_LONGEST = 300  # characters of a problem


def make_sink(order: Order) -> Sink:
    match order.tool:
        case "tensorboard":
            return TensorBoardSink(order)
        case "mlflow":
            return MlflowSink(order)
        case "wandb":
            return WandbSink(order)
        case _:
            assert_never(order.tool)


class Writer:
    """Obeys `{"open": Order}`, then `{"write": Batch}` again and again."""

    def __init__(self) -> None:
        self._sink: Sink | None = None

    def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """`{"opened": ...}`, `{"written": position}`, `{"lost": what}` or `{"problem": why}`."""
        try:
            if "open" in command:
                self._sink = make_sink(read(Order, command["open"]))
                return {"opened": dataclasses.asdict(self._sink.open())}
            assert self._sink is not None, "write before open"
            return {"written": dict(self._sink.write(read(Batch, command["write"])))}
        except Lost as lost:
            return {"lost": str(lost)}
        except Exception as error:  # whatever a library raises is for the user to read, and the parent to try again
            return {"problem": in_short(error)}

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()


def in_short(error: Exception) -> str:
    """One line for people."""
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def main() -> None:
    _end_with(int(sys.argv[1]))
    if sys.argv[2] != "anywhere":
        connect_to_public_alone()
    answers = _own_output()
    writer = Writer()
    for line in sys.stdin:
        answers.write(json.dumps(writer.obey(json.loads(line))) + "\n")
        answers.flush()
    writer.close()


def _own_output() -> IO[str]:
    """Standard output as we alone have it: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _end_with(parent: int) -> None:
    """A parent that is killed leaves nobody who writes behind the back of its successor."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main()
