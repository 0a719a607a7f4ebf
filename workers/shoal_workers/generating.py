"""What `shoal generate` runs: goes on with a text, from a checkpoint or a Hugging Face folder.

Run as `python -m shoal_workers.generating` with an order as JSON on standard input. Prints one JSON object per line:
`{"text": ...}` as it comes, and at last `{"tokens": [...]}`, with `notes` where its positions are more than the model
has, or the folder says more of choosing tokens than is done; what is wrong with the order goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shoal_planner.data_spec import BYTES
from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreError
from shoal_recovery.first_weights import open_model
from shoal_recovery.hf_beside import TOKENIZER, Files, beside, ends_of, positions_of
from shoal_recovery.hf_generation import passed_over, repetition_penalty
from shoal_workers.generate import Generator
from shoal_workers.tokenizing import Tokenizer, open_tokenizer, with_begin
from shoal_workers.user_code import told

_WHAT_THEN = {True: "what comes after these it was not taught", False: "there is no room for more"}
# What `shoal generate` calls the fields of a job that these are elsewhere.
_ASKED_AS = {"train.init_from": "WHAT", "train.init_step": "--step", "data.tokenizer": "--tokenizer"}
_HALF = "\ufffd"  # what stands for a character of which a part is still to come


def main() -> int:
    torch.set_num_threads(os.cpu_count() or 1)
    sys.path.insert(0, os.getcwd())  # where a model that is code of the user's own may be
    order = json.load(sys.stdin)
    found: list[int] = []
    notes: list[str] = []
    try:
        model, read = open_model(order["uri"], order["step"])
        files = beside(order["uri"])
        tokenizer = _tokenizer(order["tokenizer"], order["jobs_tokenizer"], files, model.vocab)
        prompt, count = with_begin(tokenizer, tokenizer.encode([order["prompt"]])[0]).tolist(), order["count"]
        wanted = max(len(prompt) + count - 1, 1)  # the last one is not looked back from
        limit = positions_of(model, files) or wanted
        if len(prompt) > limit:
            raise InvalidField("prompt", f"of {len(prompt)} tokens", f"is too long: the model has {limit} positions")
        is_rotary = model.learned_positions is None and model.module is None  # which may go further than was taught
        positions = wanted if is_rotary else min(limit, wanted)
        generator = Generator(model, lambda *part: torch.from_numpy(read(*part)), positions)
        ends = ends_of(files)
        ends = (tokenizer.end,) if ends is None else ends
        drawn, penalty = order["temperature"], repetition_penalty(files)
        notes += passed_over(files, drawn > 0)
        tokens = generator.goes_on(prompt, count, drawn, order["seed"], ends, penalty)
        for text in _pieces(_noted(tokens, found), tokenizer):
            _say({"text": text})
    except (InvalidField, StoreError) as error:
        sys.stderr.write(f"{_as_asked(error, order['asked'])}\n")
        return 2
    except BaseException as error:  # theirs may raise anything
        if (theirs := told(error)) is None:
            raise
        said = "; ".join(theirs.splitlines())
        sys.stderr.write(f"{said}; the model is code of your own: run this in the folder that holds it\n")
        return 2
    if len(prompt) + len(found) > limit + is_rotary:
        notes.append(f"the model has {limit} positions: {_WHAT_THEN[is_rotary]}")
    _say({"tokens": found, "notes": notes})
    return 0


def _as_asked(error: InvalidField | StoreError, what: str) -> InvalidField | StoreError:
    if isinstance(error, InvalidField) and error.field in _ASKED_AS:
        field = _ASKED_AS[error.field]
        return InvalidField(field, what if field == "WHAT" else error.value, error.problem)
    return error


def _tokenizer(named: str | None, jobs: str | None, files: Files, vocab: int) -> Tokenizer:
    """The one that is named, or else what stands beside the weights, or else the job's, or else bytes."""
    if named is not None or TOKENIZER not in files:
        return open_tokenizer(named or jobs or BYTES, None, vocab)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            place = Path(folder, name)
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(data)
        return open_tokenizer(folder, None, vocab)


def _noted(tokens: Iterator[int], found: list[int]) -> Iterator[int]:
    for token in tokens:
        found.append(token)
        yield token


def _pieces(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of the tokens as it grows. Tokens are read together: by itself one may lack a space, or be a part of a
    character."""
    whole: list[int] = []
    said = ""
    for token in tokens:
        whole.append(token)
        text = tokenizer.decode(whole)
        if not text.endswith(_HALF):
            yield text[len(said) :]
            said = text
    rest = tokenizer.decode(whole)[len(said) :] if whole else ""
    if rest:
        yield rest


def _say(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
