"""Jobs whose model is a user's own code, for tests on real raylets; and the same training without Shoal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from running import BATCH, job_mapping

from shoal_planner.job import parse_job
from shoal_workers.data import training_samples

STEPS = 30
WORKERS = '''"""A user's own module, named as one of Shoal's folders."""
import torch
from torch import nn

from service import WIDTH


class Layer(nn.Module):
    tensor_parallel = {"up": "column", "down": "row"}
    tensor_parallel_heads = 2

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(torch.relu(self.up(self.norm(x + self.mix * before))))
'''
SERVICE = "WIDTH = 64\n"
MODEL = """from torch import nn

from workers import Layer
from service import WIDTH


def build(layers):
    return [nn.Embedding(256, WIDTH), *(Layer() for _ in range(layers)), nn.Linear(WIDTH, 256)]
"""
PLAIN = """import json, sys
import torch
import torch.nn.functional as F
from model import build

seed, layers, rows, train = json.load(sys.stdin)
torch.manual_seed(seed)
model = torch.nn.Sequential(*build(layers=layers))
matrices = [tensor for tensor in model.parameters() if tensor.ndim > 1]
vectors = [tensor for tensor in model.parameters() if tensor.ndim == 1]
groups = [{"params": matrices, "weight_decay": train["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=train["lr"], betas=train["betas"], eps=train["eps"])
losses = []
for step, batch in enumerate(rows, start=1):
    for group in optimizer.param_groups:
        group["lr"] = train["lr"] * min(1.0, step / train["warmup_steps"])
    batch = torch.tensor(batch)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
"""


def write_code(folder: Path) -> Path:
    """As users have it."""
    for name, text in (("workers.py", WORKERS), ("service.py", SERVICE), ("model.py", MODEL)):
        (folder / name).write_text(text)
    return folder


def own_job(code: Path | str, entrypoint: str = "model:build", steps: int = STEPS, **around: Any) -> dict[str, Any]:
    """`code`: the folder, or a URI."""
    job = job_mapping(steps)
    job["model"] = {"entrypoint": entrypoint, "arguments": {"layers": 6}}
    return {**job, "code": {"working_dir": code if isinstance(code, str) else code.as_uri(), **around}}


def plain_losses(code: Path, job: dict[str, Any]) -> list[float]:
    """A loop around the same modules on the same samples, in a process that knows nothing of Shoal."""
    spec = parse_job(job_mapping(job["train"]["steps"]))  # its samples are the same
    samples, train = training_samples(spec), spec.train
    rows = [samples.read(range(step * BATCH, (step + 1) * BATCH)).tolist() for step in range(train.steps)]
    known = {name: getattr(train, name) for name in ("lr", "betas", "eps", "weight_decay", "warmup_steps")}
    order = json.dumps([train.seed, 6, rows, known])
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PLAIN]
    done = subprocess.run(command, input=order, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout)
    return losses
