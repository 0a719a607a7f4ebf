"""A job on a thousand ranks: its pages stay small, because kinds are shown before single nodes, and complete."""

from __future__ import annotations

import re
import time

import httpx
import pytest
from control_plane import Connector, Story, job_mapping, ok

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.job import parse_job
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.journal import NodeJoined, NodeLost, NodeNoticed

NUM_NODES = 125
MOST_BYTES = 200_000 - 60_000  # what pages load beside their markup: scripts and styles, compressed (55 kB)
JOB = job_mapping(
    name="a thousand ranks",
    model={"layers": 16, "hidden": 256, "heads": 8, "kv_heads": 8, "ffn": 688},
    train={"global_batch": 1000, "steps": 60},
)


def cluster() -> ClusterSnapshot:
    spot = {"name": "spot", "count": 63, "device": "A100-40G", "devices": 8, "zone": "b", "spot": True}
    return parse_cluster(
        {
            "nodes": [
                {"name": "big", "count": 62, "device": "A100-80G", "devices": 8, "zone": "a", "price_per_hour": 14.7},
                spot | {"price_per_hour": 5.2},
            ]
        }
    )


def plan(without: frozenset[str] = frozenset()) -> Plan:
    """A pipeline of two stages across each pair of nodes; what is left over, by itself."""
    nodes = [node.id for node in cluster().nodes if node.id not in without]
    big, spot = ([name for name in nodes if name.startswith(kind)] for kind in ("big", "spot"))
    pairs = [(left, right, index) for left, right in zip(big, spot, strict=False) for index in range(8)]
    left_over = [*big[len(spot) :], *spot[len(big) :]]
    pipelines = [
        (Stage(layers=((0, 10),), replicas=(_on(left, i),)), Stage(layers=((10, 16),), replicas=(_on(right, i),)))
        for left, right, i in pairs
    ]
    pipelines += [(Stage(layers=((0, 16),), replicas=(_on(node, i),)),) for node in left_over for i in range(8)]
    first = 1000 - (len(pipelines) - 1)
    return Plan(
        pipelines=tuple(
            Pipeline(micro_batch=1, micro_batches=first if number == 0 else 1, stages=stages)
            for number, stages in enumerate(pipelines)
        )
    )


def _on(node: str, index: int) -> Replica:
    return Replica(node=node, devices=(index,))


@pytest.fixture
def job_id(api: httpx.Client) -> str:
    created = str(ok(api.post("/v1/jobs", json=JOB))["id"])
    connector = Connector(http=api, cluster=cluster())
    ok(connector.renew(lease_s=600))
    told = Story(job=parse_job(JOB), cluster=cluster(), now_s=time.time() - 600)
    told.state("starting", "planned", "starting 1000 ranks on 125 nodes")
    told.adopt(plan(), told.cluster, "first plan of this job")
    told.state("running", "stepping", "training", 30.0)
    for number in range(12):
        gone = f"spot-{number}"
        told.train(2)
        told.add(NodeLost(node=gone, evidence="its connection closed", detect_s=0.062), 0.1)
        told.state("recovering", "node_lost", f"node {gone} was lost")
        told.adopt(plan(frozenset({gone})), cluster().without({gone}), f"node {gone} was lost")
        told.recover("node_lost", f"node {gone} was lost", redone=0, lost=(gone,), joined=())
        told.state("running", "stepping", "training goes on")
        told.train(2)
        told.add(NodeJoined(node=gone, device="A100-40G", devices=8), 0.1)
    told.add(NodeNoticed(node="spot-60", source="aws", why="terminate", lead_s=120.0))
    ok(connector.send(created, told.entries))
    rows = [[n, told.now_s, "warning", 1, n, f"rank {n}: " + "x" * 180] for n in range(1, 1001)]
    source = {"node": "big-0", "life": "1", "lines": rows}
    body = {"cluster_id": connector.cluster_id, "holder": connector.holder, "sources": [source]}
    ok(api.post(f"/v1/jobs/{created}/logs", json=body))
    return created


def page_text(api: httpx.Client, path: str) -> str:
    """Asked for again where the answer says so: a machine may be so loaded that a database does not answer in time."""
    answer = api.get(path)
    while answer.status_code == 503:
        answer = api.get(path)
    return answer.raise_for_status().text


def test_pages_of_a_thousand_ranks_are_small_and_complete(api: httpx.Client, job_id: str) -> None:
    api.timeout = httpx.Timeout(300)
    paths = ("/", f"/jobs/{job_id}", f"/jobs/{job_id}?epoch=1", "/nodes")
    texts = {path: page_text(api, path) for path in paths}
    for path, text in texts.items():
        assert len(text.encode()) < MOST_BYTES, (path, len(text.encode()))
    page = texts[f"/jobs/{job_id}"]
    assert re.search(r"\d+ pipelines</text>", page), "alike ones share a row"
    assert "8 x A100-80G" in page
    assert "goes away" in page and "spot-60" in page
    assert "This is computed once the page is there" in page
    assert "Any node can vanish" in api.get(f"/jobs/{job_id}/panels/losses").text
    assert "R12: node lost" in page and "7 older ones" in page
    assert "101 more are on the page of" in page
    assert "rank 1000: x" in page and "rank 1: x" not in page
    by_layer = api.get(f"/jobs/{job_id}/panels/losses").text
    assert re.search(r'<th scope="row">layers? 0(-\d+)?</th><td class="num">2', by_layer), by_layer[:3000]
    first = texts[f"/jobs/{job_id}?epoch=1"]
    assert "Plan 1 of 13" in first and "not the current plan" in first
    assert "page 1 of 2, 125 nodes" in texts["/nodes"]
    assert "8 x A100-40G" in texts["/nodes"]


def test_jobs_are_listed_in_pages_and_by_name(api: httpx.Client) -> None:
    for number in range(52):
        ok(api.post("/v1/jobs", json=job_mapping(name=f"many {number}")))
    ok(api.post("/v1/jobs", json=job_mapping(name="100% other")))
    first = api.get("/", params={"name": "MANY", "state": "active"}).text
    assert first.count('class="chip state-queued"') == 50 + 1
    (older,) = re.findall(r'href="/\?(cursor=[^"]+)">Older', first)
    assert api.get("/?" + older.replace("&amp;", "&")).text.count("<progress") == 2
    assert api.get("/", params={"name": "0% o"}).text.count("<progress") == 1
    assert "No job is like that" in api.get("/", params={"state": "failed"}).text
    assert api.get("/", params={"state": "nonsense"}).status_code == 200
