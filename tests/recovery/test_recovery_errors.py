"""Errors cross process borders and are read by users."""

from __future__ import annotations

import pickle

import pytest

from shoal_recovery.errors import (
    BaseChanged,
    StateLost,
    StoreChanged,
    StoreConflict,
    StoredPieceCorrupt,
    StoreError,
    StoreRefused,
    StoreUnreachable,
)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StateLost("no step is whole", ()), "no step is whole"),
        (StateLost("lacks", ("a master [0, 4)", "b master [1, 2)")), "lacks: a master [0, 4), b master [1, 2)"),
        *((kind("s3://b/p", "is cut off"), "s3://b/p: is cut off")
          for kind in (StoreError, StoreUnreachable, StoreRefused, StoreConflict, StoreChanged, StoredPieceCorrupt)),
        (BaseChanged("s3://b", "sha256:1", "sha256:2"),
         "s3://b: has changed since the job began: its fingerprint is sha256:2, and train.lora.base is sha256:1"),
    ],
)  # fmt: skip
def test_errors_pickle_and_speak(error: Exception, text: str) -> None:
    loaded = pickle.loads(pickle.dumps(error))
    assert type(loaded) is type(error)
    assert loaded.args == error.args
    assert str(loaded) == text
