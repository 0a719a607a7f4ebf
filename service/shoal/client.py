"""Client: the REST interface of a control plane as Python calls. The only file that knows httpx."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx
from httpx_sse import EventSource, ServerSentEvent, SSEError, connect_sse
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter
from ulid import ULID

from shoal.client_calls import Calls
from shoal.client_people import People
from shoal.client_storages import Storages
from shoal.client_text import given, path_part
from shoal.client_webhooks import Webhooks
from shoal.errors import (
    Conflict,
    InvalidRequest,
    NotAllowed,
    NotAServer,
    NotFound,
    NotSignedIn,
    RequestRefused,
    ServerUnreachable,
    WaitTimeout,
)
from shoal.settings import ClientSettings
from shoal_planner.job import JobSpec
from shoal_planner.own_model import unseen
from shoal_planner.script_spec import AnyJob, ScriptSpec, any_job_to_mapping

ENDED = ("succeeded", "failed", "cancelled")
_REFUSALS: Mapping[int, type[RequestRefused]] = {
    400: InvalidRequest,
    401: NotSignedIn,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    413: InvalidRequest,
    415: InvalidRequest,
    422: InvalidRequest,
}
_ATTEMPTS = 3
_RECONNECTS = 15  # about a minute: a control plane that is being restarted is back by then
_SILENCE_S = 45.0  # a stream pings every 15 s; three missed pings mean that nobody is there any more


class Client(Calls):
    """Talks to one control plane; safe to retry everywhere, since submitting carries an Idempotency-Key.

    `server` and `token` default to SHOAL_SERVER and SHOAL_TOKEN, then to the control plane of this machine. Answers
    are the JSON objects of the REST interface. Methods raise ShoalError.
    """

    def __init__(self, server: str | None = None, token: str | None = None) -> None:
        settings = ClientSettings()
        self.server = (server or settings.find_server()).rstrip("/")
        self._project = settings.project
        token = token or settings.find_token(self.server)
        self.token = token or ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        _check_server(self.server)
        try:
            self._http = httpx.Client(base_url=self.server, headers=headers, timeout=httpx.Timeout(60.0, connect=5.0))
        except (httpx.InvalidURL, ValueError) as error:
            raise NotAServer(self.server, f"is not a URL: {error}") from error

    @property
    def people(self) -> People:
        """Projects, roles, tokens, and what was done by whom."""
        return People(self._call)

    def storages(self, project: str) -> Storages:
        """How the object stores of a project are reached."""
        return Storages(self._call, project)

    @property
    def webhooks(self) -> Webhooks:
        """Addresses that are told of what happens to jobs."""
        return Webhooks(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(
        self, job: AnyJob | Mapping[str, Any], *, idempotency_key: str | None = None, project: str | None = None
    ) -> dict[str, Any]:
        """Creates a job and returns it, in `project`, or that of SHOAL_PROJECT, or the only one that you have a role
        in. Sending again under the same key returns the same job."""
        body = _document(job)
        params = given(project=project or self._project)
        headers = {"Idempotency-Key": idempotency_key or str(ULID())}
        return self._call("POST", "/v1/jobs", json=body, params=params, headers=headers)

    def dry_run(self, job: AnyJob | Mapping[str, Any], *, project: str | None = None) -> dict[str, Any]:
        """What would come of this job in `project`, as `submit` has it: its cluster, its plan, and what that would
        cost. Creates nothing."""
        body = _document(job)
        params = given(project=project or self._project, dry_run="1")
        return self._call("POST", "/v1/jobs", params=params, json=body)

    def clone(
        self,
        job_id: str,
        overrides: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Submits the job again, with `overrides` merged into its spec (None takes a field away), and returns the new
        one, which begins anew; with `dry_run` what would come of it, and creates nothing."""
        headers = {"Idempotency-Key": idempotency_key or str(ULID())}
        body = {"overrides": dict(overrides or {}), "dry_run": dry_run}
        return self._call("POST", f"/v1/jobs/{path_part(job_id)}/clone", json=body, headers=headers)

    def list(
        self,
        *,
        state: str | None = None,
        name: str | None = None,
        labels: Sequence[str] = (),
        created_since: str | None = None,
        created_until: str | None = None,
        created_by: str | None = None,
        project: str | None = None,
        limit: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Jobs, newest first, of all your projects or of one; pages are fetched as they are needed. Only those with
        `name` in their names, with all of these labels (KEY=VALUE, or KEY), created in that time (RFC 3339) by that
        person (`me`, `admin` or a user's id)."""
        wanted = {"state": state, "name": name, "created_since": created_since, "created_until": created_until}
        yield from self._pages(
            "/v1/jobs", limit, **wanted, label=[*labels] or None, project=project, created_by=created_by
        )

    def attempts(self, job_id: str, *, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """The epochs that the job has had, newest first."""
        yield from self._pages(f"/v1/jobs/{path_part(job_id)}/attempts", limit)

    def nodes(self, cluster_id: str | None = None) -> builtins.list[dict[str, Any]]:
        """The nodes of all clusters that have connected, or of one."""
        return [*self._pages("/v1/nodes", None, cluster_id=cluster_id)]

    def _pages(self, path: str, limit: int | None, **wanted: Any) -> Iterator[dict[str, Any]]:
        left = limit
        cursor: str | None = None
        while left is None or left > 0:
            size = 200 if left is None else min(left, 200)
            page = self._call("GET", path, params=given(**wanted, limit=size, cursor=cursor))
            yield from page["items"]
            left = None if left is None else left - len(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def events(
        self, job_id: str, *, after: int = 0, follow: bool = False, kinds: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """The journal after number `after`, or only `kinds` of its entries; with `follow` until the job has ended, over
        lost connections too."""
        path, params = f"/v1/jobs/{path_part(job_id)}/events", given(kind=[*kinds] or None)
        if follow:
            yield from self._follow(path, after, params=params)
            return
        more = True
        while more:
            page = self._call("GET", path, params={**params, "after": after, "limit": 1000})
            yield from page["items"]
            after, more = page["next_after"], page["more"]

    def logs(
        self,
        job_id: str,
        *,
        follow: bool = False,
        forgotten: Callable[[Mapping[str, Any]], None] = lambda _: None,
        **wanted: Any,
    ) -> Iterator[dict[str, Any]]:
        """What the job printed, in the order in which it came; with `follow` until the job has ended. `wanted`: rank,
        node, attempt, level, search, since, until (RFC 3339), event, tail. `forgotten` is told of lines that are not
        kept any more. Raises RequestRefused (410) where nothing of what is asked for is."""
        path, params = f"/v1/jobs/{path_part(job_id)}/logs", given(**wanted)
        if follow:
            yield from self._follow(path, None, params=params)
            return
        while True:
            page = self._call("GET", path, params=params if "tail" in params else {"limit": 5000, **params})
            if page["forgotten"] and "cursor" not in params:
                forgotten(page["forgotten"])
            yield from page["items"]
            if page["next_cursor"] is None:
                return
            params["cursor"] = page["next_cursor"]

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The job once it has ended. Raises WaitTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        job = self.get(job_id)
        if job["status"]["state"] in ENDED:
            return job
        path = f"/v1/jobs/{path_part(job_id)}/events"
        for _ in self._follow(path, job["status"]["last_seq"], deadline, met=True):
            pass
        job = self.get(job_id)
        if job["status"]["state"] not in ENDED:
            assert timeout_s is not None
            raise WaitTimeout(job_id, job["status"]["state"], timeout_s)
        return job

    def _follow(
        self,
        path: str,
        after: int | None,
        deadline: float | None = None,
        *,
        met: bool = False,
        params: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """What follows the entry or line `after`, until the job has ended or the deadline has passed. A server that was
        `met` before and restarts is asked again from where the stream broke; one that stays away is
        ServerUnreachable."""
        failures = 0
        while deadline is None or time.monotonic() < deadline:
            try:
                for event in self._stream(path, params or {}, after, deadline):
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

    def _stream(
        self, path: str, params: Mapping[str, Any], after: int | None, deadline: float | None
    ) -> Iterator[ServerSentEvent]:
        """One connection's events; ends quietly when the server closes it or the deadline passes."""
        read_s = _SILENCE_S if deadline is None else min(_SILENCE_S, max(deadline - time.monotonic(), 0.05))
        try:
            with connect_sse(
                self._http,
                "GET",
                path,
                params={"watch": "1", **params},
                headers={} if after is None else {"Last-Event-ID": str(after)},
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
        return _read(self._send(method, path, **arguments), self.server)

    def _etag(self, path: str) -> str:
        answer = self._send("GET", path)
        _read(answer, self.server)
        return str(answer.headers.get("ETag", ""))

    def _content(self, path: str, **arguments: Any) -> bytes:
        answer = self._send("GET", path, **arguments)
        if not answer.is_success:
            _read(answer, self.server)
        return answer.content

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Whatever is answered. Raises ServerUnreachable. What is sent again as no answer came is done once."""
        if method == "POST":
            arguments["headers"] = {"Idempotency-Key": str(ULID()), **(arguments.get("headers") or {})}
        retrying = Retrying(
            retry=retry_if_exception_type(httpx.TransportError),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential_jitter(multiplier=0.1, max=1.0),
            reraise=True,
        )
        try:
            return retrying(self._http.request, method, path, **arguments)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnreachable(self.server, str(error) or type(error).__name__) from error


def _document(job: AnyJob | Mapping[str, Any]) -> Mapping[str, Any]:
    """As users write it: what only Shoal says of a model is left out."""
    return unseen(any_job_to_mapping(job)) if isinstance(job, JobSpec | ScriptSpec) else dict(job)


def _check_server(server: str) -> None:
    """Raises NotAServer."""
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL as error:
        raise NotAServer(server, f"is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise NotAServer(server, "must be a URL that begins with http:// or https://")


def _read(answer: httpx.Response, server: str) -> dict[str, Any]:
    if answer.status_code == httpx.codes.NO_CONTENT:
        return {}
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
        if source.response.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # as its database is: it comes back
            raise ServerUnreachable(server, source.response.json().get("detail", "it is not available"))
        _read(source.response, server)
