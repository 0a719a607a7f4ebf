"""What a real cluster tells of itself: when its nodes were last heard, and what copies of state cost its steps."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from running import LIMIT_S, Running, job_mapping
from servers import new_place
from waiting import eventually


def heard(running: Running) -> dict[str, tuple[str | None, float]]:
    """By node: by whom, and how long before its cluster was heard of last."""
    return {node["id"]: (node["heard_by"], _age_s(node)) for node in running.client.nodes()}


def _age_s(node: dict[str, Any]) -> float:
    if node["heard_at"] is None:
        return float("inf")
    seen, told = (datetime.fromisoformat(node[name]) for name in ("heard_at", "seen_at"))
    return (told - seen).total_seconds()


@pytest.mark.long
def test_nodes_are_heard_and_steps_tell_what_held_them_up(running: Running) -> None:
    eventually(lambda: len(heard(running)) == 4 and {by for by, _ in heard(running).values()} == {"ray"}, LIMIT_S)
    job_id = running.submit(job_mapping(400, uri=new_place(), every_steps=10))
    running.until_step(job_id, 25)
    eventually(lambda: {by for by, _ in heard(running).values()} == {"processes"}, LIMIT_S)
    eventually(lambda: all(age_s < 2.0 for _, age_s in heard(running).values()), LIMIT_S)

    steps = running.events(job_id, "step_done")
    assert all(0 <= step["stalled_s"] <= step["duration_s"] for step in steps)
    told = [dict((kind, most_s) for kind, _, most_s in step["waited_s"]) for step in steps]
    assert any(waited.get("safety", 0.0) > 0 for waited in told), "copies took somebody some time"
    assert all(step["stalled_s"] <= waited.get("safety", 1e-4) + 1e-6 for step, waited in zip(steps, told, strict=True))
    stored = eventually(lambda: running.client.checkpoints(job_id)["items"], LIMIT_S)
    by_step = {step["step"]: step["stalled_s"] for step in running.events(job_id, "step_done")}
    newest = stored[-1]
    assert newest["held_up_s"] == pytest.approx(by_step[newest["step"] + 1])
    assert newest["verified"]["by"] == "manifest" and newest["duration_s"] > 0
    running.client.cancel(job_id)
