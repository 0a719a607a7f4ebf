"""The text of a manifest: read back equal, understood without Shoal, refused when anything is odd."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import layouts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.manifest import manifest_from_json, manifest_to_json
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Kind, Manifest

MODEL = ModelSpec(layers=1, hidden=8, heads=4, kv_heads=2, ffn=6, vocab=5)


def _manifest(plan: Plan, model: ModelSpec, step: int = 3) -> tuple[Manifest, dict[str, bytes]]:
    objects, pieces = {}, []
    for state in shard_map(plan, model).ranks:
        held = layouts.shard(state, layouts.arrays(model, step))
        objects[held.name] = held.content
        pieces.extend(layouts.stored_pieces(held, held.name))
    return Manifest(version=1, job="job_1", step=step, epoch=2, next_sample=48, pieces=tuple(pieces)), objects


def _small() -> Manifest:
    replicas = tuple(Replica(node=node, devices=(0,)) for node in "ab")
    stage = Stage(layers=((0, 1),), replicas=replicas)
    return _manifest(Plan(pipelines=(Pipeline(micro_batch=2, micro_batches=1, stages=(stage,)),)), MODEL)[0]


@given(st.data())
def test_read_back_equal(data: st.DataObject) -> None:
    model = data.draw(layouts.models())
    manifest, _ = _manifest(data.draw(layouts.plans(model)), model)
    assert manifest_from_json(manifest_to_json(manifest, model)) == manifest


@settings(max_examples=20)
@given(st.data())
def test_the_state_can_be_read_with_json_and_numpy_alone(data: st.DataObject) -> None:
    model = data.draw(layouts.models())
    manifest, objects = _manifest(data.draw(layouts.plans(model)), model)
    document = json.loads(manifest_to_json(manifest, model))
    assert (document["element_type"], document["byte_order"]) == ("float32", "little")
    state = {
        (name, kind): np.zeros(int(np.prod(entry["shape"])), dtype="<f4")
        for name, entry in document["parameters"].items()
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    for row in document["pieces"]:
        piece = dict(zip(document["columns"], row, strict=True))
        content = objects[document["objects"][piece["object"]]]
        values = np.frombuffer(content[piece["offset"] : piece["offset"] + piece["num_bytes"]], dtype="<f4")
        state[piece["parameter"], piece["kind"]][piece["first"] : piece["last"]] = values
    truth = layouts.arrays(model, manifest.step)
    for (name, kind), values in state.items():
        np.testing.assert_array_equal(values, truth[name, Kind(kind)])


def test_dimensions_say_how_a_matrix_is_used() -> None:
    entries = json.loads(manifest_to_json(_small(), MODEL))["parameters"]
    assert entries["layers.0.attention.o.weight"] == {"shape": [8, 8], "dimensions": ["in", "out"]}
    assert entries["layers.0.mlp.down.weight"] == {"shape": [6, 8], "dimensions": ["in", "out"]}
    assert entries["layers.0.mlp.up.weight"] == {"shape": [6, 8], "dimensions": ["out", "in"]}
    assert entries["embedding.weight"] == {"shape": [5, 8], "dimensions": ["vocabulary", "hidden"]}
    assert entries["final_norm.weight"] == {"shape": [8], "dimensions": ["hidden"]}
    assert set(entries) == {parameter.fqn for parameter in parameters(MODEL)}


def test_a_manifest_that_is_not_whole_is_not_written() -> None:
    manifest = _small()
    with pytest.raises(InvalidField, match=r"must cover all of \[0, "):
        manifest_to_json(replace(manifest, pieces=manifest.pieces[1:]), MODEL)
    with pytest.raises(InvalidField, match="is not stored state of this model"):
        manifest_to_json(_with_stranger(manifest), MODEL)


def _with_stranger(manifest: Manifest) -> Manifest:
    stranger = replace(manifest.pieces[0], key=replace(manifest.pieces[0].key, fqn="stranger.weight"))
    return replace(manifest, pieces=(*manifest.pieces, stranger))


def _row(index: int, value: object) -> Any:
    def change(document: dict[str, Any]) -> None:
        document["pieces"][0][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda document: document.update(version=2), "which says version 2"),
        (lambda document: document.update(format="other"), "format"),
        (lambda document: document.update(element_type="bfloat16"), "element_type"),
        (lambda document: document.update(stepp=1), "did you mean 'step'"),
        (lambda document: document.pop("epoch"), "epoch"),
        (lambda document: document["columns"].reverse(), "columns"),
        (lambda document: document["pieces"].append([1, 2]), "must be a row of"),
        (lambda document: document["pieces"].append(7), "must be a row of"),
        (_row(0, 9), "names object 9 of 2"),
        (_row(1, "stranger.weight"), "not listed"),
        (_row(1, 4), "not listed"),
        (_row(2, "weight"), "kind must be one of master"),
        (_row(2, 1), "kind must be one of master"),
        (_row(3, -1), "whole numbers"),
        (_row(3, True), "whole numbers"),
        (_row(4, 0), "num_bytes must be 4"),
        (_row(6, 2), "num_bytes must be 4"),
        (_row(7, 12), "checksum must be text"),
    ],
)
def test_whatever_we_did_not_write_is_refused(change: Any, problem: str) -> None:
    document = json.loads(manifest_to_json(_small(), MODEL))
    change(document)
    with pytest.raises(InvalidField, match=problem):
        manifest_from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"version": 1}'])
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(InvalidField):
        manifest_from_json(text)


def test_what_ranks_say_of_data_is_kept_and_may_be_left_out() -> None:
    plain = _small()
    marks = ((0, 7, 1, 300, 2), (1, 0, 6, 0, 40, 0))
    files = (["file:///data", 2, 4096, [["a.jsonl", "0a1b2c3d4e5f"], ["b.jsonl", "000000000000"]]],)
    full = dataclasses.replace(plain, marks=marks, files=files)
    assert manifest_from_json(manifest_to_json(full, MODEL)) == full
    document = json.loads(manifest_to_json(plain, MODEL))
    assert document.keys().isdisjoint({"marks", "files"}), "as versions before wrote it"
