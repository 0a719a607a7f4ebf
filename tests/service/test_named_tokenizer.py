"""A model that was imported, and trained with another tokenizer: what its job names is what an export and `shoal
generate` go by."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from control_plane import ControlPlane, ok
from kept_ground import PROMPT, goes_on, source, words
from stored_steps import store_step

from shoal import cli
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, parse_job
from shoal_recovery.hf_beside import files_beside
from shoal_recovery.hf_jobs import with_hf_model
from shoal_workers.solo import run_solo
from shoal_workers.tokenizing import end_token_of

TRAIN = {"global_batch": 4, "seq_len": 16, "steps": 3}
INSTRUCT = "{% for message in messages %}<257>{{ message['content'] }}<258>{% endfor %}"
TOOLS = "{{ tools }}" + INSTRUCT
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<257>", "eos_token": "<258>"}


def _instruct(folder: Path) -> Path:
    """A tokenizer of the same vocabulary, with ends, begins and templates of its own; an older one, whose special
    tokens stand in a file of theirs."""
    folder.mkdir()
    words(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": SETTINGS["tokenizer_class"]}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<257>", "eos_token": {"content": "<258>"}})
    )
    (folder / "chat_template.jinja").write_text(INSTRUCT)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    return folder


def _job(came: Path, tokenizer: Path, **data: Any) -> dict[str, Any]:
    return {
        "name": "a",
        "model": {"hf": came.as_uri()},
        "train": TRAIN,
        "data": {"uri": "stdlib:", "tokenizer": tokenizer.as_uri(), **data},
    }


def test_the_jobs_tokenizer_takes_the_place_of_the_imported_one(
    tmp_path: Path,
    http: httpx.Client,
    plane: ControlPlane,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came, instruct = source(tmp_path / "theirs"), _instruct(tmp_path / "instruct")
    job_id, spec = _submitted(_job(came, instruct), http, plane, monkeypatch, tmp_path)
    assert spec.data.tokenizer == str(instruct)
    names = {path.relative_to(instruct).as_posix(): path.read_bytes() for path in instruct.rglob("*.*")}
    shutil.rmtree(instruct)
    place, out = f"{(tmp_path / 'store').as_uri()}/{job_id}", tmp_path / "out"
    assert cli.run(["export", place, str(out)]) == 0
    for name, content in names.items():
        assert (out / name).read_bytes() == content, name
    for said in (
        transformers.AutoConfig.from_pretrained(out),
        transformers.GenerationConfig.from_pretrained(out),
    ):
        assert (said.bos_token_id, said.eos_token_id, said.pad_token_id) == (257, 258, 259), (
            "the one that it does not name stays"
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "<257>hi<258>"
    assert set(tokenizer.chat_template) == {"default", "tool_use"}
    expected = goes_on(out)
    assert len(expected) == 32, "what ended the imported one is no end"
    for what in (place, str(out), job_id):  # by its place, by its folder, by its id
        capsys.readouterr()
        assert cli.run(["generate", what, "--prompt", PROMPT, "--tokens", "32", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == expected, what


def test_without_a_tokenizer_named_text_is_read_with_the_imported_one(
    tmp_path: Path,
    http: httpx.Client,
    plane: ControlPlane,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came = source(tmp_path / "theirs")
    document = {"name": "a", "model": {"hf": str(came)}, "train": TRAIN, "data": {"uri": "stdlib:"}}
    job_id, spec = _submitted(document, http, plane, monkeypatch, tmp_path)
    assert spec.data.tokenizer == str(came)
    for what in (f"{(tmp_path / 'store').as_uri()}/{job_id}", job_id):
        capsys.readouterr()
        assert cli.run(["generate", what, "--prompt", PROMPT, "--tokens", "32", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == goes_on(came)[:-1]


def test_bytes_that_a_job_says_are_what_its_model_knows_from_then_on(
    tmp_path: Path,
    http: httpx.Client,
    plane: ControlPlane,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither an export nor `generate` says text in tokens that were never trained."""
    came, store = source(tmp_path / "theirs"), (tmp_path / "store").as_uri()
    document = _job(came, came) | {"data": {"uri": "stdlib:", "tokenizer": "bytes"}}
    job_id, spec = _submitted(document, http, plane, monkeypatch, tmp_path)
    assert spec.data.reads_bytes
    out = tmp_path / "out"
    assert cli.run(["export", f"{store}/{job_id}", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    for name in ("config.json", "generation_config.json"):
        said = json.loads((out / name).read_text())
        assert (said.get("bos_token_id"), said["eos_token_id"], said.get("pad_token_id")) == (None, 0, None), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = list(PROMPT.encode())
    found = theirs.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0)
    expected = [token for token in found[0, len(prompt) :].tolist() if token]
    for what in (f"{store}/{job_id}", str(out), job_id):
        capsys.readouterr()
        assert cli.run(["generate", what, "--prompt", PROMPT, "--tokens", "32", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == expected, what


@pytest.mark.parametrize(
    ("data", "has_one"),
    [
        ({"format": "jsonl"}, True),
        ({"mix": [{"uri": "file:///a", "format": "tokens"}, {"uri": "stdlib:"}]}, True),
        ({"mix": [{"uri": "file:///a", "format": "tokens"}], "eval_uri": "file:///b", "format": "jsonl"}, True),
        ({"mix": [{"uri": "file:///a", "format": "tokens"}]}, False),
        ({"format": "megatron"}, False),
        ({"tokenizer": "bytes"}, False),
        ({"tokenizer": "/other"}, False),
    ],
)
def test_ids_and_what_a_job_says_itself_need_no_imported_tokenizer(
    data: dict[str, Any], has_one: bool, tmp_path: Path
) -> None:
    came = source(tmp_path / "theirs")
    given = _job(came, came) | {"data": data}
    found: Any = with_hf_model(given)
    assert found["data"] == (data | {"tokenizer": came.as_uri()} if has_one else data)
    (came / "tokenizer.json").rename(came / "tokenizer.model")
    if has_one:
        said = f"data.tokenizer = None: is not said, and {came.as_uri()} has tokenizer.model: say where nodes have a "
        with pytest.raises(InvalidField, match=re.escape(said) + r".*save_pretrained\(FOLDER\)\), or bytes"):
            with_hf_model(given)
    (came / "tokenizer.model").unlink()
    found = with_hf_model(given)
    assert found["data"] == data


def _submitted(
    document: dict[str, Any], http: httpx.Client, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[str, JobSpec]:
    """As the control plane has it, with a checkpoint of it in the store; and asked for from here."""
    monkeypatch.setenv("SHOAL_SERVER", plane.url)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(plane.data_dir))
    store = (folder / "store").as_uri()
    found = ok(http.post("/v1/jobs", json=document | {"checkpoint": {"uri": store}}))
    job_id, spec = str(found["id"]), parse_job(found["spec"])
    store_step(spec, dict(run_solo(spec, 0).weights), job_id, 1, folder)
    return job_id, spec


def _kept(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What config, generation config and the tokenizer's config say."""
    job = parse_job(with_hf_model(document))
    files = files_beside(job, end_token_of(job))
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    config, generation, tokenizer = (json.loads(files[name]) for name in names)
    return config, generation, tokenizer


def test_ends_of_a_model_stay_where_documents_end_with_one_of_them(tmp_path: Path) -> None:
    came = source(tmp_path / "theirs")
    ends = transformers.GenerationConfig.from_pretrained(came).eos_token_id
    assert isinstance(ends, list) and ends[0] == 261
    for tokenizer in (came, came / "tokenizer.json"):
        config, generation, said = _kept(_job(came, tokenizer, end_token="<|over|>"))
        assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (260, 261, 259)
        assert generation["eos_token_id"] == ends
        assert (said["bos_token"], said["eos_token"]) == ("<|begin|>", "<|over|>")
    config, generation, _ = _kept(_job(came, came, end_token="<258>"))
    assert (config["eos_token_id"], generation["eos_token_id"], config["bos_token_id"]) == (258, 258, 260)


def test_an_end_that_the_tokenizer_does_not_name_is_named(tmp_path: Path) -> None:
    came = source(tmp_path / "theirs")
    config, _, said = _kept(_job(came, words(tmp_path / "words.json"), end_token="<257>"))
    assert (config["eos_token_id"], said["eos_token"]) == (257, "<257>")
