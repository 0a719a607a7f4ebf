"""Long texts have the ids that the tokenizer itself gives them, whatever it takes for a word."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from data_ground import documents, write_tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from shoal_planner.errors import InvalidField
from shoal_workers.tokenizing import open_tokenizer
from shoal_workers.word_cuts import words_apart

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPECIAL = ["<|endoftext|>", "[UNK]"]


def bpe() -> Inner:
    return Inner(models.BPE(unk_token="[UNK]"))


def byte_level() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return inner


def without_regex() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return inner


def own_regex() -> Inner:
    inner = Inner(models.BPE())
    split = pre_tokenizers.Split(Regex(f"{_SUFFIXES}|{_WORDS}"), behavior="isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.normalizer = normalizers.NFC()
    return inner


def lines_apart() -> Inner:
    """A word is a line."""
    inner = bpe()
    inner.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
    return inner


def two_words() -> Inner:
    """Two words are one, counted from the beginning."""
    inner = bpe()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\S+\s+\S+\s*"), behavior="isolated")
    return inner


def bert() -> Inner:
    inner = Inner(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return inner


def stripping() -> Inner:
    inner = byte_level()
    inner.normalizer = normalizers.Strip()
    return inner


@pytest.mark.parametrize(
    ("make", "added", "apart"),
    [
        (bpe, (), False),
        (byte_level, (), True),
        (without_regex, (), False),
        (own_regex, (), True),
        (lines_apart, (), False),
        (two_words, (), False),
        (bert, (), True),
        (stripping, (), False),
        (byte_level, ("<|sep|>\n", " and", "  "), True),
        (byte_level, ("shoal swims",), False),
        (byte_level, ("shoal ",), False),
        (byte_level, ("\nno",), False),
        (byte_level, (AddedToken("morning", rstrip=True),), False),
    ],
)
def test_ids_are_those_of_the_tokenizer_itself(
    tmp_path: Path, make: Callable[[], Inner], added: tuple[str | AddedToken, ...], apart: bool
) -> None:
    inner = make()
    options = {"vocab_size": 600, "special_tokens": _SPECIAL, "show_progress": False}
    if isinstance(inner.model, models.WordPiece):
        inner.train_from_iterator(documents(), trainers.WordPieceTrainer(**options))
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        inner.train_from_iterator(documents(), trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    inner.add_tokens(list(added))
    assert words_apart(inner) == apart
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path), None, 2000)
    long = " ".join(documents())[:20_000]
    code = Path(argparse.__file__).read_text()[:20_000]
    for text in (long, long[7:5000], f"  lead {long[:3000]}", "x  y   z\n\n\n q" * 400, "Größe é" * 900, code):
        wanted = inner.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode([text])[0].tolist() == wanted
        assert tokenizer.encode_with_places(text)[0].tolist() == wanted


def test_files_beside_a_tokenizer_that_are_none_are_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "small")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text("[]")
        with pytest.raises(InvalidField, match=rf"{name} cannot be read: it is no JSON object but \[\]"):
            open_tokenizer(str(folder), None, 512)
        (folder / name).write_text("{bad")
        with pytest.raises(InvalidField, match=f"{name} cannot be read: Expecting"):
            open_tokenizer(str(folder), None, 512)
        (folder / name).write_text("{}")


def test_special_tokens_stand_in_a_file_of_their_own_in_older_folders(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "small")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    import transformers

    for more, wanted in ({}, "<|im_end|>"), ({"added_tokens_decoder": {}}, "<|endoftext|>"):
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **more}))
        assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == wanted
        assert open_tokenizer(str(folder), None, 512).end == inner.token_to_id(wanted)
