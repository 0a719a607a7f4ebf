"""`shoal plan` and `shoal score`: explanations, pictures, and every bad input that they name."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal import cli

JOB: dict[str, Any] = {
    "name": "j",
    "model": {"layers": 4, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 256},
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 8, "seq_len": 256, "steps": 10},
}
CLUSTER: dict[str, Any] = {
    "nodes": [
        {"name": "a", "device": "A100-80G", "devices": 2, "zone": "east", "price_per_hour": 4},
        {"name": "t", "device": "T4", "zone": "west", "price_per_hour": 0.5},
    ],
    "devices": {"T4": {"efficiency": 0.3}},
    "links": [
        {"from": "east", "to": "west", "gbit_per_s": 400, "latency_ms": 0},
        {"from": "east", "to": "east", "gbit_per_s": 100, "latency_ms": 0},
    ],
}
PLAN: dict[str, Any] = {
    "pipelines": [
        {
            "micro_batch": 2,
            "micro_batches": 4,
            "stages": [
                {"layers": [[0, 1]], "replicas": [{"node": "a-0", "devices": [0], "samples": 2}]},
                {"layers": [[1, 4]], "replicas": [{"node": "t-0", "devices": [0], "samples": 2}]},
            ],
        }
    ]
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, value in (("job", JOB), ("cluster", CLUSTER), ("plan", PLAN)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value))
    return tmp_path


def arguments(command: str, files: Path) -> list[str]:
    given = [str(files / "plan.yaml")] if command == "score" else []
    return [command, *given, str(files / "job.yaml"), "--cluster", str(files / "cluster.yaml")]


def run(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str, str]:
    status = cli.run(list(given))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_plan_explains_itself_to_people_and_programs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *arguments("plan", files), "--explain", "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    answer = json.loads(out)
    found = answer["explanation"]
    assert sum(term["seconds"] for term in found["terms"]) == pytest.approx(answer["predicted"]["step_s"])
    assert found["candidates"][0]["chosen"] and found["binding"]["sentences"]
    assert {entry["adds"] for entry in found["marginals"]} == {"device", "node"}
    status, out, err = run(capsys, *arguments("plan", files), "--explain")
    assert (status, err) == (0, "")
    for words in ("WHERE THE STEP GOES", "CANDIDATES COMPARED", "WHAT BINDS", "WHAT MORE WOULD BRING", "sets the pace"):
        assert words in out, words


def test_score_explains_a_foreign_plan(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *arguments("score", files), "--explain")
    assert (status, err) == (0, "")
    assert "WHERE THE STEP GOES" in out and "holds layers 1-3 + head on t-0:0 (T4)" in out
    assert "CANDIDATES" not in out and "WHAT MORE" not in out


@pytest.mark.parametrize("command", ["plan", "score"])
def test_pictures_are_written(files: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    svg, timeline = files / "plan.svg", files / "step.svg"
    status, out, err = run(
        capsys, *arguments(command, files), "--json", "--svg", str(svg), "--timeline", str(timeline)
    )  # fmt: skip
    assert (status, err) == (0, "")
    plan_id = json.loads(out)["plan_id"]
    for path in (svg, timeline):
        root = ElementTree.parse(path).getroot()
        assert root.tag.endswith("}svg") and plan_id in path.read_text()


def test_pictures_that_cannot_be_are_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(files / "none" / "plan.svg")
    for option in ("--svg", "--timeline"):
        status, out, err = run(capsys, *arguments("score", files), option, nowhere)
        assert (status, out) == (2, "")
        assert err == f"shoal: {option} {nowhere}: cannot be written: No such file or directory\n"
    large = copy.deepcopy(JOB)
    large["train"]["global_batch"] = 65_536
    (files / "job.yaml").write_text(yaml.safe_dump(large))
    plan = copy.deepcopy(PLAN)
    plan["pipelines"][0] |= {"micro_batch": 1, "micro_batches": 65_536}
    first, last = plan["pipelines"][0]["stages"]
    first["replicas"] = [{"node": "a-0", "devices": [0, 1], "tp": 2}]
    last["replicas"][0]["samples"] = 1
    (files / "plan.yaml").write_text(yaml.safe_dump(plan))
    status, out, err = run(capsys, *arguments("score", files), "--timeline", str(files / "step.svg"))
    assert (status, out) == (2, "") and not (files / "step.svg").exists()
    assert "--timeline: instructions = " in err and "at most 1,000,000 a step" in err and err.count("\n") == 1


def changed(value: dict[str, Any], path: str, new: object) -> dict[str, Any]:
    """A copy in which the place at this path (`nodes.0.device`) has the new value."""
    made = copy.deepcopy(value)
    *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
    place: Any = made
    for key in way:
        place = place[key]
    place[last] = new
    return made


BAD_CLUSTERS = [
    ("nodes.0.device", "A100-80", ("node a-0: device = 'A100-80': is not a known device type", "'A100-80G'")),
    ("nodes.0.device", "T44", ("node a-0: device = 'T44'", "'T4'")),
    ("nodes.0.devices", 0, ("nodes[0].devices = 0: must be at least 1",)),
    ("nodes.0.count", -1, ("nodes[0].count = -1: must be at least 1",)),
    ("nodes.0.intra_gb_per_s", 0, ("nodes[0].intra_gb_per_s = 0.0: must be more than zero",)),
    ("nodes.1.inter_gbit_per_s", -5, ("nodes[1].inter_gbit_per_s = -5.0: must be more than zero",)),
    ("nodes.1.nics", 0, ("nodes[1].nics = 0: must be at least 1",)),
    ("nodes.1.price_per_hour", -1, ("nodes[1].price_per_hour = -1.0: must be zero or more",)),
    ("nodes.1.host_memory_gib", -1, ("nodes[1].host_memory_gib = -1.0: must be zero or more",)),
    ("nodes.1.group_gb_per_s", 0, ("nodes[1].group_gb_per_s = 0.0: must be more than zero",)),
    ("devices.T4.efficiency", 0, ("devices.T4.efficiency = 0.0: must be more than zero",)),
    ("devices.T4.efficiency", 2, ("devices.T4.efficiency = 2.0: must be at most 1",)),
    ("devices.T4.memory_gib", -1, ("devices.T4.memory_gib = -1.0: must be more than zero",)),
    ("devices.T4.tflops_bf16", 0, ("devices.T4.tflops_bf16 = 0.0: must be more than zero",)),
    ("devices.T4.memory_gb_per_s", 0, ("devices.T4.memory_gb_per_s = 0.0: must be more than zero",)),
    ("devices.New", {"tflops_bf16": 100}, ()),  # no node has that type, so nothing is missing
    ("links.0.gbit_per_s", 0, ("links[0].gbit_per_s = 0.0: must be more than zero",)),
    ("links.0.latency_ms", -1, ("links[0].latency_ms = -1.0: must be zero or more",)),
    ("links.0.to", "wset", ("links[0].to = 'wset': is not the zone of any node; did you mean 'west'?",)),
    ("links.1.from", "mars", ("links[1].from = 'mars': is not the zone of any node; the nodes are in east, west",)),
    ("links.0.from", 3, ("links[0].from = '3': is not the zone of any node",)),
]


@pytest.mark.parametrize("command", ["plan", "score"])
@pytest.mark.parametrize(("path", "value", "words"), BAD_CLUSTERS)
def test_a_bad_cluster_is_one_sentence_that_names_field_and_value(
    files: Path, capsys: pytest.CaptureFixture[str], command: str, path: str, value: object, words: tuple[str, ...]
) -> None:
    (files / "cluster.yaml").write_text(yaml.safe_dump(changed(CLUSTER, path, value)))
    status, out, err = run(capsys, *arguments(command, files), "--json")
    if not words:
        assert (status, err) == (0, "")
        return
    assert (status, out) == (2, "")
    assert err.startswith("shoal: ") and "cluster.yaml: " in err and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("command", ["plan", "score"])
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model.layers", 0, "model.layers = 0: must be at least 1"),
        ("model.hidden", -256, "model.hidden = -256: must be at least 1"),
        ("train.global_batch", 0, "train.global_batch = 0: must be at least 1"),
        ("train.seq_len", -1, "train.seq_len = -1: must be at least 1"),
        ("limits", {"min_devices": 0}, "limits.min_devices = 0: must be at least 1"),
    ],
)
def test_a_bad_job_is_one_sentence_that_names_field_and_value(
    files: Path, capsys: pytest.CaptureFixture[str], command: str, path: str, value: object, words: str
) -> None:
    (files / "job.yaml").write_text(yaml.safe_dump(changed(JOB, path, value)))
    status, out, err = run(capsys, *arguments(command, files), "--json")
    assert (status, out) == (2, "")
    assert f"job.yaml: {words}" in err and err.count("\n") == 1


def test_a_model_that_fits_nowhere_names_what_binds(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = changed(JOB, "model", {"layers": 90, "hidden": 12_288, "heads": 96, "ffn": 49_152, "vocab": 50_000})
    (files / "job.yaml").write_text(yaml.safe_dump(huge))
    status, out, err = run(capsys, *arguments("plan", files), "--json")
    assert (status, out) == (2, "")
    assert "no plan of this job fits" in err and "GiB" in err and err.count("\n") == 1
    roomy = copy.deepcopy(CLUSTER)
    for node in roomy["nodes"]:
        node["host_memory_gib"] = 1e6
    (files / "cluster.yaml").write_text(yaml.safe_dump(roomy))
    status, out, err = run(capsys, *arguments("plan", files), "--json")
    assert (status, out) == (2, "")
    assert "no plan of this job fits: needs " in err and "which has " in err
    whole = changed(PLAN, "pipelines.0.stages.0.layers", [[0, 89]])
    whole["pipelines"][0]["stages"][1]["layers"] = [[89, 90]]
    (files / "plan.yaml").write_text(yaml.safe_dump(whole))
    status, out, err = run(capsys, *arguments("score", files), "--json")
    assert (status, out) == (2, "")
    assert "plan.yaml: does not fit: needs " in err and " on a-0, which has 80" in err
