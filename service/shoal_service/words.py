"""Figures as people read them, beside `timeline.duration` and `timeline.num_bytes`."""

from __future__ import annotations

import math


def dollars(usd: float) -> str:
    """For people: $0, $0.00021, $0.75, $41.20, $12,345."""
    if usd <= 0:
        return "$0"
    digits = 0 if usd >= 1000 else max(2, 1 - math.floor(math.log10(usd)))
    return f"${usd:,.{digits}f}"


def percent(share: float) -> str:
    """As in "97.3 %", "0.4 %"."""
    return f"{100 * share:.1f} %"


def sentence(text: str) -> str:
    """With a capital letter, and an end."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def counted(number: int, name: str) -> str:
    """As in "1 node", "3 nodes"."""
    return f"{number:,} {name}" + ("" if number == 1 else "s")
