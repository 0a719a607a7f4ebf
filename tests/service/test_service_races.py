"""The same is created by many at once: it is created once, and nobody gets an error of ours."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from control_plane import ok
from sqlalchemy import text

from shoal_service.database import Database
from shoal_service.errors import Raced

AT_ONCE = 12
ROUNDS = 4


def at_once(api: httpx.Client, method: str, path: str, body: dict[str, Any]) -> list[httpx.Response]:
    barrier = threading.Barrier(AT_ONCE)

    def ask(_: int) -> httpx.Response:
        with httpx.Client(base_url=api.base_url, headers=api.headers, timeout=30) as client:
            barrier.wait(timeout=30)
            return client.request(method, path, json=body)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, range(AT_ONCE)))


def codes(answers: list[httpx.Response]) -> Counter[tuple[int, str]]:
    return Counter((each.status_code, "" if each.is_success else each.json()["code"]) for each in answers)


def test_many_create_the_same_and_one_does(api: httpx.Client) -> None:
    for number in range(ROUNDS):
        found = codes(at_once(api, "POST", "/v1/projects", {"id": f"p{number}"}))
        assert found[201, ""] == 1, found
        assert found.keys() <= {(201, ""), (409, "project_exists"), (409, "created_meanwhile")}, found

        found = codes(at_once(api, "PUT", f"/v1/projects/default/storages/s{number}", {"region": "eu-west-1"}))
        assert found[201, ""] == 1, found
        assert found.keys() <= {(201, ""), (200, ""), (409, "created_meanwhile")}, found

        body = {"email": f"ada{number}@example.org", "role": "member"}
        answers = at_once(api, "POST", "/v1/projects/default/members", body)
        found = codes(answers)
        assert {status for status, _ in found} <= {200, 201, 409}, found
        assert len({each.json()["user_id"] for each in answers if each.is_success}) == 1
    members = ok(api.get("/v1/projects/default/members"))["items"]
    assert len(members) == ROUNDS


def test_keys_that_others_wrote_are_told_so_by_both_databases(database_url: str) -> None:
    """And what only a defect can break stays an error."""

    async def run() -> None:
        database = Database(database_url)
        await database.migrate()
        insert = "INSERT INTO projects (id, created_at_s) VALUES ('default', 1.0)"
        with pytest.raises(Raced) as raced:
            async with database.write() as session:
                await session.execute(text(insert))
        assert (raced.value.status, raced.value.code) == (409, "created_meanwhile")
        with pytest.raises(Exception, match=r"(?i)null") as broken:
            async with database.write() as session:
                await session.execute(text("INSERT INTO projects (id) VALUES ('x')"))
        assert not isinstance(broken.value, Raced)
        await database.close()

    asyncio.run(run())
