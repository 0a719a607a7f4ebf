"""Variables that deploy/ sets are read by somebody, and the handbook names all that nodes read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.settings import ClientSettings
from shoal_service.settings import Settings
from shoal_workers.settings import NodeSettings, WorkerSettings

ROOT = Path(__file__).parents[2]
# Those that say who gets nodes for a cluster: where `shoal connect` runs.
PROVISIONER = {"SHOAL_PROVISIONER", "SHOAL_PROVISIONER_POOLS"}
SETTERS = (
    *sorted((ROOT / "deploy").glob("systemd/*.env")),
    ROOT / "deploy/clusters/node/node.env",
    ROOT / "deploy/compose/compose.yaml",
)


def of_settings() -> set[str]:
    kinds = (ClientSettings, Settings, WorkerSettings, NodeSettings)
    return {f"{kind.model_config['env_prefix']}{field.upper()}" for kind in kinds for field in kind.model_fields}


def of_scripts() -> set[str]:
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "deploy").glob("*.sh")]
    return {name for text in scripts for name in re.findall(r"\$\{?(SHOAL_[A-Z_]+)", text)}


@pytest.mark.parametrize("path", SETTERS, ids=lambda path: path.name)
def test_what_is_set_is_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = set(re.findall(r"^[ #]*(SHOAL_[A-Z_]+)(?:=|: )", text, flags=re.MULTILINE))
    assert found and found <= of_settings() | of_scripts() | PROVISIONER


def test_the_handbook_names_what_the_scripts_and_nodes_read() -> None:
    chapter = (ROOT / "docs/deploying.md").read_text(encoding="utf-8").partition("## Starting nodes")[2]
    rows = re.findall(r"^\| (`SHOAL_[^|]*)\|", chapter.partition("## Compose")[0], flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(SHOAL_[A-Z_]+)`", row)}
    of_nodes = {f"SHOAL_NODE_{field.upper()}" for field in NodeSettings.model_fields if field != "override_labels"}
    assert named == (of_nodes | of_scripts() | {"SHOAL_TOKEN"}) - {"SHOAL_CONNECT_ADDRESS"}
