"""Asks the metadata service of the machine's cloud, now and then, whether the machine is to go away, and passes that on
as notices. Owns requests and their times; what answers mean is `cloud_words`.

A machine without such a service is asked about it a few times, and then seldom: it may have been away for a while.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Protocol

import structlog

from shoal_workers import cloud_words as words
from shoal_workers.messages import GiveNotice
from shoal_workers.notices import Notices

log = structlog.get_logger()

_ANSWER_S = 1.0
_TOKEN_TTL_S = 21600
_TRIES = 3
_SELDOM_S = 60.0

Found = Mapping[str, GiveNotice | None]


class MetadataSilent(Exception):
    """No answer, or none that this cloud would give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`now_s` is the time of day by the clock of whoever answers, where it tells it."""

    status: int
    text: str
    headers: Mapping[str, str]
    now_s: float


class Metadata:
    """The service at one address; `authority` is whose certificates count, by default those of the machine. Never
    through a proxy, which would tell of its own machine."""

    def __init__(self, url: str, authority: Path | None = None) -> None:
        self._url = url.rstrip("/")
        proxies = urllib.request.ProxyHandler({})
        secured = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority))
        self._open = urllib.request.build_opener(proxies, secured).open

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        """Raises MetadataSilent."""
        request = urllib.request.Request(f"{self._url}{path}", headers=dict(headers), method=method)
        try:
            try:
                with self._open(request, timeout=_ANSWER_S) as response:
                    return _answer(response.status, response.read(), response.headers)
            except urllib.error.HTTPError as error:
                with error:
                    return _answer(error.code, error.read(), error.headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MetadataSilent(f"{method} {path}: {error}") from error

    def text(self, path: str, headers: Mapping[str, str]) -> Answer:
        """An answer that is not an error. Raises MetadataSilent."""
        answer = self.ask(path, headers)
        if answer.status != http.client.OK:
            raise MetadataSilent(f"GET {path}: status {answer.status}")
        return answer


class Cloud(Protocol):
    def notices(self) -> Found:
        """By source: the notice that stands, or None. Raises MetadataSilent and ValueError."""


class Aws:
    """With session tokens (IMDSv2) alone. Raises MetadataSilent where there is no such service."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = self._new_token()

    def notices(self) -> Found:
        spot = self._get("/latest/meta-data/spot/instance-action")
        rebalance = self._get("/latest/meta-data/events/recommendations/rebalance")
        return {
            words.AWS_SPOT: None if spot is None else words.aws_spot(spot.text, spot.now_s),
            words.AWS_REBALANCE: None if rebalance is None else words.aws_rebalance(rebalance.text, rebalance.now_s),
        }

    def _get(self, path: str) -> Answer | None:
        answer = self._metadata.ask(path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == http.client.UNAUTHORIZED:
            self._token = self._new_token()
            answer = self._metadata.ask(path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == http.client.NOT_FOUND:  # nothing is announced
            return None
        if answer.status != http.client.OK:
            raise MetadataSilent(f"GET {path}: status {answer.status}")
        return answer

    def _new_token(self) -> str:
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        answer = self._metadata.ask("/latest/api/token", wanted, "PUT")
        if answer.status != http.client.OK or not answer.text.strip():
            raise MetadataSilent(f"no token: status {answer.status}")
        return answer.text.strip()


class Gcp:
    """Raises MetadataSilent where there is no such service."""

    _HEADERS: Mapping[str, str] = {"Metadata-Flavor": "Google"}

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        if metadata.text("/computeMetadata/v1/instance/id", self._HEADERS).headers.get("metadata-flavor") != "Google":
            raise MetadataSilent("an answer, but not Google's")

    def notices(self) -> Found:
        preempted = self._metadata.text("/computeMetadata/v1/instance/preempted", self._HEADERS)
        maintenance = self._metadata.text("/computeMetadata/v1/instance/maintenance-event", self._HEADERS)
        return {
            words.GCP_PREEMPTION: words.gcp_preempted(preempted.text),
            words.GCP_MAINTENANCE: words.gcp_maintenance(maintenance.text),
        }


class Azure:
    """Raises MetadataSilent where there is no such service."""

    _HEADERS: Mapping[str, str] = {"Metadata": "true"}

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        compute = metadata.text("/metadata/instance/compute?api-version=2021-02-01", self._HEADERS)
        try:
            self._machine = words.azure_machine(compute.text)
        except ValueError as error:
            raise MetadataSilent(f"an answer, but not Azure's: {error}") from error

    def notices(self) -> Found:
        answer = self._metadata.text("/metadata/scheduledevents?api-version=2020-07-01", self._HEADERS)
        return {words.AZURE: words.azure_event(answer.text, self._machine, answer.now_s)}


def find_cloud(metadata: Metadata) -> Cloud | None:
    """Whose machine this is."""
    kinds: tuple[Callable[[Metadata], Cloud], ...] = (Aws, Gcp, Azure)
    for kind in kinds:
        try:
            return kind(metadata)
        except MetadataSilent as error:
            log.debug("not this cloud", cloud=str(kind), why=str(error))
    return None


class CloudWatch:
    """One thread that asks whom it `find`s every `period_s` until `close`; after some attempts that found nobody it
    looks every `seldom_s` only."""

    def __init__(
        self, notices: Notices, find: Callable[[], Cloud | None], period_s: float, seldom_s: float = _SELDOM_S
    ) -> None:
        self._notices = notices
        self._find = find
        self._period_s = period_s
        self._seldom_s = max(period_s, seldom_s)
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="cloud-notices", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        tries = 0
        while (cloud := self._find()) is None:
            tries += 1
            if tries == _TRIES:
                log.info("nobody there to tell of notices; asking seldom", asked=str(self._find))
            if self._closed.wait(self._period_s if tries < _TRIES else self._seldom_s):
                return
        log.info("listening to notices", cloud=type(cloud).__name__)
        while not self._closed.is_set():
            self.look(cloud)
            self._closed.wait(self._period_s)

    def look(self, cloud: Cloud) -> None:
        """Passes on what the cloud says now. Who does not answer says nothing: what was told before still holds."""
        try:
            found = cloud.notices()
        except (MetadataSilent, ValueError) as error:
            log.warning("notices of the cloud not known", error=str(error))
            return
        for source, notice in found.items():
            if notice is None:
                self._notices.withdraw(source)
            else:
                self._notices.give(notice)


def _answer(status: int, body: bytes, headers: Message) -> Answer:
    """Raises ValueError."""
    told = headers.get("Date")
    now_s = time.time() if told is None else parsedate_to_datetime(told).timestamp()
    named = {name.lower(): value for name, value in headers.items()}
    return Answer(status=status, text=body.decode(), headers=named, now_s=now_s)
