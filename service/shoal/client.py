"""Client: the REST interface of a control plane as Python calls. The only file that knows httpx."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx
from httpx_sse import EventSource, ServerSentEvent, SSEError, connect_sse
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter
from ulid import ULID

from shoal.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    NotSignedIn,
    RequestRefused,
    ServerUnreachable,
    WaitTimeout,
)
from shoal.settings import ClientSettings
from shoal_planner.job import JobSpec, job_to_mapping
from shoal_planner.script_spec import AnyJob, ScriptSpec, any_job_to_mapping

ENDED = ("succeeded", "failed", "cancelled")
_REFUSALS: Mapping[int, type[RequestRefused]] = {
    400: InvalidRequest,
    401: NotSignedIn,
    404: NotFound,
    409: Conflict,
    413: InvalidRequest,
    415: InvalidRequest,
    422: InvalidRequest,
}
_ATTEMPTS = 3
_RECONNECTS = 15  # about a minute: a control plane that is being restarted is back by then
_SILENCE_S = 45.0  # a stream pings every 15 s; three missed pings mean that nobody is there any more


class Client:
    """Talks to one control plane; safe to retry everywhere, since submitting carries an Idempotency-Key.

    `server` and `token` default to SHOAL_SERVER and SHOAL_TOKEN, then to the control plane of this machine. Answers
    are the JSON objects of the REST interface. Methods raise ShoalError.
    """

    def __init__(self, server: str | None = None, token: str | None = None) -> None:
        settings = ClientSettings()
        self.server = (server or settings.server).rstrip("/")
        token = token or settings.find_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=self.server, headers=headers, timeout=httpx.Timeout(60.0, connect=5.0))
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerUnreachable(self.server, f"is not a URL: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, job: AnyJob | Mapping[str, Any], *, idempotency_key: str | None = None) -> dict[str, Any]:
        """Creates a job and returns it. Sending again under the same key returns the same job."""
        body = any_job_to_mapping(job) if isinstance(job, JobSpec | ScriptSpec) else dict(job)
        return self._call("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": idempotency_key or str(ULID())})

    def list(self, *, state: str | None = None, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Jobs, newest first; pages are fetched as they are needed."""
        left = limit
        cursor: str | None = None
        while left is None or left > 0:
            size = 200 if left is None else min(left, 200)
            page = self._call("GET", "/v1/jobs", params=_given(state=state, limit=size, cursor=cursor))
            yield from page["items"]
            left = None if left is None else left - len(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def get(self, job_id: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/jobs/{_part(job_id)}")

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Wishes the job to stop; it has stopped when its state is `cancelled`."""
        return self._call("POST", f"/v1/jobs/{_part(job_id)}/cancel")

    def pause(self, job_id: str) -> dict[str, Any]:
        """Wishes the job to rest; its state is `paused` once its newest step stands in its object store: then it has no
        nodes. Raises Conflict where it has no store, has ended, or is wished to rest already."""
        return self._call("POST", f"/v1/jobs/{_part(job_id)}/pause")

    def resume(self, job_id: str) -> dict[str, Any]:
        """Lets a job that rests go on, on whatever cluster suits it best now; or calls a pause off that has not come
        about yet. Raises Conflict where it is not wished to rest."""
        return self._call("POST", f"/v1/jobs/{_part(job_id)}/resume")

    def set_limits(self, job_id: str, **limits: Any) -> dict[str, Any]:
        """Changes `budget_usd`, `max_price_per_hour`, `max_devices`, `deadline` or `priority`; None takes one away. A
        job that rests because of a limit goes on when it is resumed. Raises Conflict where it has ended."""
        return self._call("POST", f"/v1/jobs/{_part(job_id)}/limits", json=limits)

    def metrics(self, job_id: str, *, max_points: int | None = None) -> dict[str, Any]:
        return self._call("GET", f"/v1/jobs/{_part(job_id)}/metrics", params=_given(max_points=max_points))

    def plan(self, job_id: str, *, epoch: int | None = None) -> dict[str, Any]:
        """The plan that the job runs by, or ran by in `epoch`."""
        return self._call("GET", f"/v1/jobs/{_part(job_id)}/plan", params=_given(epoch=epoch))

    def recoveries(self, job_id: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/jobs/{_part(job_id)}/recoveries")

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        """What stands whole in the job's object store now, newest first."""
        return self._call("GET", f"/v1/jobs/{_part(job_id)}/checkpoints")

    def bulk_losses(self, job_id: str) -> dict[str, Any]:
        """What of the job's state only its object store would hold, by what could be lost at once: each node, pool and
        zone, the costliest first."""
        return self._call("GET", f"/v1/jobs/{_part(job_id)}/bulk-losses")

    def cost(self, job_id: str) -> dict[str, Any]:
        """What the nodes that the job has had cost so far and cost now, in dollars, by type of node; None where nobody
        stated a price."""
        return self._call("GET", f"/v1/jobs/{_part(job_id)}/cost")

    def nodes(self) -> builtins.list[dict[str, Any]]:
        items: builtins.list[dict[str, Any]] = self._call("GET", "/v1/nodes")["items"]
        return items

    def preempt(self, node: str, *, notice_s: float = 120.0, cluster_id: str | None = None) -> dict[str, Any]:
        """A drill: the node is told that it goes away, and jobs leave it; nothing ends it. `cluster_id` says whose it
        is where several clusters have one of that name."""
        body = _given(notice_s=notice_s, cluster_id=cluster_id)
        return self._call("POST", f"/v1/nodes/{_part(node)}/preempt", json=body)

    def preview(
        self, job: JobSpec | Mapping[str, Any], cluster: Mapping[str, Any] | None = None, *, seed: int = 0
    ) -> dict[str, Any]:
        """The plan of a job on a CLUSTER, or on the connected one. Creates nothing."""
        body = job_to_mapping(job) if isinstance(job, JobSpec) else dict(job)
        return self._call("POST", "/v1/plans", json=_given(job=body, cluster=cluster, seed=seed))

    def login_link(self) -> dict[str, Any]:
        """A link that signs one browser in, once."""
        return self._call("POST", "/v1/login-links")

    def events(self, job_id: str, *, after: int = 0, follow: bool = False) -> Iterator[dict[str, Any]]:
        """The journal after number `after`; with `follow` until the job has ended, over lost connections too."""
        if follow:
            yield from self._follow(job_id, after)
            return
        more = True
        while more:
            page = self._call("GET", f"/v1/jobs/{_part(job_id)}/events", params={"after": after, "limit": 1000})
            yield from page["items"]
            after, more = page["next_after"], page["more"]

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The job once it has ended. Raises WaitTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        job = self.get(job_id)
        if job["status"]["state"] in ENDED:
            return job
        for _ in self._follow(job_id, job["status"]["last_seq"], deadline, met=True):
            pass
        job = self.get(job_id)
        if job["status"]["state"] not in ENDED:
            assert timeout_s is not None
            raise WaitTimeout(job_id, job["status"]["state"], timeout_s)
        return job

    def _follow(
        self, job_id: str, after: int, deadline: float | None = None, *, met: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Until the job has ended or the deadline has passed. A server that was `met` before and restarts is asked
        again from where the stream broke; one that stays away is ServerUnreachable."""
        failures = 0
        while deadline is None or time.monotonic() < deadline:
            try:
                for event in self._stream(job_id, after, deadline):
                    failures, met = 0, True
                    if event.event == "end":
                        return
                    if not event.data:  # a sign of life
                        continue
                    after = int(event.id)
                    yield event.json()
            except ServerUnreachable:
                failures += 1
                if failures > (_RECONNECTS if met else 0):
                    raise
                time.sleep(min(0.25 * 2**failures, 5.0))

    def _stream(self, job_id: str, after: int, deadline: float | None) -> Iterator[ServerSentEvent]:
        """One connection's events; ends quietly when the server closes it or the deadline passes."""
        url = f"/v1/jobs/{_part(job_id)}/events"
        read_s = _SILENCE_S if deadline is None else min(_SILENCE_S, max(deadline - time.monotonic(), 0.05))
        try:
            with connect_sse(
                self._http,
                "GET",
                url,
                params={"watch": "1"},
                headers={"Last-Event-ID": str(after)},
                timeout=httpx.Timeout(read_s, connect=5.0),
            ) as source:
                _raise_for_stream(source, self.server)
                yield from source.iter_sse()
        except httpx.ReadTimeout as error:
            if deadline is None or time.monotonic() < deadline:
                raise ServerUnreachable(self.server, "the stream of events fell silent") from error
        except (httpx.HTTPError, SSEError) as error:
            raise ServerUnreachable(self.server, str(error) or type(error).__name__) from error

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        retrying = Retrying(
            retry=retry_if_exception_type(httpx.TransportError),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential_jitter(multiplier=0.1, max=1.0),
            reraise=True,
        )
        try:
            answer = retrying(self._http.request, method, path, **arguments)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnreachable(self.server, str(error) or type(error).__name__) from error
        return _read(answer, self.server)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _part(job_id: str) -> str:
    """A path segment; an id with a slash must not become another path."""
    return job_id.replace("%", "%25").replace("/", "%2F").replace("?", "%3F") or "%20"


def _read(answer: httpx.Response, server: str) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError as error:
        raise ServerUnreachable(server, f"something else answers there, with status {answer.status_code}") from error
    if answer.is_success and isinstance(value, dict):
        return value
    if not isinstance(value, dict) or "code" not in value:
        raise ServerUnreachable(server, f"something else answers there, with status {answer.status_code}")
    kind = _REFUSALS.get(answer.status_code, RequestRefused)
    raise kind(answer.status_code, value["code"], value["detail"], value.get("param"))


def _raise_for_stream(source: EventSource, server: str) -> None:
    if not source.response.is_success:
        source.response.read()
        _read(source.response, server)
