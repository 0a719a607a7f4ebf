"""Where a text may be cut so that its parts have the ids of the whole.

Most tokenizers split a text into words before anything else, and then each word has ids of its own. Some do not: with
them a token may reach over a space, and a cut there makes other ids.
"""

from __future__ import annotations

import re
from typing import Any

# Before a single space, or between two lines without any.
BETWEEN_WORDS = re.compile(r"\S(?:\n(?=\S)|(?= \S))")
# Letters, digits and marks of many kinds beside each other, with all that may stand between them.
_PROBE = (
    "one two\nthree 4 56 789 0123\n12345 it's 'tis we'll don't I'M x_y __z .dot dot. , ; ( a ) [b] {c: d}\n"
    "\tif a == b:\n    return c  # why\n\n\nUpper CASE camelCase\r\nline\n$5 5% -3 +4 1.5 1,000 a/b ht://x.y/z?q=1\n"
    '<b> </b>\n<|x|> @me #tag ~ ` ^ & * = \\n " .\n!? Gr\u00f6\u00dfe e\u0301 \u00e0 la \ufb01 \u00bd \u00b2 \u2116\n'
    "\u201c \u201d \u2014 \u2026 \u00a0 x\u00a0y z \u200b q \u0301 w \u3000 e\n"
    "\u4e2d\u6587 \u6587 \u3042 \uac00 \u1100\u1161 \u0627\u0644 \u05d0\u05d1 \u0e01\u0e33 \u0928\u093f\n"
    "\U0001f600 \U0001f468\u200d\U0001f469 end"
)


def words_apart(inner: Any) -> bool:
    """Whether a tokenizers.Tokenizer gives the parts of a text the ids of the whole wherever `BETWEEN_WORDS` cuts."""
    if any(_is_cut(token) for token in inner.get_added_tokens_decoder().values()):
        return False
    try:
        whole = _words(inner, _PROBE)
        cuts = [found.end() for found in BETWEEN_WORDS.finditer(_PROBE)]
        return all(_words(inner, _PROBE[:cut]) + _words(inner, _PROBE[cut:]) == whole for cut in cuts)
    except Exception:  # tokenizers raises Exception itself; that nothing is known of it is only slower
        return False


def _words(inner: Any, text: str) -> list[str]:
    if inner.normalizer is not None:
        text = inner.normalizer.normalize_str(text)
    return [text] if inner.pre_tokenizer is None else [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text)]


def _is_cut(token: Any) -> bool:
    """Whether it may stand over a cut: those that were added are found in the text before it is split."""
    if token.rstrip:  # it takes the space behind it
        return True
    content = token.content
    return any(1 < found.end() < 1 + len(content) for found in BETWEEN_WORDS.finditer(f"x{content}x"))
