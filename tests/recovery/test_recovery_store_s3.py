"""What only S3 servers do: refuse credentials, lack buckets, fall silent, answer ranges oddly, ignore conditions."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import layouts
import pytest
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError
from servers import READER, boto3_environment, free_ports, new_place

from shoal_planner.job import ModelSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery import multipart
from shoal_recovery.checkpoints import commit, put_shard, remove_orphans, shard_name
from shoal_recovery.errors import StoreConflict, StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Manifest
from shoal_recovery.store import Entry, open_store
from shoal_recovery.store_s3 import S3Store


def _point_boto3_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in boto3_environment(endpoint).items():
        monkeypatch.setenv(name, value)


def test_wrong_credentials_are_said_so(
    s3_uri: str, s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "wrong-" + s3_environment[name])
            store = open_store(s3_uri)
            for call in (store.check_writable, lambda store=store: store.put_new("a", b"x")):
                with pytest.raises(StoreUnreachable, match="refuses the credentials") as error:
                    call()
                assert s3_environment["AWS_ENDPOINT_URL_S3"] in str(error.value)


def test_a_bucket_that_is_not_there_is_named(moto_environment: dict[str, str]) -> None:
    """SeaweedFS would make it: its administrators may."""
    store = open_store("s3://no-such-bucket/x")
    for call in (store.check_writable, lambda: store.put_new("a", b"x"), lambda: store.list("")):
        with pytest.raises(StoreError, match="no bucket 'no-such-bucket'"):
            call()


@pytest.mark.parametrize("environment", ["s3_environment", "rclone_environment"])
def test_a_vanished_bucket_is_refused_by_real_servers(environment: str, request: pytest.FixtureRequest) -> None:
    """And not made anew, as an administrator's first object would at SeaweedFS."""
    request.getfixturevalue(environment)
    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket="short-lived")
    store = open_store("s3://short-lived/x")
    store.check_writable()
    client.delete_bucket(Bucket="short-lived")
    with pytest.raises(StoreRefused, match="no bucket 'short-lived'"):
        store.check_writable()
    assert "short-lived" not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]


def test_who_may_not_write_is_refused(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(s3_uri).put("there", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER[1])
    store = open_store(s3_uri)
    assert store.read("there") == b"x"
    with pytest.raises(StoreRefused, match="denies these credentials this access to bucket 'shoal-tests'"):
        store.check_writable()


def test_without_credentials_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    _point_boto3_to("http://127.0.0.1:9", monkeypatch)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreUnreachable, match=r"no credentials for http://127\.0\.0\.1:9"):
        open_store("s3://bucket/x").read("a")


def test_a_configuration_that_cannot_be_used_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _point_boto3_to("not a url", monkeypatch)
    with pytest.raises(StoreError, match=r"s3://bucket/x: the configuration of S3 access cannot be used.*not a url"):
        open_store("s3://bucket/x")


def test_a_bucket_name_that_cannot_be_is_said_so(s3_environment: dict[str, str]) -> None:
    with pytest.raises(StoreError, match="Invalid bucket name") as error:
        open_store("s3://a bad name/x").read("a")
    assert not isinstance(error.value, StoreUnreachable)


def _impatient(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """As `open_store` makes it, but for the timeouts."""
    _point_boto3_to(endpoint, monkeypatch)
    config = Config(connect_timeout=0.3, read_timeout=0.3, retries={"mode": "standard", "total_max_attempts": 1})
    return S3Store(
        "s3://bucket/x", bucket="bucket", prefix="x", client=boto3.session.Session().client("s3", config=config)
    )


def _attempts(store: S3Store) -> list[Callable[[], object]]:
    large = bytes(17 << 20)
    return [
        lambda: store.read("a"),
        lambda: store.put("a", b"x"),
        lambda: store.put("a", large),
        lambda: store.list(""),
        lambda: store.delete("a"),
        store.check_writable,
    ]


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    for attempt in _attempts(_impatient(endpoint, monkeypatch)):
        with pytest.raises(StoreUnreachable, match=f"{endpoint} does not answer"):
            attempt()
    with pytest.raises(StoreUnreachable, match=endpoint):
        open_store("s3://bucket/x").check_writable()


def test_a_server_that_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreUnreachable, match=f"{endpoint} does not answer"):
            _impatient(endpoint, monkeypatch).read("a")


# What servers say of a moment, each in its own words: a status that means it with any code, or a code that does.
_PASSING = {
    "starting": (503, "XMinioServerNotInitialized"),
    "too many": (429, "TooMany"),
    "timed out": (400, "RequestTimeout"),
    "in conflict": (409, "ConditionalRequestConflict"),
}


class _Lax(BaseHTTPRequestHandler):
    """An S3 server of the careless kind: accepts any signature, overwrites whatever the condition says, answers ranges
    with status 200. `mode` makes it worse."""

    protocol_version = "HTTP/1.1"
    server: _LaxServer

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.mode == "rival":
            body = b"the rival's"
        elif self.server.mode == "busy":
            return self._answer(503, b"<Error><Code>SlowDown</Code><Message>later</Message></Error>")
        elif self.server.mode in _PASSING:
            status, code = _PASSING[self.server.mode]
            return self._answer(status, f"<Error><Code>{code}</Code><Message>later</Message></Error>".encode())
        elif self.server.mode == "odd":
            return self._answer(418, b"<Error><Code>Teapot</Code><Message>short and stout</Message></Error>")
        mark, taken = self.headers.get("x-amz-meta-shoal-writer"), self.path in self.server.objects
        refused = b"<Error><Code>PreconditionFailed</Code></Error>"
        if self.server.mode == "strict, lost answer" and taken:
            return self._answer(412, refused)
        self.server.objects[self.path] = (body, mark)
        if self.server.mode == "strict, lost answer" and mark:
            return self._answer(412, refused)
        return self._answer(200)

    def do_DELETE(self) -> None:
        if self.server.mode == "no conditional deletes" and self.headers.get("If-Match"):
            return self._answer(501, b"<Error><Code>NotImplemented</Code></Error>")
        self.server.objects.pop(self.path, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        bucket, _, query = self.path.partition("?")
        if "list-type=2" in query:
            return self._list(bucket, parse_qs(query).get("prefix", [""])[0])
        if self.path not in self.server.objects:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        body, mark = self.server.objects[self.path]
        headers = {"x-amz-meta-shoal-writer": mark} if mark else {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.server.mode != "no ranges":
            first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            body = body[first : last + 1]
        return self._answer(200, body, headers)

    def _list(self, bucket: str, prefix: str) -> None:
        there = {path.removeprefix(f"{bucket}/"): len(body) for path, body in dict(self.server.objects).items()}
        found = "".join(
            f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>tag</ETag></Contents>"
            for key, size in there.items()
            if key.startswith(prefix)
        )
        self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self.server.mode == "cut short" and body else body)
            if self.server.mode == "cut short":
                self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class _LaxServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Lax)
        self.objects: dict[str, tuple[bytes, str | None]] = {}
        self.mode = ""


@pytest.fixture
def lax() -> Iterator[_LaxServer]:
    server = _LaxServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def lax_store(lax: _LaxServer, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    return _impatient(f"http://127.0.0.1:{lax.server_address[1]}", monkeypatch)


def test_a_part_may_come_with_status_200(lax_store: S3Store) -> None:
    lax_store.put("a", b"0123456789")
    assert lax_store.read("a", 3, 4) == b"3456"
    with pytest.raises(StoreError, match="has 2 of the 5 bytes asked for at 8"):
        lax_store.read("a", 8, 5)


def test_a_server_that_ignores_ranges_is_found_out(lax: _LaxServer, lax_store: S3Store) -> None:
    lax_store.put("a", b"0123456789")
    lax.mode = "no ranges"
    with pytest.raises(StoreError, match="did not answer with the part of a that was asked for"):
        lax_store.read("a", 0, 4)
    with pytest.raises(StoreError, match="did not answer with the part of a that was asked for"):
        lax_store.read_into("a", 0, [memoryview(bytearray(4))])


def test_an_answer_cut_short_is_found_out(lax: _LaxServer, lax_store: S3Store) -> None:
    lax_store.put("a", b"0123456789")
    lax.mode = "cut short"
    with pytest.raises(StoreUnreachable, match="does not answer"):
        lax_store.read("a")
    with pytest.raises(StoreUnreachable, match="does not answer"):
        lax_store.read_into("a", 0, [memoryview(bytearray(3)), memoryview(bytearray(7))])


def test_put_new_holds_where_conditions_are_ignored(lax: _LaxServer, lax_store: S3Store) -> None:
    lax_store.put_new("m", b"first")
    with pytest.raises(StoreConflict):
        lax_store.put_new("m", b"second")
    assert lax_store.read("m") == b"first"
    lax.mode = "rival"
    with pytest.raises(StoreConflict, match="written by somebody else at the same time"):
        lax_store.put_new("n", b"ours")


def test_put_new_is_ours_even_if_the_first_answer_was_lost(lax: _LaxServer, lax_store: S3Store) -> None:
    """A retry of boto3 then meets our own object and is answered 412."""
    lax.mode = "strict, lost answer"
    lax_store.put_new("m", b"ours")
    assert lax_store.read("m") == b"ours"
    with pytest.raises(StoreConflict, match="m is already there"):
        lax_store.put_new("m", b"another's")
    assert lax_store.read("m") == b"ours"


@pytest.mark.parametrize("environment", ["s3_environment", "moto_environment"])
def test_what_was_replaced_after_a_last_look_is_not_deleted(environment: str, request: pytest.FixtureRequest) -> None:
    """As by the request that boto3 sends again because the answer to the first was lost."""
    request.getfixturevalue(environment)

    class Looks(S3Store):
        def entries(self, prefix: str) -> tuple[Entry, ...]:
            found = super().entries(prefix)
            if looked:
                plain.put("m", b"another's")
            looked.append(prefix)
            return found

    looked: list[str] = []
    uri = new_place()
    plain = open_store(uri)
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    store = Looks(uri, bucket=bucket, prefix=prefix, client=boto3.session.Session().client("s3"))
    plain.put("m", b"ours")
    store.delete_listed(*store.entries("m"))
    assert plain.read("m") == b"another's"


def test_where_deletions_take_no_condition_a_look_has_to_do(lax: _LaxServer, lax_store: S3Store) -> None:
    lax.mode = "no conditional deletes"
    lax_store.put("m", b"ours")
    lax_store.delete_listed(*lax_store.entries("m"))
    assert lax_store.list("m") == ()


def test_other_answers_are_passed_on_in_words(lax: _LaxServer, lax_store: S3Store) -> None:
    lax.mode = "busy"
    with pytest.raises(StoreUnreachable, match=r"cannot answer at present \(SlowDown: later\)"):
        lax_store.put("a", b"x")
    lax.mode = "odd"
    with pytest.raises(StoreError, match="answered Teapot: short and stout") as error:
        lax_store.put("a", b"x")
    assert not isinstance(error.value, StoreUnreachable)


@pytest.mark.parametrize("mode", sorted(_PASSING))
def test_what_passes_by_itself_is_worth_another_try(lax: _LaxServer, lax_store: S3Store, mode: str) -> None:
    lax.mode = mode
    with pytest.raises(StoreUnreachable, match=rf"cannot answer at present \({_PASSING[mode][1]}: later\)"):
        lax_store.put("a", b"x")


def test_a_store_that_gives_back_something_else_is_not_writable(lax: _LaxServer, lax_store: S3Store) -> None:
    lax.mode = "rival"
    with pytest.raises(StoreError, match="does not give back what was written"):
        lax_store.check_writable()


# --- parts ---

_STAGE = Stage(layers=((0, 1),), replicas=(Replica(node="a", devices=(0,)),))
_PART = 5 * 1024**2  # the least that servers take


@pytest.fixture(params=["s3_environment", "rclone_environment"])
def parted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store on a real server that sends all objects of some size in parts."""
    request.getfixturevalue(request.param)
    monkeypatch.setattr(multipart, "PART_BYTES", _PART)
    store = open_store(new_place())
    assert isinstance(store, S3Store)
    return store


def _sent(store: S3Store, fails_from: int | None = None) -> list[int]:
    """The parts that are sent from now on (0: a whole object); the wire breaks at those of a number from this one."""
    numbers: list[int] = []

    def note(request: Any, **_: Any) -> None:
        number = int(parse_qs(urlsplit(request.url).query).get("partNumber", ["0"])[0])
        if fails_from is not None and number >= fails_from:
            raise EndpointConnectionError(endpoint_url=request.url)
        numbers.append(number)

    for operation in ("UploadPart", "PutObject"):
        store._client.meta.events.unregister(f"before-send.s3.{operation}", unique_id="sent")
        store._client.meta.events.register(f"before-send.s3.{operation}", note, unique_id="sent")
    return numbers


def test_after_a_broken_connection_only_missing_parts_are_sent(parted: S3Store) -> None:
    data = os.urandom(5 * _PART + 3)
    _sent(parted, fails_from=4)
    with pytest.raises(StoreUnreachable, match="does not answer"):
        parted.put("large", data)
    assert parted.list("") == ()
    assert parted.unfinished("la") == ("large",)
    again = open_store(parted.uri)  # as a process that was started anew
    assert isinstance(again, S3Store)
    sent = _sent(again)
    again.put("large", memoryview(data))
    assert sorted(sent) == [4, 5, 6]
    assert again.read("large") == data
    assert again.unfinished("") == ()


def test_parts_of_other_content_are_not_taken(parted: S3Store) -> None:
    data = os.urandom(3 * _PART)
    _sent(parted, fails_from=3)
    with pytest.raises(StoreUnreachable):
        parted.put("large", data)
    changed = bytes(_PART) + data[_PART:]
    sent = _sent(parted)
    parted.put("large", changed)
    assert sorted(sent) == [1, 2, 3]
    assert parted.read("large") == changed


@pytest.mark.parametrize("num_bytes", [2 * 1024**2, 2 * _PART])
def test_an_object_that_is_there_is_not_sent_again(parted: S3Store, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    parted.put("there", data)
    sent = _sent(parted)
    parted.put("there", data)
    assert sent == []
    parted.put("there", data[::-1])
    assert sent
    assert parted.read("there") == data[::-1]


def test_unfinished_parts_are_given_up(parted: S3Store) -> None:
    _sent(parted, fails_from=2)
    for name in ("a", "a1"):
        with pytest.raises(StoreUnreachable):
            parted.put(name, os.urandom(2 * _PART))
    parted.abandon("a")
    assert parted.unfinished("") == ("a1",)
    parted.abandon("a1")
    assert parted.unfinished("") == ()


def test_cleaning_up_gives_up_parts_and_claims_of_old_steps_alone(parted: S3Store) -> None:
    model = ModelSpec(layers=1, hidden=8, heads=2, ffn=4, vocab=8)
    plan = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(_STAGE,)),))
    held = layouts.shard(shard_map(plan, model).ranks[0], layouts.arrays(model, 5))
    pieces = put_shard(parted, job="j", step=5, epoch=1, shard="r", data=held.content, pieces=held.pieces)
    commit(parted, Manifest(version=1, job="j", step=5, epoch=1, next_sample=0, pieces=pieces), model)
    parted.put("j/manifests/000000003.json.claim-dead-1", b"-")
    _sent(parted, fails_from=2)
    for step in (4, 6):
        with pytest.raises(StoreUnreachable):
            parted.put(shard_name("j", step, 1, "r"), os.urandom(2 * _PART))
    before = parted.list("")
    assert remove_orphans(parted, "j") == ()
    assert parted.unfinished("") == (shard_name("j", 6, 1, "r"),)  # it may be on its way
    assert set(before) - set(parted.list("")) == {"j/manifests/000000003.json.claim-dead-1"}
    parted.abandon(shard_name("j", 6, 1, "r"))
