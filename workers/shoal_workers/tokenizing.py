"""From text to token ids: bytes as they are, or a tokenizer that stands in a file.

Text is encoded in parts of a bounded length, cut at line ends where there are any: a document of gigabytes takes no
more memory than a short one, and gives the same ids whatever comes before or after it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal_planner.data_spec import BYTES, NUM_BYTE_TOKENS
from shoal_planner.errors import InvalidField

Ids = npt.NDArray[np.uint32]

BYTE_END = 0  # never in text that people write
_PART_CHARS = 2**16
_CHARS_AT_ONCE = 2**18
# Names of the token between documents that tokenizers use which do not say it, most usual first.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class Tokenizer(Protocol):
    """`end` is the id between documents, `digest` differs wherever ids may."""

    @property
    def vocab(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a Hugging Face folder says besides: names of special tokens, the chat template."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, nothing added. Raises ValueError."""

    def decode(self, ids: Sequence[int]) -> str:
        """Their text; U+FFFD for what is no whole character."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """UTF-8."""

    vocab = NUM_BYTE_TOKENS
    end = BYTE_END
    digest = BYTES

    @property
    def settings(self) -> Mapping[str, Any]:
        return {}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        # What JSON may hold and UTF-8 may not, half a character, is kept as the bytes that it would have.
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.uint32) for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < NUM_BYTE_TOKENS).decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizers JSON file."""

    def __init__(self, inner: Any, end: int, settings: Mapping[str, Any], digest: str) -> None:
        self._inner = inner
        self.end = end
        self.settings = settings
        self.digest = digest
        # Ids need not be dense.
        self.vocab = 1 + max(inner.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        parts = [list(_parts(text)) for text in texts]
        encoded = self._encoded(itertools.chain(*parts))
        return [_joined(list(itertools.islice(encoded, len(own)))) for own in parts]

    def _encoded(self, parts: Iterator[str]) -> Iterator[Ids]:
        """A few at once: what the library keeps of a token takes a hundred times as much memory as its id."""
        while group := list(_first(parts, _CHARS_AT_ONCE)):
            try:
                found = self._inner.encode_batch_fast(list(map(_paired, group)), add_special_tokens=False)
            except Exception as error:  # tokenizers raises Exception itself
                raise ValueError(f"cannot be tokenised: {error}") from error
            for one in found:
                yield np.array(one.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))


def open_tokenizer(path: str, end_token: str | None, vocab: int) -> Tokenizer:
    """Raises InvalidField where it cannot be used with a model of `vocab` ids."""
    if path == BYTES:
        return ByteTokenizer()
    # Slow to load, and of no use to jobs whose tokens are bytes.
    from tokenizers import Tokenizer as Inner

    folder = Path(path) if Path(path).is_dir() else None
    file = Path(path) if folder is None else folder / "tokenizer.json"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidField("data.tokenizer", path, f"cannot be read: {error}") from error
    try:
        inner = Inner.from_str(text)
    except Exception as error:  # tokenizers raises Exception itself
        raise InvalidField("data.tokenizer", path, f"{file} is no tokenizers file: {error}") from error
    settings = {} if folder is None else _settings(path, folder)
    inner.no_truncation()
    inner.no_padding()
    digest = f"{hash_of(text)} {end_token} {settings.get('eos_token')}"
    found = FileTokenizer(inner, _end(inner, path, end_token, settings), settings, digest)
    if found.vocab > vocab:
        problem = f"is too small for {path}, whose largest id is {found.vocab - 1}"
        raise InvalidField("model.vocab", vocab, problem)
    return found


def hash_of(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _settings(path: str, folder: Path) -> dict[str, Any]:
    """Of tokenizer_config.json, and the template where it has a file of its own."""
    found: dict[str, Any] = {}
    try:
        if (folder / "tokenizer_config.json").exists():
            found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if (folder / "chat_template.jinja").exists():
            found["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidField("data.tokenizer", path, f"tokenizer_config.json cannot be read: {error}") from error
    return found


def token_text(value: object) -> str | None:
    """Special tokens stand there as text, or as a mapping that has it."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _end(inner: Any, path: str, end_token: str | None, settings: Mapping[str, Any]) -> int:
    if end_token is not None:
        wanted: tuple[str, ...] = (end_token,)
    else:
        said = token_text(settings.get("eos_token"))
        wanted = _END_TOKENS if said is None else (said,)
    for token in wanted:
        found = inner.token_to_id(token)
        if found is not None:
            return int(found)
    if end_token is not None:
        raise InvalidField("data.end_token", end_token, f"is no token of {path}")
    raise InvalidField("data.tokenizer", path, "does not say which token ends a document: name it as data.end_token")


def _paired(text: str) -> str:
    """With U+FFFD for what JSON may hold and UTF-8 may not, half a character: tokenizers take none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parts(text: str) -> Iterator[str]:
    first = 0
    while len(text) - first > _PART_CHARS:
        limit = first + _PART_CHARS
        cut = text.rfind("\n", first, limit) + 1 or text.rfind(" ", first, limit) or limit
        cut = cut if cut > first else limit
        yield text[first:cut]
        first = cut
    yield text[first:]


def _first(parts: Iterator[str], num_chars: int) -> Iterator[str]:
    """The next ones, until they have so many characters."""
    while num_chars > 0 and (part := next(parts, None)) is not None:
        num_chars -= len(part)
        yield part


def _joined(parts: list[Ids]) -> Ids:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
