"""Folders in which what a model is to be evaluated on stands beside what it is to be trained on.

Owns which names say so: those by which `datasets` tells splits, as words of their own in names of files and folders.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

from shoal_planner.errors import InvalidField
from shoal_recovery.storage_access import without_access
from shoal_workers.file_ranges import File

_TRAINED_ON = frozenset({"train", "training"})
_EVALUATED_ON = frozenset({"val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation"})
_BETWEEN = re.compile(r"[-._ 0-9]+")
_EVALUATIONS = "data.eval_uri"


def mixed_splits(field: str, uri: str, files: Sequence[File], *, of_text: bool) -> InvalidField | None:
    """What is wrong where something for training stands beside something for evaluations, file or folder. Files of text
    are documents, mostly, whose names tell of themselves: there all of them have to say what they are for."""
    places = [_place(file.relative) for file in files]
    if of_text and None in places:
        return None
    told = dict.fromkeys(place for place in places if place is not None)
    trained = [(folder, name) for folder, name, is_for_training in told if is_for_training]
    folders = {folder for folder, _ in trained}
    others = [(folder, name) for folder, name, is_for_training in told if not is_for_training and folder in folders]
    if not others:
        return None
    mixed = [one for one in trained if one[0] == others[0][0]]
    one, other = (_below(uri, *place) for place in (mixed[0], others[0]))
    name = field.removeprefix("data.")
    if field == _EVALUATIONS:
        way = f"say {name}: {other}"
    elif len(mixed) == 1:
        way = f"say {name}: {one}, eval_uri: {other} (with train.eval_every, or leave it out)"
    else:
        way = f"put the one kind into a folder of its own and say that as {name}, the other as eval_uri, if at all"
    problem = f"has what is to be trained on ({mixed[0][1]}) beside what is to be evaluated on ({others[0][1]})"
    return InvalidField(field, uri, f"{problem}: {way}; to read both, make them sources of data.mix")


def _place(relative: str) -> tuple[str, str, bool] | None:
    """Folder and name of the first part of a path that says what it is for, and whether that is training."""
    parts = relative.split("/")
    for index, part in enumerate(parts):
        is_file = index == len(parts) - 1
        words = set(_BETWEEN.split(part.lower().rpartition(".")[0] or part.lower() if is_file else part.lower()))
        if words & _TRAINED_ON and words & _EVALUATED_ON:
            continue
        if words & (_TRAINED_ON | _EVALUATED_ON):
            return "/".join(parts[:index]), part, bool(words & _TRAINED_ON)
    return None


def _below(uri: str, folder: str, name: str) -> str:
    path = f"{folder}/{name}" if folder else name
    return f"{without_access(uri).rstrip('/')}/{path if uri.startswith('s3://') else quote(path)}"
