"""docs/api.md is what its generator makes of this server."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_reference", FOLDER / "api_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_of_this_server() -> None:
    made, kept = generator(), (FOLDER / "api.md").read_text(encoding="utf-8")
    document = made.described()
    assert kept == made.written(document), "run python docs/api_reference.py"
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"### {method.upper()} {path}\n" in kept
