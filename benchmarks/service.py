"""How fast the control plane answers on PostgreSQL with a long history: 10,000 jobs, 1,000,000 events, 200 watchers.

A real server in a process of its own, asked over HTTP by one client at a time, as a page or a command does; `ms.*`
are from the request to the last byte, p95 of `ROUNDS` (`p50.*` beside it), `bytes.*` the largest answer, `cpu_ms.*`
what an answer takes of a core in the server and in PostgreSQL, which others' load changes little; `free_cores` is how
many cores were idle just before: with less than one the `ms.*` say more of the others. The history is
that of a real journal, brought through the API for one job and copied in SQL for all others, with other ids, names,
projects, states and times; `list` is of all projects. `ms.curve` is of a job with 1,000,000 points. `watchers.*`: a
job's stream is followed by 200 clients while its journal grows; `mib_more` is what the server's resident memory grew
by, `lag_*` from sending an entry until every one of them has it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.cores import free_cores
from benchmarks.reporting import answer
from shoal_service import curve_levels, jobs
from shoal_service.database import Database

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # no package: tests and benchmarks start the same servers
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, story
from postgres import RunningPostgres, start_postgres

JOBS = 10_000
EVENTS_PER_JOB = 100
POINTS = 1_000_000
PROJECTS = 10
WATCHERS = 200
WATCHED_ENTRIES = 100
ROUNDS = 100
STATES = ("succeeded", "failed", "cancelled", "running", "paused")


def _template(http: httpx.Client) -> tuple[str, Any]:
    """A job with a whole story of EVENTS_PER_JOB entries."""
    mapping = job_mapping(train={"steps": 60 + EVENTS_PER_JOB})
    job_id = str(ok(http.post("/v1/jobs", json=mapping))["id"])
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    told = story(mapping, started_at_s=time.time() - 1000).entries
    assert len(told) >= EVENTS_PER_JOB
    ok(connector.send(job_id, told[:EVENTS_PER_JOB]))
    return job_id, connector


def _fill(server: RunningPostgres, database: str, template: str) -> None:
    columns = [name for name in server.sql(_COLUMNS.format("jobs"), database).split("\n") if name not in _OWN]
    listed, chosen = ", ".join(columns), ", ".join(f"t.{name}" for name in columns)
    states = ", ".join(f"'{state}'" for state in STATES)
    server.sql(
        f"INSERT INTO projects (id, created_at_s) SELECT 'p' || n, 1.7e9 FROM generate_series(0, {PROJECTS - 1}) n",
        database,
    )
    server.sql(
        f"INSERT INTO jobs ({', '.join(_OWN)}, {listed}) "
        f"SELECT 'job_01AAAA' || lpad(n::text, 20, '0'), 'p' || n / 7 % {PROJECTS}, 'run ' || n, "
        f"(ARRAY[{states}])[1 + n % {len(STATES)}], 'k' || n, "
        f"t.created_at_s - {JOBS} + n, t.since_at_s - {JOBS} + n, 'run', "
        f"CASE WHEN n % {len(STATES)} = 3 THEN 'away' ELSE 'local' END, {chosen} "
        f"FROM jobs t, generate_series(1, {JOBS - 1}) n WHERE t.id = '{template}'",
        database,
    )
    for table in ("journal", "step_points", "shares", "job_totals"):
        names = [name for name in server.sql(_COLUMNS.format(table), database).split("\n") if name != "job_id"]
        server.sql(
            f"INSERT INTO {table} (job_id, {', '.join(names)}) SELECT j.id, {', '.join('t.' + name for name in names)} "
            f"FROM jobs j, {table} t WHERE t.job_id = '{template}' AND j.id LIKE 'job_01AAAA%'",
            database,
        )


_OWN = ("id", "project_id", "name", "state", "idempotency_key", "created_at_s", "since_at_s", "wish", "cluster_id")
_COLUMNS = "SELECT column_name FROM information_schema.columns WHERE table_name = '{}'"


def _long_curve(server: RunningPostgres, database: str, url: str) -> str:
    """POINTS points that count and a few hundred that do not, with the levels that the server would have made."""
    job_id = "job_01AAAA" + "1".zfill(20)
    gone = f"DELETE FROM {{}} WHERE job_id = '{job_id}'; "
    names = "job_id, seq, epoch, step, at_s, loss, grad_norm, lr, tokens, duration_s, rolled_back, skipped"
    losses = "1 + 9 / (1 + n / 1e4) + random() / 10"
    server.sql(
        gone.format("step_points") + gone.format("curve_buckets") + f"INSERT INTO step_points ({names}) "
        f"SELECT '{job_id}', n, 1 + n / 100000, n, 1.7e9 + n, {losses}, 1, 3e-4, 4096, 1.0, false, false "
        f"FROM generate_series(1, {POINTS}) n; INSERT INTO step_points ({names}) "
        f"SELECT '{job_id}', {POINTS} + n, n / 50, n * 1900, 1.7e9 + n, 3 + random(), 1, 3e-4, 4096, 1.0, true, false "
        f"FROM generate_series(1, 500) n; UPDATE jobs SET step = {POINTS} WHERE id = '{job_id}'",
        database,
    )

    async def seal() -> None:
        kept = Database(url, timeout_s=600)
        async with kept.write() as session:
            row = await jobs.get(session, job_id)
            await curve_levels.keep_up(session, job_id, redone_from=None, newest_step=row.step)
        await kept.close()

    asyncio.run(seal())
    server.sql("VACUUM ANALYZE", database)
    return job_id


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Of these and all that they started."""
    times = [one.cpu_times() for each in processes for one in (each, *each.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _measure(ask: Callable[[int], httpx.Response], servers: Sequence[psutil.Process]) -> dict[str, Any]:
    """Of ROUNDS answers."""
    times_ms, largest, cpu_s = [], 0, 0.0
    for index in range(ROUNDS + 5):
        if index == 5:
            cpu_s = _cpu_s(servers)
        began_s = time.perf_counter()
        found = ask(index)
        took_ms = (time.perf_counter() - began_s) * 1e3
        assert found.is_success, found.text
        largest = max(largest, len(found.content))
        if index >= 5:  # connections and plans of queries are there then
            times_ms.append(took_ms)
    ordered = sorted(times_ms)
    return {
        "p50_ms": statistics.median(ordered),
        "p95_ms": ordered[int(0.95 * len(ordered))],
        "max_ms": ordered[-1],
        "cpu_ms": (_cpu_s(servers) - cpu_s) / ROUNDS * 1e3,
        "bytes": largest,
    }


def _answers(http: httpx.Client, long_job: str, servers: Sequence[psutil.Process]) -> dict[str, dict[str, Any]]:
    ids = [f"job_01AAAA{str(1 + n * 47 % (JOBS - 1)).zfill(20)}" for n in range(1, ROUNDS + 6)]
    cursors, cursor = [], None
    for _ in range(20):
        page = http.get("/v1/jobs", params={"limit": 200} | ({"cursor": cursor} if cursor else {})).json()
        cursor = page["next_cursor"]
        cursors.append(cursor)
    asked: dict[str, Callable[[int], httpx.Response]] = {
        "list": lambda n: http.get("/v1/jobs"),
        "list_200": lambda n: http.get("/v1/jobs", params={"limit": 200}),
        "list_state": lambda n: http.get("/v1/jobs", params={"state": STATES[n % len(STATES)]}),
        "list_deep": lambda n: http.get("/v1/jobs", params={"cursor": cursors[n % len(cursors)]}),
        "show": lambda n: http.get(f"/v1/jobs/{ids[n]}"),
        "events": lambda n: http.get(f"/v1/jobs/{ids[n]}/events", params={"limit": 1000}),
        "events_kind": lambda n: http.get(f"/v1/jobs/{ids[n]}/events", params={"kind": "recovery_done"}),
        "recoveries": lambda n: http.get(f"/v1/jobs/{ids[n]}/recoveries"),
        "cost": lambda n: http.get(f"/v1/jobs/{ids[n]}/cost"),
        "metrics": lambda n: http.get(f"/v1/jobs/{ids[n]}/metrics"),
        "curve": lambda n: http.get(f"/v1/jobs/{long_job}/metrics"),
        "page_list": lambda n: http.get("/", headers={"Accept": "text/html"}),
        "page_job": lambda n: http.get(f"/jobs/{ids[n]}", headers={"Accept": "text/html"}),
    }
    return {name: _measure(ask, servers) for name, ask in asked.items()}


async def _watch(plane: ControlPlane, job_id: str, after: int, told: list[Any], cluster: str) -> dict[str, Any]:
    resident = psutil.Process(plane.process.pid)
    before = resident.memory_info().rss
    seen = [after] * WATCHERS
    everybody = asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=plane.url, headers=plane.headers, timeout=120, limits=limits) as http:

        async def follow(number: int) -> None:
            async with http.stream("GET", f"/v1/jobs/{job_id}/events", params={"watch": 1, "after": after}) as source:
                async for line in source.aiter_lines():
                    if line.startswith("id:"):
                        seen[number] = int(line[3:])
                        if min(seen) == seen[number]:
                            everybody.set()

        watching = [asyncio.create_task(follow(number)) for number in range(WATCHERS)]
        lags_ms, most = [], before
        connector = {"cluster_id": cluster, "holder": "connector-1"}
        for entry in told:
            began_s = time.perf_counter()
            sent = await http.post(f"/v1/jobs/{job_id}/journal", json={**connector, "entries": [entry]})
            assert sent.is_success, sent.text
            while min(seen) < entry["seq"]:
                everybody.clear()
                await asyncio.wait_for(everybody.wait(), 60)
            lags_ms.append((time.perf_counter() - began_s) * 1e3)
            most = max(most, resident.memory_info().rss)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    ordered = sorted(lags_ms)
    return {
        "mib_before": before / 2**20,
        "mib_more": (most - before) / 2**20,
        "lag_p50_ms": statistics.median(ordered),
        "lag_p95_ms": ordered[int(0.95 * len(ordered))],
        "entries": len(told),
    }


def _watched(http: httpx.Client, plane: ControlPlane) -> dict[str, Any]:
    from shoal_recovery.journal import entry_to_mapping

    mapping = job_mapping(train={"steps": 1000})
    job_id = str(ok(http.post("/v1/jobs", json=mapping))["id"])
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    whole = story(mapping, started_at_s=time.time()).entries
    ok(connector.send(job_id, whole[:5]))
    told = json.loads(json.dumps([entry_to_mapping(entry) for entry in whole[5 : 5 + WATCHED_ENTRIES]]))
    return asyncio.run(_watch(plane, job_id, 5, told, connector.cluster_id))


def main() -> None:
    server = start_postgres(lasting=True)
    try:
        url = server.new_database()
        database = url.rpartition("/")[2]
        with (
            tempfile.TemporaryDirectory() as folder,
            control_plane(Path(folder), database_url=url, max_lease_s="100000") as plane,
            httpx.Client(base_url=plane.url, headers=plane.headers, timeout=120) as http,
        ):
            template, _ = _template(http)
            _fill(server, database, template)
            long_job = _long_curve(server, database, url)
            counts = {name: int(server.sql(f"SELECT count(*) FROM {name}", database)) for name in ("jobs", "journal")}
            assert server.process is not None
            servers = [psutil.Process(each.pid) for each in (plane.process, server.process)]
            free = free_cores()
            runs: dict[str, Any] = {"counts": counts, "answers": _answers(http, long_job, servers)}
            runs["watchers"] = _watched(http, plane)
    finally:
        server.close()
    results: dict[str, float | None] = {"free_cores": free}
    for name, found in runs["answers"].items():
        results |= {f"ms.{name}": found["p95_ms"], f"p50.{name}": found["p50_ms"], f"bytes.{name}": found["bytes"]}
        results[f"cpu_ms.{name}"] = found["cpu_ms"]
    results |= {f"watchers.{name}": value for name, value in runs["watchers"].items()}
    answer("service", results, runs)


if __name__ == "__main__":
    main()
