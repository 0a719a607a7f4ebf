"""The newcomer's path: the commands of docs/quickstart.md, as they stand there, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from servers import free_ports
from waiting import eventually

from shoal.client import Client

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/quickstart.md"
START_S = 240.0
RUN_S = 600
INSTALL_S = 1200
NEXT = "=== next command"


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_the_page_has_the_whole_path_in_ten_commands() -> None:
    found = commands()
    assert len(found) <= 10
    text = "\n".join(found)
    for step in ("make setup", "shoal up", "shoal submit", "shoal watch", "shoal preempt", "shoal export"):
        assert step in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As after cloning, but for what the commands write."""
    for name in ("Makefile", "pyproject.toml", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def cloned(tmp_path: Path) -> Path:
    """Every file that a clone would have, as it stands here."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip(f"not a checkout: {listed.stderr.strip()}")
    there = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def environment(folder: Path, programs: Path) -> Mapping[str, str]:
    """A port and a data folder of a test's own, and the programs that it uses."""
    (port,) = free_ports(1)
    own = {
        "SHOAL_PORT": str(port),
        "SHOAL_SERVER": f"http://127.0.0.1:{port}",
        "SHOAL_DATA_DIR": str(folder / "data"),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    foreign = ("SHOAL_TOKEN", "PYTHONPATH")
    return {**{name: value for name, value in os.environ.items() if name not in foreign}, **own}


@contextlib.contextmanager
def in_a_terminal_of_its_own(command: str, folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Until it is ended, as by Ctrl-C."""
    said = folder / "up.said"
    with said.open("w", encoding="utf-8") as output:
        up = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=output, stderr=output
        )
    try:
        eventually(lambda: "Ctrl-C stops all of it" in said.read_text("utf-8") or up.poll() is not None, START_S)
        assert up.poll() is None, said.read_text("utf-8")
        yield
        up.terminate()  # a Ctrl-C would be ignored where the tests themselves run in the background
        assert up.wait(START_S) == 0, said.read_text("utf-8")
    finally:
        up.terminate()  # after which it stops what it has started; nothing, if it has ended
        up.wait()


@pytest.mark.long
@pytest.mark.timeout(START_S * 2 + RUN_S)
def test_the_commands_do_what_the_page_says(folder: Path) -> None:
    """With what they would install, in which this test runs."""
    install, *rest = commands()
    planned = subprocess.run(["make", "--dry-run", "setup"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert install == "make setup" and planned.returncode == 0, planned.stderr
    follow(rest, folder, environment(folder, Path(sys.executable).parent))


@pytest.mark.long
@pytest.mark.timeout(INSTALL_S + START_S * 2 + RUN_S)
def test_the_commands_do_what_the_page_says_from_nothing_but_a_clone(cloned: Path) -> None:
    install, path, *rest = commands()
    assert path == 'export PATH="$PWD/.venv/bin:$PATH"'
    surroundings = environment(cloned, cloned / ".venv/bin")
    installed = subprocess.run(
        install.split(), cwd=cloned, env=surroundings, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    assert installed.returncode == 0, installed.stderr
    follow([path, *rest], cloned, surroundings)


def follow(rest: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    """All commands behind the first."""
    up = next(command for command in rest if command.startswith("shoal up"))
    others = [command for command in rest if command != up]
    script = "\n".join(line for command in others for line in (f"echo '{NEXT}'", command))
    with in_a_terminal_of_its_own(up, folder, environment):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{script}\necho '{NEXT}'\necho $ID"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        *said, last = done.stdout.split(f"{NEXT}\n")[1:]
        by_command = dict(zip(others, said, strict=True))
        with Client(environment["SHOAL_SERVER"], (folder / "data/admin.token").read_text().strip()) as client:
            job = client.get(last.strip())
            changes = client.recoveries(job["id"])["items"]
            noticed = [event["node"] for event in client.events(job["id"], kinds=["node_noticed"])]
    assert "nothing was created" in by_command["shoal submit examples/quickstart.yaml --dry-run"]
    assert job["status"]["state"] == "succeeded"
    assert (job["status"]["step"], job["status"]["lost_steps"]) == (60, 0)
    assert "step " in by_command["shoal watch $ID --until-step 8"]
    assert "succeeded" in by_command["shoal watch $ID"].splitlines()[-1]
    assert "small-1 of cluster local is told that it goes away" in by_command["shoal preempt small-1 --notice 20"]
    assert "small-1" in noticed
    assert any("small-1" in change["reason"] for change in changes)
    assert len(by_command["shoal recoveries $ID"].splitlines()) == 1 + len(changes)
    check_export(folder / "quickstart-model")


def check_export(exported: Path) -> None:
    about = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    weights = load_file(exported / "model.safetensors")
    assert about["num_hidden_layers"] == 8
    assert weights["model.embed_tokens.weight"].shape == (256, 256)
    assert all(bool((abs(weight) < 100).all()) for weight in weights.values())
