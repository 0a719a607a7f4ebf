"""How far a job is, as it goes: a live line with a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_PLAIN_LINES = 20  # about so many for the steps of a whole job


class View(Protocol):
    """What is told of one job. A context: what is left on the screen at its end is the last that was told."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, job: Mapping[str, Any]) -> None:
        """The job as the server shows it."""

    def step(self, step: int, loss: Any) -> None:
        """It has done this step."""

    def line(self, text: str) -> None:
        """Something happened."""


def view_on(console: Console) -> View:
    return LiveView(console) if console.is_terminal else PlainView(console)


class LiveView:
    """A bar that stays at the bottom, with what happened above it."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
        )
        self._progress = Progress(*columns, console=console, transient=False)
        self._task = self._progress.add_task("", total=None, figures="")
        self._job: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, job: Mapping[str, Any]) -> None:
        self._job = job
        self.step(job["status"]["step"], job["status"]["loss"])

    def step(self, step: int, loss: Any) -> None:
        assert self._job is not None
        status = self._job["status"]
        self._progress.update(
            self._task,
            description=f"{self._job['name']} {status['state']}",
            completed=step,
            total=status["steps"],
            figures=figures(status, step, loss),
        )

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


class PlainView:
    """A line for each change of state, and for about each twentieth of the steps; nothing that moves."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._job: Mapping[str, Any] | None = None
        self._told = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, job: Mapping[str, Any]) -> None:
        if self._job is None:
            self.line(f"{job['id']} {job['name']}: {job['status']['state']}: {job['status']['reason']}")
        self._job = job

    def step(self, step: int, loss: Any) -> None:
        assert self._job is not None
        status = self._job["status"]
        part = step * _PLAIN_LINES // (status["steps"] or 100 * _PLAIN_LINES)
        if part != self._told:
            self._told = part
            self.line(figures(status, step, loss))

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def figures(status: Mapping[str, Any], step: int, loss: Any) -> str:
    """Steps, loss, speed, time to go, and, where it does not simply run, why."""
    parts = [f"step {step}" + (f" of {status['steps']}" if status["steps"] else "")]
    if loss is not None:
        parts.append(f"loss {loss:.4f}" if isinstance(loss, int | float) else f"loss {loss}")
    if status["tokens_per_s"] is not None:
        parts.append(f"{status['tokens_per_s']:,.0f} tokens/s")
    if status["eta_s"] is not None:
        parts.append(f"{duration(status['eta_s'])} to go")
    if status["state"] != "running":
        parts.append(status["reason"])
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """As people say it, in two units at most."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    first = next((index for index, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2] if count or unit == "s")
