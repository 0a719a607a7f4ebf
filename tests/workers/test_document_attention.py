"""Packed documents of which each is seen by itself (`data.attention: document`): the numbers of running each alone, by
transformers' models as well as under every kind of layout."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from document_ground import document_job, ids_of_step, logits_one_by_one, loss_one_by_one, write
from engine_runs import (
    LAYOUTS,
    assert_holders_agree,
    assert_same_bits,
    job,
    part,
    plan,
    run_noting_logits,
    worst_difference,
)
from family_ground import save_family
from torch import Tensor

from shoal_planner.job import JobSpec
from shoal_planner.levels import Sharding
from shoal_planner.lora import LoraSpec
from shoal_planner.overlap import Overlap
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.hf_folder import HfFolder
from shoal_recovery.store import open_store
from shoal_workers.attention import attend, for_all_heads
from shoal_workers.borders import BEGINS, Borders, borders_of
from shoal_workers.data import evaluation_samples
from shoal_workers.exchange import SoloExchange
from shoal_workers.processes import Processes
from shoal_workers.rotary import Rotary
from shoal_workers.samples import ids_of
from shoal_workers.segments import ACTIVATIONS
from shoal_workers.solo import RunRequest, SoloRun, run_rank, run_solo, solo_plan

STEPS = 10
FEW = 4  # with their models, document by document
BOUND = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module", params=["llama", "qwen3, yarn", "gpt2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp(request.param, tmp_path_factory.mktemp("theirs"))


def save_sharp(name: str, folder: Path) -> Path:
    """With matrices so large that it matters what attention sees."""
    model = theirs(save_family(name, folder))
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def solo(folder: Path) -> dict[bool, SoloRun]:
    return {tied: run_solo(document_job(folder, tied=tied), STEPS) for tied in (True, False)}


def begun(saved: Path, folder: Path) -> JobSpec:
    """On these weights."""
    model = HfFolder(open_store(saved.as_uri())).model
    spec = replace(document_job(folder, tied=False), model=model)
    return replace(spec, train=replace(spec.train, init_from=saved.as_uri()))


def theirs(saved: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    return model


def alone(model: Any, ids_L: Tensor) -> Tensor:
    logits_LV: Tensor = model(ids_L.unsqueeze(0)).logits[0]
    return logits_LV


def losses_of(model: Any, spec: JobSpec) -> list[float]:
    """An ordinary loop that gives the model each document by itself."""
    train, losses = spec.train, []
    matrices = [tensor for tensor in model.parameters() if tensor.ndim > 1]
    vectors = [tensor for tensor in model.parameters() if tensor.ndim == 1]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    for step in range(1, FEW + 1):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * min(1.0, step / train.warmup_steps)
        loss = loss_one_by_one(lambda ids_L: alone(model, ids_L), ids_of_step(spec, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_as_with_their_model_that_sees_one_document_at_a_time(saved: Path, folder: Path) -> None:
    spec = begun(saved, folder)
    run = run_solo(spec, FEW)
    np.testing.assert_allclose(run.losses, losses_of(theirs(saved), spec), rtol=2e-5)
    across = run_solo(replace(spec, data=replace(spec.data, attention="sequence")), 1)
    assert abs(across.losses[0] - run.losses[0]) > 1e-3, "what stands before a document would have had a part in it"


LOGITS = {
    "one": plan((2, (part(6, (1, 4)),))),
    "tp 2": LAYOUTS["tp 2"],
    "layers 1+5": LAYOUTS["layers 1+5"],
}


@pytest.mark.parametrize("layout", LOGITS)
def test_logits_are_those_of_each_document_by_itself(
    processes: Processes, saved: Path, folder: Path, layout: str
) -> None:
    spec = begun(saved, folder)
    request = RunRequest(job=spec, plan=LOGITS[layout], until_step=1)
    noted = processes.call(request.plan.num_devices, run_noting_logits, request)
    rows: dict[int, list[np.ndarray]] = {}
    for first_row, logits_TV in (one for found in noted for one in found):
        rows.setdefault(first_row, []).append(logits_TV)
    ours_TV = np.concatenate([np.concatenate(rows[first_row]) for first_row in sorted(rows)], axis=1)
    model = theirs(saved).eval()
    with torch.no_grad():
        expected_BSV = logits_one_by_one(lambda ids_L: alone(model, ids_L), ids_of_step(spec, 1)[:, :-1])
    np.testing.assert_allclose(ours_TV, expected_BSV.flatten(0, 1).numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("layout", "tied"), [*((name, False) for name in LAYOUTS), ("3 stages beside 1", True)])
def test_layout_equals_one_process(
    processes: Processes, folder: Path, solo: dict[bool, SoloRun], layout: str, tied: bool
) -> None:
    spec = document_job(folder, tied=tied)
    run = processes.run(RunRequest(job=spec, plan=LAYOUTS[layout], until_step=STEPS))
    np.testing.assert_allclose(run.losses, solo[tied].losses, rtol=1e-5)
    assert worst_difference(run.weights, solo[tied].weights) <= BOUND
    assert_holders_agree(run, spec)


def test_pipeline_split_does_not_change_a_bit(processes: Processes, folder: Path) -> None:
    """Of three stages the middle one has neither tokens nor targets, and finds the same documents."""
    spec = document_job(folder, tied=False)
    split = plan((4, (part(1, (1, 2)), part(3, (1, 2)), part(2, (1, 2)))))
    found = processes.run(RunRequest(job=spec, plan=split, until_step=3))
    whole = processes.run(RunRequest(job=spec, plan=plan((4, (part(6, (1, 2)),))), until_step=3))
    assert_same_bits(found.state, whole.state)
    assert found.losses == whole.losses


_PAIR = tuple(Replica(node="n", devices=(2 * first, 2 * first + 1), tp=2, samples=2) for first in (0, 1))


def _stage(first: int, last: int, device: int, **named: object) -> Stage:
    replica = Replica(node="n", devices=(device,), tp=1, samples=2)
    return Stage(layers=((first, last),), replicas=(replica,), **named)  # type: ignore[arg-type]


def _chunks(device: int, *layers: tuple[int, int]) -> Stage:
    return replace(_stage(0, 1, device), layers=layers)


PLANS = {
    "in slices": Plan(
        pipelines=(
            Pipeline(
                micro_batch=4,
                micro_batches=2,
                stages=(Stage(layers=((0, 6),), replicas=_PAIR, recompute="selective", slices=2),),
            ),
        ),
        sharding=Sharding(weights="cluster", gradients="cluster"),
    ),
    "put off, run again": Plan(
        pipelines=(
            Pipeline(
                micro_batch=2,
                micro_batches=4,
                stages=(
                    replace(_stage(0, 4, 0, recompute="full"), replicas=(replace(_PAIR[0], samples=2),)),
                    _stage(4, 6, 2, recompute="selective"),
                ),
            ),
        ),
        schedule="zero_bubble",
        overlap=Overlap(stages=True, gradients=True, tensor_chunks=2),
    ),
    "interleaved": Plan(
        pipelines=(
            Pipeline(micro_batch=2, micro_batches=4, stages=(_chunks(0, (0, 1), (3, 4)), _chunks(1, (1, 3), (4, 6)))),
        ),
        schedule="interleaved",
    ),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", ["llama 3.1, biases", "gpt2"])
def test_plans_of_everything_equal_one_process(
    processes: Processes, folder: Path, tmp_path: Path, family: str, name: str
) -> None:
    spec = begun(save_sharp(family, tmp_path), folder)
    run = processes.run(RunRequest(job=spec, plan=PLANS[name], until_step=STEPS))
    reference = run_solo(spec, STEPS)
    np.testing.assert_allclose(run.losses, reference.losses, rtol=1e-5)
    # Where positions are not turned, what all keys have in common changes nothing: AdamW divides rounding errors there.
    moved = {fqn: values for fqn, values in reference.weights.items() if not fqn.endswith("k.bias")}
    assert worst_difference(run.weights, moved) <= BOUND
    assert_holders_agree(run, spec)


@pytest.mark.parametrize("layout", ["tp 2", "3 stages beside 1"])
def test_adapters_learn_the_same_in_every_layout(
    processes: Processes, folder: Path, tmp_path: Path, layout: str
) -> None:
    spec = begun(save_sharp("llama", tmp_path), folder)
    spec = replace(spec, train=replace(spec.train, lora=LoraSpec(rank=4), lr=3e-3))
    run = processes.run(RunRequest(job=spec, plan=LAYOUTS[layout], until_step=STEPS))
    np.testing.assert_allclose(run.losses, run_solo(spec, STEPS).losses, rtol=1e-5)


def test_bf16_follows_the_losses_of_fp32(processes: Processes, folder: Path) -> None:
    spec = document_job(folder, precision="bf16", lr=2e-3)
    run = processes.run(RunRequest(job=spec, plan=LAYOUTS["tp 1 beside tp 2"], until_step=STEPS))
    full = run_solo(replace(spec, train=replace(spec.train, precision="fp32")), STEPS)
    np.testing.assert_allclose(run.losses, full.losses, rtol=0.02)


@pytest.mark.filterwarnings("ignore")  # torch warns of what it does itself when it compiles
@pytest.mark.long  # half a minute of compilers
def test_compiled_positions_are_those_of_documents_too(folder: Path, solo: dict[bool, SoloRun]) -> None:
    spec = document_job(folder)
    run = run_solo(replace(spec, train=replace(spec.train, compile=True)), 3)
    np.testing.assert_allclose(run.losses, solo[True].losses[:3], rtol=1e-5)


@pytest.mark.parametrize("layout", ["3 stages beside 1", "uneven state, head alone"])
def test_evaluations_are_by_document_as_well(processes: Processes, folder: Path, tmp_path: Path, layout: str) -> None:
    saved = save_sharp("llama", tmp_path)
    spec = begun(saved, folder)
    train = replace(spec.train, eval_every=1, eval_batches=2, steps=1, lr=1e-9, warmup_steps=0, weight_decay=0.0)
    data = replace(spec.data, eval_uri=write(folder).uri)
    spec = replace(spec, train=train, data=data)
    run = processes.run(RunRequest(job=spec, plan=LAYOUTS[layout], until_step=1))
    single = run_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=1), 0, SoloExchange())
    for rank in run.ranks:
        np.testing.assert_allclose(rank.evaluations[0].loss, single.evaluations[0].loss, rtol=1e-5)
    held_out = evaluation_samples(spec)
    assert held_out is not None
    model = theirs(saved).eval()
    with torch.no_grad():
        rows = ids_of(held_out.read(range(spec.train.global_batch * 2)))
        expected = loss_one_by_one(lambda ids_L: alone(model, ids_L), rows)
    assert single.evaluations[0].loss == pytest.approx(float(expected), rel=1e-5)


def test_a_job_of_one_long_document_is_what_it_was_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no borders in here, " * 5000)
    spec = job(tied=False)
    kinds = [replace(spec.data, uri=tmp_path.as_uri(), attention=kind) for kind in ("sequence", "document")]
    one, other = (run_solo(replace(spec, data=data), 3) for data in kinds)
    assert one.losses == other.losses
    assert all(one.weights[fqn].tobytes() == values.tobytes() for fqn, values in other.weights.items())


@pytest.mark.parametrize("window", [None, 1, 3, 8, 40])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_sees_a_window_within_its_document_and_nothing_else(window: int | None, kv_heads: int) -> None:
    torch.manual_seed(1)
    given = [torch.randn(2, heads, 30, 8, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]
    lengths = (7, 1, 12, 10, 10, 1, 19)  # four in the first of two sequences
    slope_BSC = torch.randn(2, 30, 32, dtype=torch.float64)

    def passed(compute: object) -> list[Tensor]:
        heads = [tensor.clone().requires_grad_() for tensor in given]
        out = compute(*heads)  # type: ignore[operator]
        out.backward(slope_BSC)
        return [out.detach(), *(tensor.grad for tensor in heads if tensor.grad is not None)]

    found = passed(lambda q, k, v: attend(q, k, v, window, borders(lengths, 30)))
    for ours, expected in zip(found, passed(lambda q, k, v: masked(q, k, v, window, lengths)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_heads_that_share_keys_and_values_may_have_copies_of_them() -> None:
    torch.manual_seed(1)
    q_BNSD, k_BKSD, v_BKSD = (torch.randn(2, heads, 30, 8, dtype=torch.float64) for heads in (6, 2, 2))
    copies = for_all_heads(k_BKSD, v_BKSD, 3)
    assert all(copy.shape == q_BNSD.shape for copy in copies)
    expected = attend(q_BNSD, k_BKSD, v_BKSD, None)
    torch.testing.assert_close(attend(q_BNSD, *copies, None), expected, rtol=0, atol=1e-12)


def borders(lengths: tuple[int, ...], seq_len: int) -> Borders:
    """By way of rows of tokens."""
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    ids = torch.arange(sum(lengths))
    ids[starts] = ~(ids[starts] | BEGINS)
    rows = ids.view(-1, seq_len)
    found = borders_of(torch.cat((rows, rows[:, :1]), dim=1), torch.device("cpu"))
    assert found.lengths == lengths
    assert found.positions_BS.flatten().tolist() == [place for length in lengths for place in range(length)]
    return found


def masked(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, window: int | None, lengths: tuple[int, ...]) -> Tensor:
    """Softmax by hand, over one long sequence with everything masked that is not to be seen."""
    of_T = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    place_T = torch.arange(len(of_T))
    behind_TT = place_T[:, None] - place_T
    seen_TT = (of_T[:, None] == of_T) & (behind_TT >= 0) & (behind_TT < (window or len(of_T)))
    group = q_BNSD.shape[1] // k_BKSD.shape[1]
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k_BKSD, v_BKSD))
    q_NTD, k_NTD, v_NTD = (tensor.transpose(0, 1).flatten(1, 2) for tensor in (q_BNSD, k, v))
    scores_NTT = q_NTD @ k_NTD.transpose(1, 2) / q_NTD.shape[-1] ** 0.5
    mixed_NTD = scores_NTT.masked_fill(~seen_TT, -torch.inf).softmax(dim=-1) @ v_NTD
    batch, _, length, _ = q_BNSD.shape
    return mixed_NTD.transpose(0, 1).reshape(batch, length, -1)


def test_a_document_has_the_bits_that_it_has_by_itself() -> None:
    """Wherever it stands: its positions begin anew. (Rotary positions that went on would only round otherwise.)"""
    torch.manual_seed(2)
    rotary = Rotary(job().model, 30, torch.device("cpu"))
    lengths = (7, 1, 12, 10, 10, 1, 19)
    x_BNSD = torch.randn(2, 4, 30, 16)
    mixed_BSC = attend(*[rotary(x_BNSD, borders(lengths, 30))] * 2, x_BNSD, None, borders(lengths, 30))
    for mixed_LC, x_LND in zip(
        mixed_BSC.flatten(0, 1).split(lengths), x_BNSD.transpose(1, 2).flatten(0, 1).split(lengths), strict=True
    ):
        x_NLD = x_LND.transpose(0, 1).unsqueeze(0)
        assert torch.equal(mixed_LC, attend(rotary(x_NLD), rotary(x_NLD), x_NLD, None)[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_keeps_no_more_than_without_but_for_the_borders(folder: Path, precision: str) -> None:
    spec = document_job(folder, tied=False, precision=precision)
    across = replace(spec, data=replace(spec.data, attention="sequence"))
    requests = [RunRequest(job=one, plan=solo_plan(one), until_step=2) for one in (spec, across)]
    ours, others = (run_rank(request, 0, SoloExchange()).breakdown[ACTIVATIONS] for request in requests)
    tokens = spec.train.global_batch * spec.train.seq_len
    of_borders = 8 * tokens + 4 * (tokens + 1) + 8 * tokens * spec.model.head_size
    assert ours <= others + of_borders
