"""Notices of clouds, as their documents have them: read, and asked for over HTTP of a server that speaks as they do."""

from __future__ import annotations

import http.server
import json
import queue
import threading
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import structlog
from waiting import eventually

from shoal_workers import cloud_words as words
from shoal_workers.clouds import Aws, Azure, Cloud, CloudWatch, Gcp, Metadata, MetadataSilent, find_cloud
from shoal_workers.messages import GiveNotice, Noticed, Withdrawn
from shoal_workers.notices import Notices

NOW_S = 1_505_723_000.0  # 2017-09-18T08:23:20Z
SPOT = '{"action": "terminate", "time": "2017-09-18T08:25:20Z"}'
NOWHERE = Path("/nowhere")  # the firmware of a machine that says nothing of itself
REBALANCE = '{"noticeTime": "2017-09-18T08:23:10Z"}'


def azure_document(**event: Any) -> str:
    """As the documentation prints it."""
    whole = {
        "EventId": "f020ba2e-3bc0-4c40-a10b-86575a9eabd5",
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_0", "vm_1"],
        "NotBefore": "Mon, 18 Sep 2017 08:23:50 GMT",
        "Description": "Virtual machine is being preempted.",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [{**whole, **event}]})


def test_what_clouds_say_is_read() -> None:
    spot = words.aws_spot(SPOT, NOW_S)
    assert (spot.source, spot.why, spot.lead_s) == ("aws spot", "terminate", 120.0)
    assert words.aws_spot(SPOT, NOW_S + 500).lead_s == 0.0
    rebalance = words.aws_rebalance(REBALANCE, NOW_S)
    assert rebalance is not None and rebalance.lead_s == 590.0
    assert words.aws_rebalance(REBALANCE, NOW_S + 590.0) is None, "an agent that starts later leaves nothing for it"
    preempted, maintenance = words.gcp_preempted("TRUE"), words.gcp_maintenance("TERMINATE_ON_HOST_MAINTENANCE\n")
    assert preempted is not None and preempted.lead_s == 30.0
    assert maintenance is not None and maintenance.lead_s == 60.0
    assert words.gcp_preempted("FALSE") is words.gcp_maintenance("NONE") is None
    assert words.gcp_maintenance("MIGRATE_ON_HOST_MAINTENANCE") is None
    azure = words.azure_event(azure_document(), "vm_1", NOW_S)
    assert azure is not None and (azure.why, azure.lead_s) == ("preempt", 30.0)
    begun = words.azure_event(azure_document(EventStatus="Started", NotBefore=""), "vm_0", NOW_S)
    assert begun is not None and begun.lead_s == 0.0
    assert words.azure_event(azure_document(EventType="Freeze"), "vm_0", NOW_S) is None
    assert words.azure_event(azure_document(), "vm_7", NOW_S) is None
    for events in ("[]", "null"):
        assert words.azure_event(f'{{"DocumentIncarnation": 1, "Events": {events}}}', "vm_0", NOW_S) is None
    assert words.azure_event(azure_document(Resources=None), "vm_0", NOW_S) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"action": "stop"}', '{"action": "stop", "time": "soon"}'])
def test_what_is_none_of_it_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        words.aws_spot(text, NOW_S)
    with pytest.raises(ValueError):
        words.aws_rebalance(text, NOW_S)
    with pytest.raises(ValueError):
        words.azure_machine(text)
    with pytest.raises(ValueError):
        words.aws_spot('{"action": "stop", "time": "2017-09-18T08:25:20"}', NOW_S)
    for document in (
        '{"Events": [{}]}',
        '{"Events": 7}',
        azure_document(Resources="vm_0"),
        azure_document(Resources=7),
    ):
        with pytest.raises(ValueError):
            words.azure_event(document, "vm_0", NOW_S)


class Service(http.server.ThreadingHTTPServer):
    """A metadata service: `paths` say what it answers, and `token` what it wants to be shown first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: dict[str, str] = {}
        self.needed: dict[str, str] = {}
        self.flavor: str | None = None
        self.token: str | None = None
        self.broken: set[str] = set()
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.path in self.server.broken:
            self._say(500, "")
        elif self.server.token is not None and self.headers.get("X-aws-ec2-metadata-token") != self.server.token:
            self._say(401, "")
        elif any(self.headers.get(name) != value for name, value in self.server.needed.items()):
            self._say(403, "")
        elif self.path in self.server.paths:
            self._say(200, self.server.paths[self.path])
        else:
            self._say(404, "")

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self._say(200 if known and self.server.token else 405, self.server.token or "")

    def _say(self, status: int, text: str) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(NOW_S, usegmt=True))
        self.send_header("Content-Length", str(len(text)))
        if self.server.flavor is not None:
            self.send_header("Metadata-Flavor", self.server.flavor)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def service() -> Iterator[Service]:
    started = Service()
    thread = threading.Thread(target=started.serve_forever, args=(0.01,))
    thread.start()
    yield started
    started.shutdown()
    thread.join()
    started.server_close()


def found(service: Service, firmware: Path = NOWHERE) -> Cloud | None:
    return find_cloud(Metadata(service.url), firmware)


def said(cloud: Cloud) -> dict[str, GiveNotice | None]:
    return {source: cloud.notice(source) for source in cloud.sources}


def test_aws_is_asked_with_tokens(service: Service) -> None:
    service.token = "first"
    cloud = found(service)
    assert isinstance(cloud, Aws)
    assert said(cloud) == {words.AWS_SPOT: None, words.AWS_REBALANCE: None}
    service.token = "second"  # the first has expired
    service.paths["/latest/meta-data/spot/instance-action"] = SPOT
    service.paths["/latest/meta-data/events/recommendations/rebalance"] = REBALANCE
    assert cloud.notice(words.AWS_SPOT) == words.aws_spot(SPOT, NOW_S), "by the clock of the service"
    assert cloud.notice(words.AWS_REBALANCE) == words.aws_rebalance(REBALANCE, NOW_S)


def test_gcp_is_asked_as_it_wants(service: Service) -> None:
    instance = "/computeMetadata/v1/instance"
    service.needed, service.flavor = {"Metadata-Flavor": "Google"}, "Google"
    service.paths |= {f"{instance}/id": "1", f"{instance}/preempted": "FALSE", f"{instance}/maintenance-event": "NONE"}
    cloud = found(service)
    assert isinstance(cloud, Gcp)
    assert said(cloud) == {words.GCP_PREEMPTION: None, words.GCP_MAINTENANCE: None}
    service.paths[f"{instance}/preempted"] = "TRUE"
    assert cloud.notice(words.GCP_PREEMPTION) == words.gcp_preempted("TRUE")


def test_azure_is_asked_for_this_machine(service: Service) -> None:
    service.needed = {"Metadata": "true"}
    service.paths["/metadata/instance/compute?api-version=2021-02-01"] = '{"name": "vm_1"}'
    service.paths["/metadata/scheduledevents?api-version=2020-07-01"] = azure_document()
    cloud = found(service)
    assert isinstance(cloud, Azure)
    assert said(cloud) == {words.AZURE: words.azure_event(azure_document(), "vm_1", NOW_S)}


def test_what_is_no_cloud_is_none(service: Service) -> None:
    assert found(service) is None
    assert find_cloud(Metadata("http://127.0.0.1:9"), NOWHERE) is None
    with pytest.raises(MetadataSilent):
        Gcp(Metadata(service.url))


def test_a_service_that_was_away_when_it_was_first_asked_is_found_later(service: Service) -> None:
    """Whatever it knew meanwhile is told then."""
    notices, looks = Notices("n0"), [0]
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)

    def find() -> Aws | Gcp | Azure | None:
        looks[0] += 1
        return Aws(Metadata(service.url)) if looks[0] > 5 else None

    service.token = "token"
    service.paths["/latest/meta-data/spot/instance-action"] = SPOT
    watch = CloudWatch(notices, find, 0.01, 0.02)
    watch.start()
    try:
        told = events.get(timeout=10.0)
        assert isinstance(told, Noticed) and told.source == words.AWS_SPOT
    finally:
        watch.close()


def test_notices_come_go_and_outlive_silence(service: Service) -> None:
    service.token = "token"
    notices = Notices("n0")
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)
    watch = CloudWatch(notices, lambda: found(service), 0.01)
    watch.start()
    try:
        eventually(lambda: service.asked > 2, 10.0)
        service.paths["/latest/meta-data/spot/instance-action"] = SPOT
        told = events.get(timeout=10.0)
        assert isinstance(told, Noticed) and told.source == words.AWS_SPOT
        asked = service.asked
        service.paths["/latest/meta-data/spot/instance-action"] = "not what it should be"
        eventually(lambda: service.asked > asked + 4, 10.0)
        del service.paths["/latest/meta-data/spot/instance-action"]
        assert events.get(timeout=10.0) == Withdrawn(source=words.AWS_SPOT)
    finally:
        watch.close()
    assert events.empty()


INSTANCE = "/computeMetadata/v1/instance"
TWO_SOURCES = {
    words.AWS_SPOT: "/latest/meta-data/spot/instance-action",
    words.AWS_REBALANCE: "/latest/meta-data/events/recommendations/rebalance",
    words.GCP_PREEMPTION: f"{INSTANCE}/preempted",
    words.GCP_MAINTENANCE: f"{INSTANCE}/maintenance-event",
}


@pytest.mark.parametrize("source", TWO_SOURCES)
def test_a_source_that_fails_takes_no_other_with_it(service: Service, source: str) -> None:
    if source in Aws.sources:
        service.token = "token"
        service.paths |= dict(zip((TWO_SOURCES[each] for each in Aws.sources), (SPOT, REBALANCE), strict=True))
    else:
        service.flavor = "Google"
        service.paths |= {f"{INSTANCE}/id": "1", f"{INSTANCE}/preempted": "TRUE"}
        service.paths[f"{INSTANCE}/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    notices = Notices("n0")
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)
    cloud = found(service)
    assert cloud is not None
    service.broken.add(TWO_SOURCES[source])
    CloudWatch(notices, lambda: cloud, 0.01).look(cloud)
    told = events.get_nowait()
    assert isinstance(told, Noticed) and (told.source, source) in (cloud.sources, cloud.sources[::-1])
    assert events.empty()


@pytest.mark.parametrize("odd", ['{"Events": {"a": 1}}', "7", "not what it should be"])
def test_what_nobody_can_read_is_said_once_and_asking_goes_on(service: Service, odd: str) -> None:
    events_path = "/metadata/scheduledevents?api-version=2020-07-01"
    service.paths["/metadata/instance/compute?api-version=2021-02-01"] = '{"name": "vm_1"}'
    service.paths[events_path] = odd
    notices = Notices("n0")
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)
    watch = CloudWatch(notices, lambda: found(service), 0.01)
    with structlog.testing.capture_logs() as logs:
        watch.start()
        try:
            eventually(lambda: service.asked > 10, 10.0)
            service.paths[events_path] = azure_document()
            told = events.get(timeout=10.0)
            assert isinstance(told, Noticed) and told.source == words.AZURE
        finally:
            watch.close()
    assert len([each for each in logs if each["event"] == "no notices from it now; asking on"]) == 1


class Unforeseen(Azure):
    """An error that nobody has thought of, instead of an answer."""

    def notice(self, source: str) -> GiveNotice | None:
        asked = super().notice(source)
        if asked is None:
            raise TypeError("'NoneType' object is not iterable")
        return asked


def test_no_error_ends_the_thread_that_notices_come_by(service: Service) -> None:
    events_path = "/metadata/scheduledevents?api-version=2020-07-01"
    service.paths["/metadata/instance/compute?api-version=2021-02-01"] = '{"name": "vm_1"}'
    service.paths[events_path] = '{"Events": null}'
    notices, finds = Notices("n0"), iter([TypeError("no cloud")])
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)

    def find() -> Cloud:
        for error in finds:
            raise error
        return Unforeseen(Metadata(service.url))

    watch = CloudWatch(notices, find, 0.01)
    with structlog.testing.capture_logs() as logs:
        watch.start()
        try:
            eventually(lambda: service.asked > 5, 10.0)
            service.paths[events_path] = azure_document()
            told = events.get(timeout=10.0)
            assert isinstance(told, Noticed) and told.source == words.AZURE
        finally:
            watch.close()
    said = [each["source"] for each in logs if each["event"] == "no notices from it now; asking on"]
    assert said == ["its service", words.AZURE]


@pytest.mark.parametrize(
    ("said", "vendor"),
    [
        ({"sys_vendor": "Amazon EC2"}, "AWS"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "AWS"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "GCP"),
        (
            {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
            "Azure",
        ),
    ],
)
def test_a_machine_of_a_cloud_is_known_before_its_service_answers(
    service: Service, tmp_path: Path, said: dict[str, str], vendor: str
) -> None:
    """It is asked often: of a machine that says nothing of itself it would be asked again after a minute."""
    for name, text in said.items():
        (tmp_path / name).write_text(f"{text}\n")
    with pytest.raises(MetadataSilent, match=f"this is a machine of {vendor}, whose metadata service does not answer"):
        found(service, tmp_path)
    notices, events = Notices("n0"), queue.SimpleQueue[Noticed | Withdrawn]()
    notices.watch(events)
    watch = CloudWatch(notices, lambda: found(service, tmp_path), 0.01)
    watch.start()
    try:
        eventually(lambda: service.asked > 30, 10.0)
        service.paths["/latest/meta-data/spot/instance-action"] = SPOT
        service.token = "token"
        told = events.get(timeout=10.0)
        assert isinstance(told, Noticed) and told.source == words.AWS_SPOT
    finally:
        watch.close()


def test_other_machines_are_no_clouds(service: Service, tmp_path: Path) -> None:
    (tmp_path / "sys_vendor").write_text("Microsoft Corporation\n")  # one under Hyper-V
    (tmp_path / "product_name").write_text("Virtual Machine\n")
    assert found(service, tmp_path) is None
