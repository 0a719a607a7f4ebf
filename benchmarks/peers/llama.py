"""The engine's model as ordinary modules of PyTorch: what all peers train, unless the job names a model of its own.

What autograd makes of F.rms_norm, SDPA, F.silu and matrix products with q, k, v, gate and up apart, and the same first
weights. The engine has the same kernels, but goes back through norms and positions in a way of its own. Linear layers
store their weights [out, in], as is usual, where the engine stores o and down [in, out].

Shapes: B sequences, S positions, N heads, D head size, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import waiting_model
from shoal_planner.job import JobSpec, ModelSpec
from shoal_planner.parameters import parameters
from shoal_workers.initial import initial_values

_STORED_TRANSPOSED = ("attention.o.weight", "mlp.down.weight")


class Norm(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model.hidden))
        self.eps = model.norm_eps

    def forward(self, x_BSH: Tensor) -> Tensor:
        return F.rms_norm(x_BSH, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        kv_width = model.num_kv_heads * model.head_size
        self.q = nn.Linear(model.hidden, model.hidden, bias=False)
        self.k = nn.Linear(model.hidden, kv_width, bias=False)
        self.v = nn.Linear(model.hidden, kv_width, bias=False)
        self.o = nn.Linear(model.hidden, model.hidden, bias=False)
        self.head_dim = model.head_size

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q_BNSD = _turn(self._heads(self.q(x_BSH)), cos_SD, sin_SD)
        k_BNSD = _turn(self._heads(self.k(x_BSH)), cos_SD, sin_SD)
        v_BNSD = self._heads(self.v(x_BSH))
        grouped = q_BNSD.shape[1] != k_BNSD.shape[1]
        mixed_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True, enable_gqa=grouped)
        mixed_BSH: Tensor = self.o(mixed_BNSD.transpose(1, 2).flatten(2))
        return mixed_BSH

    def _heads(self, x_BSH: Tensor) -> Tensor:
        return x_BSH.view(*x_BSH.shape[:2], -1, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        out_BSH: Tensor = self.down(F.silu(self.gate(x_BSH)) * self.up(x_BSH))
        return out_BSH


class Block(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = Norm(model)
        self.attention = Attention(model)
        self.mlp_norm = Norm(model)
        self.mlp = Mlp(model)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos_SD, sin_SD)
        out_BSH: Tensor = x_BSH + self.mlp(self.mlp_norm(x_BSH))
        return out_BSH


class Llama(nn.Module):
    """Blocks [first, last), with the embedding where they begin with the first, and norm and head where they end with
    the last. Logits out of tokens, or activations in their place."""

    def __init__(self, job: JobSpec, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        model = job.model
        last = model.layers if last is None else last
        self.embedding = nn.Embedding(model.vocab, model.hidden) if first == 0 else None
        self.layers = nn.ModuleDict({str(layer): Block(model) for layer in range(first, last)})
        self.final_norm = Norm(model) if last == model.layers else None
        self.head = nn.Linear(model.hidden, model.vocab, bias=False) if last == model.layers else None
        half = model.head_size // 2
        rates = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles_SD = torch.outer(torch.arange(job.train.seq_len, dtype=torch.float64), rates).repeat(1, 2)
        self.register_buffer("cos_SD", angles_SD.cos().float(), persistent=False)
        self.register_buffer("sin_SD", angles_SD.sin().float(), persistent=False)

    def forward(self, entering: Tensor) -> Tensor:
        x_BSH = entering if self.embedding is None else self.embedding(entering)
        for block in self.layers.values():
            x_BSH = block(x_BSH, self.cos_SD, self.sin_SD)
        if self.final_norm is None or self.head is None:
            return x_BSH
        logits: Tensor = self.head(self.final_norm(x_BSH))
        return logits


def build(job: JobSpec, first: int = 0, last: int | None = None) -> Llama:
    """With the first weights of the job's seed."""
    assert not job.model.tie_embeddings and job.model.gated_mlp, job.model
    model = Llama(job, first, last)
    stored = {parameter.fqn: parameter for parameter in parameters(job.model)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            parameter = stored[name]
            values = initial_values(parameter, job.model, job.train.seed, 0, parameter.numel).view(parameter.shape)
            weight.copy_(values.t() if name.endswith(_STORED_TRANSPOSED) else values)
    return model


def model_of(job: JobSpec) -> nn.Module:
    """What the job trains: this, or the modules of `waiting_model`."""
    module = job.model.module
    return build(job) if module is None else nn.Sequential(*waiting_model.build(**json.loads(module.arguments)))


def mean_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def adamw(job: JobSpec, weights: Iterable[Tensor]) -> torch.optim.AdamW:
    """The job's, fused; matrices decay and norms do not."""
    train, matrices, norms = job.train, list[Tensor](), list[Tensor]()
    for weight in weights:
        (matrices if weight.dim() > 1 else norms).append(weight)
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        fused=True,
    )


def _turn(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    low, high = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-high, low), dim=-1) * sin_SD
