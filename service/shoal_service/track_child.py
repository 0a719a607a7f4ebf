"""The control plane's end of a writer's process (`track_writer`): starts it, asks it, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from shoal_service.settings import writer_environment
from shoal_service.sinks import Lost, Opened, Order, Position, SinkFailed
from shoal_service.track_feed import Batch
from shoal_service.tracking_hosts import Reach

# As `track_writer` takes them.
_WHERE = {True: "anywhere", False: "public"}


class Child:
    """Of one tracker of one job. After SinkFailed or Lost it is of no use but to be closed."""

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        self._process = process
        self._timeout_s = timeout_s

    @classmethod
    async def start(cls, timeout_s: float, reach: Reach) -> Child:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shoal_service.track_writer", str(os.getpid()), _WHERE[reach.private]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=writer_environment(reach),
            start_new_session=True,  # a Ctrl-C is for us, and all that it starts can be ended with it
        )
        return cls(process, timeout_s)

    @property
    def pid(self) -> int:
        """Of the group of processes, too."""
        return self._process.pid

    async def open(self, order: Order) -> Opened:
        """Raises SinkFailed, and Lost."""
        return Opened(**(await self._ask({"open": dataclasses.asdict(order)}))["opened"])

    async def write(self, batch: Batch) -> Position:
        """Raises SinkFailed, and Lost."""
        position: Position = (await self._ask({"write": dataclasses.asdict(batch)}))["written"]
        return position

    async def close(self, grace_s: float) -> None:
        """Lets it finish for so long, and kills it then."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            # What it has started, too, and also where this task is cancelled meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()

    async def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                self._process.stdin.write(json.dumps(command).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise SinkFailed(f"did not answer within {self._timeout_s:g} s") from error
        except ConnectionError as error:
            raise SinkFailed("the process that writes to it has ended") from error
        if not line:
            raise SinkFailed(f"the process that writes to it ended with status {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "lost" in answer:
            raise Lost(answer["lost"])
        if "problem" in answer:
            raise SinkFailed(answer["problem"])
        return answer
