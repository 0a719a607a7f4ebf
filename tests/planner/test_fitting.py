"""Whether nodes suffice for a job, asked often: the planner is asked once for each kind of answer."""

from __future__ import annotations

import dataclasses

import pytest
from control_plane import job_mapping

from shoal_planner import fitting
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.fitting import Fitting, Known
from shoal_planner.job import parse_job
from shoal_planner.profile import Profile
from shoal_planner.script_spec import AnyJob, parse_any_job

CLUSTER = parse_cluster(
    {
        "nodes": [
            {"name": "t", "count": 6, "device": "T4"},
            {"name": "a", "count": 2, "device": "A100-80G", "devices": 4},
        ]
    }
)
SCRIPT = parse_any_job(
    {
        "kind": "ray_train",
        "name": "s",
        "script": {"path": "/s.py"},
        "workers": {"min": 5, "max": 8},
        "checkpoint": {"uri": "file:///c"},
        "limits": {"device_types": ["T4"]},
    }
)


def ask(job: AnyJob, known: dict[str, Known] | None = None, cluster: ClusterSnapshot = CLUSTER) -> Fitting:
    return Fitting({"j": job}, cluster, Profile(), {} if known is None else known, 5.0)


def names(*names: str) -> frozenset[str]:
    return frozenset(names)


def test_what_is_found_once_is_known_of_all_nodes_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    search = fitting.plan

    def counted(job: object, snapshot: ClusterSnapshot, *arguments: object, **more: object) -> object:
        searches.append(len(snapshot.nodes))
        return search(job, snapshot, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(fitting, "plan", counted)
    known: dict[str, Known] = {}
    job = parse_job(job_mapping(limits={"device_types": ["T4"], "min_devices": 2}))
    fits = ask(job, known)
    assert not fits("j", frozenset()) and not fits("j", names("t-0")) and not fits("j", names("a-0", "a-1"))
    assert searches == [], "that there are too few devices is seen at once"
    assert fits("j", names("t-0", "t-1")) and fits("j", names("t-3", "t-5", "a-0")) and fits("j", names("t-1", "t-2"))
    assert searches == [2]
    assert ask(job, known)("j", names("t-4", "t-5")) and searches == [2]
    large = dataclasses.replace(job, limits=dataclasses.replace(job.limits, min_devices=3))
    assert not ask(large, known)("j", names("t-0", "t-1")), "it went by what was known of the job as it was"
    copies = dataclasses.replace(job.checkpoint, copies=4)
    wide = ask(dataclasses.replace(job, checkpoint=copies), known)
    searches.clear()
    assert not wide("j", names("t-0", "t-1", "t-2")) and not wide("j", names("t-3", "t-4"))
    assert searches == [3], "less of what does not fit does not either"
    assert wide("j", names("t-0", "t-1", "t-2", "t-3", "t-4"))


def test_scripts_need_devices_for_their_workers_or_all_there_is() -> None:
    fits = ask(SCRIPT)
    assert not fits("j", names("t-0", "t-1", "t-2", "t-3")) and not fits("j", names("a-0", "a-1"))
    assert fits("j", names("t-0", "t-1", "t-2", "t-3", "t-4"))
    few = dataclasses.replace(CLUSTER, nodes=CLUSTER.nodes[:4])  # two of each: its workers may be small
    assert ask(SCRIPT, cluster=few)("j", names("t-0", "t-1")) and not ask(SCRIPT, cluster=few)("j", names("t-0"))
