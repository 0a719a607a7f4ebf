"""Jobs are changed while their journals come in, entry by entry: nobody is refused for that, and of two who go by the
same state one changes it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story

STEPS = 2000
CALLS = 12
PAIRS = 6


@contextlib.contextmanager
def going_on(api: httpx.Client, tmp_path: Path, **changes: object) -> Iterator[str]:
    """A job of which a cluster tells one entry after the other, without a pause."""
    mapping = job_mapping(checkpoint={"uri": (tmp_path / "ckpt").as_uri()}, train={"steps": STEPS}, **changes)
    job_id = str(ok(api.post("/v1/jobs", json=mapping))["id"])
    entries = story(mapping, started_at_s=time.time()).entries
    over, told = threading.Event(), threading.Event()

    def tell() -> None:
        with httpx.Client(base_url=api.base_url, headers=api.headers, timeout=30) as http:
            connector = Connector(http=http)
            ok(connector.renew(lease_s=300))
            ok(connector.send(job_id, entries[:8]))
            told.set()
            for entry in entries[8:]:
                if over.is_set():
                    return
                ok(connector.send(job_id, [entry]))

    with ThreadPoolExecutor(1) as pool:
        telling = pool.submit(tell)
        assert told.wait(60) or telling.result()
        try:
            yield job_id
        finally:
            over.set()
            telling.result(60)


@pytest.mark.timeout(300)
def test_a_job_that_goes_on_is_changed_all_the_same(api: httpx.Client, tmp_path: Path) -> None:
    with going_on(api, tmp_path) as job_id:
        found = Counter(
            (verb, answer.status_code, answer.text if answer.is_error else "")
            for number in range(CALLS)
            for verb, body in (
                ("limits", {"max_price_per_hour": 100.0 + number}),
                ("resize", {"max_devices": 6 + number % 2}),
                ("checkpoint", None),
            )
            for answer in [api.post(f"/v1/jobs/{job_id}/{verb}", json=body)]
        )
    assert found == {("limits", 200, ""): CALLS, ("resize", 200, ""): CALLS, ("checkpoint", 202, ""): CALLS}


@pytest.mark.timeout(300)
def test_of_two_who_saw_the_same_state_one_changes_it(api: httpx.Client, tmp_path: Path) -> None:
    with going_on(api, tmp_path) as job_id, ThreadPoolExecutor(2) as pool:
        for number in range(PAIRS):
            tag = api.get(f"/v1/jobs/{job_id}").headers["ETag"]

            def change(price: float, tag: str = tag) -> int:
                with httpx.Client(base_url=api.base_url, headers=api.headers, timeout=30) as http:
                    body = {"max_price_per_hour": price}
                    path = f"/v1/jobs/{job_id}/limits"
                    return http.post(path, json=body, headers={"If-Match": tag}).status_code

            found = sorted(pool.map(change, (200.0 + number, 300.0 + number)))
            assert found in ([200, 412], [412, 412]), found


@pytest.mark.timeout(300)
def test_a_limit_is_kept_although_the_job_goes_on(api: httpx.Client, tmp_path: Path) -> None:
    with going_on(api, tmp_path) as job_id:
        ok(api.post(f"/v1/jobs/{job_id}/limits", json={"max_duration": "1s"}))
        deadline_s = time.monotonic() + 60
        while not (found := api.get(f"/v1/jobs/{job_id}").json())["status"].get("held") and found["wish"] == "run":
            assert time.monotonic() < deadline_s, found
            time.sleep(0.1)
        assert found["wish"] == "paused", found
