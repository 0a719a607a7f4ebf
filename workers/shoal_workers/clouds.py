"""Asks the metadata service of the machine's cloud, now and then, whether the machine is to go away, and passes that on
as notices. Owns requests and their times; what answers mean is `cloud_words`.

A machine without such a service is asked about it a few times, and then seldom: it may have been away for a while.
Where its firmware names a cloud it is asked as often as if it answered: some give 30 s of notice.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
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
FIRMWARE = Path("/sys/class/dmi/id")  # what it says of the machine, to everybody and also in containers
_FIRMWARE_SAYS = ("sys_vendor", "product_name", "bios_version", "chassis_asset_tag")


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
    @property
    def sources(self) -> Sequence[str]:
        """What there is to ask for, the most urgent first."""

    def notice(self, source: str) -> GiveNotice | None:
        """The one that stands. Raises MetadataSilent and ValueError."""


class Aws:
    """With session tokens (IMDSv2) alone. Raises MetadataSilent where there is no such service."""

    sources = (words.AWS_SPOT, words.AWS_REBALANCE)

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = self._new_token()

    def notice(self, source: str) -> GiveNotice | None:
        if source == words.AWS_SPOT:
            spot = self._get("/latest/meta-data/spot/instance-action")
            return None if spot is None else words.aws_spot(spot.text, spot.now_s)
        rebalance = self._get("/latest/meta-data/events/recommendations/rebalance")
        return None if rebalance is None else words.aws_rebalance(rebalance.text, rebalance.now_s)

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

    sources = (words.GCP_PREEMPTION, words.GCP_MAINTENANCE)
    _HEADERS: Mapping[str, str] = {"Metadata-Flavor": "Google"}

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        if metadata.text("/computeMetadata/v1/instance/id", self._HEADERS).headers.get("metadata-flavor") != "Google":
            raise MetadataSilent("an answer, but not Google's")

    def notice(self, source: str) -> GiveNotice | None:
        if source == words.GCP_PREEMPTION:
            return words.gcp_preempted(self._said("preempted"))
        return words.gcp_maintenance(self._said("maintenance-event"))

    def _said(self, what: str) -> str:
        return self._metadata.text(f"/computeMetadata/v1/instance/{what}", self._HEADERS).text


class Azure:
    """Raises MetadataSilent where there is no such service."""

    sources = (words.AZURE,)
    _HEADERS: Mapping[str, str] = {"Metadata": "true"}

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        compute = metadata.text("/metadata/instance/compute?api-version=2021-02-01", self._HEADERS)
        try:
            self._machine = words.azure_machine(compute.text)
        except ValueError as error:
            raise MetadataSilent(f"an answer, but not Azure's: {error}") from error

    def notice(self, source: str) -> GiveNotice | None:
        answer = self._metadata.text("/metadata/scheduledevents?api-version=2020-07-01", self._HEADERS)
        return words.azure_event(answer.text, self._machine, answer.now_s)


def find_cloud(metadata: Metadata, firmware: Path) -> Cloud | None:
    """Whose machine this is; None where no cloud that we know answers. Raises MetadataSilent where none answers and the
    firmware says that this is the machine of one."""
    kinds: tuple[Callable[[Metadata], Cloud], ...] = (Aws, Gcp, Azure)
    for kind in kinds:
        try:
            return kind(metadata)
        except MetadataSilent as error:
            log.debug("not this cloud", cloud=str(kind), why=str(error))
    if (vendor := words.vendor(_firmware_says(firmware))) is not None:
        raise MetadataSilent(f"this is a machine of {vendor}, whose metadata service does not answer")
    return None


def _firmware_says(folder: Path) -> str:
    said = []
    for name in _FIRMWARE_SAYS:
        with contextlib.suppress(OSError):  # it is not there in every machine, nor in every sandbox
            said.append((folder / name).read_text(errors="replace"))
    return " ".join(said)


class CloudWatch:
    """One thread that asks whom it `find`s every `period_s` until `close`; after some attempts that found nobody it
    looks every `seldom_s` only. `find` raises MetadataSilent where somebody is there who does not answer now."""

    def __init__(
        self, notices: Notices, find: Callable[[], Cloud | None], period_s: float, seldom_s: float = _SELDOM_S
    ) -> None:
        self._notices = notices
        self._find = find
        self._period_s = period_s
        self._seldom_s = max(period_s, seldom_s)
        self._closed = threading.Event()
        self._told: dict[str, set[type[Exception]]] = {}  # by source, of what went wrong since it answered last

    def start(self) -> None:
        threading.Thread(target=self._run, name="cloud-notices", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        cloud = self._found()
        if cloud is not None:
            log.info("listening to notices", cloud=type(cloud).__name__)
            while not self._closed.is_set():
                self.look(cloud)
                self._closed.wait(self._period_s)

    def _found(self) -> Cloud | None:
        """None when it is closed."""
        tries, cloud = 0, None
        while cloud is None:
            pause_s = self._period_s
            try:
                cloud = self._find()
            except Exception as error:  # as in `look`
                self._tell("its service", error)
            else:
                tries += cloud is None
                if tries == _TRIES:
                    log.info("nobody there to tell of notices; asking seldom", asked=str(self._find))
                pause_s = self._period_s if tries < _TRIES else self._seldom_s
            if cloud is None and self._closed.wait(pause_s):
                return None
        return cloud

    def look(self, cloud: Cloud) -> None:
        """Passes on what the cloud says now, each source by itself. Of one that does not answer, or with what nobody
        can read, what was told before still holds."""
        for source in cloud.sources:
            try:
                notice = cloud.notice(source)
            except Exception as error:  # what others answer must not end the thread that all notices come by
                self._tell(source, error)
                continue
            self._told.pop(source, None)
            if notice is None:
                self._notices.withdraw(source)
            else:
                self._notices.give(notice)

    def _tell(self, source: str, error: Exception) -> None:
        """Once of each kind, not as often as it is asked."""
        told = self._told.setdefault(source, set())
        if type(error) not in told:
            told.add(type(error))
            foreseen = isinstance(error, MetadataSilent | ValueError)
            log.warning("no notices from it now; asking on", source=source, error=repr(error), exc_info=not foreseen)


def _answer(status: int, body: bytes, headers: Message) -> Answer:
    """Raises ValueError."""
    told = headers.get("Date")
    now_s = time.time() if told is None else parsedate_to_datetime(told).timestamp()
    named = {name.lower(): value for name, value in headers.items()}
    return Answer(status=status, text=body.decode(), headers=named, now_s=now_s)
