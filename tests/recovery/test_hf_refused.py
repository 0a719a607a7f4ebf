"""What people name as `model.hf` that is no model in floats of safetensors: each is told what it is, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal_planner.errors import InvalidField
from shoal_recovery.hf_jobs import with_hf_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def refused(hf: Any) -> str:
    with pytest.raises(InvalidField) as caught:
        with_hf_model({"name": "a", "model": {"hf": hf}})
    assert caught.value.field == "model.hf"
    return str(caught.value)


def folder(place: Path, *files: str, **config: Any) -> str:
    (place / "config.json").write_text(json.dumps(CONFIG | config))
    for name in files:
        (place / name).write_bytes(b"x")
    return str(place)


@pytest.mark.parametrize("given", ["meta-llama/Llama-3.1-8B", "gpt2"])
def test_an_id_of_the_hub_is_told_how_it_is_fetched(given: str) -> None:
    said = refused(given)
    assert (
        "must be an absolute path, or begin with file:// or s3://; it looks like the id of a model on the Hub" in said
    )
    assert f"`hf download {given} --local-dir FOLDER`" in said


@pytest.mark.parametrize(
    "given", ["./llama", "~/llama", "../llama/8b", "https://huggingface.co/gpt2", 3, None, "a/b/c"]
)
def test_what_is_no_place_is_not_taken_for_one(given: Any) -> None:
    assert refused(given).endswith("must be an absolute path, or begin with file:// or s3://")


def test_adapters_alone_are_told_to_be_merged(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    said = refused(str(tmp_path))
    assert "'adapter_config.json': is there, and no config.json: these are adapters alone. Merge them first: " in said
    assert "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OUT)" in said
    (tmp_path / "adapter_config.json").unlink()
    assert refused(str(tmp_path)).endswith("cannot be read: config.json is not there")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_what_is_quantised_is_told_so(method: str, tmp_path: Path) -> None:
    said = refused(folder(tmp_path, "model.safetensors", quantization_config={"bits": 4, "quant_method": method}))
    assert "quantization_config = {" in said
    assert f"says that it is quantised ({method}), which is not trained: take the model that it was made from" in said


def test_pickled_weights_are_told_what_writes_others(tmp_path: Path) -> None:
    made = "transformers writes it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    said = refused(folder(tmp_path))
    assert said.endswith(f"'model.safetensors': is not there, nor an index of several. {made}")
    for name in ("pytorch_model.bin.index.json", "pytorch_model.bin"):
        assert f"nor an index of several; {name} is, which is not read. {made}" in refused(folder(tmp_path, name))
