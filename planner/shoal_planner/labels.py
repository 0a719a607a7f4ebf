"""Labels: what users call their jobs by, beside the name. Shoal itself reads nothing in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal_planner.errors import InvalidField

MOST_LABELS = 32
KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
LONGEST_LABEL = 100


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidField."""
    if len(labels) > MOST_LABELS:
        raise InvalidField("labels", f"{len(labels)} labels", f"must be at most {MOST_LABELS}")
    for key, value in labels.items():
        if not KEY.fullmatch(key):
            problem = "must be 1 to 63 letters, digits, dots, dashes, slashes or underscores between letters or digits"
            raise InvalidField("labels", key, problem)
        if len(value) > LONGEST_LABEL or not (value.isprintable() or not value):
            raise InvalidField(f"labels.{key}", value, f"must be at most {LONGEST_LABEL} printable characters")
