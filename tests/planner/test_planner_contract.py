"""The files that users write and read: jobs, clusters and plans are parsed strictly and survive a round trip."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from shoal_planner.cluster import (
    DeviceRef,
    parse_cluster,
    snapshot_from_mapping,
    snapshot_to_mapping,
)
from shoal_planner.errors import HostTooSmall, InvalidField, NoPlanFits, NotADocument, PriceAboveLimit, ScheduleError
from shoal_planner.job import ModelSpec, job_to_mapping, parse_job
from shoal_planner.limits import check_to_come, deadline_at_s
from shoal_planner.parameters import num_parameters, parameters
from shoal_planner.plan import (
    Pipeline,
    Plan,
    Prediction,
    Replica,
    Stage,
    Terms,
    check_plan,
    parse_plan,
    plan_to_mapping,
)
from shoal_planner.strict import read

JOB: dict[str, Any] = {
    "name": "quickstart",
    "model": {"family": "llama", "layers": 8, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 688, "vocab": 256},
    "data": {"uri": "stdlib:", "tokenizer": "bytes"},
    "train": {"global_batch": 16, "seq_len": 128, "steps": 60, "lr": "3e-4", "warmup_steps": 10},
    "limits": {"device_types": [], "max_price_per_hour": None, "deadline": None, "min_devices": 1},
    "checkpoint": {"uri": "file:///tmp/x", "every_steps": 20, "keep": 3, "protect_every": 1, "copies": "auto"},
}
CLUSTER: dict[str, Any] = {
    "nodes": [
        {"name": "a100", "count": 2, "device": "A100-80G", "devices": 8, "intra_gb_per_s": 300, "zone": "east"},
        {"name": "t4", "device": "T4", "devices": 4, "device_group": 2, "group_gb_per_s": 20, "zone": "west"},
    ],
    "devices": {"A100-80G": {"memory_gib": 79, "tflops_bf16": 300, "memory_gb_per_s": 2000, "efficiency": 0.4}},
    "links": [{"from": "east", "to": "west", "gbit_per_s": 5, "latency_ms": 60}],
}
PLAN: dict[str, Any] = {
    "plan_id": "other",
    "search_s": 0.4,
    "pipelines": [
        {
            "micro_batch": 3,
            "micro_batches": 2,
            "stages": [
                {
                    "layers": [[0, 8]],
                    "replicas": [
                        {"node": "a-0", "devices": [0, 1], "tp": 2, "samples": 2, "state_share": 0.7},
                        {"node": "a-0", "devices": [2]},
                    ],
                },
                {"layers": [[8, 8]], "replicas": [{"node": "b-0", "devices": [0], "samples": 3}]},
            ],
        }
    ],
    "groups": [],
    "unused": ["t4-3:0"],
}


def changed(value: dict[str, Any], path: str, new: object) -> dict[str, Any]:
    """A copy of the mapping with the value at the dotted path replaced; `...` removes it."""
    result = copy.deepcopy(value)
    at: Any = result
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        at = at[part]
    if new is ...:
        del at[last]
    else:
        at[last] = new
    return result


def test_a_job_survives_a_round_trip() -> None:
    job = parse_job(JOB)
    assert job.train.lr == 3e-4
    assert job.train.tokens_per_step == 2048
    assert job.checkpoint.num_copies == 1
    assert parse_job(json.loads(json.dumps(job_to_mapping(job)))) == job


@pytest.mark.parametrize(
    ("data", "uris"),
    [
        ({"uri": "/data/a b%/"}, ["file:///data/a%20b%25"]),
        (
            {"mix": [{"uri": "/data/a.bin", "format": "tokens"}, {"uri": "s3://b/c"}]},
            ["file:///data/a.bin", "s3://b/c"],
        ),
        ({"uri": "stdlib:", "eval_uri": "/data/b"}, ["stdlib:", "file:///data/b"]),
    ],
)
def test_files_may_be_named_by_their_path_alone(data: dict[str, Any], uris: list[str]) -> None:
    job = parse_job({**JOB, "data": data, "train": {**JOB["train"], "eval_every": 5}})
    places = [source.uri for source in (*job.data.sources, job.data.eval_source) if source is not None]
    assert places == uris
    assert parse_job(job_to_mapping(job)) == job
    with pytest.raises(InvalidField, match=r"data.uri = 'file:///a/b.bin': is no text: say format: tokens"):
        parse_job({**JOB, "data": {"uri": "/a/b.bin"}})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.layer", 8, "model.layer = 8: is not a known field; did you mean 'layers'"),
        ("zzz", 8, "zzz = 8: is not a known field; known: name"),
        ("model.layers", 0, "model.layers = 0: must be at least 1"),
        ("model.layers", True, "model.layers = True: must be a whole number"),
        ("model.layers", ..., "model.layers = None: is required"),
        ("model.heads", 7, "model.heads = 7: must divide hidden"),
        ("model.heads", 256, "rotary positions need it even"),
        ("model.kv_heads", 3, "model.kv_heads = 3: must divide heads"),
        ("model.rope_theta", -1.0, "model.rope_theta = -1.0: must be more than zero"),
        ("model.preset", "llama-77b", "model.preset = 'llama-77b': is not known; did you mean llama-7b"),
        ("model.family", "gpt", "model.family = 'gpt': must be one of llama"),
        ("model", 3, "model = 3: must be a mapping"),
        ("data.uri", "ftp://x", "data.uri = 'ftp://x': must be an absolute path, or begin with stdlib:"),
        ("data.uri", "s3://x", "data.uri = 's3://x': must name a bucket"),
        ("data.tokenizer", "x.json", "must be 'bytes', or the absolute path"),
        ("data.tokenizer", "file://elsewhere/x", "must be 'bytes', or the absolute path"),
        ("data.tokenizer", "s3://bucket/x", "must be 'bytes', or the absolute path"),
        ("train.global_batch", 1.5, "train.global_batch = 1.5: must be a whole number"),
        ("train.lr", "fast", "train.lr = 'fast': must be a number"),
        ("train.lr", float("inf"), "train.lr = inf: must be a finite number"),
        ("train.steps", 0, "train.steps = 0"),
        ("train.seed", -1, "train.seed = -1: must be at least 0"),
        ("train.weight_decay", -0.1, "must be zero or more"),
        ("train.betas", [0.9], "train.betas = [0.9]: must have 2 entries"),
        ("train.betas", [0.9, 1.0], "train.betas[1] = 1.0: must lie in"),
        ("train.betas", "ab", "must be a list"),
        ("train.on_nan", "ignore", "train.on_nan = 'ignore': must be one of fail, skip"),
        ("train.eval_every", 0, "train.eval_every = 0: must be at least 1"),
        ("train.eval_batches", 2, "train.eval_batches = 2: needs train.eval_every"),
        ("data.eval_uri", "stdlib:", "data.eval_uri = 'stdlib:': needs train.eval_every"),
        ("data.eval_uri", "ftp://x", "data.eval_uri = 'ftp://x': must be an absolute path, or begin with stdlib:"),
        ("train.clip_norm", 0.0, "train.clip_norm = 0.0: must be more than zero"),
        ("train.lr_schedule", "step", "train.lr_schedule = 'step': must be one of constant, linear, cosine"),
        ("train.min_lr", 1.0, "train.min_lr = 1.0: must be zero or more, and at most lr (0.0003)"),
        ("train.min_lr", 1e-5, "train.min_lr = 1e-05: needs lr_schedule 'linear' or 'cosine'"),
        ("train.precision", "fp8", "must be one of fp32, bf16"),
        ("model.layers", 100_000, "model.layers = 100000: must be at most 2000"),
        ("model.hidden", 2**40, "must be at most 262144"),
        ("model.heads", 2**15, "must be at most 16384"),
        ("model.ffn", 2**30, "must be at most 2097152"),
        ("model.vocab", 2**30, "must be at most 16777216"),
        ("train.global_batch", 2_000_000, "train.global_batch = 2000000: must be at most 65536"),
        ("train.seq_len", 2**21, "must be at most 1048576"),
        ("train.steps", 10**12, "must be at most 1000000000"),
        ("train.sharding", "node", "train.sharding = 'node': must be one of auto, none"),
        ("train.gather", "int4", "train.gather = 'int4': must be one of plain, int8"),
        ("train.scatter", True, "train.scatter = True: must be one of plain, int4"),
        ("train.secondary_weights", 1, "train.secondary_weights = 1: must be true or false"),
        ("train.recompute", "full", "train.recompute = 'full': must be one of auto, none"),
        ("train.overlap", True, "train.overlap = True: must be one of auto, none"),
        ("model.gated_mlp", "no", "model.gated_mlp = 'no': must be true or false"),
        ("data.uri", "stdlib:xyz", "data.uri = 'stdlib:xyz': must be exactly 'stdlib:'"),
        ("data.uri", "stdlib://", "must be exactly 'stdlib:'"),
        ("checkpoint.uri", None, "checkpoint.every_steps = 20: needs a checkpoint.uri"),
        ("checkpoint", {"keep": 2}, "checkpoint.keep = 2: needs a checkpoint.uri"),
        ("limits.min_devices", 0, "limits.min_devices = 0"),
        ("limits.max_price_per_hour", 0, "limits.max_price_per_hour = 0.0: must be more than zero"),
        ("limits.budget_usd", "much", "limits.budget_usd = 'much': must be a number"),
        ("limits.max_devices", 0, "limits.max_devices = 0: must be at least 1"),
        ("limits.deadline", "2026-01-01", "limits.deadline = '2026-01-01': must say its offset from UTC"),
        ("limits", {"min_devices": 3, "max_devices": 2}, "limits.max_devices = 2: must be at least min_devices (3)"),
        ("priority", 1001, "priority = 1001: must be at most 1000"),
        ("priority", "urgent", "priority = 'urgent': must be a whole number or low or normal or high"),
        ("checkpoint.uri", "ftp://x", "must begin with file:// or s3://"),
        ("checkpoint.every_steps", 0, "must be at least 1"),
        ("checkpoint.protect_every", 0, "must be at least 1"),
        ("checkpoint.copies", -1, "must be at least 0"),
        ("checkpoint.copies", "many", "checkpoint.copies = 'many': must be a whole number or auto"),
        ("name", "", "must be 1 to 100 printable"),
        ("name", 3, "name = 3: must be text"),
    ],
)
def test_a_wrong_job_names_field_and_value(path: str, value: object, message: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_job(changed(JOB, path, value))
    assert message in str(caught.value)


def test_a_cluster_survives_a_round_trip() -> None:
    cluster = parse_cluster(CLUSTER)
    assert [node.id for node in cluster.nodes] == ["a100-0", "a100-1", "t4-0"]
    assert cluster.num_devices == 20
    assert cluster.node("t4-0").refs()[3] == DeviceRef(node="t4-0", index=3)
    assert cluster.without(["a100-0"]).num_devices == 12
    assert snapshot_from_mapping(json.loads(json.dumps(snapshot_to_mapping(cluster)))) == cluster
    with pytest.raises(KeyError):
        cluster.node("nobody")


@pytest.mark.parametrize(
    ("node", "gib"),
    [
        ({"device": "cpu-1t"}, 64),
        ({"device": "T4"}, 64),
        ({"device": "T4", "devices": 4}, 240),
        ({"device": "A100-80G", "devices": 8}, 4 * 8 * 79),  # the file changes what the device has
        ({"device": "nobody-knows", "devices": 8}, 64),
        ({"device": "A100-80G", "devices": 8, "host_memory_gib": 32}, 32),
    ],
)
def test_host_memory_that_is_not_stated_follows_the_devices(node: dict[str, Any], gib: float) -> None:
    found = parse_cluster({"nodes": [{"name": "n", **node}], "devices": CLUSTER["devices"]})
    assert found.nodes[0].host_memory_bytes == gib * 2**30


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nodes", [], "nodes = []: must be a list of at least one node"),
        ("nodes", ..., "nodes = None: is required: a list of at least one node"),
        ("node", [], "node = []: is not a known field; did you mean 'nodes'?"),
        ("nodes.0.device", ..., "nodes[0].device = None: is required"),
        ("nodes.0.intra_gb", 3, "nodes[0].intra_gb = 3: is not a known field; did you mean 'intra_gb_per_s'"),
        ("nodes.0.count", 0, "nodes[0].count = 0: must be at least 1"),
        ("nodes.0.devices", 0, "nodes[0].devices = 0: must be at least 1"),
        ("nodes.0.intra_gb_per_s", 0, "nodes[0].intra_gb_per_s = 0.0: must be more than zero"),
        ("nodes.0.price_per_hour", -1, "nodes[0].price_per_hour = -1.0: must be zero or more"),
        ("nodes.0.price_per_hour", math.nan, "nodes[0].price_per_hour = nan: must be a finite number"),
        ("nodes.0.price_per_hour", 1e300, "nodes[0].price_per_hour = 1e+300: must be at most 1000000"),
        ("nodes.0.host_memory_gib", math.inf, "nodes[0].host_memory_gib = inf: must be a finite number"),
        ("nodes.0.host_memory_gib", 10**400, "is too large for a number"),
        ("nodes.0.disk_gib", -math.inf, "nodes[0].disk_gib = -inf: must be a finite number"),
        ("nodes.0.disk_gib", 1e300, "nodes[0].disk_gib = 1e+300: must be at most 1073741824"),
        ("nodes.0.inter_gbit_per_s", 1e-300, "nodes[0].inter_gbit_per_s = 1e-300: must be at least 1e-09"),
        ("nodes.0.devices", 10**30, "must fit into 64 bits"),
        ("nodes.0.devices", 10**6, "nodes[0].devices = 1000000: must be at most 1024"),
        ("nodes.0.count", 10**9, "nodes[0].count = 1000000000: must be at most 16384"),
        ("nodes.1.group_gb_per_s", -1, "nodes[1].group_gb_per_s = -1.0: must be more than zero"),
        ("nodes.1.device_group", 5, "nodes[1].device_group = 5: must be at most devices (4)"),
        ("devices.A100-80G.memory_gib", math.inf, "devices.A100-80G.memory_gib = inf: must be a finite number"),
        ("devices.A100-80G.memory_gib", "9" * 400, "must be a finite number"),
        ("devices.A100-80G.efficiency", 1.5, "devices.A100-80G.efficiency = 1.5: must be at most 1"),
        ("devices", {3: {}, "x": 1}, "devices.x = 1: must be a mapping"),
        ("links.0.latency_ms", math.nan, "links[0].latency_ms = nan: must be a finite number"),
        ("links.0.latency_ms", -1, "links[0].latency_ms = -1.0: must be zero or more"),
        ("nodes.0.name", "a b", "must be 1 to 63 letters"),
        ("nodes.1.name", "a100", "nodes = 'a100-0': two nodes have this id"),
        ("nodes.0.spot", "yes", "nodes[0].spot = 'yes': must be true or false"),
        ("devices", None, None),
        ("devices", [], "devices = []: must be a mapping"),
        ("devices", 3, "devices = 3: must be a mapping"),
        ("devices.A100-80G.memory", 3, "did you mean 'memory_gib'"),
        ("links", 3, "links = 3: must be a list"),
        ("links.0.incast", -1, "links[0].incast = -1.0: must be zero or more"),
        ("links.0.fan_in", 2.5, "links[0].fan_in = 2.5: must be a whole number"),
        ("links.0.fan_in", 1, "links[0].fan_in = 1.0: must be at least 2"),
        ("links.0.from", ..., "must have the fields from, to"),
        ("links.0.from", "eats", "links[0].from = 'eats': is not the zone of any node; did you mean 'east'?"),
        ("links.0.to", "moon", "links[0].to = 'moon': is not the zone of any node; the nodes are in east, west"),
        ("links.0.gbit_per_s", "x", "links[0].gbit_per_s = 'x': must be a number"),
        ("links.0.gbit_per_s", 0, "links[0].gbit_per_s = 0.0: must be more than zero"),
    ],
)
def test_a_wrong_cluster_names_field_and_value(path: str, value: object, message: str | None) -> None:
    if message is None:  # no overrides at all
        assert parse_cluster(changed(CLUSTER, path, value)).overrides == ()
        return
    with pytest.raises(InvalidField) as caught:
        parse_cluster(changed(CLUSTER, path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(("parse", "name"), [(parse_job, "job"), (parse_cluster, "cluster"), (parse_plan, "plan")])
def test_a_document_must_be_a_mapping(parse: Callable[[object], object], name: str) -> None:
    for value, problem in ((None, "is empty"), ([1], "is a list"), ("text", "is no more than 'text'")):
        with pytest.raises(InvalidField) as caught:
            parse(value)
        assert str(caught.value) == f"the {name} {problem}: it must be a mapping of fields to values"


@pytest.mark.parametrize("name", ["host_memory_bytes", "intra_bytes_per_s", "price_per_hour", "reclaim_at_s"])
def test_the_snapshot_of_a_running_cluster_is_read_as_strictly(name: str) -> None:
    mapping: Any = json.loads(json.dumps(snapshot_to_mapping(parse_cluster(CLUSTER))))
    mapping["nodes"][1][name] = math.nan
    with pytest.raises(InvalidField) as caught:
        snapshot_from_mapping(mapping)
    assert caught.value.field == f"nodes[1].{name}"


@pytest.mark.parametrize("name", ["price_per_hour", "intra_bytes_per_s"])
def test_values_that_nobody_read_from_a_file_are_checked_too(name: str) -> None:
    node = parse_cluster(CLUSTER).nodes[0]
    for value in (math.nan, math.inf, -1.0):
        with pytest.raises(InvalidField):
            dataclasses.replace(node, **{name: value})


def test_a_plan_survives_a_round_trip() -> None:
    plan = parse_plan(PLAN)
    assert plan.pipelines[0].stages[0].sample_range(1) == (2, 3)
    assert plan.unused == ("t4-3:0",)
    mapping = json.loads(json.dumps(plan_to_mapping(plan)))
    assert parse_plan({**mapping, "explanation": "what `plan --explain` adds"}) == plan
    assert mapping["plan_id"] == plan.plan_id


def test_a_plan_with_choices_of_layers_survives_a_round_trip() -> None:
    """Recomputation, optimizer state on the host, devices that only hold state, and state that is not split."""
    value = changed(PLAN, "sharding", {"optimizer": "none"})
    stage_value: Any = value["pipelines"][0]["stages"][0]
    stage_value["recompute"] = "selective"
    stage_value["overrides"] = [
        {"layers": [0, 2], "recompute": "full", "offload": "optimizer"},
        {"layers": [5, 6], "offload": "optimizer"},
        {"layers": [6, 8], "recompute": "none"},
    ]
    stage_value["replicas"].append({"node": "c-0", "devices": [0], "samples": 0})
    plan = parse_plan(value)
    stage = plan.pipelines[0].stages[0]
    assert stage.recomputed() == {"none": 2, "selective": 4, "full": 2}
    assert stage.offloaded() == 3
    assert stage.sample_range(2) == (3, 3)
    assert plan.sharding.optimizer == "none"
    assert parse_plan(json.loads(json.dumps(plan_to_mapping(plan)))) == plan
    assert plan.plan_id != parse_plan(PLAN).plan_id


def test_the_plan_id_is_of_the_structure_alone() -> None:
    plan = parse_plan(PLAN)
    prediction = Prediction(
        step_s=1, tokens_per_s=1, mfu=0.1, price_per_million_tokens=0, terms=Terms(), memory_bytes=(("a-0:0", 1.0),)
    )
    told = Plan(pipelines=plan.pipelines, prediction=prediction, reason="so", unused=())
    assert told.plan_id == plan.plan_id
    assert plan_to_mapping(told)["predicted"]["memory_bytes"] == {"a-0:0": 1.0}  # type: ignore[index]
    assert parse_plan({**PLAN, "copies": 2}).plan_id != plan.plan_id


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("pipeline", [], "pipeline = []: is not a known field; did you mean 'pipelines'"),
        ("pipelines", [], "pipelines = []: must have at least one entry"),
        ("pipelines.0.stages", [], "pipelines[0].stages = []: must have at least one entry"),
        ("pipelines.0.micro_batches", 0, "pipelines[0].micro_batches = 0: must be at least 1"),
        ("pipelines.0.micro_batch", 4, "stages[0].replicas = 3: samples must add up to micro_batch (4)"),
        ("pipelines.0.stages.0.layers", [[0, 2], [2, 4]], "must be as many chunks as in stage 0 (2)"),
        ("pipelines.0.stages.0.layers", [[3, 2]], "must hold chunks [first, last)"),
        ("pipelines.0.stages.0.layers", [[1, 8]], "stages[0].layers = [[1, 8]]: must begin at layer 0"),
        ("pipelines.0.stages.0.replicas", [], "must have at least one entry"),
        ("pipelines.0.stages.0.recompute", "some", "recompute = 'some': must be one of none, selective, full"),
        ("pipelines.0.stages.0.overrides", [{"layers": [4, 4]}], "overrides[0].layers = [4, 4]: must be [first, last)"),
        (
            "pipelines.0.stages.0.overrides",
            [{"layers": [4, 9]}],
            "stages[0].overrides[0].layers = [4, 9]: must lie within layers 0 to 8, in order and apart",
        ),
        (
            "pipelines.0.stages.0.overrides",
            [{"layers": [2, 4]}, {"layers": [3, 5]}],
            "stages[0].overrides[1].layers = [3, 5]: must lie within layers 4 to 8",
        ),
        (
            "pipelines.0.stages.0.overrides",
            [{"layers": [2, 4], "offload": "weights"}],
            "overrides[0].offload = 'weights': must be one of none, optimizer",
        ),
        ("pipelines.0.stages.0.replicas.0.tp", 3, "must name as many devices as tp (3)"),
        ("pipelines.0.stages.0.replicas.0.devices", [1, 1], "names a device twice"),
        (
            "pipelines.0.stages.0.replicas.1.samples",
            -1,
            "replicas[1].samples = -1: must be zero (the devices only hold",
        ),
        ("pipelines.0.stages.0.replicas.1.samples", 0, "replicas = 2: samples must add up to micro_batch (3)"),
        ("pipelines.0.stages.1.replicas.0.samples", 0, "replicas = 1: must have at least one entry that runs samples"),
        ("pipelines.0.stages.0.replicas.1.state_share", 0, "must be more than zero"),
        ("pipelines.0.stages.0.replicas.1.state_share", math.inf, "must be a finite number"),
        ("pipelines.0.stages.0.replicas.1.state_share", 1e300, "must be at most 1000000"),
        ("pipelines.0.stages.1.replicas.0.node", "a-0", "pipelines = 'a-0:0': uses this device twice"),
        (
            "groups",
            [{"layers": [0, 8], "collective": "rings"}],
            "groups[0].collective = 'rings': must be direct, ring, ",
        ),
        (
            "groups",
            [{"layers": [0, 8], "collective": "parameter_server 4x"}],
            "groups[0].collective = 'parameter_server",
        ),
        ("groups", [{"layers": [0, 8], "collective": "ring 4x2"}], "is one ring: it has no fan-ins"),
        (
            "groups",
            [{"layers": [0, 8], "collective": "tree: ring 4"}],
            "groups[0].collective = 'tree: ring 4': must be",
        ),
        ("groups", [{"layers": [0, 8], "collective": "tree: ring > ring 2"}], "or what each level does"),
        ("groups", [{"layers": [0, 8], "collective": "tree: halving_doubling 3 > ring 2"}], "is for a power of two"),
        ("groups", [{"layers": [5, 4], "collective": "ring"}], "groups[0].layers = [5, 4]: must be [first, last)"),
        (
            "groups",
            [{"layers": [0, 9], "collective": "ring"}],
            "groups[0].layers = [0, 9]: must lie within layers 0 to 8",
        ),
        (
            "groups",
            [{"layers": [3, 3], "collective": "ring"}],
            "must hold a layer, or be [0, 0] (the embedding) or [8, 8]",
        ),
        (
            "groups",
            [{"layers": [0, 4], "collective": "ring"}] * 2,
            "groups[1].layers = [0, 4]: must lie within layers 4 to",
        ),
        ("groups", [{"layers": [0, 0], "collective": "ring"}] * 2, "groups[1].layers = [0, 0]: must hold a layer"),
        ("copies", -1, "must be zero or more"),
        ("schedule", "gpipe", "must be one of 1f1b"),
        ("sharding", {"gather": "int8"}, "sharding.gather = 'int8': must be 'plain' where sharding.weights is 'none'"),
        ("sharding", {"scatter": "int4"}, "sharding.scatter = 'int4': must be 'plain' where sharding.gradients is"),
        ("sharding", {"weights": "node", "secondary": True}, "sharding.secondary = True: must be false where"),
        ("device_groups", [{"node": "a", "size": 0}], "device_groups[0].size = 0: must be at least 1"),
        ("device_groups", [{"node": "a", "size": 2}] * 2, "device_groups = ['a', 'a']: names a node twice"),
        ("sharding", {"weights": "host"}, "sharding.weights = 'host': must be one of none, group, node, cluster"),
        (
            "sharding",
            {"gradients": "node", "optimizer": "none"},
            "sharding.gradients = 'node': must be 'none' where sharding.optimizer is 'none': an update needs all",
        ),
        (
            "sharding",
            {"gradients": "cluster", "optimizer": "node"},
            "sharding.gradients = 'cluster': must be 'none' or 'group' or 'node' where sharding.optimizer is 'node'",
        ),
    ],
)
def test_a_wrong_plan_names_field_and_value(path: str, value: object, message: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_plan(changed(PLAN, path, value))
    assert message in str(caught.value)


def stage(first: int, last: int, node: str) -> Stage:
    return Stage(layers=((first, last),), replicas=(Replica(node=node, devices=(0,)),))


def test_only_the_ends_of_a_pipeline_may_hold_no_layer() -> None:
    ends = (stage(0, 0, "a"), stage(0, 8, "b"), stage(8, 8, "c"))
    assert Pipeline(micro_batch=1, micro_batches=1, stages=ends).samples == 1
    with pytest.raises(InvalidField, match=r"stages\[1\].layers = \[\[4, 4\]\]: must hold a layer"):
        Pipeline(micro_batch=1, micro_batches=1, stages=(stage(0, 4, "a"), stage(4, 4, "b"), stage(4, 8, "c")))


def test_pipelines_of_a_plan_end_at_the_same_layer() -> None:
    pipelines = tuple(
        Pipeline(micro_batch=1, micro_batches=1, stages=(stage(0, last, f"n-{last}"),)) for last in (7, 8)
    )
    with pytest.raises(InvalidField, match="must all end at the same layer"):
        Plan(pipelines=pipelines)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.layers", 7, "must cover the 7 layers"),
        ("train.global_batch", 7, "must add up to global_batch (7)"),
        ("model.kv_heads", 1, "tp = 2: must divide heads (8) and kv_heads (1)"),
    ],
)
def test_a_plan_is_checked_against_its_job(path: str, value: object, message: str) -> None:
    base = changed(JOB, "train.global_batch", 6)
    check_plan(parse_plan(PLAN), parse_job(base))
    with pytest.raises(InvalidField) as caught:
        check_plan(parse_plan(PLAN), parse_job(changed(base, path, value)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        InvalidField("a.b", 3, "is odd"),
        NotADocument("job", None, "is empty"),
        NoPlanFits("too big"),
        HostTooSmall("too big"),
        PriceAboveLimit(1.5, 2.0),
        ScheduleError(3, "waits"),
    ],
)
def test_errors_survive_pickling(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loose:
    figures: dict[str, int]
    other: Any = None
    either: int | str = 0
    pair: tuple[int, str] = (0, "")


def test_mappings_and_unions_are_read() -> None:
    found = read(Loose, {"figures": {"a": 1}, "other": [1], "either": "x", "pair": [1, "y"]})
    assert found == Loose(figures={"a": 1}, other=[1], either="x", pair=(1, "y"))
    with pytest.raises(InvalidField, match=r"top.figures.a = 'x': must be a whole number"):
        read(Loose, {"figures": {"a": "x"}}, "top")
    with pytest.raises(InvalidField, match="figures = 3: must be a mapping"):
        read(Loose, {"figures": 3})


def test_long_values_are_cut_in_messages() -> None:
    assert len(str(InvalidField("a", "x" * 500, "is long"))) < 200


def test_a_number_that_python_refuses_to_write_out_is_told_too() -> None:
    with pytest.raises(InvalidField) as caught:
        parse_cluster(changed(CLUSTER, "nodes.0.host_memory_gib", 10**5000))
    assert str(caught.value) == (
        "nodes[0].host_memory_gib = a number of thousands of digits: is too large for a number"
    )


def test_parameters_of_a_model() -> None:
    tied = ModelSpec(layers=2, hidden=8, heads=2, kv_heads=1, ffn=16, vocab=10)
    names = {parameter.fqn: parameter for parameter in parameters(tied)}
    assert names["embedding.weight"].units == (0, 3)
    assert "head.weight" not in names
    assert names["layers.1.mlp.down.weight"].interval(1, 2) == (64, 128)
    assert names["final_norm.weight"].interval(1, 2) == (0, 8)
    block = 8 * (8 + 4 + 4 + 8) + 3 * 8 * 16 + 16
    assert num_parameters(tied) == 80 + 2 * block + 8
    untied = ModelSpec(layers=2, hidden=8, heads=2, kv_heads=1, ffn=16, vocab=10, tie_embeddings=False)
    assert num_parameters(untied) == num_parameters(tied) + 80


def test_what_is_wanted_now_has_a_deadline_to_come() -> None:
    deadline = "2027-01-31T18:00:00Z"
    check_to_come(None, 0.0)
    check_to_come(deadline, deadline_at_s(deadline) - 1)
    with pytest.raises(InvalidField, match=f"limits.deadline = '{deadline}': has passed already"):
        check_to_come(deadline, deadline_at_s(deadline))


def test_ten_thousand_machines_are_a_cluster() -> None:
    cluster = parse_cluster({"nodes": [{"name": "a", "count": 10_000, "device": "A100-80G", "devices": 1}]})
    assert cluster.num_devices == 10_000
    with pytest.raises(InvalidField, match="nodes = 20000: must be at most 16384 nodes"):
        parse_cluster({"nodes": [{"name": name, "count": 10_000, "device": "L4", "devices": 1} for name in "ab"]})
