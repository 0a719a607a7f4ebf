"""What a folder of Hugging Face's says of a tokenizer: the file of it, names of special tokens, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal_planner.errors import InvalidField, show
from shoal_recovery.hf_beside import SLOW, TEMPLATES, TOKENIZER

_FIELD = "data.tokenizer"


def tokenizer_text(path: str, file: Path) -> str:
    """The tokenizers file of a tokenizer named as `path`. Raises InvalidField."""
    folder = file.parent
    if not file.exists() and (slow := [name for name in SLOW if (folder / name).exists()]):
        problem = f"{' and '.join(slow)} stand there, but no {TOKENIZER}, which alone is read. transformers writes it: "
        made = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise InvalidField(_FIELD, path, problem + made)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidField(_FIELD, path, f"cannot be read: {error}") from error


def settings_of(path: str, folder: Path) -> dict[str, Any]:
    """Of tokenizer_config.json, special tokens that special_tokens_map.json names (older folders have it), and
    templates where they have files of their own: one as text, several as a list of {name, template}. Raises
    InvalidField."""
    found = _mapping(path, folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in found:  # with it, what the other file says is of an older day
        found |= _mapping(path, folder / "special_tokens_map.json")
    if (template := folder / "chat_template.jinja").exists():
        found["chat_template"] = _text(path, template)
    others = {file.stem: _text(path, file) for file in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if others:
        default = found.get("chat_template")
        named = ({"default": default} if isinstance(default, str) else {}) | others
        found["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return found


def _text(path: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidField(_FIELD, path, f"{file.name} cannot be read: {error}") from error


def _mapping(path: str, file: Path) -> dict[str, Any]:
    """What a file of JSON says; nothing if it is not there. Raises InvalidField."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise InvalidField(_FIELD, path, f"{file.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        problem = f"{file.name} cannot be read: it is no JSON object but {show(found)}"
        raise InvalidField(_FIELD, path, problem)
    return found
