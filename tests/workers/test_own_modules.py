"""Modules of a user's own train as in a plain loop around them, in every layout, and what they lack is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import own_code
import pytest
import torch
import torch.nn.functional as F
from engine_runs import LAYOUTS, assert_holders_agree, job, worst_difference
from torch import nn

from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_planner.levels import Sharding
from shoal_planner.own_model import OwnModule, seen_model
from shoal_planner.parameters import num_parameters, parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage, check_plan
from shoal_planner.slices import check_slices
from shoal_workers import blueprint
from shoal_workers.blueprint import BareModules, Blueprint
from shoal_workers.data import training_samples
from shoal_workers.errors import UserCodeError
from shoal_workers.own_look import look
from shoal_workers.processes import Processes
from shoal_workers.solo import RunRequest, run_solo

STEPS = 10
BOUND = 2e-5
ENTRYPOINTS = ("own_code:build", "own_code:makers")


def document(entrypoint: str, **arguments: Any) -> dict[str, Any]:
    return job_to_mapping(job(steps=STEPS)) | {"model": {"entrypoint": entrypoint, "arguments": arguments}}


def seen(entrypoint: str, **arguments: Any) -> JobSpec:
    """The job once a worker has looked at its modules."""
    return looked_at(document(entrypoint, **arguments))


def looked_at(given: dict[str, Any]) -> JobSpec:
    spec = parse_job(given)
    assert spec.model.module is not None
    shape = look(spec.model.module, spec.train.seed, spec.train.seq_len, spec.train.precision)
    mapping = job_to_mapping(spec) | {"model": seen_model(dataclasses.asdict(spec.model.module), shape)}
    assert parse_job(job_to_mapping(parse_job(mapping))) == parse_job(mapping)
    return parse_job(mapping)


def modules(spec: JobSpec) -> list[nn.Module]:
    assert spec.model.module is not None
    built = Blueprint(spec.model.module, spec.train.seed)
    return [built.module(unit) for unit in range(built.num_layers + 2)]


def plain_losses(spec: JobSpec) -> list[float]:
    """A loop around the modules themselves."""
    model, train = nn.Sequential(*modules(spec)), spec.train
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    groups = [
        {"params": [tensor for tensor in trained if tensor.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [tensor for tensor in trained if tensor.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    samples, losses = training_samples(spec), []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * min(1.0, step / train.warmup_steps)
        rows_BS = samples.read(range((step - 1) * train.global_batch, step * train.global_batch))
        loss = F.cross_entropy(model(rows_BS[:, :-1]).flatten(0, 1), rows_BS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_one_process_trains_as_a_plain_loop(entrypoint: str) -> None:
    spec = seen(entrypoint)
    run = run_solo(spec, STEPS)
    np.testing.assert_allclose(run.losses, plain_losses(spec), rtol=2e-6)
    assert run.losses[-1] < run.losses[0] - 0.1


@pytest.mark.parametrize("layout", [*LAYOUTS, "sharded, recomputed"])
@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_every_layout_trains_as_one_process(processes: Processes, entrypoint: str, layout: str) -> None:
    spec = seen(entrypoint)
    plan = LAYOUTS.get(layout, SHARDED)
    check_plan(plan, spec)
    run, alone = processes.run(RunRequest(job=spec, plan=plan, until_step=STEPS)), run_solo(spec, STEPS)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-5)
    # What all keys have in common changes nothing: AdamW divides rounding errors there.
    moved = {fqn: values for fqn, values in alone.weights.items() if not fqn.endswith("attention.k.bias")}
    assert worst_difference(run.weights, moved) <= BOUND
    assert_holders_agree(run, spec)


_PAIR = tuple(Replica(node="n", devices=(2 * first, 2 * first + 1), tp=2, samples=2) for first in (0, 1))
SHARDED = Plan(
    pipelines=(
        Pipeline(micro_batch=4, micro_batches=2, stages=(Stage(layers=((0, 6),), replicas=_PAIR, recompute="full"),)),
    ),
    sharding=Sharding(weights="cluster", gradients="cluster"),
)


def test_what_is_trained_is_known_by_name() -> None:
    tied, apart = (seen(entrypoint) for entrypoint in ENTRYPOINTS)
    known = {parameter.fqn: parameter for parameter in parameters(tied.model)}
    assert known["first.tokens.weight"].units == (0, 7) and known["first.positions.weight"].units == (0,)
    assert known["layers.2.attention.o.weight"].cut and not known["layers.2.attention.o.bias"].cut
    assert "layers.2.fixed" not in known, "it takes no gradient"
    for spec in (tied, apart):
        whole = {
            id(tensor): tensor for module in modules(spec) for tensor in module.parameters() if tensor.requires_grad
        }
        assert num_parameters(spec.model) == sum(tensor.numel() for tensor in whole.values())
    assert num_parameters(apart.model) - num_parameters(tied.model) == 256 * 48


def test_nothing_is_planned_before_somebody_looked() -> None:
    spec = parse_job(document("own_code:build"))
    with pytest.raises(InvalidField, match=r"model.entrypoint = 'own_code:build': has to be looked at where it is"):
        parameters(spec.model)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"entrypoint": "own_code.build"}, r"entrypoint = 'own_code.build': must be a module and a function in it"),
        ({"entrypoint": 3}, r"model.entrypoint = 3: must be text"),
        ({"entrypoint": "a:b", "layers": 3}, r"model.layers = 3: is what model.entrypoint builds: leave it out"),
        ({"entrypoint": "a:b", "arguments": [1]}, r"model.arguments = \[1\]: must be a mapping"),
    ],
)
def test_a_wrong_entrypoint_is_refused(model: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidField, match=said):
        parse_job(document("own_code:build") | {"model": model})


class Noisy(own_code.Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Counting(own_code.Layer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x)


class Pairs(own_code.Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class Misnamed(own_code.Layer):
    tensor_parallel: ClassVar = {"attention.qkv": "column"}


class Fused(nn.Module):
    """Halves of one product mean different things."""

    tensor_parallel: ClassVar = {"both": "column", "down": "row"}
    tensor_parallel_heads = 4

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class NormedHeads(nn.Module):
    """A parameter that is whole on heads that are split."""

    tensor_parallel: ClassVar = {"up": "column", "down": "row"}
    tensor_parallel_heads = 4

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width // heads)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x).unflatten(-1, (-1, self.norm.normalized_shape[0]))).flatten(-2))


class Kept(nn.Module):
    """Weights that stand in a plain list, too."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(width))
        self.all = [self.one]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.all[0]


class Frozen(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(x)


class Drawing(own_code.Layer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.scale = nn.Parameter(torch.tensor(np.random.default_rng().standard_normal(width), dtype=torch.float32))


class Aliased(nn.Module):
    """The same products under two names; right as it is."""

    tensor_parallel: ClassVar = {"up": "column", "down": "row"}
    tensor_parallel_heads = 2

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = nn.Sequential(self.up, nn.Tanh(), self.down)
        self.still = nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.still(x + self.mlp(x)) + self.shift


def shared() -> list[nn.Module]:
    first, layer, last = own_code.build(1)
    return [first, layer, layer, last]


def split_logits() -> list[nn.Module]:
    first, layer, last = own_code.build(1)
    last.tensor_parallel = {"out": "column"}
    return [first, layer, last]


def with_layer(kind: str) -> list[nn.Module]:
    first, *_, last = own_code.build(1)
    return [first, globals()[kind](48, 4), last]


def uneven() -> list[nn.Module]:
    first, layer, last = own_code.build(1)
    return [first, layer, own_code.Logits(48, 48), last]


def one() -> Any:
    return own_code.Logits(3, 3)


def two() -> Any:
    return own_code.build(1)[:2]


def words() -> Any:
    return ["first", "layer", "last"]


def yielded() -> Iterator[nn.Module]:
    """Draws as it is run through, after the call that made it."""
    yield own_code.Tokens(256, 48, 64)
    for _ in range(2):
        yield own_code.Layer(48, 4)
    yield own_code.Logits(256, 48)


def torn() -> Iterator[nn.Module]:
    yield own_code.Tokens(256, 48, 64)
    raise TypeError("of the user's own")


def number() -> Any:
    return 7


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("with_layer", {"kind": "Noisy"}, r"module 1 .*\(Noisy\) gives something else each time .*: set dropout to 0"),
        ("with_layer", {"kind": "Counting"}, r"\(Counting\) changes its buffer 'seen' when it runs"),
        ("with_layer", {"kind": "Pairs"}, r"module 1 gives a tuple for a tensor \[1, 32, 48\] .*a block gives what"),
        ("with_layer", {"kind": "Misnamed"}, r"tensor_parallel\['attention.qkv'\]: there is no nn.Linear of that name"),
        ("with_layer", {"kind": "Fused"}, r"module 1 .*\(Fused\) gives other outputs split between 2 devices"),
        ("with_layer", {"kind": "NormedHeads"}, r"gives 'norm.weight' another gradient split between 2 devices"),
        ("with_layer", {"kind": "Kept"}, r"\(Kept\) gives 'one' another gradient on weights that Shoal keeps"),
        ("with_layer", {"kind": "Frozen"}, r"\(Frozen\) has no parameter that is trained"),
        ("with_layer", {"kind": "Drawing"}, r"\(Drawing\) is built with another 'scale' each time"),
        ("shared", {}, r"module 2 shares its parameter 'scale' with module 1: only the last one may, with the first"),
        ("split_logits", {}, r"module 2 .*gives other outputs split between 2 devices: \[2, 32, 128\] instead of"),
        ("uneven", {}, r"module 2 \(Logits\) has other parameters than module 1: blocks must be alike"),
        ("one", {}, r"returned one Logits: it must return a list of modules in order"),
        ("two", {}, r"returned 2 modules: it must return the first, one or more blocks, the last"),
        ("number", {}, r"returned int 7: it must return a list of modules in order"),
        ("words", {}, r"returned str 'first' at place 0: neither a module nor a callable that makes one"),
        ("oen", {}, r"test_own_modules has no 'oen'; did you mean 'one'\?"),
        ("STEPS", {}, r"STEPS is int 10, which cannot be called"),
    ],
)
def test_what_cannot_be_trained_is_said(function: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserCodeError, match=said):
        seen(f"{__name__}:{function}", **arguments)


def test_modules_that_a_generator_yields_are_drawn_from_the_seed() -> None:
    """And an error of its own stays one."""
    spec = seen(f"{__name__}:yielded")
    for one, other in zip(modules(spec), modules(spec), strict=True):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    with pytest.raises(TypeError, match="of the user's own"):
        Blueprint(OwnModule(entrypoint=f"{__name__}:torn"), 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_names_that_are_two_and_constants_train_as_a_plain_loop(processes: Processes, precision: Any) -> None:
    given = document(f"{__name__}:with_layer", kind="Aliased")
    given["train"]["precision"] = precision
    spec = looked_at(given)
    alone = run_solo(spec, STEPS)
    run = processes.run(RunRequest(job=spec, plan=ONE_SPLIT, until_step=STEPS))
    if precision == "fp32":
        np.testing.assert_allclose(alone.losses, plain_losses(spec), rtol=2e-6)
        np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-5)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=5e-3)


ONE_SPLIT = Plan(
    pipelines=(
        Pipeline(
            micro_batch=4,
            micro_batches=2,
            stages=(Stage(layers=((0, 1),), replicas=(Replica(node="n", devices=(0, 1), tp=2, samples=4),)),),
        ),
    ),
)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UserCodeError, match="there is no module 'own_cod' in the job's code"):
        look(OwnModule(entrypoint="own_cod:build"), 0, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schedule": "zero_bubble"}, "schedule = 'zero_bubble': is not for modules of a user's own"),
        ({"stage": {"recompute": "selective"}}, r"stages\[0\].recompute = 'selective': is not for modules"),
        ({"stage": {"slices": 2}}, "stages.0..slices = 2: must be 1: modules of a user's own are not cut"),
    ],
)
def test_plans_that_are_not_for_them_are_refused(change: dict[str, Any], said: str) -> None:
    spec, (pipeline,) = seen("own_code:build"), SHARDED.pipelines
    stage = replace(pipeline.stages[0], **change.pop("stage", {}))
    plan = replace(SHARDED, pipelines=(replace(pipeline, stages=(stage,)),), **change)
    with pytest.raises(InvalidField, match=said):
        check_plan(plan, spec)
        check_slices(plan, spec.model)


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_a_process_builds_modules_once_for_all_plans(entrypoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = seen(entrypoint)
    built: list[int] = []
    build = Blueprint.module
    monkeypatch.setattr(Blueprint, "module", lambda self, unit: (built.append(unit), build(self, unit))[1])
    blueprint._kept.cache_clear()
    first, second = (BareModules(spec.model, spec.train.seed) for _ in range(2))
    units = range(first.num_units)
    bare = [first.module(unit) for unit in units]
    assert [second.module(unit) for unit in units] == bare and built == list(units)
    for module, whole in zip(bare, modules(spec), strict=True):
        assert all(value.is_meta for _, value in blueprint.trained(module))
        assert [name for name, _ in blueprint.trained(module)] == [name for name, _ in blueprint.trained(whole)]
        for name, buffer in whole.named_buffers():
            assert torch.equal(module.get_buffer(name), buffer)
    built.clear()
    monkeypatch.setattr(blueprint, "_KEPT_BYTES", -1)
    blueprint._kept.cache_clear()
    assert [first.module(0), second.module(0), first.module(0)] and built == [0, 0, 0], "constants may be large"


def test_a_second_run_of_a_process_is_the_first_one_again() -> None:
    spec = seen("own_code:build")
    once, again = run_solo(spec, STEPS), run_solo(spec, STEPS)
    assert once.losses == again.losses
