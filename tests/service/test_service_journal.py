"""What connectors send: leases, wishes, journals; and what the control plane then shows."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from control_plane import ALL_NODES, Connector, Story, job_mapping, ok, snapshot, story

from shoal_planner.cluster import parse_cluster
from shoal_planner.job import parse_job
from shoal_recovery.journal import (
    Entry,
    EvaluationDone,
    NodeNoticed,
    NodeRecovered,
    NodeSlowed,
    NodeStays,
    NoticeEnded,
    StateChanged,
    StepDone,
    StepSkipped,
    entry_to_mapping,
)


# Jobs are submitted before the cluster comes where the order does not matter: no plan is searched for then.
def submit(api: httpx.Client, **changes: Any) -> str:
    return str(ok(api.post("/v1/jobs", json=job_mapping(**changes)))["id"])


def step(seq: int, number: int, *, epoch: int = 1, loss: float = 2.0) -> Entry:
    event = StepDone(
        epoch=epoch,
        step=number,
        loss=loss,
        grad_norm=1.0,
        lr=3e-4,
        tokens=256,
        duration_s=0.5,
        samples=((0, 8),),
    )
    return Entry(seq=seq, at_s=1000.0 + seq, event=event)


def state(seq: int, name: str, reason: str = "because") -> Entry:
    return Entry(seq=seq, at_s=1000.0 + seq, event=StateChanged(state=name, code="code", reason=reason))


def test_one_holder_at_a_time_speaks_for_a_cluster(
    api: httpx.Client, connector: Connector, eventually: Callable[..., Any]
) -> None:
    lease = ok(connector.renew(lease_s=30))
    assert lease["cluster_id"] == "local" and lease["lease_until"].endswith("Z")
    other = Connector(http=api, holder="connector-2")
    refused = other.renew()
    assert refused.status_code == 409
    assert refused.json()["code"] == "lease_held"
    assert "connector-1" in refused.json()["detail"]
    job_id = submit(api)
    assert other.send(job_id, [state(1, "starting")]).json()["code"] == "lease_held"
    ok(connector.renew(lease_s=0.01))
    eventually(lambda: other.renew().is_success)


def test_a_cluster_report_is_checked(api: httpx.Client, connector: Connector) -> None:
    body = {"holder": "h", "lease_s": 5, "snapshot": {"nodes": [{"id": "a"}]}, "profile": {}}
    problem = api.put("/v1/clusters/c", json=body)
    assert (problem.status_code, problem.json()["param"]) == (422, "snapshot.nodes[0].device")
    body = {"holder": "h", "lease_s": 5, "snapshot": {"nodes": []}, "profile": {"odd": 1}}
    assert api.put("/v1/clusters/c", json=body).json()["param"] == "profile.odd"
    assert api.put("/v1/clusters/c", json={"holder": "h"}).json()["param"] == "snapshot"
    assert ok(api.get("/v1/clusters"))["items"] == []


def test_a_waiting_job_goes_to_the_first_cluster_that_comes(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    wished = connector.wishes()
    assert [(job["id"], job["wish"], job["last_seq"]) for job in wished["jobs"]] == [(job_id, "run", 0)]
    assert wished["jobs"][0]["spec"]["name"] == "tiny"
    assert ok(api.get(f"/v1/jobs/{job_id}"))["cluster_id"] == "local"
    ok(Connector(http=api, cluster_id="second", holder="x").renew())
    assert Connector(http=api, cluster_id="second", holder="x").wishes()["jobs"] == []


def test_wishes_are_answered_as_soon_as_they_change(api: httpx.Client, connector: Connector) -> None:
    ok(connector.renew())
    version = connector.wishes()["version"]
    assert connector.wishes(after=version)["version"] == version
    answers: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(connector.wishes(after=version, wait_s=20)))
    waiting.start()
    started_s = time.monotonic()
    job_id = submit(api)
    waiting.join(timeout=10)
    assert time.monotonic() - started_s < 8
    assert [job["id"] for job in answers[0]["jobs"]] == [job_id]
    # Progress is no new wish; a cancellation is.
    version = answers[0]["version"]
    ok(connector.send(job_id, [state(1, "starting"), step(2, 1)]))
    assert connector.wishes()["version"] == version
    assert connector.wishes()["jobs"][0]["last_seq"] == 2
    ok(api.post(f"/v1/jobs/{job_id}/cancel"))
    assert connector.wishes()["version"] != version
    assert connector.wishes()["jobs"][0]["wish"] == "cancelled"
    ok(connector.send(job_id, [state(3, "cancelled")]))
    assert connector.wishes()["jobs"] == []


def test_a_drill_is_a_wish_until_it_is_over(
    api: httpx.Client, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preempt(node: str, **body: Any) -> httpx.Response:
        return api.post(f"/v1/nodes/{node}/preempt", json=body)

    assert preempt("spot-1").json()["code"] == "node_not_found"
    ok(connector.renew())
    before = connector.wishes()
    assert before["drills"] == []
    asked_s = time.time()
    drill = ok(preempt("spot-1", notice_s=90))
    assert (drill["cluster_id"], drill["node"], drill["notice_s"]) == ("local", "spot-1", 90.0)
    going = [node["id"] for node in ok(api.get("/v1/nodes"))["items"] if node["reclaim_at_s"]]
    assert going == ["spot-1"]
    wished = connector.wishes()
    (told,) = wished["drills"]
    assert (told["id"], told["node"]) == (drill["id"], "spot-1")
    assert 90 - (time.time() - asked_s) <= told["left_s"] <= 90
    assert wished["version"] != before["version"]
    later = ok(preempt("spot-1", notice_s=30))
    wished = connector.wishes()
    assert [told["id"] for told in wished["drills"]] == [later["id"]], "both would be repeated, and each be news"
    ok(connector.renew())
    assert connector.wishes()["version"] == wished["version"], "a lease forgets no drill"
    ok(Connector(http=api, cluster_id="second", holder="x").renew(lease_s=0.001))
    assert preempt("spot-1").json()["code"] == "node_ambiguous"
    assert preempt("spot-1", cluster_id="second").json()["code"] == "cluster_not_connected"
    assert preempt("spot-1", cluster_id="local", notice_s=-1).json()["param"] == "notice_s"
    later_s = asked_s + 1000
    monkeypatch.setattr(time, "time", lambda: later_s)
    assert connector.wishes()["drills"] == []


def test_what_comes_of_notices_is_shown(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    told = Story(job=parse_job(job_mapping()), cluster=snapshot(), now_s=1000.0)
    told.state("starting", "planned", "starting")
    told.adopt(ALL_NODES, told.cluster, "first plan of this job")
    told.state("running", "stepping", "training")
    told.add(NodeNoticed(node="spot-1", source="aws", why="terminate", lead_s=120.0), 5.0)
    told.add(NodeStays(node="spot-1", reason="No plan fits without it."))
    told.add(NodeSlowed(node="big-0", slowdown=2.0, reason="It computes 2 times slower than it should."), 5.0)
    told.add(NodeRecovered(node="big-0", reason="It computes as fast as it should again."), 5.0)
    told.add(NoticeEnded(node="spot-1", source="aws", outcome="gone"), 115.0)
    ok(connector.send(job_id, told.entries))
    page = api.get(f"/jobs/{job_id}").text
    assert "spot-1 is to go away in 2 min (aws: terminate)" in page
    assert "spot-1 is gone, as announced (aws)" in page
    assert "spot-1 went, as announced (aws)" in page
    assert "big-0: It computes 2 times slower than it should." in page
    assert "big-0: It computes as fast as it should again." in page
    cost = ok(api.get(f"/v1/jobs/{job_id}/cost"))
    (spot,) = [charge for charge in cost["charges"] if charge["device"] == "T4" and charge["spot"]]
    assert spot["num_nodes_now"] == spot["num_nodes"] - 1, "what is gone costs nothing any more"


def test_a_journal_is_neither_lost_nor_doubled(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time()).entries
    assert ok(connector.send(job_id, told[:10])) == {"last_seq": 10}
    assert ok(connector.send(job_id, told[:10])) == {"last_seq": 10}
    assert ok(connector.send(job_id, told[5:15])) == {"last_seq": 15}
    gap = connector.send(job_id, told[20:25])
    assert (gap.status_code, gap.json()["code"], gap.json()["expected_seq"]) == (409, "journal_gap", 16)
    assert ok(connector.send(job_id, told)) == {"last_seq": len(told)}
    shown: list[dict[str, Any]] = []
    after, more = 0, True
    while more:
        page = ok(api.get(f"/v1/jobs/{job_id}/events", params={"after": after, "limit": 30}))
        shown += page["items"]
        after, more = page["next_after"], page["more"]
    sent = [entry_to_mapping(entry) for entry in told]
    assert [{key: item for key, item in event.items() if key != "at"} for event in shown] == json_values(sent)


def json_values(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_senders_at_the_same_time_write_each_entry_once(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    told = [state(1, "starting"), state(2, "running"), *(step(seq, seq - 2) for seq in range(3, 63))]

    def send() -> None:
        sent = 0
        while sent < len(told):
            sent = ok(connector.send(job_id, told[sent : sent + 7]))["last_seq"]

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    job = ok(api.get(f"/v1/jobs/{job_id}"))
    assert (job["status"]["last_seq"], job["status"]["step"]) == (62, 60)
    assert ok(api.get(f"/v1/jobs/{job_id}/metrics"))["num_points"] == 60


def test_the_whole_story_of_a_job(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time())
    ok(connector.send(job_id, told.entries))
    job = ok(api.get(f"/v1/jobs/{job_id}"))["status"]
    assert (job["state"], job["code"], job["step"], job["epoch"]) == ("succeeded", "all_steps_done", 60, 3)
    assert (job["recoveries"], job["redone_steps"], job["lost_steps"]) == (2, 1, 0)
    assert job["loss"] is not None and job["eta_s"] is None
    assert job["evaluation"] == {"step": 60, "loss": 2.25, "perplexity": math.exp(2.25)}

    curve = ok(api.get(f"/v1/jobs/{job_id}/metrics"))
    assert [point["step"] for point in curve["points"]] == list(range(1, 61))
    assert [(point["step"], point["epoch"]) for point in curve["rolled_back"]] == [(20, 1)]
    assert [(found["step"], found["loss"], found["tokens"]) for found in curve["evaluations"]] == [(60, 2.25, 1024)]
    assert [(mark["cause"], mark["step"]) for mark in curve["markers"]] == [("node_lost", 19), ("node_joined", 39)]

    plan = ok(api.get(f"/v1/jobs/{job_id}/plan"))
    assert plan["plan_id"] == told.plan_id == job["plan_id"]
    assert [each["epoch"] for each in plan["generations"]] == [1, 2, 3]
    older = ok(api.get(f"/v1/jobs/{job_id}/plan", params={"epoch": 2}))
    assert older["plan_id"] != plan["plan_id"]
    assert {node["id"] for node in older["snapshot"]["nodes"]} == {"big-0", "big-1", "spot-0"}
    assert api.get(f"/v1/jobs/{job_id}/plan", params={"epoch": 9}).json()["param"] == "epoch"

    recoveries = ok(api.get(f"/v1/jobs/{job_id}/recoveries"))
    assert [item["cause"] for item in recoveries["items"]] == ["node_lost", "node_joined"]
    assert recoveries["items"][0]["nodes_lost"] == ["spot-1"]
    (known,) = recoveries["items"][0]["known_by"]
    assert (known["node"], known["notice"], known["loss"]["evidence"]) == ("spot-1", None, "its connection closed")
    assert recoveries["items"][1]["known_by"] == []
    assert recoveries["bytes"] == {"own": 62_800_000, "node": 16_400_000, "peer": 25_800_000, "store": 0}
    assert ok(api.get("/v1/jobs", params={"state": "succeeded"}))["items"][0]["id"] == job_id


def test_points_that_were_rolled_back_stay_and_are_told_apart(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    entries = [state(1, "starting"), state(2, "running")]
    entries += [step(seq, seq - 2, loss=float(seq)) for seq in range(3, 13)]
    entries += [step(13 + index, 6 + index, epoch=2, loss=50.0) for index in range(3)]
    ok(connector.send(job_id, entries))
    curve = ok(api.get(f"/v1/jobs/{job_id}/metrics"))
    assert [(point["step"], point["epoch"]) for point in curve["points"]] == [
        *((number, 1) for number in range(1, 6)),
        *((number, 2) for number in range(6, 9)),
    ]
    assert [point["step"] for point in curve["rolled_back"]] == [6, 7, 8, 9, 10]
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["step"] == 8


def test_skipped_steps_that_are_rolled_back_no_longer_count(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())

    def skipped(seq: int, number: int, epoch: int) -> list[Entry]:
        event = dataclasses.replace(step(seq + 1, number, epoch=epoch).event, skipped=True)
        told = StepSkipped(epoch=epoch, step=number, problem="not finite on rank 0 (a:0)")
        return [Entry(seq=seq, at_s=1.0, event=told), Entry(seq=seq + 1, at_s=1.0, event=event)]

    entries = [state(1, "starting"), state(2, "running"), step(3, 1), *skipped(4, 2, 1), *skipped(6, 3, 1)]
    ok(connector.send(job_id, entries))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["skipped_steps"] == 2
    ok(connector.send(job_id, skipped(8, 3, 2)))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["skipped_steps"] == 2, "done again and skipped again"
    ok(connector.send(job_id, [step(10, 3, epoch=3), step(11, 4, epoch=3)]))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["skipped_steps"] == 1


def test_the_newest_step_says_what_was_exchanged(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    ok(connector.send(job_id, [state(1, "starting"), state(2, "running"), step(3, 1)]))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["exchanges"] is None, "a journal of an older version"
    event = dataclasses.replace(
        step(4, 2).event, moved_bytes=(("zone", 800),), exposed=(0.25, 0.5), waited_s=(("stages", 0.125, 0.25),)
    )
    ok(connector.send(job_id, [Entry(seq=4, at_s=5.0, event=event)]))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["exchanges"] == {
        "step": 2,
        "exposed_share": 0.25,
        "most_exposed_share": 0.5,
        "waited_s": {"stages": {"mean": 0.125, "most": 0.25}},
        "moved_bytes": {"zone": 800},
    }
    page = api.get(f"/jobs/{job_id}", headers={"Accept": "text/html"}).text
    assert "25.0%" in page and "at most 50.0% on a rank" in page
    assert "between nodes" in page and "800 B" in page


def test_the_time_to_go_includes_evaluations(api: httpx.Client, connector: Connector) -> None:
    """Of 10 steps the 4th, the 8th and the last are followed by one."""
    job_id = submit(api, train={"steps": 10, "eval_every": 4, "eval_batches": 3})
    ok(connector.renew())
    ok(connector.send(job_id, [state(1, "starting"), state(2, "running"), step(3, 1), step(4, 2)]))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["eta_s"] == pytest.approx(8 * 0.5 + 3 * 3 * 0.5 / 3)
    found = EvaluationDone(epoch=1, step=4, loss=2.0, tokens=9, duration_s=2.0)
    ok(connector.send(job_id, [step(5, 3), step(6, 4), Entry(seq=7, at_s=9.0, event=found)]))
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["eta_s"] == pytest.approx(6 * 0.5 + 2 * 2.0)


def test_a_long_curve_is_thinned_but_keeps_its_extremes(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api, train={"steps": 5000})
    ok(connector.renew())
    entries = [state(1, "starting"), state(2, "running")]
    entries += [step(seq, seq - 2, loss=9.0 if seq == 777 else 2.0 + seq / 1e5) for seq in range(3, 1503)]
    ok(connector.send(job_id, entries))
    curve = ok(api.get(f"/v1/jobs/{job_id}/metrics", params={"max_points": 100}))
    assert curve["downsampled"] and curve["num_points"] == 1500
    assert 50 <= len(curve["points"]) <= 100
    assert max(point["loss"] for point in curve["points"]) == 9.0
    steps = [point["step"] for point in curve["points"]]
    assert steps == sorted(set(steps)) and steps[0] == 1 and steps[-1] == 1500


def test_a_loss_that_is_no_number_is_kept_and_shown_as_null(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    bad = entry_to_mapping(step(2, 1)) | {"loss": "nan"}
    body = {"cluster_id": "local", "holder": "connector-1", "entries": [entry_to_mapping(state(1, "starting")), bad]}
    ok(api.post(f"/v1/jobs/{job_id}/journal", json=body))
    assert ok(api.get(f"/v1/jobs/{job_id}/metrics"))["points"][0]["loss"] is None
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["loss"] is None
    assert math.isnan(float(ok(api.get(f"/v1/jobs/{job_id}/events"))["items"][1]["loss"]))


@pytest.mark.parametrize(
    ("entry", "param"),
    [
        ({"at_s": 1.0, "kind": "state_changed"}, "entries[0].seq"),
        ({"seq": 1, "at_s": 1.0, "kind": "odd"}, "entries[0].kind"),
        ({"seq": 1, "at_s": 1.0, "kind": "step_done", "epoch": "x"}, "entries[0].epoch"),
        ({"seq": 0, "at_s": 1.0, "kind": "state_changed", "state": "running", "code": "", "reason": ""}, "entries[0]"),
        ({"seq": 1, "at_s": 1.0, "kind": "state_changed", "state": "odd", "code": "", "reason": ""}, "entries[0]"),
        (
            {"seq": "x", "at_s": 1.0, "kind": "state_changed", "state": "odd", "code": "", "reason": ""},
            "entries[0].seq",
        ),
        ({"seq": 1, "at_s": "1", "kind": "state_changed", "state": "odd", "code": "", "reason": ""}, "entries[0].at_s"),
    ],
)
def test_entries_that_cannot_be_read_are_refused(
    api: httpx.Client, connector: Connector, entry: dict[str, Any], param: str
) -> None:
    job_id = submit(api)
    ok(connector.renew())
    body = {"cluster_id": "local", "holder": "connector-1", "entries": [entry]}
    refused = api.post(f"/v1/jobs/{job_id}/journal", json=body)
    assert (refused.status_code, refused.json()["param"]) == (422, param)
    assert ok(api.get(f"/v1/jobs/{job_id}"))["status"]["last_seq"] == 0


def test_a_journal_comes_from_the_jobs_own_cluster(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    other = Connector(http=api, cluster_id="other", holder="h")
    assert other.send(job_id, []).json()["code"] == "cluster_not_found"
    ok(other.renew())
    assert other.send(job_id, [state(1, "starting")]).json()["code"] == "wrong_cluster"
    assert connector.send("job_x", []).status_code == 404


def test_cancelling(api: httpx.Client, connector: Connector) -> None:
    alone = submit(api)
    job = ok(api.post(f"/v1/jobs/{alone}/cancel"))
    assert (job["wish"], job["status"]["state"]) == ("cancelled", "cancelled")
    running, done = submit(api), submit(api)
    ok(connector.renew())
    ok(connector.send(running, [state(1, "starting"), state(2, "running"), step(3, 1)]))
    job = ok(api.post(f"/v1/jobs/{running}/cancel"))
    assert (job["wish"], job["status"]["state"]) == ("cancelled", "cancelling")
    assert ok(api.post(f"/v1/jobs/{running}/cancel"))["status"]["state"] == "cancelling"
    # A supervisor that has not heard of it yet goes on reporting; that is kept, but does not undo the wish.
    ok(connector.send(running, [state(4, "recovering"), step(5, 2)]))
    job = ok(api.get(f"/v1/jobs/{running}"))
    assert (job["status"]["state"], job["status"]["step"]) == ("cancelling", 2)
    ok(connector.send(running, [state(6, "cancelled", "the user asked for it")]))
    assert ok(api.get(f"/v1/jobs/{running}"))["status"]["state"] == "cancelled"
    ok(connector.send(done, [state(1, "starting"), state(2, "succeeded")]))
    refused = api.post(f"/v1/jobs/{done}/cancel")
    assert (refused.status_code, refused.json()["code"]) == (409, "job_ended")


def test_nodes_say_whom_they_work_for(api: httpx.Client, connector: Connector) -> None:
    assert ok(api.get("/v1/nodes"))["items"] == []
    job_id = submit(api)
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time()).entries
    ok(connector.send(job_id, told[:10]))
    nodes = {node["id"]: node for node in ok(api.get("/v1/nodes"))["items"]}
    assert set(nodes) == {"big-0", "big-1", "spot-0", "spot-1"}
    assert all(node["jobs"] == [job_id] and node["connected"] for node in nodes.values())
    assert nodes["spot-1"]["spot"] and nodes["spot-1"]["zone"] == "b"
    ok(connector.send(job_id, told))
    assert all(node["jobs"] == [] for node in ok(api.get("/v1/nodes"))["items"])


def test_nodes_come_in_pages_that_an_answer_can_hold(api: httpx.Client) -> None:
    many = {"nodes": [{"name": "n", "count": 1200, "device": "T4", "devices": 1, "zone": "b"}]}
    ok(Connector(http=api, cluster_id="many", cluster=parse_cluster(many)).renew())
    ok(Connector(http=api, cluster_id="few", holder="x").renew())
    whole: list[tuple[str, str]] = []
    asked: dict[str, Any] = {"limit": 500}
    while True:
        answered = api.get("/v1/nodes", params=asked)
        found = ok(answered)
        assert 0 < len(found["items"]) <= 500 and len(answered.content) <= 200_000
        whole += [(node["cluster_id"], node["id"]) for node in found["items"]]
        if found["next_cursor"] is None:
            break
        asked["cursor"] = found["next_cursor"]
    assert whole == sorted({*whole}) and len(whole) == 1204
    first = ok(api.get("/v1/nodes", params={"limit": 4}))
    assert [node["cluster_id"] for node in first["items"]] == ["few"] * 4 and first["next_cursor"] is not None
    for wrong in ("x", "WzFd", base64.urlsafe_b64encode(b"[" * 700).decode()):
        assert api.get("/v1/nodes", params={"cursor": wrong}).json()["param"] == "cursor"


def test_a_running_job_says_how_long_it_still_takes(api: httpx.Client, connector: Connector) -> None:
    job_id = submit(api)
    ok(connector.renew())
    ok(connector.send(job_id, [state(1, "starting"), state(2, "running"), step(3, 1), step(4, 2)]))
    shown = ok(api.get(f"/v1/jobs/{job_id}"))["status"]
    assert shown["step_s"] == 0.5 and shown["eta_s"] == 58 * 0.5 and shown["tokens_per_s"] == 512
