"""Webhooks: what they are told, how it is signed, that it arrives, and where it never goes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, start_control_plane, story
from fastapi import FastAPI
from receivers import Receiver, receiving
from servers import free_ports
from sqlalchemy import update
from waiting import eventually

from shoal import cli
from shoal_recovery.journal import Entry, JobState
from shoal_service import job_figures, signing
from shoal_service.awake import Awake
from shoal_service.couriers import PAUSES_S, pause_s
from shoal_service.database import Database
from shoal_service.guarded_http import Poster, Refused, check_url, is_public
from shoal_service.lookout import Lookout
from shoal_service.models_webhooks import WebhookRow
from shoal_service.progress import stuck

OWN = {"webhook_private": True}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def is_signed(headers: dict[str, str], body: bytes, secret: str) -> bool:
    """As a receiver finds out."""
    signed = b".".join((headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body))
    made = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    found = [each.partition(",") for each in headers["webhook-signature"].split(" ")]
    return any(v == "v1" and hmac.compare_digest(base64.b64decode(signature), made) for v, _, signature in found)


def test_signatures_are_those_of_the_standard() -> None:
    """An example that libraries of Standard Webhooks are tested with."""
    found = signing.headers(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        '{"test": 2432232314}',
    )
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert found["webhook-timestamp"] == "1614265330"


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fd12::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::"),
    ],
)
def test_addresses_that_are_nobodys_business(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "64:ff9b::101:101"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://hooks.example.invalid/x", "must begin with https://"),
        ("ftp://hooks.example.invalid/x", "must begin with https://"),
        ("https://", "names no server"),
        ("https://127.0.0.1/x", "private network"),
        ("https://[::1]/x", "private network"),
        ("https://169.254.169.254/latest", "private network"),
        ("https://localhost/x", "private network"),
        ("https://metadata.google.internal/x", "private network"),
        ("https://user:pass@hooks.example.invalid/", "no user or password"),
        ("https://hooks.example.invalid/a b", "characters"),
        ("https://hooks.example.invalid:99999/", "is not a URL"),
    ],
)
def test_urls_that_are_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_url(url, allow_private=False)


def test_urls_that_are_taken() -> None:
    check_url("https://hooks.example.invalid:8443/x?y=z", allow_private=False)
    check_url("http://127.0.0.1:9/x", allow_private=True)


async def test_a_name_of_a_private_address_is_refused_when_it_is_looked_up(receiver: Receiver) -> None:
    poster = Poster(allow_private=False, timeout_s=10.0)
    try:
        with pytest.raises(Refused, match="private network"):
            await poster.post(receiver.url.replace("127.0.0.1", "localhost"), {}, b"{}")
    finally:
        await poster.close()
    assert not receiver.heard


def test_pauses_grow_to_a_day_and_end() -> None:
    assert [pause_s(number, 0.5) for number in range(1, len(PAUSES_S) + 1)] == pytest.approx(PAUSES_S)
    assert pause_s(len(PAUSES_S) + 1, 0.5) is None
    assert list(PAUSES_S) == sorted(PAUSES_S)
    assert 0.9 * 5 <= pause_s(1, 0.0) < pause_s(1, 0.99) <= 1.1 * 5  # type: ignore[operator]


def test_when_a_job_is_stuck() -> None:
    """By what its journal says, and up to when it was heard."""
    begun = job_figures.fresh(1000.0)
    running = job_figures.advance(begun, "state_changed", 1010.0, {"state": "running"})
    stepped = job_figures.advance(running, "step_done", 1500.0, {"duration_s": 1.0, "tokens": 8})
    queued = (JobState.QUEUED, begun)
    assert stuck(queued[1], queued[0], None, 1e9, 600.0) is None, "it waits for its turn"
    assert stuck(running, JobState.RUNNING, None, 1610.0, 600.0) is None
    found = stuck(running, JobState.RUNNING, None, 1611.0, 600.0)
    assert found is not None and (found.code, found.since_s) == ("no_steps", 1010.0)
    assert stuck(stepped, JobState.RUNNING, 1.0, 2100.0, 600.0) is None
    assert stuck(stepped, JobState.RUNNING, 1.0, 2101.0, 600.0) is not None
    assert stuck(stepped, JobState.RUNNING, 100.0, 2400.0, 600.0) is None, "its steps take that long"
    assert stuck(stepped, JobState.RUNNING, 1.0, 1400.0, 600.0) is None, "nothing was heard since"
    for state in ("starting", "recovering", "waiting", "draining"):
        moved = job_figures.advance(stepped, "state_changed", 2000.0, {"state": state})
        assert stuck(moved, JobState(state), 1.0, 2600.0, 600.0) is None
        late = stuck(moved, JobState(state), 1.0, 2601.0, 600.0)
        assert late is not None and late.code == state
        assert stuck(moved, JobState.CANCELLING, 1.0, 9999.0, 600.0) is None, "its journal has not heard of that yet"
    for state in ("paused", "succeeded", "failed", "cancelled"):
        rests = job_figures.advance(stepped, "state_changed", 2000.0, {"state": state})
        assert stuck(rests, JobState(state), 1.0, 1e9, 600.0) is None


def begin(api: httpx.Client, entries: list[Entry], **changes: Any) -> str:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping(**changes)))["id"])
    ok(Connector(http=api).renew())
    ok(Connector(http=api).send(job_id, entries))
    return job_id


def told_story(started_s: float = 60.0) -> list[Entry]:
    return story(job_mapping(), started_at_s=time.time() - started_s).entries


def hook(api: httpx.Client, url: str, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = ok(api.post("/v1/webhooks", json={"url": url, **more}))
    return made


def deliveries(api: httpx.Client, webhook: str, **params: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ok(api.get(f"/v1/webhooks/{webhook}/deliveries", params=params))["items"]
    return found


@pytest.mark.parametrize("settings", [OWN], indirect=True)
def test_a_webhook_is_told_once_of_each_thing_with_a_signature(api: httpx.Client, receiver: Receiver) -> None:
    made = hook(api, receiver.url)
    some = hook(api, receiver.url + "/some", events=["job.failed"])
    assert made["secret"].startswith("whsec_") and made["secret"] != some["secret"]
    entries = told_story()
    job_id = begin(api, entries)
    ok(Connector(http=api).send(job_id, entries))  # once more
    eventually(lambda: len(receiver.heard) >= 2)
    eventually(lambda: {each["state"] for each in deliveries(api, made["id"])} == {"delivered"})
    assert receiver.types() == ["job.recovered", "job.succeeded"], "and nothing of nodes that joined"
    for headers, body in receiver.heard:
        assert is_signed(headers, body, made["secret"]) and not is_signed(headers, body, some["secret"])
        assert headers["content-type"] == "application/json"
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    recovered, succeeded = sorted(receiver.told(), key=lambda each: str(each["type"]))
    assert recovered["data"].items() >= {"job": job_id, "project": "default", "cause": "node_lost"}.items()
    assert recovered["data"]["nodes_lost"] == ["spot-1"] and recovered["data"]["redone_steps"] == 1
    assert succeeded["data"].items() >= {"job": job_id, "name": "tiny", "step": 60}.items()
    ids = {headers["webhook-id"] for headers, _ in receiver.heard}
    assert ids == {each["id"] for each in deliveries(api, made["id"])} and len(ids) == 2
    assert not deliveries(api, some["id"])


def test_secrets_are_told_once_and_kept_nowhere(api: httpx.Client, app: FastAPI, tmp_path: Path) -> None:
    made = hook(api, "https://hooks.example.invalid/x")
    renewed = ok(api.post(f"/v1/webhooks/{made['id']}/secret"))
    assert renewed["secret"] != made["secret"]
    for path in ("/v1/webhooks", f"/v1/webhooks/{made['id']}", "/v1/audit-events"):
        assert "whsec_" not in api.get(path).text
    if app.state.services.settings.resolved_database_url.startswith("sqlite"):
        for path in tmp_path.rglob("shoal.db*"):
            for secret in (made["secret"], renewed["secret"]):
                assert secret.removeprefix("whsec_").encode() not in path.read_bytes()


@pytest.mark.parametrize("settings", [OWN], indirect=True)
def test_the_secret_before_signs_as_well_for_as_long_as_is_said(api: httpx.Client, receiver: Receiver) -> None:
    made = hook(api, receiver.url)
    path = f"/v1/webhooks/{made['id']}"
    renewed = ok(api.post(f"{path}/secret", json={"overlap_s": 3600}))
    left = datetime.fromisoformat(ok(api.get(path))["old_secret_until"]).timestamp() - time.time()
    assert 3500 < left <= 3600
    ok(api.post(f"{path}/ping"))
    eventually(lambda: len(receiver.heard) == 1)
    headers, body = receiver.heard[0]
    assert is_signed(headers, body, made["secret"]) and is_signed(headers, body, renewed["secret"])
    at_once = ok(api.post(f"{path}/secret", json={"overlap_s": 0}))
    assert at_once["old_secret_until"] is None
    ok(api.post(f"{path}/ping"))
    eventually(lambda: len(receiver.heard) == 2)
    headers, body = receiver.heard[1]
    assert is_signed(headers, body, at_once["secret"]) and headers["webhook-signature"].count("v1,") == 1
    refused = api.post(f"{path}/secret", json={"overlap_s": -1})
    assert (refused.status_code, refused.json()["param"]) == (422, "overlap_s")


@pytest.mark.parametrize("settings", [OWN], indirect=True)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_secret_before_ends_when_it_was_said(api: httpx.Client, app: FastAPI, receiver: Receiver) -> None:
    made = hook(api, receiver.url)
    path = f"/v1/webhooks/{made['id']}"
    ok(api.post(f"{path}/secret"))
    assert ok(api.get(path))["old_secret_until"] is not None, "by default there is time to take the new one"
    asyncio.run(_end_overlap(app.state.services.settings.resolved_database_url))
    assert ok(api.get(path))["old_secret_until"] is None
    ok(api.post(f"{path}/ping"))
    eventually(lambda: len(receiver.heard) == 1)
    headers, body = receiver.heard[0]
    assert not is_signed(headers, body, made["secret"]) and headers["webhook-signature"].count("v1,") == 1


async def _end_overlap(database_url: str) -> None:
    database = Database(database_url)
    async with database.write() as session:
        await session.execute(update(WebhookRow).values(old_until_s=time.time() - 1))
    await database.close()


def test_whose_webhooks_are_whose(api: httpx.Client) -> None:
    ok(api.post("/v1/projects", json={"id": "other"}))

    def client(**what: Any) -> httpx.Client:
        secret = ok(api.post("/v1/tokens", json={"name": "test", **what}))["secret"]
        return httpx.Client(base_url=api.base_url, headers={"Authorization": f"Bearer {secret}"})

    with client(role="admin", project="default") as mine, client(role="admin", project="other") as theirs:
        made = hook(mine, "https://hooks.example.invalid/x")
        assert made["project"] == "default"
        everything = hook(api, "https://hooks.example.invalid/all", project=None)
        assert everything["project"] is None
        assert [each["id"] for each in ok(mine.get("/v1/webhooks"))["items"]] == [made["id"]]
        assert len(ok(api.get("/v1/webhooks"))["items"]) == 2
        assert ok(theirs.get("/v1/webhooks"))["items"] == []
        for webhook in (made, everything):
            foreign = theirs.get(f"/v1/webhooks/{webhook['id']}")
            assert (foreign.status_code, foreign.json()["code"]) == (404, "webhook_not_found")
        assert (
            theirs.post("/v1/webhooks", json={"url": "https://x.example.invalid", "project": None}).status_code == 403
        )
        foreign = theirs.post("/v1/webhooks", json={"url": "https://x.example.invalid", "project": "default"})
        assert (foreign.status_code, foreign.json()["code"]) == (404, "project_not_found")
        for url in ("https://10.0.0.1/x", "http://hooks.example.invalid"):
            refused = mine.post("/v1/webhooks", json={"url": url})
            assert (refused.status_code, refused.json()["param"]) == (422, "url")
            assert mine.patch(f"/v1/webhooks/{made['id']}", json={"url": url}).status_code == 422
        changed = ok(mine.patch(f"/v1/webhooks/{made['id']}", json={"events": ["job.failed"], "enabled": False}))
        assert (changed["events"], changed["enabled"]) == (["job.failed"], False)
        unknown = mine.patch(f"/v1/webhooks/{made['id']}", json={"events": ["job.exploded"]})
        assert (unknown.status_code, unknown.json()["param"]) == (422, "events[0]")
        hook(theirs, "https://hooks.example.invalid/theirs")
        assert mine.delete(f"/v1/webhooks/{made['id']}").status_code == 204
        assert mine.get(f"/v1/webhooks/{made['id']}").status_code == 404
        assert api.delete("/v1/projects/other").status_code == 204, "and what was told of it"


@pytest.mark.parametrize("settings", [OWN], indirect=True)
def test_one_that_hangs_delays_nobody(api: httpx.Client, receiver: Receiver) -> None:
    with receiving() as hangs:
        hangs.answers.clear()
        slow = hook(api, hangs.url)
        for _ in range(30):
            ok(api.post(f"/v1/webhooks/{slow['id']}/ping"))
        eventually(lambda: len(hangs.heard) >= 1)
        quick = hook(api, receiver.url, events=["job.succeeded"])
        job_id = begin(api, told_story())
        assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["state"] == "succeeded"
        eventually(lambda: receiver.types() == ["job.succeeded"])
        assert not [each for each in deliveries(api, slow["id"]) if each["state"] == "delivered"]
        assert len(hangs.heard) <= 2, "no more at once"
        eventually(lambda: deliveries(api, quick["id"])[0]["state"] == "delivered")


@pytest.mark.parametrize("settings", [OWN], indirect=True)
def test_a_receiver_that_refuses(api: httpx.Client, receiver: Receiver) -> None:
    receiver.status = 500
    made = hook(api, receiver.url)
    sent = ok(api.post(f"/v1/webhooks/{made['id']}/ping"))
    found = eventually(lambda: [each for each in deliveries(api, made["id"]) if each["attempts"]])[0]
    assert (found["id"], found["state"], found["status"]) == (sent["id"], "pending", 500)
    assert found["problem"] == "answered 500" and found["next_attempt_at"] > found["last_attempt_at"]
    receiver.status = 204
    ok(api.post(f"/v1/webhooks/{made['id']}/deliveries/{sent['id']}/retry"))
    eventually(lambda: deliveries(api, made["id"], state="delivered"))
    assert {headers["webhook-id"] for headers, _ in receiver.heard} == {sent["id"]}, "the same, however often"
    receiver.status = 410
    ok(api.post(f"/v1/webhooks/{made['id']}/ping"))
    gone = eventually(lambda: [each for each in ok(api.get("/v1/webhooks"))["items"] if not each["enabled"]])[0]
    assert "410" in gone["problem"]


@pytest.mark.parametrize("settings", [OWN], indirect=True)
def test_budgets(api: httpx.Client, receiver: Receiver, tmp_path: Path) -> None:
    """Four nodes of 15 dollars an hour together, for ten hours."""
    made = hook(api, receiver.url, events=["job.budget_warning", "job.budget_spent"])
    place = {"uri": f"file://{tmp_path}/store"}
    job_id = begin(api, told_story(36000.0)[:10], limits={"budget_usd": 165}, checkpoint=place)
    eventually(lambda: receiver.types() == ["job.budget_warning"])
    assert "of its budget is spent" in receiver.told()[0]["data"]["reason"]
    ok(api.post(f"/v1/jobs/{job_id}/limits", json={"budget_usd": 100}))
    eventually(lambda: receiver.types() == ["job.budget_spent", "job.budget_warning"])
    assert len(deliveries(api, made["id"])) == 2, "each of them once"


@pytest.mark.parametrize("settings", [OWN | {"no_progress_s": 30.0}], indirect=True)
def test_a_job_that_makes_no_progress(api: httpx.Client, app: FastAPI, receiver: Receiver, stack: ExitStack) -> None:
    made = hook(api, receiver.url, events=["job.stuck"])
    entries = told_story(3600.0)
    job_id = begin(api, entries[:10])

    database = Database(app.state.services.settings.resolved_database_url)
    lookout = Lookout(database, Awake(), 30.0)
    runner = stack.enter_context(asyncio.Runner())
    stack.callback(lambda: runner.run(database.close()))

    def look() -> None:
        runner.run(lookout.look())

    look()
    look()
    eventually(lambda: len(receiver.heard) == 1)
    told = receiver.told()[0]["data"]
    assert (told["job"], told["code"], told["step"]) == (job_id, "no_steps", 7)
    assert told["reason"].startswith("runs, and no step was done for")
    assert len(deliveries(api, made["id"])) == 1, "of one time that it is stuck it tells once"
    ok(Connector(http=api).send(job_id, entries[10:12]))
    look()
    eventually(lambda: len(receiver.heard) == 2)


def test_what_is_to_be_told_survives_a_kill(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    given = {"webhook_private": "true"}
    plane = start_control_plane(tmp_path / "data", **given)
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as api:
        made = hook(api, f"http://127.0.0.1:{port}/x", events=["job.succeeded"])
        begin(api, told_story())  # nobody listens there yet
        eventually(lambda: [each for each in deliveries(api, made["id"]) if each["attempts"]])
        plane.kill()
    with receiving(port) as receiver:
        plane = start_control_plane(tmp_path / "data", int(plane.url.rpartition(":")[2]), **given)
        try:
            eventually(lambda: receiver.types() == ["job.succeeded"], 60)
            assert is_signed(*receiver.heard[0], made["secret"]), "the secret is the same after a restart"
            with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as api:
                eventually(lambda: deliveries(api, made["id"])[0]["state"] == "delivered")
        finally:
            plane.stop()


def test_two_replicas_tell_it_once(postgres: Any, migrated: str, tmp_path: Path, receiver: Receiver) -> None:
    given = {"database_url": postgres.new_database(migrated), "webhook_private": "true"}
    with control_plane(tmp_path / "one", **given) as one:
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / "admin.token").write_text(one.token)
        with control_plane(tmp_path / "two", **given) as two:
            askers = [httpx.Client(base_url=each.url, headers=one.headers, timeout=30) for each in (one, two)]
            made = hook(askers[0], receiver.url, events=["job.succeeded"])
            for number in range(10):
                begin(askers[number % 2], told_story())
            eventually(lambda: len(deliveries(askers[1], made["id"], state="delivered")) == 10)
            assert len({headers["webhook-id"] for headers, _ in receiver.heard}) == 10
            assert len(receiver.heard) == 10
            for asker in askers:
                asker.close()


@pytest.fixture
def shell(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line: status, standard output and error."""
    monkeypatch.setenv("SHOAL_SERVER", plane.url)
    monkeypatch.setenv("SHOAL_TOKEN", plane.token)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.run(["webhooks", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_the_command_line(shell: Callable[..., tuple[int, str, str]]) -> None:
    made = json.loads(shell("create", "https://hooks.example.invalid/x", "--event", "job.failed", "--json")[1])
    assert made["events"] == ["job.failed"] and made["secret"]
    listed = shell("list")[1]
    assert made["id"] in listed and "enabled" in listed and "whsec_" not in listed
    renewed = shell("renew-secret", made["id"])[1]
    assert renewed.strip().startswith("whsec_") and renewed.strip() != made["secret"]
    pinged = json.loads(shell("ping", made["id"], "--json")[1])
    assert pinged["id"] in shell("deliveries", made["id"])[1]
    assert "pending" in shell("retry", made["id"], pinged["id"])[1]
    assert "disabled" in shell("change", made["id"], "--disable")[1]
    status, _, err = shell("create", "http://10.0.0.1/x")
    assert status == 2 and "url = 'http://10.0.0.1/x': must begin with https://" in err
    assert shell("create", "https://x.example.invalid", "--project", "default", "--all-projects")[0] == 2
    assert shell("delete", made["id"])[0] == 0
    assert made["id"] not in shell("list")[1]
