"""What run-node.sh asks of a machine: whoever logs in there may use Docker by sudo alone, what runs is let go before it
is replaced, and a registry is told who pulls. Docker, sudo and the cloud's program are stand-ins that write down what
they are asked; nothing of this machine is changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NODE = ROOT / "deploy/clusters/node"
LAUNCHER = {"RAY_HEAD_IP": "10.0.0.5", "RAY_OVERRIDE_RESOURCES": '{"GPU": 4}', "RAY_OVERRIDE_LABELS": '{"a": "b"}'}
# As the real one: but for what it is told to keep, nothing of the environment gets through.
SUDO = """#!/bin/bash
kept=(env -i PATH="$PATH" ASKED="$ASKED" BY_SUDO=1)
for name in RAY_HEAD_IP RAY_OVERRIDE_RESOURCES RAY_OVERRIDE_LABELS; do
    case ",${1#--preserve-env=}," in *",$name,"*) kept+=("$name=${!name}") ;; esac
done
case $1 in --preserve-env=*) shift ;; esac
exec "${kept[@]}" "$@"
"""
DOCKER = """#!/bin/bash
[ -n "${BY_SUDO:-}" ] || { echo "permission denied while trying to connect to the Docker daemon socket" >&2; exit 1; }
said=
case " $* " in *" login "*) said=$(cat) ;; esac
told="${RAY_HEAD_IP:-}${RAY_OVERRIDE_RESOURCES:-}${RAY_OVERRIDE_LABELS:-}"
printf '%s\\t%s\\t%s\\n' "docker $*" "$told" "$said" >>"$ASKED"
"""
# As many devices as the file says.
NVIDIA_SMI = """#!/bin/bash
[ -s "$HOME/gpus" ] && cat "$HOME/gpus"
"""
OTHER = """#!/bin/bash
printf '%s\\t\\t\\n' "${0##*/} $*" >>"$ASKED"
[ "${0##*/}" != aws ] || echo a-password
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_ins = {
        "sudo": SUDO,
        "docker": DOCKER,
        "nvidia-smi": NVIDIA_SMI,
        **dict.fromkeys(("install", "rm", "aws"), OTHER),
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    shutil.copytree(NODE, tmp_path / "shoal")
    (tmp_path / "shoal/ray.token").write_text("token")
    return tmp_path


def start(machine: Path, role: str, image: str, **told: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{machine / 'bin'}:{os.environ['PATH']}", "HOME": str(machine), **LAUNCHER, **told}
    command = ["bash", machine / "shoal/run-node.sh", role, image, "--num-cpus=4"]
    return subprocess.run(
        command,
        env={**environment, "ASKED": str(machine / "asked")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run(machine: Path, role: str, image: str, **told: str) -> list[tuple[str, str, str]]:
    """What was asked, in order: the call, what it was told by variables, and what it read."""
    done = start(machine, role, image, **told)
    assert done.returncode == 0, done.stderr
    found = []
    for line in (machine / "asked").read_text().splitlines():
        call, told, said = line.split("\t")
        found.append((call.replace("docker --config /etc/shoal-registry ", "docker "), told, said))
    return found


def verbs(asked: list[tuple[str, str, str]]) -> list[str]:
    return [call.split()[1] for call, _, _ in asked if call.startswith("docker ")]


def test_what_runs_is_let_go_before_it_is_replaced(machine: Path) -> None:
    asked = run(machine, "worker", "registry.example.org/shoal-worker:0.1.0-cuda")
    assert verbs(asked) == ["pull", "stop", "rm", "run"]
    calls = [call for call, _, _ in asked]
    assert "docker stop -t 90 shoal" in calls and "--stop-timeout 90" in calls[-1]
    assert calls[-1].endswith("registry.example.org/shoal-worker:0.1.0-cuda start-worker.sh --block --num-cpus=4")
    assert asked[-1][1] == "".join(LAUNCHER.values()), "what the launcher has said gets through"


def labels(device: str) -> str:
    return json.dumps({"shoal.io/pool": "some", "shoal.io/device": device, "shoal.io/devices": "1"})


def test_a_machine_without_its_devices_is_no_node(machine: Path) -> None:
    """Whoever started it sees that, and ends it: Ray's launcher does."""
    done = start(machine, "worker", "registry.example.org/shoal-worker:0.1.0-cuda", RAY_OVERRIDE_LABELS=labels("T4"))
    assert done.returncode == 1 and "shoal.io/device = 'T4': nvidia-smi lists no device" in done.stderr
    assert not (machine / "asked").exists(), "nothing was pulled or changed"


def test_devices_that_are_there_are_given_to_the_container(machine: Path) -> None:
    (machine / "gpus").write_text("GPU 0: Tesla T4 (UUID: GPU-0)\n")
    calls = run(machine, "worker", "registry.example.org/worker:1-cuda", RAY_OVERRIDE_LABELS=labels("T4"))
    assert " --gpus all " in calls[-1][0]


@pytest.mark.parametrize(("role", "told"), [("worker", labels("cpu-2t")), ("head", "{}")])
def test_a_machine_that_has_none_needs_none(machine: Path, role: str, told: str) -> None:
    calls = run(machine, role, "registry.example.org/worker:1", RAY_OVERRIDE_LABELS=told)
    assert verbs(calls)[-1] == "run" and "--gpus" not in calls[-1][0]


def test_a_registry_that_asks_is_told_who_pulls(machine: Path) -> None:
    (machine / "shoal/registry.json").write_text(json.dumps({"auths": {"registry.example.org": {"auth": "dTpw"}}}))
    calls = [call for call, _, _ in run(machine, "worker", "registry.example.org/shoal-worker:0.1.0-cuda")]
    assert f"install --mode=600 {machine}/shoal/registry.json /etc/shoal-registry/config.json" in calls
    assert "rm --force /var/lib/shoal/shoal/registry.json" in calls, "code of users does not find it"


@pytest.mark.parametrize(
    ("registry", "region"),
    [
        ("123456789012.dkr.ecr.us-east-1.amazonaws.com", "us-east-1"),
        ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", "cn-north-1"),
    ],
)
def test_the_registry_of_aws_is_asked_with_the_role_of_the_machine(machine: Path, registry: str, region: str) -> None:
    asked = run(machine, "head", f"{registry}/shoal-worker:0.1.0")
    assert verbs(asked) == ["login", "pull", "stop", "rm", "run"]
    assert f"aws ecr get-login-password --region {region}" in [call for call, _, _ in asked]
    (login,) = [each for each in asked if " login " in each[0]]
    assert login[0] == f"docker login --username AWS --password-stdin {registry}" and login[2] == "a-password"


def test_the_policy_of_the_registry_allows_to_pull_one_image() -> None:
    statements = json.loads((ROOT / "deploy/iam/aws-registry.json").read_text())["Statement"]
    allowed = {action: each["Resource"] for each in statements for action in each["Action"]}
    image = "arn:aws:ecr:*:123456789012:repository/shoal-worker"
    assert allowed == {
        "ecr:GetAuthorizationToken": "*",  # which knows no resources
        "ecr:BatchCheckLayerAvailability": image,
        "ecr:BatchGetImage": image,
        "ecr:GetDownloadUrlForLayer": image,
    }
