"""A run of Weights & Biases, online or in files for `wandb sync`.

wandb writes behind our back: what it was given may be lost when its process is killed. Online its server says up to
which step it has a run. Offline nobody can tell, so each process writes the run's files from the first step on, and
removes those of the process before it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal_recovery.journal import JobState
from shoal_service.sinks import Opened, Order, Position
from shoal_service.track_feed import Batch, End


class WandbSink:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._offline = order.settings["mode"] == "offline"
        self._dir = Path(order.settings["dir"] or order.folder)
        self._run: Any = None
        self._last_step = 0
        self._notes: list[str] = []

    def open(self) -> Opened:
        import wandb

        if self._offline:
            self._remove_old_files()
        self._dir.mkdir(parents=True, exist_ok=True)
        settings = self._order.settings
        self._run = wandb.init(
            project=settings["project"],
            entity=settings["entity"],
            name=settings["name"] or self._order.name,
            id=self._order.run_id,
            dir=str(self._dir),
            mode=settings["mode"],
            resume=None if self._offline else "allow",
            config=self._config(),
            tags=["shoal"],
            settings=wandb.Settings(
                init_timeout=60,
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,  # of the machine of the control plane: they say nothing of the job
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )
        self._last_step = 0 if self._offline else max(0, self._run.step - 1)
        self._run.define_metric("eval/loss", summary="min")
        url = str(Path(self._run.dir).parent) if self._offline else self._run.url
        return Opened(position=self._position(), url=url, step=self._last_step)

    def write(self, batch: Batch) -> Position:
        for step, values in sorted(self._rows(batch).items()):
            self._run.log(values, step=step)
            self._last_step = step
        if batch.notes:
            self._notes += [f"step {note.step}: {note.text}" for note in batch.notes]
            self._run.notes = "\n".join(self._notes)
        if batch.end is not None:
            self._end(batch.end)
        return self._position()

    def close(self) -> None:
        """Files are whole after this."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _rows(self, batch: Batch) -> Mapping[int, dict[str, Any]]:
        """One for each step, as wandb takes them in the order of steps; what is of a step that it has is left out."""
        rows: dict[int, dict[str, Any]] = {}
        for scalars in (*batch.steps, *batch.evaluations):
            if scalars.step > self._last_step:
                rows.setdefault(scalars.step, {}).update(scalars.values)
        for note in batch.notes:
            after = [step for step in rows if step > note.step]
            if after:
                rows[min(after)]["shoal/recoveries"] = note.number
        return rows

    def _config(self) -> dict[str, Any]:
        about = {"shoal.job_id": self._order.job_id, "shoal.url": self._order.url}
        return {**self._order.parameters, **{name: value for name, value in about.items() if value}}

    def _end(self, end: End) -> None:
        self._run.summary["shoal/state"] = end.state
        self._run.summary["shoal/reason"] = end.reason
        self._run.finish(exit_code=0 if end.state == JobState.SUCCEEDED else 1)
        self._run = None

    def _position(self) -> Position:
        return {"generation": self._order.generation}

    def _remove_old_files(self) -> None:
        """Of earlier processes and generations: their names end with the job's id."""
        for name in (self._order.job_id, f"{self._order.job_id}-[0-9]*"):
            for folder in self._dir.glob(f"wandb/offline-run-*-{name}"):
                shutil.rmtree(folder, ignore_errors=True)
