"""Models of the published families compute what transformers computes, and come in and go out unchanged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from engine_runs import (
    LAYOUTS,
    assert_holders_agree,
    assert_same_bits,
    job,
    on_nodes,
    part,
    plan,
    run_noting_logits,
    worst_difference,
)
from family_ground import CONFIGS, WINDOWS, save_family
from safetensors.torch import load_file, save_file

from shoal_planner.architecture import ModelSpec, RopeScaling
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_planner.levels import Sharding
from shoal_planner.overlap import Overlap
from shoal_planner.parameters import parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.strict import read
from shoal_recovery.hf_folder import HfFolder
from shoal_recovery.hf_jobs import with_hf_model
from shoal_recovery.hf_layout import config_of_model, model_of_config
from shoal_recovery.state import OWNED_KINDS, Kind
from shoal_recovery.store import open_store
from shoal_workers.data import training_samples
from shoal_workers.generate import Generator
from shoal_workers.processes import Processes
from shoal_workers.solo import RunRequest, WholeState, run_solo

STEPS = 10
BOUND = 2e-5


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_family(request.param, tmp_path_factory.mktemp("theirs"))


def read_in(folder: Path) -> tuple[JobSpec, WholeState]:
    theirs = HfFolder(open_store(folder.as_uri()))
    spec = replace(job(tied=False), model=theirs.model)
    theirs.check(spec.model)
    return spec, state_of(theirs, spec.model)


def state_of(folder: HfFolder, model: ModelSpec) -> WholeState:
    known = {parameter.fqn: parameter for parameter in parameters(model)}
    values: dict[Kind, dict[str, Any]] = {kind: {} for kind in OWNED_KINDS}
    for fqn, parameter in known.items():
        for kind in OWNED_KINDS:
            values[kind][fqn] = np.zeros(parameter.shape, np.float32)
        values[Kind.MASTER][fqn] = folder.values(model, parameter, 0, parameter.numel).reshape(parameter.shape)
    return WholeState(step=0, values=values)


def train_theirs(folder: Path, spec: JobSpec) -> list[float]:
    """An ordinary loop around their model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    train = spec.train
    matrices = [tensor for tensor in model.parameters() if tensor.ndim > 1]
    vectors = [tensor for tensor in model.parameters() if tensor.ndim == 1]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    samples, losses = training_samples(spec), []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * min(1.0, step / train.warmup_steps)
        rows_BS = samples.read(range((step - 1) * train.global_batch, step * train.global_batch))
        logits_BSV = model(rows_BS[:, :-1]).logits
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), rows_BS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_as_with_their_model(saved: tuple[str, Path]) -> None:
    spec, start = read_in(saved[1])
    run = run_solo(spec, STEPS, start=start)
    np.testing.assert_allclose(run.losses, train_theirs(saved[1], spec), rtol=2e-5)


def test_logits_and_what_a_model_goes_on_with_are_those_of_transformers(saved: tuple[str, Path]) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved[1], dtype=torch.float32).eval()
    folder = HfFolder(open_store(saved[1].as_uri()))
    ours = Generator(folder.model, lambda *part: torch.from_numpy(folder.values(folder.model, *part)), 48)
    tokens_BS = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens_BS), theirs(tokens_BS).logits, rtol=0, atol=1e-4)
    prompt = tokens_BS[:1, :8]
    found = theirs.generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(ours.goes_on(prompt[0].tolist(), 32)) == found[0, 8:].tolist()
    drawn = [list(ours.goes_on([1, 2], 12, temperature=1.0, seed=seed)) for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]
    first = drawn[0][0]
    assert list(ours.goes_on([1, 2], 12, temperature=1.0, seed=5, ends=(first,))) == []
    with pytest.raises(InvalidField, match="prompt = 256: is no token of the model, which knows 256"):
        list(ours.goes_on([1, 256], 1))


@pytest.mark.parametrize("name", WINDOWS)
def test_attention_within_windows_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """And what is farther away counts in layers without one, as in a model that has none it would in all."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(save_family(name, tmp_path), dtype=torch.float32).eval()
    folder = HfFolder(open_store(tmp_path.as_uri()))

    def ours(model: ModelSpec) -> Generator:
        return Generator(model, lambda *part: torch.from_numpy(folder.values(model, *part)), 48)

    tokens_BS = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens_BS).logits
        torch.testing.assert_close(ours(folder.model).logits(tokens_BS), expected, rtol=0, atol=1e-4)
        without = ours(replace(folder.model, window=None, window_layers=None)).logits(tokens_BS)
        assert (without - expected).abs().max() > 0.1
    found = theirs.generate(tokens_BS[:1, :8], max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(ours(folder.model).goes_on(tokens_BS[0, :8].tolist(), 32)) == found[0, 8:].tolist()
    document = {"name": "a", "model": {"hf": tmp_path.as_uri()}, "data": {"uri": "stdlib:"}}
    document["train"] = {"global_batch": 4, "seq_len": 17, "steps": 3}
    with pytest.raises(InvalidField, match=r"train.seq_len = 17: must be at most model.window \(16\)"):
        parse_job(with_hf_model(document))
    document["model"]["window"] = None
    with pytest.raises(InvalidField, match=r"model.window = None: is what model.hf says: leave it out"):
        with_hf_model(document)


@pytest.mark.parametrize(
    ("window", "layers", "problem"),
    [(None, (0,), "needs window"), (4, (), "numbers of blocks"), (4, (2,), "from 0 to 1"), (4, (1, 0), "in order")],
)
def test_windows_of_layers_that_are_none_are_refused(window: int | None, layers: tuple[int, ...], problem: str) -> None:
    with pytest.raises(InvalidField, match=f"window_layers = .*{problem}"):
        ModelSpec(layers=2, hidden=8, heads=2, ffn=8, vocab=9, window=window, window_layers=layers)


LOGITS = {
    "tp 2": LAYOUTS["tp 2"],
    "layers 1+5": LAYOUTS["layers 1+5"],
    "tp 2 in layers 2+4": on_nodes(plan((4, (part(2, (2, 2)), part(4, (2, 2))))), "here", "there"),
}


@pytest.mark.parametrize("layout", LOGITS)
def test_logits_in_layouts_are_those_of_transformers(
    processes: Processes, saved: tuple[str, Path], layout: str
) -> None:
    spec, _ = read_in(saved[1])
    spec = replace(spec, train=replace(spec.train, init_from=saved[1].as_uri()))
    request = RunRequest(job=spec, plan=LOGITS[layout], until_step=1)
    noted = processes.call(request.plan.num_devices, run_noting_logits, request)
    rows: dict[int, list[np.ndarray]] = {}
    for first_row, logits_TV in (one for found in noted for one in found):
        rows.setdefault(first_row, []).append(logits_TV)
    ours_TV = np.concatenate([np.concatenate(rows[first_row]) for first_row in sorted(rows)], axis=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved[1], dtype=torch.float32).eval()
    tokens_BS = training_samples(spec).read(range(spec.train.global_batch))[:, :-1]
    with torch.no_grad():
        np.testing.assert_allclose(ours_TV, theirs(tokens_BS).logits.flatten(0, 1).numpy(), rtol=0, atol=1e-4)


def test_what_is_written_is_what_was_read(saved: tuple[str, Path]) -> None:
    """The config of a model says the same model again, to their own classes as well."""
    spec, _ = read_in(saved[1])
    theirs = transformers.AutoConfig.for_model(**config_of_model(spec.model, 64)).to_dict()
    assert read(ModelSpec, model_of_config(theirs)) == spec.model


ALL_OPTIONS = {
    "rotary": ModelSpec(
        layers=3,
        hidden=32,
        heads=8,
        kv_heads=4,
        head_dim=6,
        ffn=50,
        vocab=259,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=True,
        activation="gelu_tanh",
        rope_scaling=RopeScaling(kind="llama3", factor=2.0, original_positions=8),
    ),
    "learned": ModelSpec(
        layers=3,
        hidden=32,
        heads=4,
        ffn=50,
        vocab=259,
        gated_mlp=False,
        qkv_bias=True,
        mlp_bias=True,
        qk_norm=True,
        learned_positions=24,
        tie_embeddings=False,
    ),
}
# Tied, with a table of positions that only the first stage has.
GPT2 = parse_job(
    job_to_mapping(job())
    | {"model": {"family": "gpt2", "layers": 3, "hidden": 32, "heads": 4, "ffn": 50, "vocab": 259}}
).model
_PAIR = tuple(Replica(node="n", devices=(2 * first, 2 * first + 1), tp=2, samples=2) for first in (0, 1))
_SPLIT = (Replica(node="n", devices=(0, 1), tp=2, samples=2),), (Replica(node="n", devices=(2,), samples=2),)
PLANS = {
    "in slices": Plan(
        pipelines=(
            Pipeline(
                micro_batch=4,
                micro_batches=2,
                stages=(Stage(layers=((0, 3),), replicas=_PAIR, recompute="selective", slices=2),),
            ),
        ),
        sharding=Sharding(weights="cluster", gradients="cluster"),
    ),
    "put off": Plan(
        pipelines=(
            Pipeline(
                micro_batch=2,
                micro_batches=4,
                stages=(
                    Stage(layers=((0, 2),), replicas=_SPLIT[0], recompute="full"),
                    Stage(layers=((2, 3),), replicas=_SPLIT[1], recompute="selective"),
                ),
            ),
        ),
        schedule="zero_bubble",
        overlap=Overlap(stages=True, gradients=True, tensor_chunks=2),
    ),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("options", [*ALL_OPTIONS, "gpt2"])
def test_all_options_under_plans_of_everything(processes: Processes, options: str, name: str) -> None:
    spec = job(steps=STEPS)
    spec = replace(spec, model=ALL_OPTIONS.get(options, GPT2), train=replace(spec.train, seq_len=16))
    start = shaken(spec)
    run = processes.run(RunRequest(job=spec, plan=PLANS[name], until_step=STEPS, start=start))
    alone = run_solo(spec, STEPS, start=start)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-5)
    # Where positions are not turned, what all keys have in common changes nothing: AdamW divides rounding errors there.
    moved = {fqn: values for fqn, values in alone.weights.items() if options != "gpt2" or not fqn.endswith("k.bias")}
    assert worst_difference(run.weights, moved) <= BOUND
    assert_holders_agree(run, spec)


def shaken(spec: JobSpec) -> WholeState:
    """The first state, with something in all vectors."""
    random = np.random.default_rng(3)
    masters = {
        fqn: values + 0.2 * random.standard_normal(values.shape, dtype=np.float32) if values.ndim == 1 else values
        for fqn, values in run_solo(spec, 0).weights.items()
    }
    moments = {fqn: np.zeros_like(values) for fqn, values in masters.items()}
    return WholeState(step=0, values={kind: masters if kind is Kind.MASTER else moments for kind in OWNED_KINDS})


def test_a_job_begins_with_their_weights_in_every_layout(processes: Processes, saved: tuple[str, Path]) -> None:
    """As it does when the same values are handed to it; each rank reads what it holds."""
    spec, start = read_in(saved[1])
    begun = replace(spec, train=replace(spec.train, init_from=saved[1].as_uri()))
    plan = LAYOUTS["3 stages beside 1"]
    run = processes.run(RunRequest(job=begun, plan=plan, until_step=1))
    given = processes.run(RunRequest(job=spec, plan=plan, until_step=1, start=start))
    assert run.losses == given.losses
    assert_same_bits(run.state, given.state)


def header(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


def as_index(file: Path, places: Any) -> None:
    file.unlink()
    (file.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file: file.unlink(), "is not there, nor an index of several. transformers writes it: "),
        (lambda file: file.write_bytes(b"PK" * 100), "is no length of a header: it is no safetensors file"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "it was cut short or replaced"),
        (lambda file: save_file({"a": torch.ones(2)}, file), "model.embed_tokens.weight"),
        (
            lambda file: file.write_bytes(header({"a": {"dtype": "F32"}})),
            "model.safetensors: a = {'dtype': 'F32'}: says",
        ),
        (
            lambda file: file.write_bytes(header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})),
            "says of no tensor what it is and where",
        ),
        (lambda file: file.write_bytes(header([])), "holds no mapping"),
        (lambda file: as_index(file, {"a": "../b.safetensors"}), "must map names of tensors to files beside it"),
        (lambda file: as_index(file, ["a"]), "must map names of tensors to files beside it"),
    ],
)
def test_what_cannot_be_begun_with_is_named(spoil: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(tmp_path)
    spec, _ = read_in(tmp_path)
    spoil(tmp_path / "model.safetensors")
    with pytest.raises(InvalidField) as error:
        run_solo(replace(spec, train=replace(spec.train, init_from=tmp_path.as_uri())), 1)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"hidden": 128}}, r"model.hidden = 128: is 64 where these weights were trained"),
        ({"model": {"heads": 2, "kv_heads": 1, "head_dim": 32}}, r"model.heads = 2: is 4 where these weights were"),
        ({"model": {"activation": "gelu"}}, r"train.init_from = .*model.activation = 'gelu': is 'silu'"),
        ({"train": {"init_step": 3}}, "is a Hugging Face folder, which has no steps"),
        ({"train": {"init_from": "file:///nowhere/job_1"}}, "holds neither config.json nor a checkpoint"),
    ],
)
def test_a_folder_of_another_model_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(tmp_path)
    spec, _ = read_in(tmp_path)
    document: dict[str, Any] = job_to_mapping(replace(spec, train=replace(spec.train, init_from=tmp_path.as_uri())))
    for section, fields in change.items():
        document[section] = {**document[section], **fields}
    with pytest.raises(InvalidField, match=said):
        run_solo(parse_job(document), 1)


def test_a_file_cut_in_half_is_seen_without_a_tensor_read(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    document = {"name": "a", "model": {"hf": tmp_path.as_uri()}, "data": {"uri": "stdlib:"}}
    with_hf_model(document)
    with file.open("r+b") as opened:
        opened.truncate(size // 2)
    said = f"model.safetensors = {size // 2}: bytes are not the {size} that its header tells of"
    with pytest.raises(InvalidField, match=said):
        with_hf_model(document)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral"}, {"kv_heads": 8, "window": 4096}),
        ({"model_type": "mistral", "sliding_window": None}, {"window": None}),
        ({"model_type": "qwen2"}, {"kv_heads": 32, "window": None, "qkv_bias": True, "out_bias": False}),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 32}, {"window": None}),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
            {"window": 4096, "window_layers": tuple(range(2, 32))},
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"] * 32}, {"window": None}),
        ({"model_type": "qwen3"}, {"kv_heads": 32, "head_dim": 128, "qk_norm": True}),
        ({"model_type": "llama", "head_dim": None, "sliding_window": 77}, {"head_dim": None, "window": None}),
        (
            {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 3.0}},
            {"rope_scaling": dataclasses.asdict(RopeScaling(kind="linear", factor=2.0))},
        ),
    ],
)
def test_what_a_config_leaves_out_is_what_their_classes_take(config: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 9}
    found = model_of_config({**shape, "vocab_size": 300, **config})
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bloom"}, "model_type = 'bloom': is none of llama"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear': must be a mapping"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "rope_scaling.mscale = 0.7"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = 'longrope': is none of"),
        ({"hidden_act": ["silu"]}, "hidden_act = ['silu']: is none of silu"),
        ({"hidden_size": None}, "hidden_size = None: must be a whole number"),
        ({"layer_types": ["linear_attention"]}, "layer_types = ['linear_attention']"),
    ],
)
def test_configs_of_what_cannot_be_trained_are_refused(change: dict[str, Any], said: str) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 9}
    with pytest.raises(InvalidField) as error:
        model_of_config({"model_type": "llama", **shape, "vocab_size": 300, **change})
    assert said in str(error.value)


def test_old_files_of_gpt2_have_names_without_a_prefix_and_masks_beside(tmp_path: Path) -> None:
    """And are in half precision, some of them."""
    transformers.AutoModelForCausalLM.from_config(CONFIGS["gpt2"]()).save_pretrained(tmp_path)
    _, start = read_in(tmp_path)
    file = tmp_path / "model.safetensors"
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(theirs | {"h.0.attn.bias": torch.ones(1, 1, 48, 48)}, file)
    assert_same_bits(read_in(tmp_path)[1], start)
    for dtype in (torch.bfloat16, torch.float16):
        save_file({name: tensor.to(dtype) for name, tensor in theirs.items()}, file)
        for fqn, values in read_in(tmp_path)[1].values[Kind.MASTER].items():
            expected = torch.from_numpy(start.values[Kind.MASTER][fqn]).to(dtype).float()
            assert values.tobytes() == expected.numpy().tobytes(), fqn


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_tied_weight_may_be_there_as_the_head_alone(name: str, tmp_path: Path) -> None:
    """As their loaders take it. Where both are there they must be the same: their loaders would not tie others."""
    _, start = read_in(save_family(name, tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors[embedding].clone()
    save_file(tensors, file)
    assert_same_bits(read_in(tmp_path)[1], start)
    save_file(tensors | {"lm_head.weight": tensors[embedding] + 1}, file)
    with pytest.raises(InvalidField, match=r"lm_head.weight = \[256, 64\]: differs from the embedding, which config"):
        read_in(tmp_path)
    del tensors[embedding]
    save_file(tensors, file)
    assert_same_bits(read_in(tmp_path)[1], start)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(theirs.get_input_embeddings().weight, tensors["lm_head.weight"])


def test_an_embedding_is_not_the_head_where_these_are_two(tmp_path: Path) -> None:
    file = save_family("llama", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, file)
    with pytest.raises(InvalidField, match=r"'model.embed_tokens.weight': is a tensor that the folder does not have"):
        read_in(tmp_path)


@pytest.mark.parametrize("layout", ["3 stages beside 1", "tp 1 beside tp 2", "replicas of 3 and 1"])
def test_layouts_equal_one_process(processes: Processes, saved: tuple[str, Path], layout: str) -> None:
    if saved[0] not in ("llama 3.1, biases", "qwen3, yarn", "gpt2"):
        pytest.skip("has no option that these have not")
    spec, start = read_in(saved[1])
    request = RunRequest(job=spec, plan=LAYOUTS[layout], until_step=STEPS, start=start)
    run, alone = processes.run(request), run_solo(spec, STEPS, start=start)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-5)
    assert worst_difference(run.weights, alone.weights) <= BOUND
    assert_holders_agree(run, spec)
