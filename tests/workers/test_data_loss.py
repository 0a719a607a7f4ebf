"""The loss is the mean over the targets of the whole batch, for any layout; what is no target changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from data_ground import documents, job, write_chats
from engine_runs import on_nodes, part, plan, worst_difference

from shoal_planner.data_spec import DataSpec
from shoal_planner.plan import Plan
from shoal_recovery.state import Kind
from shoal_workers.data import training_samples
from shoal_workers.exchange import SoloExchange
from shoal_workers.processes import run_plan
from shoal_workers.samples import IGNORED, batch
from shoal_workers.solo import run_solo
from shoal_workers.tensor_parallel import TensorGroup, cross_entropy_sum

ALONE = TensorGroup(rank=0, size=1, reducer=SoloExchange())
LAYOUTS = {
    "tp 2": plan((2, (part(2, (2, 5)),))),
    "two stages": plan((5, (part(1, (1, 2)), part(1, (1, 2))))),
    "uneven replicas": plan((2, (part(2, (1, 3), (1, 2)),))),
}


def test_ignored_targets_have_no_loss_and_no_gradient() -> None:
    logits_TV = torch.randn(12, 30, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets_T = torch.arange(12)
    targets_T[[0, 5, 11]] = IGNORED
    ours = cross_entropy_sum((logits_TV[:, :13], logits_TV[:, 13:]), targets_T, (0, 13), ALONE)
    (gradient,) = torch.autograd.grad(ours, logits_TV)
    theirs = F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="sum")
    (expected,) = torch.autograd.grad(theirs, logits_TV)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert torch.allclose(gradient, expected, atol=1e-6)
    assert not gradient[[0, 5, 11]].any()


def test_nothing_to_learn_gives_zero() -> None:
    logits_TV = torch.randn(3, 5).requires_grad_()
    loss = cross_entropy_sum((logits_TV,), torch.full((3,), IGNORED), (0,), ALONE)
    (gradient,) = torch.autograd.grad(loss, logits_TV)
    assert (loss.item(), bool(gradient.any())) == (0.0, False)


def test_rows_become_tokens_and_targets(tmp_path: Path) -> None:
    samples = training_samples(job(write_chats(tmp_path / "chats", documents(60)), seq_len=128))
    rows = samples.read(range(20))
    found = batch(samples, range(20), torch.device("cpu"))
    assert torch.equal(found.tokens_BS, torch.where(rows < 0, ~rows, rows)[:, :-1])
    assert torch.equal(found.targets_BS == IGNORED, rows[:, 1:] < 0)
    assert found.num_targets == int((found.targets_BS >= 0).sum())
    assert 0 < found.num_targets < 20 * 128


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_on_the_mean_over_targets(tmp_path: Path, name: str) -> None:
    spec = job(
        write_chats(tmp_path / "chats", documents(60)),
        seq_len=128,
        eval_every=3,
        eval_batches=1,
        clip_norm=0.5,
        lr=1e-2,
    )
    alone, layout = run_solo(spec, 3), _placed(LAYOUTS[name])
    run = run_plan(spec, layout, 3)
    assert run.ranks[0].losses == pytest.approx(alone.losses, rel=1e-5)
    assert worst_difference(run.state.values[Kind.MASTER], alone.weights) < 1e-4
    assert 3.0 < alone.losses[0] < 9.0, "that of one token, not of the fifth of it that is learnt"


def test_gradients_are_those_of_the_mean(tmp_path: Path) -> None:
    """One step of plain descent in the direction of AdamW says little of scale, so the norm is looked at."""
    spec = job(write_chats(tmp_path / "chats", documents(60)), seq_len=128)
    once, twice = (run_plan(spec, _placed(layout), 1).ranks[0].reports[0] for layout in (LAYOUTS["tp 2"], _SOLO))
    assert once.grad_norm == pytest.approx(twice.grad_norm, rel=1e-4)
    assert once.loss == pytest.approx(twice.loss, rel=1e-5)


def test_a_step_without_a_target_is_left_alone(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "why? " * 800}, {"role": "assistant", "content": "because"}]}
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 40))
    data = DataSpec(uri=(tmp_path / "chats.jsonl").as_uri(), format="jsonl", template="chatml")
    spec = job(data, seq_len=16, eval_every=2, eval_batches=1)
    first, run = run_plan(spec, _SOLO, 0), run_plan(spec, _placed(LAYOUTS["tp 2"]), 2)
    for rank in run.ranks:
        assert [report.skipped for report in rank.reports] == [
            "none of its samples has a target: nothing is learnt of it"
        ] * 2
        assert all(math.isnan(loss) for loss in rank.losses)
        assert [math.isnan(evaluation.loss) for evaluation in rank.evaluations] == [True]
    assert worst_difference(run.weights, first.weights) == 0.0, "nor do weights decay"


_SOLO = plan((5, (part(2, (1, 2)),)))


def _placed(layout: Plan) -> Plan:
    return on_nodes(layout, *["here"] * 8)
