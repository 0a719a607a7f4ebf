"""What a model is called where there is room for one word: its family and size, or whose code it is. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from shoal_planner.architecture import ModelSpec
from shoal_planner.errors import InvalidField
from shoal_planner.job import parse_job
from shoal_planner.parameters import num_parameters

_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def model_name(spec: Mapping[str, Any]) -> str:
    """Of a job as it is kept: `llama-6.7B`; of modules of the user's own, and of scripts, where they begin."""
    if (script := spec.get("script")) is not None:
        return str(script.get("path") or script.get("entrypoint") or "")
    if (module := spec["model"].get("module")) is not None:
        return str(module["entrypoint"])
    return _named(json.dumps(spec, sort_keys=True))


@functools.lru_cache(maxsize=1024)
def _named(spec: str) -> str:
    try:
        model: ModelSpec = parse_job(json.loads(spec)).model
    except InvalidField:  # of a job that a version before this one took; a scrape must not fail for a name
        return ""
    count = float(num_parameters(model))
    size, letter = next(((count / unit, letter) for unit, letter in _SIZES if count >= unit), (count, ""))
    return f"{model.family}-{size:.1f}{letter}"
