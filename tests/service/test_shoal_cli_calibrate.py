"""`shoal calibrate` and `--profile` as users run them: what they say, what they write, and sentences about mistakes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal import cli
from shoal_planner.calibration import FACTORS, Calibration
from shoal_planner.cluster import parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.job import parse_job
from shoal_planner.plan import parse_plan
from shoal_planner.predict import predict
from shoal_planner.profile import Profile

JOB = {
    "name": "measured",
    "model": {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000},
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 16, "seq_len": 1024, "steps": 10, "precision": "bf16"},
}
CLUSTER = {"nodes": [{"name": "n", "device": "A10G", "count": 2, "devices": 2, "inter_gbit_per_s": 25}]}
OFFER = {"name": "n", "device": "A10G", "available": 2, "devices": 2, "price_per_hour": 1.0}
TRUE = Calibration(compute=0.7, passes=2.5, kernel=2.0, inside=0.5, network=0.3)


def plan_mapping(stages: int, micro_batch: int) -> dict[str, Any]:
    """4 / stages equal pipelines of one device a stage."""
    pipelines = []
    for p in range(4 // stages):
        devices = range(p * stages, (p + 1) * stages)
        cuts = [8 * s // stages for s in range(stages + 1)]
        pipelines.append(
            {
                "micro_batch": micro_batch,
                "micro_batches": 16 * stages // 4 // micro_batch,
                "stages": [
                    {
                        "layers": [[cuts[s], cuts[s + 1]]],
                        "replicas": [
                            {"node": f"n-{device // 2}", "devices": [device % 2], "tp": 1, "samples": micro_batch}
                        ],
                    }
                    for s, device in enumerate(devices)
                ],
            }
        )
    return {"pipelines": pipelines, "copies": 0}


PLANS = [plan_mapping(stages, micro_batch) for stages in (1, 2, 4) for micro_batch in (1, 2)]


def runs() -> dict[str, Any]:
    costs = CostModel(parse_job(JOB), parse_cluster(CLUSTER), Profile(calibration=TRUE))
    return {
        "job": JOB,
        "runs": [
            {"name": f"run {index}", "plan": plan, "step_s": predict(parse_plan(plan), costs).step_s}
            for index, plan in enumerate(PLANS)
        ],
    }


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "market.yaml").write_text(yaml.safe_dump({"offers": [OFFER]}))
    (tmp_path / "runs.json").write_text(json.dumps(runs()))
    (tmp_path / "plan.json").write_text(json.dumps(PLANS[2]))
    return tmp_path


def shoal(capsys: pytest.CaptureFixture[str], files: Path, command: str, *options: str) -> tuple[int, str, str]:
    """Names of files stand for those of this test."""
    named = [str(files / word) if word.endswith((".json", ".yaml")) else word for word in (*command.split(), *options)]
    status = cli.run(named)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


CALIBRATE = "calibrate runs.json --cluster cluster.yaml"


def test_runs_make_a_profile_that_scores_as_they_were_measured(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = shoal(capsys, files, f"{CALIBRATE} --out profile.json --json")
    assert (status, err) == (0, "")
    said = json.loads(out)
    written = json.loads((files / "profile.json").read_text())
    assert written == said["profile"] and set(written) == {"calibration"}
    assert set(written["calibration"]) == {*FACTORS, "source", "error"}
    assert said["errors"]["after"] < 0.02 < said["errors"]["before"]
    assert said["errors"]["after"] <= said["errors"]["from_others"] < said["errors"]["before"]
    status, out, err = shoal(
        capsys, files, "score plan.json job.yaml --cluster cluster.yaml --profile profile.json --json"
    )
    assert (status, err) == (0, "")
    scored = json.loads(out)
    assert scored["predicted"]["step_s"] == said["runs"][2]["after_s"]
    assert scored["predicted"]["step_s"] == pytest.approx(runs()["runs"][2]["step_s"], rel=0.05)
    assert scored["profile"]["calibration"] == written["calibration"]
    (files / "again.json").write_text(out)
    assert shoal(capsys, files, "score again.json job.yaml --cluster cluster.yaml --profile profile.json")[0] == 0


def test_plans_and_fleets_are_priced_by_the_profile(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shoal(capsys, files, f"{CALIBRATE} --out profile.json")
    for command, key in (
        ("plan job.yaml --cluster cluster.yaml", None),
        ("rent job.yaml --market market.yaml --budget 2", "plan"),
    ):
        plain = json.loads(shoal(capsys, files, f"{command} --json")[1])
        priced = json.loads(shoal(capsys, files, f"{command} --profile profile.json --json")[1])
        assert "profile" not in plain and priced["profile"]["calibration"]["source"] == "6 measured runs"
        slower, faster = (answer[key] if key else answer for answer in (priced, plain))
        assert slower["predicted"]["step_s"] > 1.1 * faster["predicted"]["step_s"]
        assert "costs: calibrated on 6 measured runs" in shoal(capsys, files, f"{command} --profile profile.json")[1]


def test_for_people(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = shoal(capsys, files, CALIBRATE)
    assert (status, err) == (0, "")
    for words in ("FROM THE OTHERS S", "run 5", "mean error:", "where the others predict each run", "factors: compute"):
        assert words in out


def test_one_run_is_said_to_say_little(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "runs.json").write_text(json.dumps({**runs(), "runs": runs()["runs"][:1]}))
    status, out, err = shoal(capsys, files, CALIBRATE)
    assert status == 0 and "where the others" not in out
    assert "one run shows how slow the cluster is, hardly why" in err


def test_runs_that_contradict_each_other_are_not_recommended(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same plan at once fast and slow: what one says of the other is wrong both ways."""
    given = runs()["runs"][0]
    costs = CostModel(parse_job(JOB), parse_cluster(CLUSTER), Profile())
    plain_s = predict(parse_plan(PLANS[0]), costs).step_s
    odd = [{**given, "step_s": plain_s * factor} for factor in (0.7, 1.4)]
    (files / "runs.json").write_text(json.dumps({"job": JOB, "runs": odd}))
    assert "do not predict each other better than the catalogue" in shoal(capsys, files, CALIBRATE)[2]


def test_measured_figures_are_kept_and_older_factors_replaced(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = {"from_node": "n-0", "to_node": "n-1", "latency_s": 0, "bytes_per_s": 1e9, "source": "ping"}
    (files / "old.json").write_text(json.dumps({"links": [link], "calibration": {"compute": 0.01}}))
    status, out, _ = shoal(capsys, files, f"{CALIBRATE} --profile old.json --json")
    found = json.loads(out)["profile"]
    assert status == 0
    assert found["links"] == [link] and found["calibration"]["compute"] > 0.3


def changed(path: str, value: object) -> dict[str, Any]:
    """The runs with one value changed; `path` as in the sentence that is expected."""
    found: Any = copy.deepcopy(runs())
    *way, last = path.replace("[", ".").replace("]", "").split(".")
    at = found
    for word in way:
        at = at[int(word)] if word.isdigit() else at[word]
    at[int(last) if last.isdigit() else last] = value
    return dict(found)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (changed("runs", []), "runs = []: must have at least one entry"),
        (changed("runs[1].step_s", 0), "runs[1].step_s = 0.0: must be more than zero"),
        (changed("runs[1].steps", 1), "runs[1].steps = 1: is not a known field; did you mean 'step_s'?"),
        (changed("job.train.global_batch", 0), "job.train.global_batch = 0: must be"),
        (changed("job.train.global_batch", 32), "runs[0].plan.pipelines = 16: micro-batches must add up"),
        (changed("runs[2].plan.pipelines[0].stages[0].replicas[0].node", "m"), "node = 'm': is not a node of this"),
        (changed("runs[0].plan", {}), "runs[0].plan.pipelines = None: is required"),
        ({"runs": runs()["runs"]}, "runs[0].job = None: is required, here or once for all runs"),
        ([], "the runs is a list: it must be a mapping"),
    ],
)
def test_wrong_runs_are_named(files: Path, capsys: pytest.CaptureFixture[str], document: Any, sentence: str) -> None:
    (files / "runs.json").write_text(json.dumps(document))
    status, out, err = shoal(capsys, files, CALIBRATE)
    assert (status, out) == (2, "")
    assert sentence in err and "runs.json" in err


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"calibration": {"network": 0}}, "calibration.network = 0.0: must be more than zero"),
        ({"calibration": {"newtork": 1}}, "did you mean 'network'?"),
        ({"calibration": "none"}, "calibration = 'none': must be"),
        ({"updates": [{"device": "A10H", "elements_per_s": 1e9, "source": ""}]}, "updates[0].device = 'A10H'"),
        (
            {"links": [{"from_node": "n-0", "to_node": "n-9", "latency_s": 0, "bytes_per_s": 1, "source": ""}]},
            "links[0].to_node = 'n-9': is not a node of this cluster",
        ),
        (None, "the profile is empty"),
    ],
)
def test_wrong_profiles_are_named(
    files: Path, capsys: pytest.CaptureFixture[str], document: Any, sentence: str
) -> None:
    (files / "profile.json").write_text(json.dumps(document))
    status, out, err = shoal(capsys, files, "plan job.yaml --cluster cluster.yaml --profile profile.json")
    assert (status, out) == (2, "")
    assert sentence in err and "profile.json" in err


def test_what_cannot_be_read_or_written_is_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing.json: cannot be read" in shoal(capsys, files, "calibrate nothing.json --cluster cluster.yaml")[2]
    status, _, err = shoal(capsys, files, f"{CALIBRATE} --out nowhere/profile.json")
    assert status == 2 and "profile.json: cannot be written" in err
