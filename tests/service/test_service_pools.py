"""What is told of pools: by REST, pages, metrics and the command line; and prices as AWS (moto's) has them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, story
from prometheus_client.parser import text_string_to_metric_families
from servers import RunningServer, ec2_environment, start_moto
from waiting import eventually

from shoal.cli import run
from shoal_planner.cluster import snapshot_to_mapping
from shoal_planner.provisioning import Kind
from shoal_planner.rented_pools import parse_pools
from shoal_service import pools as pools_stored
from shoal_service.pool_prices import not_offered, price_of
from shoal_service.prices_ec2 import PricesUnknown, offered_in, region_of, spot_prices

NODE = {"device": "A100-40G", "devices": 8, "spot": True, "price_per_hour": 11.6}
POOLS: list[dict[str, Any]] = [
    {"name": "spot-a100", "min": 1, "max": 4, "instance_type": "p4d.24xlarge", "zones": ["us-east-1b"], "node": NODE},
    {"name": "od", "max": 2, "node": {**NODE, "spot": False, "price_per_hour": 32.0}},
]


def report(*nodes: str, **more: Any) -> list[dict[str, Any]]:
    first = {"pool": POOLS[0], "nodes": list(nodes), "starting": 0, "problem": None, "said": None, **more}
    return [first, {"pool": POOLS[1], "nodes": [], "starting": 0, "problem": None, "said": None}]


def test_whatever_comes_of_a_pool_has_a_word_in_timelines() -> None:
    assert set(pools_stored.WORDS) == set(get_args(Kind))


def renew(connector: Connector, pools: list[dict[str, Any]] | None) -> None:
    body = {
        "holder": connector.holder,
        "snapshot": snapshot_to_mapping(connector.cluster),
        "profile": {},
        "lease_s": 60,
        "pools": pools,
    }
    ok(connector.http.put(f"/v1/clusters/{connector.cluster_id}", json=body))


def asked(connector: Connector) -> dict[str, tuple[int, list[str]]]:
    wishes = connector.wishes()
    return {pool["name"]: (pool["target"], pool["release"]) for pool in wishes["pools"] or ()}


def test_what_spot_nodes_save_is_told_by_what_a_pool_would_cost(api: httpx.Client, connector: Connector) -> None:
    """Nobody has a node of that kind on demand; but a pool would give one."""
    node = {"device": "T4", "devices": 1, "spot": False, "price_per_hour": 0.5}
    dear = {"pool": {"name": "od-t4", "max": 1, "node": node}, "nodes": [], "starting": 0}
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    ok(connector.renew())
    ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time() - 60).entries))
    assert "no such node has a price on demand" in api.get(f"/jobs/{job_id}/panels/cost").text
    renew(connector, [dear])
    assert "the same hours on demand here: $" in api.get(f"/jobs/{job_id}/panels/cost").text


def test_pools_are_told_everywhere_they_matter(api: httpx.Client, connector: Connector) -> None:
    assert ok(api.get("/v1/pools")) == {"items": [], "next_cursor": None}
    assert ok(api.get("/v1/pool-events")) == {"items": [], "next_after": 0, "more": False}
    ok(connector.renew())
    assert connector.wishes()["pools"] is None, "nobody said that there are any"
    renew(connector, report())
    eventually(lambda: asked(connector) == {"spot-a100": (1, []), "od": (0, [])})
    renew(connector, report("n-0", starting=1, said="2 pods are pending"))
    eventually(lambda: len(ok(api.get("/v1/pool-events"))["items"]) == 2)
    first, second = ok(api.get("/v1/pool-events", params={"cluster_id": "local"}))["items"]
    assert (first["kind"], first["count"]) == ("pool_asked", 1) and "it always has so many" in first["reason"]
    assert (second["kind"], second["nodes"], second["job_id"]) == ("nodes_came", ["n-0"], None)
    rest = ok(api.get("/v1/pool-events", params={"after": first["id"], "limit": 1}))
    assert (rest["items"], rest["more"], rest["next_after"]) == ([second], False, second["id"])
    page = ok(api.get("/v1/pool-events", params={"limit": 1}))
    assert (page["items"], page["more"], page["next_after"]) == ([first], True, first["id"])
    pools = {pool["name"]: pool for pool in ok(api.get("/v1/pools"))["items"]}
    assert (pools["spot-a100"]["nodes"], pools["spot-a100"]["problem"]) == (["n-0"], "2 pods are pending")
    assert (pools["od"]["source"], pools["od"]["price_per_hour"], pools["od"]["max"]) == ("pools file", 32.0, 2)
    prices = {price["pool"]: price for price in ok(api.get("/v1/prices"))["items"] if price["pool"]}
    assert (prices["spot-a100"]["price_per_device_hour"], prices["spot-a100"]["zone"]) == (1.45, "us-east-1b")
    shown = api.get("/nodes", headers={"Accept": "text/html"}).text
    assert "Nodes that can be rented" in shown and "Pool spot-a100 has got n-0" in shown
    figures = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(api.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("shoal_pool")
    }
    assert figures["shoal_pool_nodes", "local", "spot-a100", "there"] == 1
    assert figures["shoal_pool_nodes_asked_total", "local", "spot-a100"] == 1
    assert figures["shoal_pool_price_dollars_per_hour", "local", "od"] == 32.0
    renew(connector, report()[1:])
    assert [pool["name"] for pool in ok(api.get("/v1/pools"))["items"]] == ["od"]


def test_whether_a_job_rents_may_change_while_it_waits_or_runs(api: httpx.Client, connector: Connector) -> None:
    ok(connector.renew())
    job = ok(api.post("/v1/jobs", json=job_mapping()))
    assert job["spec"]["limits"]["rent"] is False
    path = f"/v1/jobs/{job['id']}/limits"
    refused = api.post(path, json={"rent": True})
    assert (refused.status_code, refused.json()["param"]) == (422, "limits.rent")
    assert "needs max_price_per_hour" in refused.json()["detail"]
    assert ok(api.post(path, json={"rent": True, "max_price_per_hour": 5}))["spec"]["limits"]["rent"] is True
    assert ok(api.post(path, json={"rent": False}))["spec"]["limits"]["rent"] is False


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        server = start_moto(tmp_path_factory.mktemp("moto"))
        for name, value in ec2_environment(server).items():
            patch.setenv(name, value)
        yield server
        server.stop()


def test_prices_are_those_of_the_cloud_and_age(
    aws: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = spot_prices(["p4d.24xlarge"], "us-east-1")
    assert {kind for kind, _ in found} == {"p4d.24xlarge"} and len(found) >= 2
    assert offered_in(["p4d.24xlarge"], "us-east-1") == frozenset(found)
    with control_plane(tmp_path / "plane", cloud_prices="aws") as plane:
        check_prices(plane, found["p4d.24xlarge", "us-east-1b"])
        for name, value in plane.environment().items():
            monkeypatch.setenv(name, value)
        assert run(["pools"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any("spot-a100" in line and "8 x A100-40G" in line for line in lines)
        assert run(["pools", "--events", "--cluster", "local"]) == 0
        assert "asked for 1 x spot-a100 in us-east-1b" in capsys.readouterr().out
        assert run(["pools", "--events", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["items"][0]["kind"] == "pool_asked"


def check_prices(plane: ControlPlane, usd: float) -> None:
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
        renew(Connector(http=http), report())

        def told() -> bool:
            return bool(pools()["spot-a100"]["source"] == "AWS spot price history")

        def pools() -> dict[str, dict[str, Any]]:
            return {pool["name"]: pool for pool in ok(http.get("/v1/pools"))["items"]}

        eventually(told)
        assert pools()["spot-a100"]["price_per_hour"] == usd
        assert pools()["od"]["source"] == "pools file", "it has no type that AWS would know"
        assert pools()["spot-a100"]["problem"] is None
        eventually(lambda: ok(http.get("/v1/pool-events"))["items"])


def test_the_dearest_zone_counts_and_a_cloud_that_does_not_answer_is_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    (pool, _) = parse_pools([{**POOLS[0], "zones": ["us-east-1a", "us-east-1b"]}, POOLS[1]])
    found = {
        ("p4d.24xlarge", "us-east-1a"): 9.0,
        ("p4d.24xlarge", "us-east-1b"): 10.0,
        ("p4d.24xlarge", "us-east-1c"): 30.0,
        ("g5.xlarge", "us-east-1a"): 50.0,
    }
    assert price_of(pool, found) == 10.0
    assert price_of(pool, {}) is None
    assert not_offered(pool, found) is None
    assert not_offered(pool, {("p4d.24xlarge", "us-east-1c")}) == "AWS has no p4d.24xlarge in us-east-1a or us-east-1b"
    assert (region_of("us-east-1b"), region_of("us-gov-west-1a"), region_of("europe-west4-a")) == (
        "us-east-1",
        "us-gov-west-1",
        None,
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    began_s = time.monotonic()
    with pytest.raises(PricesUnknown, match="spot prices of us-east-1"):
        spot_prices(["p4d.24xlarge"], "us-east-1")
    with pytest.raises(PricesUnknown, match="what is offered in us-east-1"):
        offered_in(["p4d.24xlarge"], "us-east-1")
    assert time.monotonic() - began_s < 60
