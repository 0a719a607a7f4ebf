"""A checkpoint listed, exported to other tools, and read as the documents say: all hold the same weights."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import layouts
import own_code
import pytest
import torch
import torch.nn.functional as F
import transformers
from control_plane import Connector, job_mapping, ok
from safetensors.torch import load_file
from stored_steps import store_step
from torch import Tensor

from shoal import cli
from shoal.export_hf import export_hf
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_planner.own_model import seen_model
from shoal_planner.parameters import parameters
from shoal_recovery.checkpoints import load_manifest
from shoal_recovery.hf_folder import HfFolder
from shoal_recovery.hf_jobs import with_hf_model
from shoal_recovery.journal import CheckpointCommitted, Entry, StoreFailed, StoreRecovered
from shoal_recovery.state import Kind
from shoal_recovery.store import open_store
from shoal_workers.data import training_samples
from shoal_workers.own_look import look
from shoal_workers.solo import run_solo

FILES_MD = Path(__file__).parent.parent.parent / "docs" / "files.md"
TRAIN = {"global_batch": 4, "seq_len": 16, "steps": 4, "warmup_steps": 0, "lr": 0.01}


def small_job(**model: Any) -> JobSpec:
    shape = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 256, "rope_theta": 500.0}
    return parse_job(job_mapping(model=shape | model, train=TRAIN, data={"uri": Path(json.__file__).as_uri()}))


def their_loss(folder: Path, tokens_BS: Tensor) -> float:
    """Hugging Face's Llama in plain PyTorch, from the exported files alone."""
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    inputs, targets = tokens_BS[:, :-1], tokens_BS[:, 1:]
    num, length = inputs.shape
    rates = config["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.outer(torch.arange(length).double(), rates)
    cos, sin = (torch.cat((part, part), -1).float() for part in (angles.cos(), angles.sin()))

    def norm(x: Tensor, name: str) -> Tensor:
        return weights[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])

    def split(x: Tensor, count: int) -> Tensor:
        return x.view(num, length, count, size).transpose(1, 2)

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

    x = weights["model.embed_tokens.weight"][inputs]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        h = norm(x, f"{prefix}input_layernorm.weight")
        q, k, v = (F.linear(h, weights[f"{prefix}self_attn.{name}_proj.weight"]) for name in "qkv")
        keys, values = (split(part, kv_heads).repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        a = F.scaled_dot_product_attention(turned(split(q, heads)), turned(keys), values, is_causal=True)
        x = x + F.linear(a.transpose(1, 2).reshape(num, length, -1), weights[f"{prefix}self_attn.o_proj.weight"])
        h = norm(x, f"{prefix}post_attention_layernorm.weight")
        gate, up = (F.linear(h, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    logits = F.linear(norm(x, "model.norm.weight"), weights[head])
    return float(F.cross_entropy(logits.reshape(-1, config["vocab_size"]), targets.reshape(-1)))


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_checkpoint_goes_on_with_the_loss_of_training(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = small_job(tie_embeddings=tied)
    store_step(job, dict(run_solo(job, 2).weights), "job_1", 2, tmp_path)
    place = f"{(tmp_path / 'store').as_uri()}/job_1"
    assert cli.run(["export", place, str(tmp_path / "out"), "--format", "hf", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step"] == 2
    assert {Path(file).name for file in said["files"]} == {"config.json", "model.safetensors"}
    tokens_BS = training_samples(job).read(range(8, 12))  # of the third step
    assert their_loss(tmp_path / "out", tokens_BS) == pytest.approx(run_solo(job, 3).losses[2], rel=1e-5)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "activation": "gelu_tanh"},
    "mistral": {"head_dim": 8, "tie_embeddings": False},
    "qwen2": {"rope_scaling": {"kind": "yarn", "factor": 2.0, "original_positions": 8}},
    "qwen3": {"head_dim": 6, "rope_scaling": {"kind": "llama3", "factor": 2.0, "original_positions": 8}},
    "gpt2": {"kv_heads": 4, "learned_positions": 20, "rope_theta": 10000.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_is_loaded_by_transformers_as_one_of_its_family(family: str, tmp_path: Path) -> None:
    """In one file and in several; and read in again, it is what it was."""
    job = small_job(family=family, **FAMILIES[family])
    weights = dict(run_solo(job, 2).weights)
    store_step(job, weights, "job_1", 2, tmp_path)
    store = open_store((tmp_path / "store").as_uri())
    tokens_BS = training_samples(job).read(range(8, 12))
    for file_bytes in (1 << 20, 3000):
        out = tmp_path / str(file_bytes)
        export_hf(store, load_manifest(store, "job_1", 2), job.model, 16, out, file_bytes=file_bytes)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert theirs.config.model_type == family
        with torch.no_grad():
            logits_BSV = theirs(tokens_BS[:, :-1]).logits
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten())
        assert float(loss) == pytest.approx(run_solo(job, 3).losses[2], rel=1e-5)
        back = HfFolder(open_store(out.as_uri()))
        back.check(job.model)
        assert back.model == job.model
        for parameter in parameters(job.model):
            first, last = parameter.numel // 3, parameter.numel - 1  # from the middle of a row
            read = back.values(job.model, parameter, first, last)
            assert read.tobytes() == weights[parameter.fqn].reshape(-1)[first:last].tobytes(), parameter.fqn


def test_a_job_begins_with_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    job = small_job()
    weights = dict(run_solo(job, 2).weights)
    store_step(job, weights, "job_1", 2, tmp_path)
    place = f"{(tmp_path / 'store').as_uri()}/job_1"

    def begun(**train: Any) -> JobSpec:
        return replace(job, train=replace(job.train, init_from=place, **train))

    for fqn, values in run_solo(begun(init_step=2), 0).weights.items():
        assert values.tobytes() == weights[fqn].tobytes(), fqn
    for step in (None, 3):
        with pytest.raises(InvalidField, match=rf"train.init_step = {step}: must be one of the stored steps: 2"):
            run_solo(begun(init_step=step), 1)
    with pytest.raises(InvalidField, match=r"model.hidden = 32: is 16 where these weights were trained"):
        run_solo(replace(begun(init_step=2), model=replace(job.model, hidden=32, head_dim=8)), 1)


def test_a_checkpoint_goes_on_with_a_text_as_its_export_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same 32 tokens as transformers finds."""
    job = small_job()
    store_step(job, dict(run_solo(job, 2).weights), "job_1", 2, tmp_path)
    place = f"{(tmp_path / 'store').as_uri()}/job_1"
    assert cli.run(["export", place, str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = torch.tensor([list(b"import o")])
    tokens = theirs.generate(prompt, max_new_tokens=32, do_sample=False)
    expected = [token for token in tokens[0, 8:].tolist() if token]
    capsys.readouterr()
    for what in (place, str(tmp_path / "out"), (tmp_path / "out").as_uri()):
        assert cli.run(["generate", what, "--prompt", "import o", "--tokens", "32", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["tokens"] == expected
        assert said["text"] == bytes(expected).decode("utf-8", "replace")
    assert cli.run(["generate", place, "--prompt", "import o", "--tokens", "32"]) == 0
    assert capsys.readouterr().out == bytes(expected).decode("utf-8", "replace") + "\n"
    missing = tmp_path / "no.json"
    for what, given, problem in (
        (place, ["--step", "7"], "--step = 7: must be one of the stored steps: 2"),
        (place, ["--tokenizer", str(missing)], f"--tokenizer = '{missing}': cannot be read"),
        (missing.as_uri(), [], f"WHAT = '{missing.as_uri()}': cannot be used"),
        (str(missing), [], f"{missing}: there is no such folder"),
    ):
        assert cli.run(["generate", what, "--prompt", "a", *given]) == 2
        assert problem in capsys.readouterr().err
    assert cli.run(["generate", place, "--prompt", ""]) == 2
    assert "must have at least one token" in capsys.readouterr().err


def test_a_model_of_hugging_faces_is_all_that_a_job_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.Qwen2Config(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    uri = (tmp_path / "theirs").as_uri()
    document = {"name": "a", "model": {"hf": uri}, "train": TRAIN, "data": {"uri": "stdlib:"}}
    found = parse_job(with_hf_model(document))
    assert (found.model.family, found.model.qkv_bias, found.train.init_from) == ("qwen2", True, uri)
    assert parse_job(with_hf_model({**document, "train": {**TRAIN, "init_from": "file:///else"}})).train.init_from == (
        "file:///else"
    )
    (tmp_path / "job.json").write_text(json.dumps(document))
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: n, count: 2, device: cpu-1t}]")
    assert cli.run(["plan", str(tmp_path / "job.json"), "--cluster", str(tmp_path / "cluster.yaml"), "--json"]) == 0
    capsys.readouterr()
    document["model"] = {"hf": f"{uri}/nothing"}
    (tmp_path / "job.json").write_text(json.dumps(document))
    assert cli.run(["plan", str(tmp_path / "job.json"), "--cluster", str(tmp_path / "cluster.yaml"), "--json"]) == 2
    said = capsys.readouterr().err
    assert "model.hf" in said and "config.json is not there" in said


@pytest.mark.parametrize("entrypoint", ["own_code:build", "own_code:makers"])
def test_modules_of_ones_own_load_what_is_exported_and_go_on_with_a_text(
    entrypoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = seen_job(entrypoint)
    run = run_solo(job, 3)
    store_step(job, dict(run_solo(job, 2).weights), "job_1", 2, tmp_path)
    store = open_store((tmp_path / "store").as_uri())
    export_hf(store, load_manifest(store, "job_1", 2), job.model, 16, tmp_path / "out")
    built = getattr(own_code, entrypoint.partition(":")[2])(layers=2)
    modules = torch.nn.ModuleList(one if isinstance(one, torch.nn.Module) else one() for one in built)
    left = modules.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    assert not left.unexpected_keys and all(name.endswith("fixed") for name in left.missing_keys)
    rows_BS = training_samples(job).read(range(8, 12))  # of the third step
    logits_BSV = torch.nn.Sequential(*modules)(rows_BS[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), rows_BS[:, 1:].flatten())
    assert loss.item() == pytest.approx(run.losses[2], rel=1e-5)

    monkeypatch.chdir(Path(own_code.__file__).parent)
    uri = (tmp_path / "store").as_uri()
    command = ["generate", f"{uri}/job_1", "--prompt", "def", "--tokens", "4"]
    assert cli.run([*command, "--json"]) == 0
    tokens, found = list(b"def"), []
    for _ in range(4):
        with torch.no_grad():
            found.append(int(torch.nn.Sequential(*modules)(torch.tensor([tokens + found]))[0, -1].argmax()))
    assert json.loads(capsys.readouterr().out)["tokens"] == found
    monkeypatch.chdir(tmp_path)
    assert cli.run(command) == 2
    assert "there is no module 'own_code' in the job's code" in capsys.readouterr().err


def seen_job(entrypoint: str) -> JobSpec:
    job = parse_job(job_to_mapping(small_job()) | {"model": {"entrypoint": entrypoint, "arguments": {"layers": 2}}})
    assert job.model.module is not None
    shape = look(job.model.module, job.train.seed, job.train.seq_len)
    return parse_job(job_to_mapping(job) | {"model": seen_model(dataclasses.asdict(job.model.module), shape)})


def test_a_model_that_its_family_cannot_be_is_not_exported(tmp_path: Path) -> None:
    job = small_job(family="mistral", qkv_bias=True)
    store_step(job, dict(run_solo(job, 1).weights), "job_1", 1, tmp_path)
    store = open_store((tmp_path / "store").as_uri())
    with pytest.raises(InvalidField, match=r"model.qkv_bias = True: is False in every mistral of Hugging Face's"):
        export_hf(store, load_manifest(store, "job_1", 1), job.model, 16, tmp_path / "out")


def test_a_large_model_goes_to_several_files(tmp_path: Path) -> None:
    job = small_job()
    store_step(job, dict(run_solo(job, 1).weights), "job_1", 1, tmp_path)
    store = open_store((tmp_path / "store").as_uri())
    written = export_hf(store, load_manifest(store, "job_1", 1), job.model, 16, tmp_path / "out", file_bytes=6000)
    index = json.loads(written[-1].read_text())
    assert index["metadata"]["total_size"] == sum(4 * parameter.numel for parameter in parameters(job.model))
    assert len(set(index["weight_map"].values())) == len(written) - 2 > 2
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)


def test_the_documented_lines_read_a_checkpoint(tmp_path: Path) -> None:
    job, weights = small_job(), {}
    for step in (1, 2):
        weights = dict(run_solo(job, step).weights)
        store_step(job, weights, "job_1", step, tmp_path)
    store_step(job, dict(run_solo(job, 1).weights), "job_2", 1, tmp_path)  # another's, whose name sorts last
    (lines,) = re.findall(r"```python\n(import json.*?)```", FILES_MD.read_text(), flags=re.DOTALL)
    assert len(lines.split("\n")) - lines.count("\n\n") - 1 == 10
    found: dict[str, Any] = {}
    exec(lines.replace('"/checkpoints"', repr(str(tmp_path / "store"))), found)
    assert found["weights"].keys() == weights.keys()
    for name, array in weights.items():
        assert torch.equal(found["weights"][name], torch.from_numpy(array))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ("{store}/job_2", "{out}"),
            2,
            "has no checkpoint of job_2; of a job that runs 'shoal checkpoint ID' stores one",
        ),
        (("{store}/job_1", "{out}", "--step", "7"), 2, "--step 7: {store} has steps 1 of job_1"),
        (("gs://bucket/job_1", "{out}"), 2, "must begin with file:// or s3://"),
        (("{store}/job_1", "{store_path}/job_1/manifests/000000001.json"), 1, "File exists"),
        (("{store}/job_1", "{out}", "--format", "onnx"), 2, "'onnx' is not one of 'hf'"),
    ],
)
def test_what_cannot_be_exported_is_said(
    arguments: tuple[str, ...], status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = small_job()
    store_step(job, layouts_weights(job), "job_1", 1, tmp_path)
    store = tmp_path / "store"
    known = {"store": store.as_uri(), "store_path": str(store), "out": str(tmp_path / "out")}
    assert cli.run(["export", *(argument.format(**known) for argument in arguments)]) == status
    assert words.format(**known) in capsys.readouterr().err


def layouts_weights(job: JobSpec) -> dict[str, Any]:
    truth = layouts.arrays(job.model, 1)
    return {one.fqn: truth[one.fqn, Kind.MASTER].reshape(one.shape) for one in parameters(job.model)}


def test_a_damaged_shard_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = small_job()
    store_step(job, layouts_weights(job), "job_1", 1, tmp_path)
    shard = next((tmp_path / "store" / "job_1" / "shards").glob("*/*"))
    content = bytearray(shard.read_bytes())
    for place in range(len(content) // 4, len(content), 64):  # in whatever kind of state
        content[place] ^= 1
    shard.write_bytes(content)
    assert cli.run(["export", f"{(tmp_path / 'store').as_uri()}/job_1", str(tmp_path / "out")]) == 1
    assert "has checksum crc32:" in capsys.readouterr().err


def test_checkpoints_of_a_job_are_listed_as_the_store_has_them(
    api: httpx.Client, connector: Connector, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    uri = (tmp_path / "store").as_uri()
    ok(connector.renew())
    job = small_job()
    body = {**job_to_mapping(job), "checkpoint": {"uri": uri}}
    created = ok(api.post("/v1/jobs", json=body))["id"]
    assert ok(api.get(f"/v1/jobs/{created}/checkpoints")) == {"uri": uri, "items": []}
    store_step(job, layouts_weights(job), created, 4, tmp_path)
    event = CheckpointCommitted(step=4, epoch=1, uri=uri, num_bytes=1234, duration_s=0.1)
    ok(connector.send(created, [Entry(seq=1, at_s=1e9, event=event)]))
    (one,) = ok(api.get(f"/v1/jobs/{created}/checkpoints"))["items"]
    manifest = f"{uri}/{created}/manifests/000000004.json"
    assert one == {
        "step": 4,
        "uri": manifest,
        "epoch": 1,
        "num_bytes": 1234,
        "committed_at": "2001-09-09T01:46:40.000Z",
        "duration_s": 0.1,
        "held_up_s": None,
        "verified": {"at": "2001-09-09T01:46:40.000Z", "by": "manifest", "seq": 1},
    }
    page = api.get(f"/jobs/{created}").text
    assert "object store, whole" in page and "1 step there" in page
    monkeypatch.setenv("SHOAL_SERVER", str(api.base_url))
    monkeypatch.setenv("SHOAL_TOKEN", api.headers["Authorization"].removeprefix("Bearer "))
    assert cli.run(["checkpoints", created]) == 0
    assert manifest in capsys.readouterr().out
    assert cli.run(["checkpoints", "job_none"]) == 2
    assert cli.run(["export", created, str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 16
    other = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    assert ok(api.get(f"/v1/jobs/{other}/checkpoints")) == {"uri": None, "items": []}
    assert cli.run(["export", other, str(tmp_path / "out")]) == 2
    assert f"{other} has no checkpoint.uri" in capsys.readouterr().err


def test_a_store_that_fails_is_said_everywhere_until_it_works_again(
    api: httpx.Client, connector: Connector, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ok(connector.renew())
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    monkeypatch.setenv("SHOAL_SERVER", str(api.base_url))
    monkeypatch.setenv("SHOAL_TOKEN", api.headers["Authorization"].removeprefix("Bearer "))

    def shown() -> tuple[str | None, str, str]:
        assert cli.run(["status", job_id]) == 0
        status = ok(api.get(f"/v1/jobs/{job_id}"))["status"]
        return status["store_problem"], api.get(f"/jobs/{job_id}").text, capsys.readouterr().out

    failed = StoreFailed(uri="s3://b/p", step=20, problem="http://there does not answer")
    ok(connector.send(job_id, [Entry(seq=1, at_s=1e9, event=failed)]))
    problem, page, text = shown()
    assert problem == "http://there does not answer"
    assert "No checkpoints at present, training goes on: http://there does not answer" in page
    assert "none at present: http://there does not answer" in text
    recovered = StoreRecovered(uri="s3://b/p", step=40, duration_s=90.0)
    ok(connector.send(job_id, [Entry(seq=2, at_s=1e9, event=recovered)]))
    problem, page, text = shown()
    assert problem is None
    assert "No checkpoints at present" not in page
    assert "works again after 1 min 30 s: step 40 stands there" in page
    assert "none at present" not in text
    assert cli.run(["events", job_id]) == 0
    lines = capsys.readouterr().out
    assert "s3://b/p does not take step 20: http://there does not answer; training goes on" in lines
    assert "s3://b/p works again after 90 s: step 40 stands there" in lines
