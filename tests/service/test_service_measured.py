"""What was measured of a cluster: kept with it, shown with its nodes, and what a preview of a plan is priced by."""

from __future__ import annotations

from typing import Any

import httpx
from control_plane import Connector, job_mapping, ok

from shoal.cli_show import event_line
from shoal_planner.cluster import snapshot_to_mapping
from shoal_planner.job import parse_job
from shoal_planner.profile import (
    KindLink,
    LayerTime,
    LinkFigure,
    Part,
    Profile,
    UpdateRate,
    link_kind,
    profile_to_mapping,
)
from shoal_recovery.journal import Entry, FiguresMeasured, PredictionChecked, StateChanged
from shoal_service.measured import in_short, measured_lines

SECONDS_PER_SAMPLE = 3.0


def layer(device: str, part: Part, samples: int) -> LayerTime:
    spec = parse_job(job_mapping())
    return LayerTime(
        device=device,
        part=part,
        tp=1,
        micro_batch=samples,
        seq_len=spec.train.seq_len,
        hidden=spec.model.hidden,
        forward_s=SECONDS_PER_SAMPLE * samples,
        backward_s=SECONDS_PER_SAMPLE * samples,
        source="timed",
        heads=spec.model.heads,
        kv_heads=spec.model.num_kv_heads,
        ffn=spec.model.ffn,
        vocab=spec.model.vocab,
    )


def figures(connector: Connector) -> Profile:
    """Blocks are far slower than anybody expects; big nodes are linked, and one pair falls behind."""
    big = link_kind(connector.cluster.node("big-0"))
    return Profile(
        layers=tuple(layer(device, "block", samples) for device in ("A100-80G", "T4") for samples in (1, 2)),
        updates=(UpdateRate(device="T4", elements_per_s=2e8, source="timed on spot-0"),),
        kind_links=(KindLink(from_kind=big, to_kind=big, latency_s=1e-4, bytes_per_s=5e8, source="probed"),),
        links=(LinkFigure(from_node="big-0", to_node="spot-1", latency_s=2e-3, bytes_per_s=1e6, source="probed"),),
    ).on(connector.cluster.nodes)


def offer(api: httpx.Client, connector: Connector, profile: Profile) -> None:
    body = {
        "holder": connector.holder,
        "snapshot": snapshot_to_mapping(connector.cluster),
        "profile": profile_to_mapping(profile),
        "lease_s": 60,
    }
    ok(api.put(f"/v1/clusters/{connector.cluster_id}", json=body))


def preview(api: httpx.Client) -> float:
    return float(ok(api.post("/v1/plans", json={"job": job_mapping()}))["predicted"]["step_s"])


def test_a_preview_is_priced_by_what_was_measured(api: httpx.Client, connector: Connector) -> None:
    assert api.get("/v1/clusters/local").status_code == 404
    ok(connector.renew())
    guessed_s = preview(api)
    profile = figures(connector)
    offer(api, connector, profile)
    shown = ok(api.get("/v1/clusters/local"))
    assert shown["profile"] == _plain(profile_to_mapping(profile))
    assert shown["num_nodes"] == 4
    spec = parse_job(job_mapping())
    blocks_s = 2 * SECONDS_PER_SAMPLE * spec.model.layers * spec.train.global_batch
    assert guessed_s < blocks_s / 60 < blocks_s / connector.cluster.num_devices <= preview(api)


def test_nodes_show_what_is_known_of_them(api: httpx.Client, connector: Connector) -> None:
    ok(connector.renew())
    assert all(
        node["measured"] == {"layers": 0, "update": None, "links": []} for node in ok(api.get("/v1/nodes"))["items"]
    )
    offer(api, connector, figures(connector))
    found = {node["id"]: node["measured"] for node in ok(api.get("/v1/nodes"))["items"]}
    assert [found[node]["layers"] for node in ("big-1", "spot-0")] == [2, 2]
    assert found["spot-0"]["update"]["source"] == "timed on spot-0"
    assert found["big-0"]["update"] is None
    assert [len(found[node]["links"]) for node in ("big-0", "big-1", "spot-0", "spot-1")] == [2, 1, 0, 1]
    assert in_short(found["big-0"]) == "layers, links 1 MB/s, 2 ms"
    assert in_short(found["spot-0"]) == "layers, update"
    assert "layers, links 1 MB/s" in api.get("/nodes").text


def test_events_of_measurements_read_well(api: httpx.Client, connector: Connector) -> None:
    profile = profile_to_mapping(figures(connector))
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(connector.renew())
    events = (
        StateChanged(state="starting", code="starting", reason="Waiting."),
        FiguresMeasured(profile=profile, num_bytes=4_000_000, duration_s=0.25),
        PredictionChecked(epoch=1, step=7, num_steps=5, predicted_s=0.25, measured_s=1.0),
    )
    ok(connector.send(job_id, [Entry(seq=seq, at_s=9.0, event=event) for seq, event in enumerate(events, start=1)]))
    page = api.get(f"/jobs/{job_id}").text
    assert "4.00 times" in page
    assert "T4 updates 200 million elements per second" in page
    entries = ok(api.get(f"/v1/jobs/{job_id}/events"))["items"]
    assert "4 of layers, 1 of updates, 2 of links; 4.0 MB sent" in event_line(entries[1])
    assert "1 s, predicted were 0.25 s (4.00 times), epoch 1" in event_line(entries[2])
    (unreadable,) = measured_lines({"odd": 1})
    assert "odd" in unreadable


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
