"""What a model is to be evaluated on is not trained on for standing in the same folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_ground import documents, job, write_index

from shoal_planner.data_spec import DataSpec, SourceSpec
from shoal_planner.errors import InvalidField
from shoal_recovery.store import open_store
from shoal_workers.data import evaluation_samples, samples_of, training_samples

TEXTS = documents(200)


def write(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match path.suffix:
            case ".bin":
                np.arange(1000, dtype=np.uint16).tofile(path)
            case ".idx":
                write_index(path, [1000])
            case ".parquet":
                pq.write_table(pa.table({"text": TEXTS}), path)
            case ".arrow":
                table = pa.table({"text": TEXTS})
                with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
            case ".jsonl" | ".json":
                path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
            case _:
                path.write_text("\n".join(TEXTS))


def of(folder: Path, form: Any, **more: Any) -> DataSpec:
    return DataSpec(uri=folder.as_uri(), format=form, **more)


NANOGPT = ("train.bin", "val.bin", "meta.pkl", "prepare.py")


@pytest.mark.parametrize(
    ("form", "names", "trained", "evaluated"),
    [
        ("tokens", NANOGPT, "train.bin", "val.bin"),
        ("megatron", ("train.bin", "train.idx", "valid.bin", "valid.idx"), "train.bin", "valid.bin"),
        ("jsonl", ("train.jsonl", "val.jsonl"), "train.jsonl", "val.jsonl"),
        ("jsonl", ("c4-Train.0 a.json", "c4-validation.0.json"), "c4-Train.0%20a.json", "c4-validation.0.json"),
        ("parquet", ("data/train-00000-of-1.parquet", "data/test-00000-of-1.parquet"), None, None),
        ("parquet", ("en/training/0.parquet", "en/dev/0.parquet"), "en/training", "en/dev"),
        ("arrow", ("train/a.arrow", "eval/a.arrow", "train/b.arrow"), "train", "eval"),
        ("text", ("wiki.train.tokens", "wiki.test.tokens", "README.md"), "wiki.train.tokens", "wiki.test.tokens"),
    ],
)
def test_a_folder_of_both_is_refused_and_what_to_say_instead_works(
    tmp_path: Path, form: str, names: Sequence[str], trained: str | None, evaluated: str | None
) -> None:
    write(tmp_path, names)
    spec = job(of(tmp_path, form), vocab=1000, eval_every=1, eval_batches=1)
    trained = trained or "data/train-00000-of-1.parquet"
    evaluated = evaluated or "data/test-00000-of-1.parquet"
    one, other = f"{tmp_path.as_uri()}/{trained}", f"{tmp_path.as_uri()}/{evaluated}"
    for samples in (training_samples, evaluation_samples):
        with pytest.raises(InvalidField) as caught:
            samples(spec)
        assert caught.value.field == "data.uri"
        assert f"beside what is to be evaluated on ({Path(evaluated).name}): say uri: {one}, eval_uri: {other}" in str(
            caught.value
        )
    said = replace(spec, data=replace(spec.data, uri=one, eval_uri=other))
    assert training_samples(said).read([0]).shape == (1, 17)
    assert evaluation_samples(said).read([0]).shape == (1, 17)  # type: ignore[union-attr]


def test_several_files_of_a_kind_need_a_folder_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, ["train_0.bin", "train_1.bin", "val_0.bin"])
    with pytest.raises(InvalidField, match=r"put the one kind into a folder of its own and say that as uri, the other"):
        training_samples(job(of(tmp_path, "tokens"), vocab=1000))


def test_data_to_evaluate_on_and_sources_of_a_mixture_are_refused_alike(tmp_path: Path) -> None:
    write(tmp_path / "a", ["x.jsonl"])
    write(tmp_path / "b", ["train.jsonl", "test.jsonl"])
    spec = job(of(tmp_path / "a", "jsonl", eval_uri=(tmp_path / "b").as_uri()), eval_every=1, eval_batches=1)
    assert training_samples(spec).read([0]).shape == (1, 17)
    with pytest.raises(InvalidField, match=r"data.eval_uri = .*: say eval_uri: file:.*/b/test.jsonl; to read both"):
        evaluation_samples(spec)
    mix = tuple(SourceSpec(uri=(tmp_path / name).as_uri(), format="jsonl") for name in ("a", "b"))
    with pytest.raises(
        InvalidField, match=r"data.mix\[1\].uri = .*: say mix\[1\].uri: file:.*/b/train.jsonl, eval_uri"
    ):
        training_samples(job(DataSpec(mix=mix)))
    both = tuple(
        SourceSpec(uri=(tmp_path / "b" / f"{name}.jsonl").as_uri(), format="jsonl") for name in ("train", "test")
    )
    assert training_samples(job(DataSpec(mix=both))).read([0]).shape == (1, 17)


def test_what_is_far_is_refused_alike(s3_uri: str, s3_environment: dict[str, str]) -> None:
    store = open_store(s3_uri)
    for name in ("train_1.jsonl", "val.jsonl"):
        store.put(f"set/{name}", json.dumps({"text": "x" * 1000}).encode())
    spec = job(DataSpec(uri=f"{s3_uri}/set/", format="jsonl"), batch=1)
    with pytest.raises(InvalidField, match=f": say uri: {s3_uri}/set/train_1.jsonl, eval_uri: {s3_uri}/set/val.jsonl "):
        training_samples(spec)
    said = replace(spec.data, uri=f"{s3_uri}/set/train_1.jsonl", eval_uri=f"{s3_uri}/set/val.jsonl")
    evaluating = replace(spec.train, eval_every=1, eval_batches=1)
    assert training_samples(replace(spec, data=said, train=evaluating)).read([0]).shape == (1, 17)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("tokens", ("train_0.bin", "train_1.bin")),
        ("tokens", ("val.bin",)),
        ("jsonl", ("trains.jsonl", "tests.jsonl", "evaluator.jsonl", "pretrain.jsonl")),
        ("jsonl", ("a/train.jsonl", "b/test.jsonl")),
        ("jsonl", ("train.jsonl", "more/test.jsonl")),
        ("jsonl", ("train.jsonl", "train-test-splits.jsonl")),
        ("text", ("train.c", "test.c", "main.c")),
        ("text", ("train.py", "test.py")),
    ],
)
def test_names_that_tell_of_no_splits_are_read(tmp_path: Path, form: str, names: Sequence[str]) -> None:
    write(tmp_path, names)
    assert training_samples(job(of(tmp_path, form), vocab=1000)).read([0]).shape == (1, 17)


def test_a_job_that_has_begun_goes_on(tmp_path: Path) -> None:
    write(tmp_path, NANOGPT)
    opened = samples_of(job(of(tmp_path, "tokens"), vocab=1000))
    assert isinstance(opened.differs([]), InvalidField)
    assert opened.differs(opened.files) is None
