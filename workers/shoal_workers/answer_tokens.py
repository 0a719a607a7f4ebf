"""Which tokens of a chat are to be learnt: those of which something stands in an answer.

Answers begin and end where characters do, tokens reach over that: the space before a word is often a part of it. Where
tokens stand follows from how long each is, if the tokenizer's tokens are the bytes of a text; others are asked, which
takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shoal_workers.tokenizing import Ids, Places, Tokenizer

_PROBE = "Some words, and\n some more."


class PlacedTokens:
    """Encodes texts as its tokenizer does, and tells where tokens begin."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_bytes = np.full(tokenizer.vocab, -1, dtype=np.int64)  # of each id; 0 if that says nothing, -1 unseen
        (ids,) = tokenizer.encode([_PROBE])
        self._adds_up = self._places(_PROBE, ids) is not None

    def encode(self, texts: Sequence[str]) -> list[tuple[Ids, Places]]:
        """Ids, and the character at which each begins. Raises ValueError."""
        if not self._adds_up:
            return [self._tokenizer.encode_with_places(text) for text in texts]
        found = []
        for text, ids in zip(texts, self._tokenizer.encode(texts), strict=True):
            places = self._places(text, ids)
            found.append(self._tokenizer.encode_with_places(text) if places is None else (ids, places))
        return found

    def _places(self, text: str, ids: Ids) -> Places | None:
        """None: tokens are not the bytes of the text, one behind the other, or not whole characters."""
        lengths = self._num_bytes[ids]
        if (lengths < 0).any():
            for unseen in np.unique(ids[lengths < 0]).tolist():
                own = self._tokenizer.decode([unseen])
                self._num_bytes[unseen] = 0 if "\ufffd" in own else len(own.encode("utf-8", "surrogatepass"))
            lengths = self._num_bytes[ids]
        content = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
        ends = np.cumsum(lengths)
        if not len(ids) or not lengths.all() or ends[-1] != len(content):
            return None
        begins = ends - lengths
        if len(content) == len(text):
            return begins
        firsts = np.flatnonzero((content & 0xC0) != 0x80)  # the bytes with which characters begin
        return np.searchsorted(firsts, begins)


def learnt_tokens(
    tokenizer: Tokenizer, text: str, ids: Ids, places: Places, answers: Iterable[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Of `ids`, which begin at `places` of the text; `answers` are characters [begin, end) of it."""
    found = np.zeros(len(ids), dtype=np.bool_)
    for begin, end in answers:
        first, last = (int(at) for at in np.searchsorted(places, (begin, end)))
        if begin < end and 0 < first and not (first < len(places) and places[first] == begin):
            reaches = _reaches(tokenizer, text, int(ids[first - 1]), int(places[first - 1]), begin)
            only = first == last and not text[begin:end].isspace()
            first -= reaches or only
        found[first:last] = True
    return found


def _reaches(tokenizer: Tokenizer, text: str, token: int, place: int, to: int) -> bool:
    """Whether a token that begins at `place`, before `to`, is not over there, where no other begins. White space is
    part of no token with some tokenizers."""
    if not text[to].isspace():
        return True
    own = tokenizer.decode([token])
    return place + len(own) > to and text.startswith(own, place)
