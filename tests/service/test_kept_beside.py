"""What a folder says beside its weights stands with the checkpoints, and comes back with an export from these alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kept_ground import PROMPT, goes_on, source, words
from stored_steps import store_step

from shoal import cli
from shoal_planner.job import JobSpec, parse_job
from shoal_recovery.hf_jobs import with_hf_model
from shoal_workers.solo import run_solo

TRAIN = {"global_batch": 4, "seq_len": 16, "steps": 3}
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 262}


def _stored(document: dict[str, Any], job_id: str, place: Path) -> JobSpec:
    job = parse_job(with_hf_model(document))
    store_step(job, dict(run_solo(job, 0).weights), job_id, 1, place)
    return job


def test_an_export_says_what_the_imported_folder_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    came = source(tmp_path / "theirs")
    data = {"uri": "stdlib:"}
    _stored({"name": "a", "model": {"hf": came.as_uri()}, "train": TRAIN, "data": data}, "job_1", tmp_path)
    store = (tmp_path / "store").as_uri()
    began = {"init_from": f"{store}/job_1", "init_step": 1}
    shape = SHAPE | {"kv_heads": 2, "tie_embeddings": False, "norm_eps": 1e-6}
    data = {"uri": "stdlib:", "tokenizer": str(came)}
    _stored({"name": "b", "model": shape, "train": TRAIN | began, "data": data}, "job_2", tmp_path)
    expected = goes_on(came)
    assert len(expected) < 10, "it ends at one of its own ends"
    whole = {path.name: path.read_bytes() for path in came.iterdir()}
    said = transformers.AutoConfig.from_pretrained(came)
    shutil.rmtree(came)
    for job_id in ("job_1", "job_2"):
        out = tmp_path / f"{job_id}-exported"
        assert cli.run(["export", f"{store}/{job_id}", str(out)]) == 0
        back = transformers.AutoConfig.from_pretrained(out)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"):
            assert getattr(back, name) == getattr(said, name), name
        assert whole.keys() == {path.name for path in out.iterdir()}
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (out / name).read_bytes() == whole[name], name
        chat = transformers.AutoTokenizer.from_pretrained(out).apply_chat_template([{"content": "hi"}], tokenize=False)
        assert chat == "hi<|over|>"
        assert goes_on(out) == expected
        for what in (f"{store}/{job_id}", str(out)):
            capsys.readouterr()
            assert cli.run(["generate", what, "--prompt", PROMPT, "--tokens", "32", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["tokens"] == expected[:-1], what


def test_an_export_of_what_began_from_nothing_says_what_the_jobs_tokenizer_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = words(tmp_path / "words.json")
    data = {"uri": "stdlib:", "tokenizer": str(file), "end_token": "<|over|>"}
    _stored({"name": "a", "model": SHAPE, "train": TRAIN, "data": data}, "job_1", tmp_path)
    file.unlink()
    place = f"{(tmp_path / 'store').as_uri()}/job_1"
    out = tmp_path / "out"
    assert cli.run(["export", place, str(out)]) == 0
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 261, None)
    assert config.max_position_embeddings == 16
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == 261 and theirs.decode(theirs(PROMPT)["input_ids"]) == PROMPT
    capsys.readouterr()
    assert cli.run(["generate", place, "--prompt", PROMPT, "--tokens", "32", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens"] == goes_on(out)
    assert "shoal: the model has 16 positions: what comes after these it was not taught" in said.err
    assert cli.run(["generate", place, "--prompt", 3 * PROMPT]) == 2
    assert "'of 24 tokens': is too long: the model has 16 positions" in capsys.readouterr().err


def test_a_folder_of_a_tokenizer_says_where_texts_begin_too(tmp_path: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    words(folder / "tokenizer.json")
    settings = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|over|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    data = {"uri": "stdlib:", "tokenizer": str(folder)}
    _stored({"name": "a", "model": SHAPE, "train": TRAIN, "data": data}, "job_1", tmp_path)
    assert cli.run(["export", f"{(tmp_path / 'store').as_uri()}/job_1", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (260, 261)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == settings


def test_a_table_of_positions_ends_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=12)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    place = str(tmp_path / "theirs")
    assert cli.run(["generate", place, "--prompt", PROMPT, "--tokens", "32", "--json"]) == 0
    said = capsys.readouterr()
    prompt = torch.tensor([list(PROMPT.encode())])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
    expected = theirs.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 8:].tolist()
    assert json.loads(said.out)["tokens"] == expected, "the fifth follows on the last place"
    assert "the model has 12 positions: there is no room for more" in said.err
    assert cli.run(["generate", place, "--prompt", 2 * PROMPT]) == 2
    assert "prompt = 'of 16 tokens': is too long: the model has 12 positions" in capsys.readouterr().err


def test_checkpoints_of_earlier_versions_are_exported_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _stored({"name": "a", "model": SHAPE, "train": TRAIN, "data": {"uri": "stdlib:"}}, "job_1", tmp_path)
    shutil.rmtree(tmp_path / "store" / "job_1" / "folder")
    place = f"{(tmp_path / 'store').as_uri()}/job_1"
    assert cli.run(["export", place, str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert "eos_token_id" not in json.loads((tmp_path / "out" / "config.json").read_text())
    capsys.readouterr()
    assert cli.run(["generate", place, "--prompt", PROMPT, "--tokens", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 4
