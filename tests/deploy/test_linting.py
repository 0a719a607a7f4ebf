"""What is in deploy/ is clean to the tools that its users check it with. A tool that is not here is skipped by name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from programs import program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted(path for folder in ("deploy", "tests", "helm") for path in (ROOT / folder).glob("**/*.sh"))


def run(name: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [program(name), *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_finds_nothing() -> None:
    run("hadolint", DEPLOY / "Dockerfile")


def test_shellcheck_finds_nothing() -> None:
    assert {path.name for path in SCRIPTS} >= {"start-head.sh", "start-worker.sh", "start-connector.sh", "run-node.sh"}
    run("shellcheck", "--external-sources", *SCRIPTS)


def test_yamllint_finds_nothing() -> None:
    chart = (ROOT / "helm/shoal/Chart.yaml", ROOT / "helm/shoal/values.yaml")  # its templates are no YAML yet
    run("yamllint", "--strict", "--config-file", DEPLOY / ".yamllint.yaml", DEPLOY, *chart)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "deploy/prometheus/alerts.yaml"),
        ("check", "config", "--syntax-only", "deploy/prometheus/prometheus.yaml"),
        ("test", "rules", "deploy/prometheus/alerts.test.yaml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_finds_nothing(arguments: tuple[str, ...]) -> None:
    run("promtool", *arguments)


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("systemd/*.service")), ids=lambda path: path.name)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    """With programs that are here: those that the unit names are where it is installed."""
    text = unit.read_text(encoding="utf-8")
    copy = tmp_path / unit.name
    copy.write_text(
        "\n".join("ExecStart=/bin/true" if line.startswith("ExecStart=") else line for line in text.splitlines())
    )
    run("systemd-analyze", "verify", "--man=no", copy)
