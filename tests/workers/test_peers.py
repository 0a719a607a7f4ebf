"""The peers of the benchmark of throughput train what the engine trains: on the same samples they have its losses."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.duel import alternate
from benchmarks.throughput import DUELS, MODEL
from shoal_planner.job import ModelSpec
from shoal_workers.processes import Processes

SMALL = ModelSpec(layers=MODEL.layers, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=256, tie_embeddings=False)


@pytest.mark.parametrize("name", [duel.name for duel in DUELS])
def test_peer_has_the_engines_losses(processes: Processes, name: str) -> None:
    duel = next(duel for duel in DUELS if duel.name == name)
    train = dataclasses.replace(duel.job.train, seq_len=16)
    job = dataclasses.replace(duel.job, model=SMALL, train=train)
    for pair in alternate(processes, dataclasses.replace(duel, job=job), 2):
        assert pair.ours.loss == pytest.approx(pair.peer.loss, rel=1e-5)
        assert pair.ours.step_s > 0 and pair.peer.step_s > 0
