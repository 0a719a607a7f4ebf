"""Adapters of a checkpoint go out merged into their base, or apart for peft; both compute what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from lora_ground import lora_job, save_llama, store_step
from safetensors.torch import load_file

from shoal import cli
from shoal_planner.job import JobSpec, job_to_mapping
from shoal_planner.parameters import parameters
from shoal_recovery.errors import BaseChanged
from shoal_recovery.first_weights import base_of, fingerprint, open_model, open_weights
from shoal_workers.generate import Generator
from shoal_workers.solo import run_solo

STEPS = 5
TOKENS_BS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))


def save_gpt2(folder: Path) -> None:
    torch.manual_seed(8)
    shape = {"vocab_size": 256, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 48}
    config = transformers.GPT2Config(**shape, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


CASES: dict[str, Any] = {
    "llama, all": (save_llama, {"rank": 4}),
    "llama, some": (save_llama, {"rank": 3, "alpha": 12, "targets": ["k", "o", "up"]}),
    "gpt2, all": (save_gpt2, {"rank": 4}),
    "gpt2, some": (save_gpt2, {"rank": 2, "alpha": 5, "targets": ["q", "v", "down"]}),
}


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[JobSpec, Path]:
    """And a place with `base`, and a checkpoint in `store`."""
    save, lora = CASES[request.param]
    place = tmp_path_factory.mktemp("trained")
    save(place / "base")
    looked_at = fingerprint((place / "base").as_uri(), None)
    spec = lora_job(place / "base", lora | {"base": looked_at}, lr=2e-2)
    store_step(spec, run_solo(spec, STEPS).weights, "job_1", STEPS, place / "store")
    return spec, place


def exported(place: Path, form: str, capsys: pytest.CaptureFixture[str]) -> Path:
    out = place / form
    what = f"{(place / 'store').as_uri()}/job_1"
    assert cli.run(["export", what, str(out), "--format", form, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == STEPS
    return out


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS_BS).logits
    return found


def test_merged_and_apart_compute_the_same(trained: tuple[JobSpec, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, place = trained
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    before = logits_of(base)
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(place, "hf", capsys), dtype=torch.float32)
    apart = peft.PeftModel.from_pretrained(base, exported(place, "peft", capsys))
    model, read = open_model(f"{(place / 'store').as_uri()}/job_1", None)
    assert model.lora is None
    ours = Generator(model, lambda *part: torch.from_numpy(read(*part)), 48).logits(TOKENS_BS)
    torch.testing.assert_close(logits_of(merged), ours, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_of(apart), ours, rtol=0, atol=1e-4)
    assert (ours - before).abs().max() > 0.05  # what was trained is seen


def test_what_has_no_adapters_is_exported_as_it_was(
    trained: tuple[JobSpec, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    spec, place = trained
    lora = spec.model.lora
    assert lora is not None
    theirs = load_file(place / "base" / "model.safetensors")
    ours = load_file(exported(place, "hf", capsys) / "model.safetensors")
    changed = {name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])}
    as_one = spec.model.family == "gpt2"  # queries, keys and values
    modules = {"attention.qkv" if as_one and name[-2:] in (".q", ".k", ".v") else name for name in lora.names}
    assert len(changed) == len(modules) * spec.model.layers


def test_a_job_may_begin_with_what_adapters_made(trained: tuple[JobSpec, Path]) -> None:
    """All weights are trained then, from those that the adapters ended with."""
    _, place = trained
    uri = f"{(place / 'store').as_uri()}/job_1"
    document: dict[str, Any] = {"init_from": uri, "init_step": STEPS, "lr": 1e-9}
    whole = lora_job(place / "base", None, **document)
    read = open_weights(uri, STEPS, whole.model)
    weights = run_solo(whole, 0).weights
    for parameter in parameters(whole.model):
        assert read(parameter, 3, 7).tobytes() == weights[parameter.fqn].reshape(-1)[3:7].tobytes()


def test_a_job_goes_on_with_adapters(trained: tuple[JobSpec, Path]) -> None:
    """With the same ones, beside the same base; its own checkpoints are exported as any."""
    spec, place = trained
    uri, lora = f"{(place / 'store').as_uri()}/job_1", job_to_mapping(spec)["train"]["lora"]
    lora |= {"base": fingerprint(uri, STEPS)}
    after = lora_job(place / "base", lora, init_from=uri, init_step=STEPS, lr=2e-2)
    assert after.model.lora is not None
    assert base_of(after.model.lora).uri == (place / "base").as_uri()
    store_step(after, run_solo(after, 0).weights, "job_2", 1, place / "again")
    for folder, job in (("store", "job_1"), ("again", "job_2")):
        what = f"{(place / folder).as_uri()}/{job}"
        assert cli.run(["export", what, str(place / job), "--format", "peft"]) == 0
    assert (place / "job_1" / "adapter_config.json").read_text() == (
        place / "job_2" / "adapter_config.json"
    ).read_text()
    one, other = (load_file(place / job / "adapter_model.safetensors") for job in ("job_1", "job_2"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    different = lora_job(place / "base", lora | {"rank": 1, "base": None}, init_from=uri, init_step=STEPS)
    with pytest.raises(ValueError, match=r"train.lora.rank = 1: is \d of the adapters there: go on with the same, or"):
        run_solo(different, 1)


def test_adapters_are_merged_where_a_model_goes_on_with_text(
    trained: tuple[JobSpec, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, place = trained
    what = f"{(place / 'store').as_uri()}/job_1"
    assert cli.run(["generate", what, "--prompt", "abc", "--tokens", "8", "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(place, "hf", capsys), dtype=torch.float32)
    prompt = torch.tensor([list(b"abc")])
    found = merged.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert tokens == found[0, 3 : 3 + len(tokens)].tolist()


def test_another_base_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path / "base")
    looked_at = fingerprint((tmp_path / "base").as_uri(), None)
    spec = lora_job(tmp_path / "base", {"rank": 4, "base": looked_at})
    store_step(spec, run_solo(spec, 1).weights, "job_1", 1, tmp_path / "store")
    save_llama(tmp_path / "elsewhere")
    assert fingerprint((tmp_path / "elsewhere").as_uri(), None) == looked_at
    save_llama(tmp_path / "base", seed=9)
    with pytest.raises(
        BaseChanged, match=r"has changed since the job began: its fingerprint is sha256:\w+, and train.lo"
    ):
        run_solo(spec, 1)
    with pytest.raises(BaseChanged):
        open_model(f"{(tmp_path / 'store').as_uri()}/job_1", None)


def test_adapters_that_there_are_not_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_llama(tmp_path / "base")
    spec = lora_job(tmp_path / "base", None)
    store_step(spec, run_solo(spec, 0).weights, "job_1", 1, tmp_path / "store")
    what = f"{(tmp_path / 'store').as_uri()}/job_1"
    assert cli.run(["export", what, str(tmp_path / "out"), "--format", "peft"]) == 2
    assert "needs a job with train.lora: this one trained all weights" in capsys.readouterr().err
