"""What the documents say exists: example files parse, links lead somewhere, commands, routes and settings are real."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from shoal.cli import app
from shoal.local_shoal import DEFAULT_CLUSTER
from shoal.settings import ClientSettings
from shoal_planner.catalogue import CATALOGUE, device_type
from shoal_planner.cluster import parse_cluster
from shoal_planner.job import LimitsSpec, parse_job
from shoal_planner.market import parse_market
from shoal_planner.measured_documents import parse_runs
from shoal_planner.plan import parse_plan
from shoal_planner.script_spec import parse_any_job
from shoal_planner.search import plan
from shoal_service.app import create_app
from shoal_service.settings import Settings
from shoal_workers.settings import ProvisionerSettings, WorkerSettings

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
CLUSTERS = [path for path in EXAMPLES if "nodes" in yaml.safe_load(path.read_text())]
MARKETS = [path for path in EXAMPLES if "offers" in yaml.safe_load(path.read_text())]
JOBS = [path for path in EXAMPLES if path not in (*CLUSTERS, *MARKETS)]
TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "helm/shoal/README.md")] + sorted(
    ROOT.glob("docs/**/*.md")
)
PACKAGES = ("planner", "recovery", "service", "workers")
# Made from a running dashboard by whoever cuts a release, so it may be absent in between.


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """As code hosts make them of headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_examples_of_each_kind() -> None:
    assert {path.name for path in MARKETS} >= {"market.yaml"}
    assert {path.name for path in JOBS} >= {"quickstart.yaml"}
    assert {path.name for path in CLUSTERS} >= {"cluster-mixed.yaml", "local-cluster.yaml"}


@pytest.mark.parametrize("path", JOBS, ids=name_of)
def test_job_examples_parse(path: Path) -> None:
    parse_any_job(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", CLUSTERS, ids=name_of)
def test_cluster_examples_parse_and_name_known_devices(path: Path) -> None:
    cluster = parse_cluster(yaml.safe_load(path.read_text(encoding="utf-8")))
    for node in cluster.nodes:
        device_type(node.device, cluster.overrides)


@pytest.mark.parametrize("path", MARKETS, ids=name_of)
def test_market_examples_parse(path: Path) -> None:
    assert parse_market(yaml.safe_load(path.read_text(encoding="utf-8"))).offers


def test_the_local_cluster_example_is_the_default() -> None:
    assert parse_cluster(yaml.safe_load(read("examples/local-cluster.yaml"))) == parse_cluster(DEFAULT_CLUSTER)


def test_the_quickstart_has_a_plan_on_the_local_cluster() -> None:
    job = parse_job(yaml.safe_load(read("examples/quickstart.yaml")))
    found = plan(job, parse_cluster(yaml.safe_load(read("examples/local-cluster.yaml"))))
    assert found.plan.global_batch == job.train.global_batch


def test_the_quickstart_names_every_field_of_the_contract() -> None:
    given = yaml.safe_load(read("examples/quickstart.yaml"))
    assert set(given["limits"]) == {field.name for field in dataclasses.fields(LimitsSpec)}
    assert set(given["checkpoint"]) == {"uri", "every_steps", "keep", "protect_every", "copies"}


def test_the_client_example_imports_only_what_users_have() -> None:
    tree = ast.parse(read("examples/submit.py"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"pathlib", "shoal"}


def test_the_client_example_says_so_when_nobody_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/submit.py")],
        env={"SHOAL_SERVER": "http://127.0.0.1:9", "SHOAL_DATA_DIR": str(tmp_path), "SHOAL_TOKEN": "none"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no control plane answers at http://127.0.0.1:9" in done.stderr


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{name_of(path)} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{name_of(path)} links to {target}"


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_texts_are_ascii(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()


def test_every_decision_is_listed() -> None:
    listed = set(re.findall(r"\((\d{4}-[a-z-]+\.md)\)", read("docs/adr/README.md")))
    assert listed == {path.name for path in (ROOT / "docs/adr").glob("0*.md")}


def test_the_commands_of_the_handbook_are_those_of_the_program() -> None:
    named = set(re.findall(r"\bshoal\s+([a-z][a-z-]*)", read("docs/cli.md")))
    assert named == set(get_command(app).commands)  # type: ignore[attr-defined]


def test_the_options_of_the_handbook_are_those_of_the_program() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    usages = re.findall(r"^shoal ([a-z-]+)(.*)$", read("docs/cli.md"), flags=re.MULTILINE)
    assert len(usages) >= 13
    for command, rest in usages:
        group = getattr(commands[command], "commands", {})
        described = (commands[command], *group.values())
        parameters = [parameter for each in described for parameter in each.params]
        known = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
        named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest))
        assert named <= known, f"shoal {command}"


def test_the_routes_of_the_handbook_are_those_of_the_server(tmp_path: Path) -> None:
    paths = create_app(Settings(data_dir=tmp_path)).openapi()["paths"]
    real = {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}
    named = set(re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /\S+)`", read("docs/rest.md").partition("## Jobs")[0]))
    assert named - {"GET /openapi.json"} == real


def test_the_codes_of_the_handbook_are_those_of_the_server() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "service/shoal_service").glob("*.py")]
    table = read("docs/rest.md").partition("## Refusals")[2]
    for line in re.findall(r"^\| \d{3} \|([^|]+)\|", table, flags=re.MULTILINE):
        for code in re.findall(r"`([a-z_]+)`", line):
            assert any(f'"{code}"' in source for source in sources), code


def test_the_settings_of_the_handbook_are_those_of_the_program() -> None:
    named = set(re.findall(r"^\| `(SHOAL_[A-Z_]+)`", read("docs/cli.md"), flags=re.MULTILINE))
    real = {f"SHOAL_{field.upper()}" for kind in (ClientSettings, Settings) for field in kind.model_fields}
    real |= {f"SHOAL_{field.upper()}" for field in ProvisionerSettings.model_fields}
    assert named == real | {f"SHOAL_WORKER_{field.upper()}" for field in WorkerSettings.model_fields}


def test_the_handbook_lists_the_catalogue() -> None:
    assert {name for name in CATALOGUE if f"`{name}`" in read("docs/files.md")} == set(CATALOGUE)


def test_the_plan_and_the_runs_in_the_handbook_are_such() -> None:
    runs, plan_text = re.findall(r"```json\n(.*?)```", read("docs/files.md"), flags=re.DOTALL)
    assert parse_plan(yaml.safe_load(plan_text)).global_batch == 16
    local = parse_cluster(yaml.safe_load(read("examples/local-cluster.yaml")))
    assert len(parse_runs(yaml.safe_load(runs), local)) == 1


def test_the_readme_names_both_commands_and_shows_the_page() -> None:
    text = read("README.md")
    assert re.search(r"^make demo\b", text, flags=re.MULTILINE)
    assert re.search(r"^make test\b", text, flags=re.MULTILINE)
    assert "](docs/images/dashboard-job-light.png)" in text


def commands(text: str) -> Iterator[str]:
    """Those in blocks and between backticks, also across lines."""
    for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_code(text)))


def from_an_index(command: str) -> bool:
    """Whether it installs what an index calls shoal, which is not ours."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # an apostrophe of a sentence
        words = command.split()
    if not {"pip", "pip3", "pipx", "uv"} & {Path(word).name for word in words}:
        return False
    return any(re.fullmatch(r"shoal(\[[\w,]+\])?([=<>!~].*)?", word) for word in words)


@pytest.mark.parametrize("path", [path for path in TEXTS if path.name != "CHANGELOG.md"], ids=name_of)
def test_shoal_is_not_taken_from_an_index(path: Path) -> None:
    """PyPI's `shoal` is somebody else's, and would run there with the rights of whoever follows the handbook."""
    assert not [command for command in commands(path.read_text(encoding="utf-8")) if from_an_index(command)]


def test_what_an_index_would_give_is_recognized() -> None:
    others = (
        "pip install shoal",
        "x/pip install -U 'shoal[worker]'",
        "uv pip install shoal==0.1.0",
        "pipx install shoal",
    )
    assert all(map(from_an_index, others))
    wheel = "pip install 'shoal[worker] @ file:///PATH/shoal-0.1.0-py3-none-any.whl'  # or shoal[server]"
    assert not any(map(from_an_index, (wheel, "helm install shoal helm/shoal", "install -d -o shoal /etc/shoal")))


def test_messages_say_where_shoal_is_installed_from() -> None:
    texts = [path.read_text(encoding="utf-8") for folder in PACKAGES for path in sorted((ROOT / folder).glob("*/*.py"))]
    texts += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "deploy").glob("*.sh"))]
    told = [rest for text in texts for rest in re.findall(r"install shoal(.{0,60})", text)]
    assert len(told) >= 7
    assert [rest for rest in told if " from its wheel" not in rest] == []


def test_the_handbook_names_all_extras() -> None:
    chapter = read("docs/deploying.md").partition("## The package")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", chapter, flags=re.MULTILINE))
    assert named == tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"].keys() - {"dev"}


def test_make_knows_what_the_documents_tell_to_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    text = "\n".join(path.read_text(encoding="utf-8") for path in TEXTS)
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
