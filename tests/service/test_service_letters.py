"""Webhooks for people: lines for a chat, and letters through a real mail server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MessageHandler
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, story
from receivers import Receiver, receiving
from servers import free_ports
from waiting import eventually

from shoal import cli
from shoal_service.mail import check_mail_url, is_address, mail_server
from shoal_service.settings import Settings
from shoal_service.told_words import slack_body, words


class Letters(MessageHandler):
    def __init__(self) -> None:
        super().__init__()
        self.came: list[Message] = []

    def handle_message(self, message: Message) -> None:
        self.came.append(message)


@pytest.fixture
def letters() -> Iterator[tuple[Letters, int]]:
    handler, port = Letters(), free_ports(1)[0]
    controller = Controller(handler, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield handler, port
    finally:
        controller.stop()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def client(plane: ControlPlane) -> httpx.Client:
    return httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30)


def hook(api: httpx.Client, url: str, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = ok(api.post("/v1/webhooks", json={"url": url, **more}))
    return made


def deliveries(api: httpx.Client, webhook: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ok(api.get(f"/v1/webhooks/{webhook}/deliveries"))["items"]
    return found


def told(kind: str, **data: Any) -> str:
    known = {"job": "job_1", "project": "default", "name": "tiny", "step": 40}
    return json.dumps({"type": kind, "timestamp": "2026-01-01T00:00:00.000Z", "data": known | data})


def test_what_happened_in_words() -> None:
    title, text = words(told("job.failed", reason="the script ended with 1"), "https://shoal.example.org/")
    assert title == "tiny has failed"
    assert text.splitlines() == [
        "Job job_1 of project default, step 40, at 2026-01-01T00:00:00.000Z.",
        "The script ended with 1.",
        "https://shoal.example.org/jobs/job_1",
    ]
    _, text = words(told("job.recovered", total_s=0.43, redone_steps=1, nodes_lost=["a", "b"]), None)
    assert "It took 430 ms; 1 steps redone.\nNodes lost: a, b." in text
    assert words(json.dumps({"type": "ping", "data": {"webhook": "hook_1"}}), None)[0] == "Shoal: a test"
    title, _ = words(told("job.failed", name="a\r\nBcc: x@y.z"), None)
    assert "\n" not in title and "\r" not in title


def test_names_are_no_markup_of_a_chat() -> None:
    text = json.loads(slack_body(told("job.failed", name="<!channel> & *x*"), None))["text"]
    assert text.startswith("*&lt;!channel&gt; &amp; x has failed*\n")


@pytest.mark.parametrize(
    ("url", "sender", "problem"),
    [
        ("http://mail.example.org", "a@example.org", "must be smtp://"),
        ("smtp://", "a@example.org", "must be smtp://"),
        ("smtp://mail.example.org/inbox", "a@example.org", "must be smtp://"),
        ("smtp://mail.example.org", None, "SHOAL_MAIL_FROM"),
        ("smtp://mail.example.org", "Team <a@example.org>", "SHOAL_MAIL_FROM"),
    ],
)
def test_mail_servers_that_are_none(url: str, sender: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        mail_server(url, sender, ())


def test_operators_are_told_what_is_wrong_with_their_mail_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SMTP_URL", "smtp://me:secret-word@mail.example.org")
    with pytest.raises(ValueError, match="SHOAL_MAIL_FROM") as refused:
        Settings()
    assert "secret-word" not in str(refused.value)
    monkeypatch.setenv("SHOAL_MAIL_FROM", "shoal@example.org")
    found = Settings().mail
    assert found is not None and (found.port, found.user, found.domains) == (587, "me", frozenset({"example.org"}))
    assert "secret-word" not in repr(found) and "secret-word" not in repr(Settings())


def test_letters_go_where_the_operator_lets_them() -> None:
    server = mail_server("smtps://mail.example.org", "shoal@example.org", ["team.example.org"])
    assert (server.port, server.encrypted) == (465, True)
    check_mail_url("mailto:a@Team.example.org", server)
    for url, problem in (
        ("mailto:a@example.org", "team.example.org alone"),
        ("https://team.example.org", "must be mailto:"),
        ("mailto:a@team.example.org,b@team.example.org", "must be mailto:"),
        ("mailto:a@team.example.org?bcc=c@team.example.org", "must be mailto:"),
        ("mailto:a@team.example.org\r\nBcc: c@x.org", "must be mailto:"),
    ):
        with pytest.raises(ValueError, match=problem):
            check_mail_url(url, server)
    with pytest.raises(ValueError, match="SHOAL_SMTP_URL"):
        check_mail_url("mailto:a@example.org", None)
    assert not is_address("a@b..c") and not is_address("@b.c") and is_address("a+b@c.d")


def run_a_job(api: httpx.Client) -> str:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(Connector(http=api).renew())
    ok(Connector(http=api).send(job_id, story(job_mapping(), started_at_s=time.time() - 60).entries))
    return job_id


def test_people_are_written_to_and_a_chat_is_told(
    tmp_path: Path, letters: tuple[Letters, int], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, port = letters
    settings = {
        "smtp_url": f"smtp://127.0.0.1:{port}",
        "mail_from": "shoal@example.org",
        "webhook_private": "true",
        "public_url": "https://shoal.example.org",
    }
    with control_plane(tmp_path, **settings) as plane, client(plane) as api:
        monkeypatch.setenv("SHOAL_SERVER", plane.url)
        monkeypatch.setenv("SHOAL_TOKEN", api.headers["Authorization"].removeprefix("Bearer "))
        create = ["webhooks", "create", "mailto:team@example.org", "--form", "email", "--event", "job.succeeded"]
        assert cli.run(create) == 0
        chat = hook(api, receiver.url, form="slack", events=["job.recovered"])
        assert chat["form"] == "slack"
        for body, field in (
            ({"url": receiver.url, "form": "email"}, "must be mailto:"),
            ({"url": "mailto:team@elsewhere.org", "form": "email"}, "example.org alone"),
            ({"url": "mailto:team@example.org"}, "must begin with https:// or http://"),
        ):
            refused = api.post("/v1/webhooks", json=body)
            assert refused.status_code == 422 and field in refused.json()["detail"], refused.text
        job_id = run_a_job(api)
        eventually(lambda: len(handler.came) == 1 and len(receiver.heard) == 1)
        (letter,) = handler.came
        assert (letter["To"], letter["Subject"]) == ("team@example.org", "tiny has succeeded")
        assert f"https://shoal.example.org/jobs/{job_id}" in letter.get_payload()
        (line,) = receiver.told()
        assert line["text"].startswith("*tiny steps again*\n") and "Nodes lost: spot-1." in line["text"]
        mails = next(each for each in ok(api.get("/v1/webhooks"))["items"] if each["form"] == "email")
        eventually(lambda: [each["state"] for each in deliveries(api, mails["id"])] == ["delivered"])
        changed = api.patch(f"/v1/webhooks/{mails['id']}", json={"form": "json"})
        assert changed.status_code == 422, "an address of mail is none of HTTP"


def test_a_mail_server_that_is_away_is_tried_again(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    settings = {"smtp_url": f"smtp://127.0.0.1:{port}", "mail_from": "shoal@example.org"}
    with control_plane(tmp_path, **settings) as plane, client(plane) as api:
        made = hook(api, "mailto:team@example.org", form="email")
        ok(api.post(f"/v1/webhooks/{made['id']}/ping"))
        eventually(lambda: deliveries(api, made["id"])[0]["attempts"] == 1)
        (delivery,) = deliveries(api, made["id"])
        assert delivery["state"] == "pending" and f"127.0.0.1:{port} did not take the letter" in delivery["problem"]
        handler = Letters()
        controller = Controller(handler, hostname="127.0.0.1", port=port)
        controller.start()
        try:
            eventually(lambda: len(handler.came) == 1, 30)
        finally:
            controller.stop()
        assert handler.came[0]["Message-ID"] == f"<{delivery['id']}@example.org>"
