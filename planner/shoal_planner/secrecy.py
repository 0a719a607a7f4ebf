"""What may be a secret, by its name or by where it stands in an address, and values without it. Pure.

Messages quote what they refuse, and are shown, logged and passed on: whatever they quote goes through `concealed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "..."
# How names of secrets end, in any case.
WORDS = (
    "password|passwd|passphrase|secret|token|credentials?"
    "|(?:api|access|private|secret|signing|encryption|auth|ssh)[_-]?key"
)
_LIKE_A_SECRET = re.compile(rf"(?i)(?:^|[_-])(?:{WORDS}|passwords|secrets|authorization|cookie)(?:[_-]id)?$")
_NO_SECRETS = ("end_token",)  # a piece of text between documents
_WITHIN = ("env", "secrets")  # whatever stands below is its user's
_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Each looks at every character but a few times, however long a text is: what is refused may be megabytes.
_WHO = re.compile(r"(?<=://)[^\s/?#'\"]*@")
_BEFORE_AT = re.compile(r"(?<![^\s@'\"])([^\s@'\"]++)@")
_PASSWORD = re.compile(r":(?!//)(?=.)", re.DOTALL)
_SIGNED = re.compile(r"(://[^\s?#'\"]*+)(?:([?#])[^\s'\"]+)?")


def looks_secret(name: str) -> bool:
    """Whether what has this name is likely to be one."""
    return name not in _NO_SECRETS and _LIKE_A_SECRET.search(_NEW_WORD.sub("_", name)) is not None


def hides(field: str) -> bool:
    """Whether what stands at this dotted path is not to be shown."""
    names = [name.partition("[")[0] for name in field.split(".")]
    return any(map(looks_secret, names)) or any(name in _WITHIN for name in names[:-1])


def concealed(value: object) -> object:
    """Plain values as they may be quoted: nothing below names that mean secrets, no user or password of an address, and
    nothing behind the `?` of one, which may be signed."""
    match value:
        case str():
            return concealed_text(value)
        case Mapping():
            return {
                concealed(name): HIDDEN if inner is not None and looks_secret(str(name)) else _below(str(name), inner)
                for name, inner in value.items()
            }
        case list():
            return [concealed(inner) for inner in value]
        case tuple():
            return tuple(concealed(inner) for inner in value)
        case _:
            return value


def concealed_text(text: str) -> str:
    """The same of whole sentences, whose addresses alone are looked at."""
    known = _BEFORE_AT.sub(_without_user, _WHO.sub(f"{HIDDEN}@", text))
    return _SIGNED.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}" if found[2] else found[1], known)


def _without_user(found: re.Match[str]) -> str:
    """USER:PASSWORD in front of an at sign. Keys have slashes, so a password goes up to it, whatever is in between."""
    said = found[1]
    colon = _PASSWORD.search(said)
    if colon is None:
        return found[0]
    user = max(said.rfind("/", 0, colon.start()), said.rfind(":", 0, colon.start())) + 1
    return f"{said[:user]}{HIDDEN}@"


def _below(name: str, value: object) -> object:
    if name in _WITHIN and isinstance(value, Mapping):
        return {concealed(inner): HIDDEN for inner in value}
    return concealed(value)
