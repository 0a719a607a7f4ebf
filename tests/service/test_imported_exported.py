"""A folder of transformers', imported into a job, exported from its checkpoint and imported again."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from family_ground import CONFIGS, WINDOWS, save_family
from safetensors.torch import load_file
from stored_steps import store_step
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from shoal import cli
from shoal_planner.job import parse_job
from shoal_planner.parameters import parameters
from shoal_recovery.hf_folder import HfFolder
from shoal_recovery.hf_jobs import with_hf_model
from shoal_recovery.store import open_store
from shoal_workers.solo import run_solo

TRAIN = {"global_batch": 4, "seq_len": 16, "steps": 3}
BEGIN, END = 100, 101


# One of each family; the others differ in what tests of the engine see, too.
_USUAL = frozenset({"llama", "mistral, windows", "qwen2", "gpt2"})


def _usual_and_long(every: Sequence[Any], usual: Collection[Any]) -> list[Any]:
    """Those that are not usual are long tests: each starts processes that import transformers."""
    return [one if one in usual else pytest.param(one, marks=pytest.mark.long) for one in every]


@pytest.mark.parametrize("name", _usual_and_long([*CONFIGS, *WINDOWS], _USUAL))
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", {"attention_dropout": 0.1}),
        ("gpt2", {"attn_pdrop": 0.2, "embd_pdrop": 0.1, "resid_pdrop": 0.3}),
        ("gpt2", {"resid_pdrop": 0.1}),
    ],
)
def test_what_a_folder_says_of_dropout_is_said_again(name: str, said: dict[str, float], tmp_path: Path) -> None:
    """Also by a job that begins with a checkpoint of its own; what the config leaves to its class stays so."""
    came, store = save_family(name, tmp_path / "theirs"), (tmp_path / "store").as_uri()
    config = json.loads((came / "config.json").read_text())
    kept = {field: value for field, value in config.items() if "dropout" not in field and "pdrop" not in field}
    (came / "config.json").write_text(json.dumps(kept | said))
    job = parse_job(
        with_hf_model({"name": "a", "model": {"hf": str(came)}, "train": TRAIN, "data": {"uri": "stdlib:"}})
    )
    again = replace(job, train=replace(job.train, init_from=f"{store}/job_1", init_step=1))
    there = transformers.AutoConfig.from_pretrained(came)
    for job_id, spec in (("job_1", job), ("job_2", again)):
        store_step(spec, dict(run_solo(spec, 0).weights), job_id, 1, tmp_path)
        assert cli.run(["export", f"{store}/{job_id}", str(tmp_path / job_id)]) == 0
        back = transformers.AutoConfig.from_pretrained(tmp_path / job_id)
        for field in ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"):
            assert getattr(back, field, None) == getattr(there, field, None), field


def _with_tokenizer(folder: Path) -> Path:
    """One that puts <s> before a text, and what the folder says of ids as it has them."""
    known = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # the last two are a space and the end of a line
    known += [f"<{number}>" for number in range(len(known), BEGIN)] + ["<s>", "</s>"]
    known += [f"<{number}>" for number in range(len(known), 256)]
    made = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(known)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BEGIN)]
    )
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "generation_config.json"):
        said = json.loads((folder / name).read_text()) | {"bos_token_id": BEGIN, "eos_token_id": END}
        (folder / name).write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("name", _usual_and_long(["llama", "mistral, wide heads"], {"llama"}))
def test_a_prompt_begins_as_the_tokenizer_has_texts_begin(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    came = _with_tokenizer(save_family(name, tmp_path / "theirs"))
    data = {"uri": "stdlib:", "tokenizer": str(came)}
    document = {"name": "a", "model": {"hf": str(came)}, "train": TRAIN, "data": data}
    job = parse_job(with_hf_model(document))
    store_step(job, dict(run_solo(job, 0).weights), "job_1", 1, tmp_path)
    place = f"{(tmp_path / 'store').as_uri()}/job_1"
    assert cli.run(["export", place, str(tmp_path / "back")]) == 0
    for folder in (came, tmp_path / "back"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer("import o")["input_ids"]
        assert prompt[0] == BEGIN and len(prompt) == 9
        expected = _goes_on(folder, prompt)
        assert expected != _goes_on(folder, prompt[1:])
    # What a template wrote already does not stand there twice.
    for what, text in ((place, "import o"), (str(came), "<s>import o")):
        capsys.readouterr()
        assert cli.run(["generate", what, "--prompt", text, "--tokens", "32", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == expected


def _says(folder: Path, **fields: Any) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("penalty", _usual_and_long([0.9, 1.05, 1.3], {1.3}))
def test_tokens_that_are_there_already_are_penalised_as_the_folder_says(
    penalty: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    came, prompt = save_family("qwen2, late windows", tmp_path / "theirs"), list(b"import o")
    without = _goes_on(came, prompt)
    _says(came, repetition_penalty=penalty)
    job = parse_job(
        with_hf_model({"name": "a", "model": {"hf": str(came)}, "train": TRAIN, "data": {"uri": "stdlib:"}})
    )
    store_step(job, dict(run_solo(job, 0).weights), "job_1", 1, tmp_path)
    expected = _goes_on(came, prompt)
    assert expected != without
    for what in (str(came), f"{(tmp_path / 'store').as_uri()}/job_1"):
        capsys.readouterr()
        assert cli.run(["generate", what, "--prompt", "import o", "--tokens", "32", "--json"]) == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["tokens"] == expected
        assert "generation_config" not in said.err


def test_what_else_a_folder_says_of_choosing_tokens_is_told_to_be_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    came = save_family("llama", tmp_path / "theirs")

    def told(*more: str) -> str:
        capsys.readouterr()
        assert cli.run(["generate", str(came), "--prompt", "import o", "--tokens", "4", *more]) == 0
        return capsys.readouterr().err

    neutral = {"no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": [], "min_length": 0, "stop_strings": None}
    _says(came, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, **neutral)
    assert "generation_config" not in told()
    assert "generation_config.json says top_k = 20, top_p = 0.95, which is not done here" in told("--temperature", "1")
    _says(came, no_repeat_ngram_size=3, suppress_tokens=[7, 8], forced_eos_token_id=0)
    said = "says no_repeat_ngram_size = 3, suppress_tokens = [7, 8], forced_eos_token_id = 0, which is not done here"
    assert said in told()
    _says(came, repetition_penalty=-1)
    assert cli.run(["generate", str(came), "--prompt", "import o"]) == 2
    assert "generation_config.json: repetition_penalty = -1.0: must be more than zero" in capsys.readouterr().err


def _goes_on(folder: Path, prompt: list[int]) -> list[int]:
    """As transformers does by default, from the folder alone; without the token that ended it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)[0, len(prompt) :].tolist()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return found[:-1] if found[-1] in ends else found
