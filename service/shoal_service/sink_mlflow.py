"""A run of MLflow, on a tracking server or in a database.

A run is found again by its tags, so one that was made and not heard of is not made twice. MLflow takes the same figure
twice as one where its own database keeps them; as others may not, the first batch after an opening leaves out what is
there already. A run cannot forget figures: a generation that begins anew has a run of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from shoal_recovery.journal import JobState
from shoal_service.sinks import Opened, Order, Position, SinkFailed
from shoal_service.track_feed import Batch, End

_MOST_FIGURES = 1000  # in one request, by MLflow's own rule
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 500  # characters; of servers of any age
_LONGEST_TAG = 5000
_STATUS = {JobState.SUCCEEDED: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}


class MlflowSink:
    def __init__(self, order: Order) -> None:
        from mlflow import MlflowClient

        self._order = order
        self._uri = str(order.settings["tracking_uri"])
        self._name = str(order.settings["run_name"] or order.name)
        with self._explained():
            self._client = MlflowClient(tracking_uri=self._uri)
        self._run_id = ""
        self._may_be_there = False  # figures of the next batch

    def open(self) -> Opened:
        with self._explained():
            experiment_id = self._experiment()
            if self._order.fresh:
                self._leave_old_run()
                found = self._find(experiment_id)
                self._run_id = found or self._create(experiment_id)
                self._may_be_there = found is not None
            else:
                self._run_id, self._may_be_there = str(self._order.position["run_id"]), True
            self._describe()
        return Opened(position=self._position(), url=self._url(experiment_id))

    def write(self, batch: Batch) -> Position:
        with self._explained():
            figures = list(self._figures(batch))
            if self._may_be_there:
                figures = self._missing(figures)
                self._may_be_there = False
            for first in range(0, len(figures), _MOST_FIGURES):
                self._client.log_batch(self._run_id, metrics=figures[first : first + _MOST_FIGURES])
            for note in batch.notes:
                self._client.set_tag(self._run_id, f"shoal.recovery.{note.number}", note.text[:_LONGEST_TAG])
            if batch.end is not None:
                self._end(batch.end)
        return self._position()

    def close(self) -> None:
        pass

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = str(self._order.settings["experiment_name"])
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # somebody else was first
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise SinkFailed(f"experiment {name!r} of {self._uri} is deleted: restore it")
        return str(found.experiment_id)

    def _find(self, experiment_id: str) -> str | None:
        wanted = f"tags.`shoal.run` = '{self._order.run_id}'"
        runs = self._client.search_runs([experiment_id], filter_string=wanted, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _create(self, experiment_id: str) -> str:
        tags = {
            "shoal.run": self._order.run_id,
            "shoal.job_id": self._order.job_id,
            "mlflow.note.content": self._about(),
            "mlflow.source.name": f"Shoal job {self._order.job_id}",
        }
        if self._order.url:
            tags["shoal.url"] = self._order.url
        started_ms = int(self._order.created_at_s * 1000)
        run = self._client.create_run(experiment_id, start_time=started_ms, tags=tags, run_name=self._name)
        return str(run.info.run_id)

    def _about(self) -> str:
        where = f"[{self._order.job_id}]({self._order.url})" if self._order.url else self._order.job_id
        again = "" if self._order.generation == 1 else "; takes the place of a run whose steps were done again"
        return f"Shoal job {where}{again}"

    def _describe(self) -> None:
        """Parameters are written before any figure; the same once more is nothing new."""
        from mlflow.entities import Param

        if not self._order.fresh:
            return
        found = self._order.parameters
        given = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in found.items() if str(value)]
        for first in range(0, len(given), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=given[first : first + _MOST_PARAMETERS])

    def _leave_old_run(self) -> None:
        from mlflow.exceptions import MlflowException

        old = self._order.position.get("run_id")
        if old is not None:
            with contextlib.suppress(MlflowException):  # its user may have deleted it
                self._client.set_tag(old, "shoal.replaced_by", self._order.run_id)
                self._client.update_run(old, status="KILLED", name=f"{self._name} (replaced)")

    def _figures(self, batch: Batch) -> Iterator[Any]:
        from mlflow.entities import Metric

        for scalars in (*batch.steps, *batch.evaluations):
            for name, value in scalars.values.items():
                yield Metric(name, value, int(scalars.at_s * 1000), scalars.step)

    def _missing(self, figures: list[Any]) -> list[Any]:
        """Figures of one name come in the order of steps, so the newest one tells of all."""
        newest = {one.key: one.step for one in self._client.get_run(self._run_id).data._metric_objs}
        return [figure for figure in figures if figure.step > newest.get(figure.key, -1)]

    def _end(self, end: End) -> None:
        self._client.set_tag(self._run_id, "shoal.state", end.state)
        self._client.set_tag(self._run_id, "shoal.reason", end.reason[:_LONGEST_TAG])
        self._client.set_terminated(self._run_id, _STATUS[JobState(end.state)], end_time=int(end.at_s * 1000))

    def _position(self) -> Position:
        return {"generation": self._order.generation, "run_id": self._run_id}

    def _url(self, experiment_id: str) -> str | None:
        if urlsplit(self._uri).scheme not in ("http", "https"):
            return None
        return f"{self._uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{self._run_id}"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """MLflow's words for a server that is not there fill a page."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            cause: BaseException | None = error.__cause__ or error.__context__
            text = str(error)
            if "failed with exception" in text or "Max retries exceeded" in text:
                while cause is not None and (deeper := cause.__cause__ or cause.__context__) is not None:
                    cause = deeper
                raise SinkFailed(f"{self._uri} does not answer ({cause or 'no connection'})") from error
            raise SinkFailed(f"{self._uri}: {text}") from error
