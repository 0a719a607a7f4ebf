"""A small model in a Hugging Face folder, jobs that train adapters beside it, and the same with peft in a loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers

from shoal_planner.job import JobSpec, parse_job
from shoal_planner.parameters import parameters
from shoal_recovery.checkpoints import commit, put_shard
from shoal_recovery.crc import checksum
from shoal_recovery.hf_jobs import with_hf_model
from shoal_recovery.state import OWNED_KINDS, Kind, Manifest, Piece, ShardKey
from shoal_recovery.store import open_store
from shoal_workers.data import training_samples
from shoal_workers.initial import initial_values

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
THEIR_NAMES = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def save_llama(folder: Path, *, seed: int = 7, **shape: Any) -> None:
    """With random weights, larger than at the beginning of a training."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(SHAPE | shape), tie_word_embeddings=False, initializer_range=0.1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def lora_job(
    folder: Path, lora: dict[str, Any] | None, document: dict[str, Any] | None = None, **train: Any
) -> JobSpec:
    """With these parts of the document, and these fields of its training."""
    usual = {"global_batch": 8, "seq_len": 32, "steps": 20, "lr": 3e-3, "warmup_steps": 5}
    found: dict[str, Any] = {"name": "adapters", "model": {"hf": folder.as_uri()}, "data": {"uri": "stdlib:"}}
    found |= document or {}
    found["train"] = usual | found.get("train", {}) | train | {"lora": lora}
    return parse_job(with_hf_model(found))


def theirs(folder: Path, spec: JobSpec) -> peft.PeftModel:
    """Their model with adapters that begin as ours do."""
    lora = spec.model.lora
    assert lora is not None
    names = [f"{THEIR_NAMES[name.split('.')[1]]}" for name in lora.names]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names, lora_dropout=0.0, bias="none")
    adapted = peft.get_peft_model(model, config)
    tensors = dict(adapted.named_parameters())
    for parameter in parameters(spec.model):
        values = initial_values(parameter, spec.model, spec.train.seed, 0, parameter.numel).view(parameter.shape)
        _, layer, _, name, which, _ = parameter.fqn.split(".")
        place = f"base_model.model.model.layers.{layer}.{THEIR_NAMES[name]}.lora_{which[-1].upper()}.default.weight"
        tensor = tensors[place]
        with torch.no_grad():
            tensor.copy_(values if values.shape == tensor.shape else values.T)
    return adapted


def train_plainly(model: torch.nn.Module, spec: JobSpec, steps: int) -> list[float]:
    """An ordinary loop over whatever of a model is trained, on the samples of a job."""
    train = spec.train
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    groups = [
        {"params": [tensor for tensor in trained if tensor.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [tensor for tensor in trained if tensor.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    samples, losses = training_samples(spec), []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * min(1.0, step / train.warmup_steps)
        rows_BS = samples.read(range((step - 1) * train.global_batch, step * train.global_batch))
        loss = F.cross_entropy(model(rows_BS[:, :-1]).logits.flatten(0, 1), rows_BS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def store_step(spec: JobSpec, weights: Mapping[str, Any], job: str, step: int, place: Path) -> None:
    """A checkpoint of these masters, with moments of zeros."""
    pieces: list[Piece] = []
    content = bytearray()
    for fqn, values in weights.items():
        for kind in OWNED_KINDS:
            data = (values if kind is Kind.MASTER else np.zeros_like(values)).astype("<f4").tobytes()
            key = ShardKey(fqn=fqn, kind=kind, first=0, last=values.size)
            pieces.append(Piece(key=key, offset=len(content), num_bytes=len(data), checksum=checksum(data)))
            content += data
    store = open_store(place.as_uri())
    stored = put_shard(store, job=job, step=step, epoch=1, shard="all", data=bytes(content), pieces=pieces)
    manifest = Manifest(version=1, job=job, step=step, epoch=1, next_sample=8 * step, pieces=stored)
    commit(store, manifest, spec.model)
