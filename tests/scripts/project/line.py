"""A script for Ray Train as users write them; it knows nothing of Shoal. Fits a line by full-batch gradient descent,
the same batch on every worker, so that what it reports does not depend on how many there are. Begins where its newest
checkpoint is. Before step `hold` it waits for the file `go`, which whoever runs it makes, and before step `leave` until
it is told that a node of its workers is to go away."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from figures import BATCH, initial
from torch.nn.functional import mse_loss

import ray.train
import ray.train.torch
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer


def train_loop(config):
    model = ray.train.torch.prepare_model(initial())
    bare = model.module if hasattr(model, "module") else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 1
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            stored = torch.load(Path(folder, "state.pt"))
        bare.load_state_dict(stored["model"])
        first = stored["epoch"] + 1
    inputs, targets = BATCH
    for epoch in range(first, config["epochs"] + 1):
        if epoch == config["fail"]:
            raise ZeroDivisionError(f"epoch {epoch} is one too many")
        while epoch == config["hold"] and not Path(config["go"]).exists():
            time.sleep(0.05)
        while epoch == config["leave"] and ray.train.get_preemption_info() is None:
            time.sleep(0.05)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        report(bare, epoch, loss.item())


def report(bare, epoch, loss):
    context = ray.train.get_context()
    metrics = {"loss": loss, "epoch": epoch, "workers": context.get_world_size()}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if context.get_world_rank() == 0:
            torch.save({"model": bare.state_dict(), "epoch": epoch}, Path(folder, "state.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--leave", type=int, default=0)
    parser.add_argument("--go", default="")
    parser.add_argument("--fail", type=int, default=0)
    config = vars(parser.parse_args())
    print("fits a line with", config)
    trainer = TorchTrainer(
        train_loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=8, use_gpu=True)
    )
    result = trainer.fit()
    print("ended with loss", result.metrics["loss"])
