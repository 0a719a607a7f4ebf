"""`shoal plan` for a model that is a user's own code: it is looked at here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal import cli

ROOT = Path(__file__).parent.parent.parent
CLUSTER = str(ROOT / "examples" / "local-cluster.yaml")


def example(**code: Any) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "own-model.yaml").read_text())
    return job | {"code": {"working_dir": (ROOT / "examples" / "own_model").as_uri(), **code}}


def planned(job: dict[str, Any], folder: Path) -> int:
    (folder / "job.json").write_text(json.dumps(job))
    return cli.run(["plan", str(folder / "job.json"), "--cluster", CLUSTER, "--json"])


def test_the_example_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(example(), tmp_path) == 0
    pipelines = json.loads(capsys.readouterr().out)["pipelines"]
    assert {pipeline["stages"][-1]["layers"][-1][1] for pipeline in pipelines} == {8}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model": {"entrypoint": "tiny:buidl"}},
            "looked at here: model.entrypoint = 'tiny:buidl': tiny has no",
        ),
        ({"model": {"entrypoint": "tiny:build"}}, "TypeError: build() missing 3 required positional arguments"),
        ({"code": {"working_dir": "file:///nowhere/at/all"}}, "there is no folder /nowhere/at/all here"),
        ({"code": {"working_dir": "s3://b/code.zip"}}, "is fetched by nodes: to plan from here give a folder"),
    ],
)
def test_what_cannot_be_looked_at_is_said(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(example() | change, tmp_path) == 2
    err = capsys.readouterr().err
    assert said in err and "job.json: " in err and "Traceback" not in err
