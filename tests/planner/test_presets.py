"""Shapes of well-known models: as many parameters as were published, and what a job says beside them counts more."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_planner.parameters import num_parameters
from shoal_planner.presets import FAMILY_OPTIONS, PRESETS

# In millions, as their authors give them.
PUBLISHED = {
    "gpt2": 124.44,
    "gpt2-medium": 354.8,
    "gpt2-large": 774.0,
    "gpt2-xl": 1557.6,
    "tinyllama-1.1b": 1100.0,
    "llama-7b": 6738.4,
    "llama-13b": 13015.9,
    "llama-30b": 32528.9,
    "llama-65b": 65285.7,
    "llama-2-7b": 6738.4,
    "llama-2-13b": 13015.9,
    "llama-2-70b": 68976.6,
    "llama-3-8b": 8030.3,
    "llama-3-70b": 70553.7,
    "llama-3.1-8b": 8030.3,
    "llama-3.1-70b": 70553.7,
    "llama-3.1-405b": 405853.4,
    "llama-3.2-1b": 1235.8,
    "llama-3.2-3b": 3212.7,
    "mistral-7b-v0.1": 7241.7,
    "mistral-7b": 7248.0,
    "mistral-nemo-12b": 12247.8,
    "qwen2.5-0.5b": 494.0,
    "qwen2.5-1.5b": 1543.7,
    "qwen2.5-3b": 3085.9,
    "qwen2.5-7b": 7615.6,
    "qwen2.5-14b": 14770.0,
    "qwen2.5-32b": 32763.9,
    "qwen2.5-72b": 72706.2,
    "qwen3-0.6b": 596.0,
    "qwen3-1.7b": 1720.6,
    "qwen3-4b": 4022.5,
    "qwen3-8b": 8190.7,
    "qwen3-14b": 14768.3,
    "qwen3-32b": 32762.1,
}


def parsed(seq_len: int = 128, **model: Any) -> JobSpec:
    train = {"global_batch": 4, "seq_len": seq_len, "steps": 10}
    return parse_job({"name": "a", "model": model, "data": {"uri": "stdlib:"}, "train": train})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_was_published(name: str) -> None:
    assert num_parameters(parsed(preset=name).model) / 1e6 == pytest.approx(PUBLISHED[name], rel=1e-4)


def test_what_a_job_says_counts_more_than_its_preset_and_that_more_than_its_family() -> None:
    model = parsed(preset="qwen2.5-14b", layers=4, vocab=256, tie_embeddings=True).model
    assert (model.layers, model.vocab, model.hidden, model.tie_embeddings) == (4, 256, 5120, True)
    assert (model.qkv_bias, model.norm_eps) == (True, 1e-5)
    plain = parsed(family="gpt2", layers=2, hidden=64, heads=4, ffn=256, vocab=256, out_bias=False).model
    assert (plain.norm, plain.learned_positions, plain.out_bias, plain.mlp_bias) == ("layer", 1024, False, True)


def test_a_job_that_was_parsed_says_the_same_again() -> None:
    for name in ("gpt2", "llama-3.2-1b", "qwen3-4b"):
        job = parsed(preset=name, layers=2)
        assert parse_job(job_to_mapping(job)) == job
    assert set(FAMILY_OPTIONS) == {"llama", "mistral", "qwen2", "qwen3", "gpt2"}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"preset": "lama-7b"}, "model.preset = 'lama-7b': is not known; did you mean llama-7b"),
        ({"preset": 7}, "model.preset = 7: is none of gpt2, "),
        ({"preset": "gpt2", "layres": 3}, "model.layres = 3: is not a known field; did you mean 'layers'?"),
        (
            {"preset": "llama-7b", "head_dim": 127},
            "model.head_dim = 127: makes heads 127 wide; rotary positions need it even",
        ),
        (
            {"preset": "llama-7b", "rope_scaling": {"kind": "yarn", "factor": 4}},
            "original_positions = None: is required",
        ),
        ({"preset": "llama-7b", "rope_scaling": {"kind": "linear", "factor": 0.5}}, "factor = 0.5: must be 1 or more"),
        ({"preset": "gpt2", "rope_scaling": {"kind": "linear", "factor": 2}}, "needs rotary positions"),
        ({"preset": "llama-7b", "family": "bloom"}, "model.family = 'bloom': must be one of llama, mistral"),
        ({"preset": "llama-7b", "activation": "relu"}, "model.activation = 'relu': must be"),
    ],
)
def test_what_no_model_can_be_is_named(model: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidField) as error:
        parsed(**model)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("preset", "field"), [("gpt2", "learned_positions (1024)"), ("mistral-7b-v0.1", "window (4096)")]
)
def test_sequences_longer_than_a_model_reaches_are_refused(preset: str, field: str) -> None:
    with pytest.raises(InvalidField, match=r"train.seq_len = 8192: must be at most model\.") as error:
        parsed(8192, preset=preset)
    assert field in str(error.value)
