"""Labels: what users call their jobs by, beside the name. Shoal itself reads nothing in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal_planner.errors import InvalidField

_MOST = 32
_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
_LONGEST = 100


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidField."""
    if len(labels) > _MOST:
        raise InvalidField("labels", f"{len(labels)} labels", f"must be at most {_MOST}")
    for key, value in labels.items():
        if not _KEY.fullmatch(key):
            problem = "must be 1 to 63 letters, digits, dots, dashes, slashes or underscores between letters or digits"
            raise InvalidField("labels", key, problem)
        if len(value) > _LONGEST or not (value.isprintable() or not value):
            raise InvalidField(f"labels.{key}", value, f"must be at most {_LONGEST} printable characters")
