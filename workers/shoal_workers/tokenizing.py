"""From text to token ids: bytes as they are, or a tokenizer that stands in a file.

Text is encoded in parts of a bounded length, cut at line ends where there are any: a document of gigabytes takes no
more memory than a short one, and gives the same ids whatever comes before or after it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal_planner.data_spec import BYTES, NUM_BYTE_TOKENS
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_recovery.hf_beside import TOKENIZER
from shoal_workers.tokenizer_folder import settings_of, tokenizer_text
from shoal_workers.word_cuts import BETWEEN_WORDS, words_apart

Ids = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]

BYTE_END = 0  # never in text that people write
# Long texts are tokenised in parts: the library is a third slower on 64 KiB than on 2. They are cut between words, at
# the latest at the limit; where that is no border to a tokenizer, parts are as long as that.
_PART_CHARS = 2**11
_MOST_PART_CHARS = 2**16
_CHARS_AT_ONCE = 2**18
_WORDS_KEPT = 2**16  # with their ids, some 10 MB; the library's own 10,000 are too few for code: 5 % slower
_CONTEXT_CHARS = 64  # before a part: enough to see that it is no begin
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
    def begin(self) -> tuple[int, ...]:
        """What it puts before a text of its own accord, as a token of where texts begin."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a Hugging Face folder says besides: names of special tokens, the chat template."""

    def encode(self, texts: Sequence[str], before: Sequence[str] | None = None) -> list[Ids]:
        """The ids of each text, nothing added; `before` is the end of what stands before each. Raises ValueError."""

    def encode_with_places(self, text: str) -> tuple[Ids, Places]:
        """The same of one text, and the character of it at which each id begins. Raises ValueError."""

    def decode(self, ids: Sequence[int]) -> str:
        """Their text; U+FFFD for what is no whole character."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """UTF-8."""

    vocab = NUM_BYTE_TOKENS
    end = BYTE_END
    digest = BYTES
    begin = ()

    @property
    def settings(self) -> Mapping[str, Any]:
        return {}

    def encode(self, texts: Sequence[str], before: Sequence[str] | None = None) -> list[Ids]:
        # What JSON may hold and UTF-8 may not, half a character, is kept as the bytes that it would have.
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.uint32) for text in texts
        ]

    def encode_with_places(self, text: str) -> tuple[Ids, Places]:
        lengths = [len(one.encode("utf-8", "surrogatepass")) for one in text]
        return self.encode([text])[0], np.repeat(np.arange(len(text)), lengths)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < NUM_BYTE_TOKENS).decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizers JSON file."""

    def __init__(self, inner: Any, end: int, settings: Mapping[str, Any], digest: str) -> None:
        self._inner = inner
        self.end = end
        self.settings = settings
        self.digest = digest
        self.begin = _begin(inner)
        # Ids need not be dense.
        self.vocab = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self._marks_begins = _marks_begins(inner)
        self._part_chars = _PART_CHARS if not self._marks_begins and words_apart(inner) else _MOST_PART_CHARS

    def encode(self, texts: Sequence[str], before: Sequence[str] | None = None) -> list[Ids]:
        """See `Tokenizer`."""
        if not self._marks_begins and sum(map(len, texts)) <= _CHARS_AT_ONCE:
            return self._short(texts)
        parts = [
            [(context, part) for _, context, part in self._parts(_paired(text), _paired(context))]
            for text, context in zip(texts, before or [""] * len(texts), strict=True)
        ]
        encoded = self._encoded(itertools.chain(*parts))
        return [_joined(list(itertools.islice(encoded, len(own)))) for own in parts]

    def _short(self, texts: Sequence[str]) -> list[Ids]:
        """Of texts that can be encoded at once, whatever stands before them: the usual case."""
        parts: list[str] = []
        counts: list[int] = []
        for text in map(_paired, texts):
            own = [text] if len(text) <= self._part_chars else [part for _, part in _parts(text, self._part_chars)]
            parts += own
            counts.append(len(own))
        encoded = [_array(one.ids) for one in self._asked(self._inner.encode_batch_fast, parts)]
        if len(encoded) == len(counts):
            return encoded
        arrays = iter(encoded)
        return [_joined(list(itertools.islice(arrays, count))) for count in counts]

    def encode_with_places(self, text: str) -> tuple[Ids, Places]:
        """See `Tokenizer`."""
        found = []
        for first, context, part in self._parts(_paired(text), ""):
            (one,) = self._asked(self._inner.encode_batch, [context + part])
            ids, places = _behind(one, len(context))
            found.append((ids, places + first))
        return np.concatenate([ids for ids, _ in found]), np.concatenate([places for _, places in found])

    def _parts(self, text: str, before: str) -> Iterator[tuple[int, str, str]]:
        """Parts of a text: where each begins, and what stands before it, if that matters."""
        for first, part in _parts(text, self._part_chars):
            context = (text[max(0, first - _CONTEXT_CHARS) : first] if first else before) if self._marks_begins else ""
            yield first, context, part

    def _encoded(self, parts: Iterator[tuple[str, str]]) -> Iterator[Ids]:
        """A few at once: what the library keeps of a token takes a hundred times as much memory as its id."""
        while group := list(_first(parts, _CHARS_AT_ONCE)):
            if any(context for context, _ in group):  # only then is it of interest where tokens stand
                found = self._asked(self._inner.encode_batch, [context + part for context, part in group])
                yield from (_behind(one, len(context))[0] for one, (context, _) in zip(found, group, strict=True))
            else:
                found = self._asked(self._inner.encode_batch_fast, [part for _, part in group])
                yield from (_array(one.ids) for one in found)

    def _asked(self, encode: Callable[..., list[Any]], texts: list[str]) -> list[Any]:
        try:
            return encode(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(f"cannot be tokenised: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))


def open_tokenizer(path: str, end_token: str | None, vocab: int) -> Tokenizer:
    """Raises InvalidField where it cannot be used with a model of `vocab` ids."""
    if path == BYTES:
        return ByteTokenizer()
    # Slow to load, and of no use to jobs whose tokens are bytes.
    from tokenizers import Tokenizer as Inner

    folder = Path(path) if Path(path).is_dir() else None
    file = Path(path) if folder is None else folder / TOKENIZER
    text = tokenizer_text(path, file)
    try:
        inner = Inner.from_str(text)
    except Exception as error:  # tokenizers raises Exception itself
        raise InvalidField("data.tokenizer", path, f"{file.name} is no tokenizers file: {error}") from error
    settings = {} if folder is None else settings_of(path, folder)
    if resize := getattr(inner.model, "_resize_cache", None):  # not every kind of model has one
        resize(_WORDS_KEPT)
    inner.no_truncation()
    inner.no_padding()
    digest = f"{hash_of(text)} {end_token} {settings.get('eos_token')}"
    found = FileTokenizer(inner, _end(inner, path, end_token, settings), settings, digest)
    if found.vocab > vocab:
        problem = f"is too small for {path}, whose largest id is {found.vocab - 1}"
        raise InvalidField("model.vocab", vocab, problem)
    return found


def end_token_of(job: JobSpec) -> int | None:
    """What ends documents in a job's data; None where all of it is ids already and no tokenizer is named. Raises
    InvalidField as `open_tokenizer`."""
    if job.data.tokenizer == BYTES and not job.data.reads_bytes:
        return None
    return open_tokenizer(job.data.tokenizer, job.data.end_token, job.model.vocab).end


def hash_of(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


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
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _begin(inner: Any) -> tuple[int, ...]:
    """The ids that its post-processor puts before a text."""
    try:
        encoded = inner.encode("x")
    except Exception:  # it does not know the letter, and raises Exception itself
        return ()
    # What stands for no part of what was given belongs to no sequence.
    added = sum(1 for _ in itertools.takewhile(lambda sequence: sequence is None, encoded.sequence_ids))
    return tuple(encoded.ids[:added]) if added < len(encoded.ids) else ()


def with_begin(tokenizer: Tokenizer, ids: Ids) -> Ids:
    """Behind what the tokenizer puts before a text, unless it stands there already: as text, from a template."""
    begin = np.array(tokenizer.begin, dtype=np.uint32)
    return ids if np.array_equal(ids[: len(begin)], begin) else np.concatenate((begin, ids))


def _marks_begins(inner: Any) -> bool:
    """Whether a text has other ids where it begins, as with tokenizers in the manner of SentencePiece."""
    try:
        alone, behind = (inner.encode(text, add_special_tokens=False).ids for text in ("x", "\nx"))
    except Exception:  # it knows neither, which tells nothing: to suppose so is only slower
        return True
    return bool(behind[len(behind) - len(alone) :] != alone)


def _behind(encoded: Any, num_chars: int) -> tuple[Ids, Places]:
    """The ids of what begins behind these characters, and where it does, counted from there."""
    ids = _array(encoded.ids)
    places = np.array([begin for begin, _ in encoded.offsets], dtype=np.int64)
    return (ids[places >= num_chars], places[places >= num_chars] - num_chars) if num_chars else (ids, places)


def _parts(text: str, least: int) -> Iterator[tuple[int, str]]:
    """Each of at least so many characters, but for the last one."""
    first = 0
    while len(text) - first > least:
        between = BETWEEN_WORDS.search(text, first + least - 1, first + _MOST_PART_CHARS)
        cut = between.end() if between is not None else _late_cut(text, first)
        yield first, text[first:cut]
        first = cut
    yield first, text[first:]


def _late_cut(text: str, first: int) -> int:
    limit = first + _MOST_PART_CHARS
    if len(text) <= limit:
        return len(text)
    cut = text.rfind("\n", first, limit) + 1 or text.rfind(" ", first, limit) or limit
    return cut if cut > first else limit


def _first(parts: Iterator[tuple[str, str]], num_chars: int) -> Iterator[tuple[str, str]]:
    """The next ones, until they have so many characters."""
    while num_chars > 0 and (part := next(parts, None)) is not None:
        num_chars -= len(part[1])
        yield part


def _array(ids: list[int]) -> Ids:
    """By way of what takes a list in half the time that numpy does."""
    return np.frombuffer(array("I", ids), dtype=np.uint32)


def _joined(parts: list[Ids]) -> Ids:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
