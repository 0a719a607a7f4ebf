"""Takes secrets out of what is handed to others: those that this process knows, and what looks like one. Pure.

What somebody printed may hide a secret in a form that nobody knows; whoever passes a dump on should look at it first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shoal_planner.secrecy import WORDS, looks_secret

REDACTED = "[redacted]"
_LEAST = 6  # characters: a shorter secret is part of too many words
_GIVEN = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;}\"']+)"
_QUERY = r"x-amz-(?:signature|credential|security-token)|sig|signature|code"
# What stands before the last word of a name stays as it is, so nobody looks at it: lines may be long.
_LIKE_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REDACTED}"),
    (re.compile(r"(?i)(\bset-cookie:|\bcookie:)\s*[^\n]+"), rf"\1 {REDACTED}"),
    (re.compile(r"(?<=://)[^/\s@:\"']+:[^/\s@\"']+(?=@)"), REDACTED),
    (re.compile(rf"(?i)(?<![a-z0-9])((?:{WORDS})(?:_id)?[\"']?\s*[=:]\s*){_GIVEN}"), rf"\1{REDACTED}"),
    (re.compile(rf"(?i)([?&](?:{_QUERY})=)[^&\s\"']+"), rf"\1{REDACTED}"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), REDACTED),
    (re.compile(r"\b(?:hf|ghp|gho|ghs|glpat|xox[abp]|sk|shoal)[_-][A-Za-z0-9_-]{20,}"), REDACTED),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REDACTED),
)


class Redactor:
    """`secrets` are whole values that must not be seen, whatever stands around them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = sorted({secret for secret in secrets if len(secret) >= _LEAST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        for pattern, instead in _LIKE_SECRETS:
            text = pattern.sub(instead, text)
        return text

    def value(self, value: Any) -> Any:
        """Of plain JSON values; what stands under the name of a secret goes, whatever it is."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {
                    self.text(str(name)): REDACTED if _hides(str(name), inner) else self.value(inner)
                    for name, inner in value.items()
                }
            case list() | tuple():
                return [self.value(inner) for inner in value]
            case _:
                return value


def _hides(name: str, value: Any) -> bool:
    return isinstance(value, str) and looks_secret(name)
