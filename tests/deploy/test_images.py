"""What can be known of the images without building one: what they copy is there and sent, what they install is what
pyproject.toml asks for, and what they run is a command that exists."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from typer.main import get_command

from shoal.cli import app

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
LOCKS = ROOT / "deploy/requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = {"control-plane": ("server", "oidc", "otel", "trackers"), "worker": ("worker",)}


def instructions() -> list[tuple[str, str]]:
    """As (NAME, rest), with continued lines joined."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")))
    return [(name, rest) for name, _, rest in (line.strip().partition(" ") for line in joined.splitlines() if line)]


def asked(*extras: str) -> list[Requirement]:
    optional = PROJECT["project"]["optional-dependencies"]
    found = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    for extra in extras:
        for text in optional[extra]:
            requirement = Requirement(text)
            found += asked(*requirement.extras) if requirement.name == "shoal" else [requirement]
    return found


def pinned(name: str) -> dict[str, Version]:
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", text, flags=re.MULTILINE)
    assert len(pins) == len(re.findall(r"^[A-Za-z0-9]", text, flags=re.MULTILINE)), "something is not pinned"
    return {each.lower().replace("_", "-"): Version(version) for each, version in pins}


def test_everything_that_is_copied_is_there_and_is_sent() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [rest.split() for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    assert len(copied) >= 7
    for *sources, _target in copied:
        for source in sources:
            assert any(ROOT.glob(source)), source
            assert any(fnmatch.fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in sent), source


@pytest.mark.parametrize("image", EXTRAS)
def test_what_is_installed_is_what_the_package_asks_for(image: str) -> None:
    pins = pinned(image)
    for requirement in asked(*EXTRAS[image]):
        if requirement.name == "torch":
            continue
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement
    assert not [name for name in pins if name.startswith(("torch", "nvidia-", "cuda-", "triton"))]


@pytest.mark.parametrize("image", [*EXTRAS, "build", "cloud-gcp", "cloud-azure"])
def test_everything_that_is_installed_is_pinned_by_hash(image: str) -> None:
    text = (LOCKS / f"{image}.txt").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    assert pinned(image)
    assert all("--hash=sha256:" in entry for entry in entries), [entry for entry in entries if "--hash" not in entry]
    assert f"--require-hashes -r deploy/requirements/{re.sub('cloud-.*', 'cloud-${CLOUD}', image)}.txt" in DOCKERFILE


def test_nothing_but_torch_comes_without_a_hash() -> None:
    """As docs/deploying.md says."""
    installed = [part.strip() for name, rest in instructions() if name == "RUN" for part in rest.split("&&")]
    unchecked = [part for part in installed if re.search(r"\bpip install\b", part) and "--require-hashes" not in part]
    assert sorted(part for part in unchecked if "--no-index" not in part) == [
        'pip install --index-url "${TORCH_INDEX}" "torch==${TORCH_VERSION}"'
    ]
    assert "**but for torch and what it needs of CUDA**" in (ROOT / "docs/deploying.md").read_text(encoding="utf-8")


def test_torch_is_the_one_that_the_package_asks_for() -> None:
    (version,) = re.findall(r"^ARG TORCH_VERSION=(\S+)$", DOCKERFILE, flags=re.MULTILINE)
    (requirement,) = [each for each in asked("worker") if each.name == "torch"]
    assert requirement.specifier.contains(version)
    (backend,) = PROJECT["build-system"]["requires"]
    assert Requirement(backend).specifier.contains(pinned("build")["hatchling"])


def test_workers_have_what_compiles_jobs() -> None:
    """torch calls a C++ compiler, Triton a C compiler with the headers of Python."""
    stage = re.sub(r"\\\n", " ", DOCKERFILE.partition(" AS worker\n")[2])
    (given,) = re.findall(r'^ARG COMPILER="(.*)"$', stage, flags=re.MULTILINE)
    assert {"g++", "python3-dev"} <= set(given.split())
    (installed,) = re.findall(r"apt-get install (.*?)&&", stage)
    assert installed.split()[-1] == "${COMPILER}"
    assert stage.index("ARG COMPILER") < stage.index("apt-get install"), "an argument is known to what follows it alone"


def test_both_targets_run_without_root() -> None:
    for target in EXTRAS:
        stage = DOCKERFILE.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert re.search(r"^USER 10001:10001$", stage, flags=re.MULTILINE), target
    assert "HOME=/var/lib/shoal" in DOCKERFILE


def test_what_the_images_run_exists() -> None:
    serve, worker = (json.loads(rest) for name, rest in instructions() if name == "CMD")
    command = get_command(app).commands[serve[1]]  # type: ignore[attr-defined]
    assert serve[0] == "shoal" and {"--host"} <= {option for each in command.params for option in each.opts}
    assert set(serve[2::2]) <= {option for each in command.params for option in each.opts}
    assert (ROOT / "deploy" / worker[0]).exists()
    linked = re.findall(r"(/opt/shoal/\S+) ", re.search(r"RUN ln -s (.*) /usr/local/bin/", DOCKERFILE, re.S)[1] + " ")  # type: ignore[index]
    assert "/opt/shoal/bin/shoal" in linked


def test_start_connector_knows_the_options_of_connect() -> None:
    used = re.findall(r"--[a-z-]+", (ROOT / "deploy/start-connector.sh").read_text().partition("shoal connect")[2])
    known = get_command(app).commands["connect"].params  # type: ignore[attr-defined]
    assert used and set(used) <= {option for each in known for option in each.opts}


def test_the_start_scripts_know_the_options_of_ray() -> None:
    from ray.scripts.scripts import start

    known = {option for each in start.params for option in each.opts}
    for name in ("start-head.sh", "start-worker.sh"):
        used = set(re.findall(r"--[a-z-]+", (ROOT / f"deploy/{name}").read_text().partition("set -euo pipefail")[2]))
        assert used and used <= known, name


def test_the_health_check_says_no_where_nobody_answers() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy/healthcheck.py"], env={"SHOAL_PORT": "9"}, check=False, timeout=60
    )
    assert done.returncode == 1
