"""A folder of transformers', imported into a job, exported from its checkpoint and imported again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from family_ground import CONFIGS, WINDOWS, save_family
from safetensors.torch import load_file
from stored_steps import store_step

from shoal import cli
from shoal_planner.job import parse_job
from shoal_planner.parameters import parameters
from shoal_recovery.hf_folder import HfFolder
from shoal_recovery.hf_jobs import with_hf_model
from shoal_recovery.store import open_store
from shoal_workers.solo import run_solo

TRAIN = {"global_batch": 4, "seq_len": 16, "steps": 3}


@pytest.mark.parametrize("name", [*CONFIGS, *WINDOWS])
def test_what_comes_back_is_what_came_and_goes_on_alike(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    came = save_family(name, tmp_path / "theirs")
    document = {"name": "a", "model": {"hf": came.as_uri()}, "train": TRAIN, "data": {"uri": "stdlib:"}}
    job = parse_job(with_hf_model(document))
    begun = run_solo(job, 0)
    store_step(job, dict(begun.weights), "job_1", 1, tmp_path)
    place = f"{(tmp_path / 'store').as_uri()}/job_1"
    assert cli.run(["export", place, str(tmp_path / "back")]) == 0
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        assert values.dtype == after[tensor].dtype and torch.equal(values, after[tensor]), tensor
    again = HfFolder(open_store((tmp_path / "back").as_uri()))
    assert again.model == job.model
    for one in parameters(job.model):
        values = np.asarray(again.values(job.model, one, 0, one.numel))
        assert values.tobytes() == begun.weights[one.fqn].tobytes(), one.fqn
    capsys.readouterr()
    prompt = list(b"import o")
    expected = _goes_on(tmp_path / "theirs", prompt)
    assert _goes_on(tmp_path / "back", prompt) == expected
    for what in (place, str(tmp_path / "back")):
        assert cli.run(["generate", what, "--prompt", "import o", "--tokens", "32", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == expected


def _goes_on(folder: Path, prompt: list[int]) -> list[int]:
    """As transformers does by default, from the folder alone; without the token that ended it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)[0, len(prompt) :].tolist()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return found[:-1] if found[-1] in ends else found
