"""What a job would have cost on nodes that are all alike and on demand: looked for beside requests, kept, shown."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, snapshot, story

from shoal import cli
from shoal_planner.cluster import ClusterSnapshot, snapshot_to_mapping
from shoal_planner.job import parse_job
from shoal_planner.search import plan
from shoal_service.comparison import offers_of
from shoal_service.models import ClusterRow

Eventually = Callable[..., object]


def row(name: str, cluster: ClusterSnapshot) -> ClusterRow:
    return ClusterRow(id=name, snapshot=snapshot_to_mapping(cluster))


def test_offers_are_the_cheapest_of_each_kind_on_demand() -> None:
    here = snapshot()
    big = here.node("big-0")
    dear = dataclasses.replace(here, nodes=tuple(dataclasses.replace(n, price_per_hour=9.0) for n in here.nodes))
    single = dataclasses.replace(big, id="single", devices=1, price_per_hour=1.0)
    found = offers_of([row("a", dear), row("b", here)], [(single, "pool p of cluster a (pools file)")])
    assert [(each.node.devices, each.node.price_per_hour, each.source) for each in found] == [
        (1, 1.0, "pool p of cluster a (pools file)"),
        (2, 7.3, "cluster b"),
    ]
    free = dataclasses.replace(here, nodes=tuple(dataclasses.replace(n, price_per_hour=0.0) for n in here.nodes))
    assert offers_of([row("a", free)], []) == (), "spot, or without a price"


def run(api: httpx.Client, connector: Connector) -> str:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time() - 60)
    ok(connector.send(job_id, told.entries[:-1]))
    return job_id


@pytest.mark.timeout(180)
def test_a_job_is_compared_with_nodes_that_are_all_alike(
    api: httpx.Client,
    connector: Connector,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job_id = run(api, connector)
    eventually(lambda: ok(api.get(f"/v1/jobs/{job_id}/cost"))["on_demand_plan"], 90)
    cost = ok(api.get(f"/v1/jobs/{job_id}/cost"))
    found = cost["on_demand_plan"]
    assert (found["device"], found["devices"], found["price_per_hour"]) == ("A100-80G", 2, 7.3)
    assert found["price_source"] == "cluster local" and found["compared_at"]

    count = found["num_nodes"]
    big = connector.cluster.node("big-0")
    alike = ClusterSnapshot(nodes=tuple(dataclasses.replace(big, id=f"n-{index}") for index in range(count)))
    predicted = plan(parse_job(job_mapping()), alike, thorough=False).plan.prediction
    assert predicted is not None and predicted.tokens_per_s == pytest.approx(found["tokens_per_s"])
    wanted = ok(api.get(f"/v1/jobs/{job_id}/plan"))["plan"]["predicted"]["tokens_per_s"]
    assert found["wanted_tokens_per_s"] == wanted and found["as_fast"] == (predicted.tokens_per_s >= 0.999 * wanted)
    assert found["usd_per_hour"] == pytest.approx(7.3 * count)
    measured = ok(api.get(f"/v1/jobs/{job_id}"))["status"]["tokens_per_s"]
    assert found["measured_by_predicted"] == pytest.approx(wanted / measured)
    tokens, slower = 60 * 256, wanted / measured
    assert found["usd"] == pytest.approx(slower * tokens / predicted.tokens_per_s / 3600 * 7.3 * count)
    assert found["saved_usd"] == pytest.approx(found["usd"] - cost["usd"], abs=0.01)

    page = api.get(f"/jobs/{job_id}/panels/cost", headers={"Accept": "text/html"}).text
    assert "Saved against nodes that are all alike" in page and "estimate" in page
    assert f"{count} node of 2 x A100-80G at $7.30 an hour each, as cluster local states" in page
    monkeypatch.setenv("SHOAL_SERVER", str(api.base_url))
    monkeypatch.setenv("SHOAL_TOKEN", api.headers["Authorization"].removeprefix("Bearer "))
    assert cli.run(["status", job_id]) == 0
    assert f"on {count} x 2 A100-80G on demand" in capsys.readouterr().out


@pytest.mark.timeout(60)
def test_without_a_price_on_demand_there_is_nothing_to_compare_with(api: httpx.Client, tmp_path: Path) -> None:
    spot = tuple(dataclasses.replace(node, spot=True) for node in snapshot().nodes)
    job_id = run(api, Connector(http=api, cluster=ClusterSnapshot(nodes=spot)))
    assert ok(api.get(f"/v1/jobs/{job_id}/cost"))["on_demand_plan"] is None
    page = api.get(f"/jobs/{job_id}/panels/cost", headers={"Accept": "text/html"}).text
    assert "all alike" not in page
