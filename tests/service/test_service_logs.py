"""What jobs print, in the control plane: stored once, read in pieces, followed, searched, forgotten with a reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story
from httpx_sse import connect_sse
from sqlalchemy import update

from shoal_recovery.journal import ClusterEntered, Entry
from shoal_service import log_store
from shoal_service.database import Database
from shoal_service.jobs import rfc3339
from shoal_service.log_chunks import CHUNK_BYTES, Line, Wanted
from shoal_service.log_retention import forget_old
from shoal_service.log_store import Brought
from shoal_service.models import JobRow

BASE_S = 1_800_000_000.0
Row = list[Any]


def row(
    number: int, text: str, *, at_s: float = BASE_S, level: str = "info", epoch: int = 1, rank: int | None = 0
) -> Row:
    return [number, at_s, level, epoch, rank, text]


@pytest.fixture
def job(api: httpx.Client, connector: Connector) -> str:
    ok(connector.renew())
    job_id: str = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    return job_id


def bring(connector: Connector, job: str, rows: list[Row], node: str = "big-0", life: str = "1") -> httpx.Response:
    source = {"node": node, "life": life, "lines": rows}
    body = {"cluster_id": connector.cluster_id, "holder": connector.holder, "sources": [source]}
    return connector.http.post(f"/v1/jobs/{job}/logs", json=body)


def texts(api: httpx.Client, job: str, **params: Any) -> list[str]:
    return [item["text"] for item in ok(api.get(f"/v1/jobs/{job}/logs", params=params))["items"]]


def test_lines_are_stored_once_and_found_by_what_they_are_of(api: httpx.Client, connector: Connector, job: str) -> None:
    assert texts(api, job) == []
    first = [row(1, "one"), row(2, "TWO of rank 1", rank=1, level="warning", at_s=BASE_S + 10)]
    ok(bring(connector, job, first))
    ok(bring(connector, job, [*first, row(3, 'three\\of "it"', epoch=2, level="error", at_s=BASE_S + 20)]))
    ok(bring(connector, job, [row(1, "of another", rank=2, at_s=BASE_S + 30)], node="spot-0"))
    ok(bring(connector, job, [row(1, "of a new life", rank=None, at_s=BASE_S + 40)], life="2"))
    assert texts(api, job) == ["one", "TWO of rank 1", 'three\\of "it"', "of another", "of a new life"]
    (second,) = ok(api.get(f"/v1/jobs/{job}/logs", params={"rank": 1}))["items"]
    assert second == {
        "line": 2,
        "at": rfc3339(BASE_S + 10),
        "level": "warning",
        "attempt": 1,
        "rank": 1,
        "node": "big-0",
        "text": "TWO of rank 1",
    }
    assert texts(api, job, node="spot-0") == ["of another"]
    assert texts(api, job, attempt=2) == ['three\\of "it"']
    assert texts(api, job, level="warning") == ["TWO of rank 1", 'three\\of "it"']
    assert texts(api, job, search="two OF") == ["TWO of rank 1"]
    assert texts(api, job, search='\\of "') == ['three\\of "it"']
    assert texts(api, job, since=rfc3339(BASE_S + 10), until=rfc3339(BASE_S + 30))[1:] == [
        'three\\of "it"',
        "of another",
    ]
    assert texts(api, job, tail=2) == ["of another", "of a new life"]


def test_pages_go_through_many_chunks_without_losing_a_line(api: httpx.Client, connector: Connector, job: str) -> None:
    width = CHUNK_BYTES // 40
    for batch in range(3):
        numbers = range(batch * 50 + 1, batch * 50 + 51)
        ok(bring(connector, job, [row(n, f"{n:03d} " + "x" * width, at_s=BASE_S + n, rank=n % 2) for n in numbers]))
    found: list[str] = []
    params: dict[str, Any] = {"limit": 7, "rank": 1}
    while True:
        page = ok(api.get(f"/v1/jobs/{job}/logs", params=params))
        assert len(page["items"]) <= 7
        found += [item["text"][:3] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert found == [f"{n:03d}" for n in range(1, 151, 2)]
    assert [text[:3] for text in texts(api, job, tail=3)] == ["148", "149", "150"]


def test_lines_are_followed_and_gone_on_with(
    api: httpx.Client, connector: Connector, job: str, eventually: Callable[..., object]
) -> None:
    """Until the job has ended; a stream that breaks goes on after the line that was had last."""
    ok(bring(connector, job, [row(1, "one"), row(2, "two", rank=1), row(3, "three")]))
    told = story(job_mapping(), started_at_s=time.time() - 100)
    with connect_sse(api, "GET", f"/v1/jobs/{job}/logs", params={"watch": "1", "rank": 0}) as source:
        stream = source.iter_sse()
        assert [next(stream).json()["text"] for _ in range(2)] == ["one", "three"]
        ok(bring(connector, job, [row(4, "four")]))
        assert (event := next(stream)).json()["text"] == "four" and event.id == "4"
    ok(connector.send(job, told.entries))
    with connect_sse(
        api, "GET", f"/v1/jobs/{job}/logs", params={"watch": "1"}, headers={"Last-Event-ID": "1"}
    ) as source:
        events = list(source.iter_sse())
    assert [event.event for event in events] == ["line", "line", "line", "end"]
    assert [event.json()["text"] for event in events[:-1]] == ["two", "three", "four"]
    assert events[-1].json()["state"] == "succeeded"


def test_lines_around_an_event_are_found(api: httpx.Client, connector: Connector, job: str) -> None:
    told = story(job_mapping(), started_at_s=BASE_S)
    ok(connector.send(job, told.entries))
    lost = next(entry for entry in told.entries if entry.event.kind == "node_lost")
    times = {"long before": -60.0, "before": -20.0, "after": 20.0, "long after": 60.0}
    rows = [row(n, text, at_s=lost.at_s + s) for n, (text, s) in enumerate(times.items(), start=1)]
    ok(bring(connector, job, rows))
    assert texts(api, job, event=lost.seq) == ["before", "after"]
    refused = api.get(f"/v1/jobs/{job}/logs", params={"event": 100_000})
    assert (refused.status_code, refused.json()["code"]) == (404, "event_not_found")


async def forget(database_url: str, now_s: float) -> int:
    database = Database(database_url)
    try:
        return await forget_old(database, 86_400.0, now_s)
    finally:
        await database.close()


def test_old_lines_are_gone_with_a_reason(database_url: str, api: httpx.Client, connector: Connector, job: str) -> None:
    ok(bring(connector, job, [row(n, "y" * 19_000, at_s=BASE_S + n) for n in range(1, 30)]))
    assert asyncio.run(forget(database_url, BASE_S + 86_400)) == 0
    assert ok(api.get(f"/v1/jobs/{job}/logs"))["forgotten"] is None
    assert asyncio.run(forget(database_url, BASE_S + 86_430)) > 1
    gone = api.get(f"/v1/jobs/{job}/logs")
    assert (gone.status_code, gone.json()["code"]) == (410, "logs_forgotten")
    assert "lines are kept for 1 days" in gone.json()["detail"]
    ok(bring(connector, job, [row(30, "a new one", at_s=BASE_S + 200_000)]))
    page = ok(api.get(f"/v1/jobs/{job}/logs"))
    assert [item["line"] for item in page["items"]] == [30]
    assert page["forgotten"] == {"lines": 29, "reason": "lines are kept for 1 days"}
    for params in ({"cursor": "line_3"}, {"until": rfc3339(BASE_S + 1)}):
        assert api.get(f"/v1/jobs/{job}/logs", params=params).status_code == 410
    streamed = api.get(f"/v1/jobs/{job}/logs", params={"watch": "1"}, headers={"Last-Event-ID": "3"})
    assert streamed.status_code == 410


async def test_of_a_job_that_prints_too_much_the_newest_is_kept(database_url: str, api: httpx.Client, job: str) -> None:
    database = Database(database_url)
    lines = [(n, "z" * 1000) for n in range(1, 3001)]
    made = tuple((n, Line(at_s=n, level="info", attempt=1, rank=0, node="a", text=text)) for n, text in lines)
    async with database.write() as session:
        assert await log_store.append(session, job, [Brought(source="a@1", lines=made)], 2**20)
    async with database.read() as session:
        kept = await log_store.get(session, job)
        assert kept is not None and kept.forgotten is not None
        assert 2**20 - CHUNK_BYTES < kept.num_bytes <= 2**20 and kept.next_line == 3001
        page = await log_store.read(session, kept, Wanted(), kept.first_line, 5000)
    assert [number for number, _ in page.lines] == list(range(kept.first_line, 3001))
    await database.close()


async def test_lines_that_come_while_one_reads_are_read_once(database_url: str, api: httpx.Client, job: str) -> None:
    """How many there are is known before they are read."""
    database = Database(database_url)

    async def append(number: int) -> None:
        line = Line(at_s=number, level="info", attempt=1, rank=0, node="a", text=f"line {number}")
        async with database.write() as session:
            assert await log_store.append(session, job, [Brought(source="a@1", lines=((number, line),))], 2**20)

    await append(1)
    async with database.read() as session:
        known = await log_store.get(session, job)
        assert known is not None
        session.expunge(known)
    await append(2)
    async with database.read() as session:
        page = await log_store.read(session, known, Wanted(), 1, 500)
        assert [number for number, _ in page.lines] == [1, 2]
        following = await log_store.read(session, known, Wanted(), page.next_line, 500)
    assert following.lines == () and following.next_line == 3
    await database.close()


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"cursor": "nothing"}, "cursor"),
        ({"cursor": "line_x"}, "cursor"),
        ({"cursor": "line_" + "0" * 15 + "9" * 20}, "cursor"),
        ({"cursor": "line_1", "tail": 3}, "tail"),
        ({"since": "yesterday"}, "since"),
        ({"level": "loud"}, "level"),
        ({"rank": -1}, "rank"),
        ({"event": 1, "since": "2026-01-01T00:00:00Z"}, "event"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(
    api: httpx.Client, job: str, params: dict[str, Any], param: str
) -> None:
    refused = api.get(f"/v1/jobs/{job}/logs", params=params)
    assert (refused.status_code, refused.json()["param"]) == (422, param)


def test_who_does_not_speak_for_a_cluster_brings_no_lines(api: httpx.Client, connector: Connector, job: str) -> None:
    other = Connector(http=api, holder="somebody else")
    assert bring(other, job, [row(1, "no")]).status_code == 409
    assert bring(connector, "job_none", [row(1, "no")]).status_code == 404
    assert bring(connector, job, [row(0, "no")]).status_code == 422
    assert bring(connector, job, [row(1, "no", at_s=1e300)]).status_code == 422
    assert bring(connector, job, [row(1, "no")], node="a\x00").status_code == 422
    assert texts(api, job) == []


async def moved(database_url: str, job: str, cluster_id: str) -> None:
    database = Database(database_url)
    async with database.write() as session:
        await session.execute(update(JobRow).where(JobRow.id == job).values(cluster_id=cluster_id))
    await database.close()


def test_a_cluster_that_had_the_job_brings_what_was_printed_there(
    database_url: str, api: httpx.Client, connector: Connector, job: str
) -> None:
    connectors = {}
    for cluster_id in ("local", "second", "third"):
        wanted = {"name": cluster_id, "role": "connector", "cluster_id": cluster_id}
        secret = ok(api.post("/v1/tokens", json=wanted))["secret"]
        http = httpx.Client(base_url=api.base_url, headers={"Authorization": f"Bearer {secret}"})
        connectors[cluster_id] = Connector(http=http, cluster_id=cluster_id, holder=f"of {cluster_id}")
    connectors["local"].holder = connector.holder
    for each in connectors.values():
        ok(each.renew())
    entered = ClusterEntered(cluster="local", incarnation="1")
    ok(connectors["local"].send(job, [Entry(seq=1, at_s=BASE_S, event=entered)]))
    asyncio.run(moved(database_url, job, "second"))
    ok(bring(connectors["second"], job, [row(1, "here")], node="n-2"))
    ok(bring(connectors["local"], job, [row(1, "there, before")]))
    refused = bring(connectors["third"], job, [row(1, "never")], node="n-3")
    assert (refused.status_code, refused.json()["code"]) == (409, "wrong_cluster")
    late = connectors["local"].send(job, [Entry(seq=2, at_s=BASE_S, event=entered)])
    assert (late.status_code, late.json()["code"]) == (409, "wrong_cluster")
    assert texts(api, job) == ["here", "there, before"]
    for each in connectors.values():
        each.http.close()
