"""`shoal rent` as users run it: the answer for people and for programs, and sentences about what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rent_ground import offer

from shoal import cli

JOB = {
    "name": "rented",
    "model": {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 2752, "vocab": 32000},
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 32, "seq_len": 1024, "steps": 5000, "precision": "bf16"},
    "checkpoint": {"uri": "s3://bucket/rented"},
}
OFFERS = {"offers": [offer("RTX4090", 3, spot=True, inter_gbit_per_s=25), offer("A40", 2, inter_gbit_per_s=25)]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "market.yaml").write_text(yaml.safe_dump(OFFERS))
    (tmp_path / "calm.csv").write_text("t_s,available\n0,4\n36000000,4\n")
    (tmp_path / "rough.csv").write_text("t_s,available\n" + "".join(f"{600 * i},{4 - i % 2}\n" for i in range(2000)))
    return tmp_path


def rent(files: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = cli.run(["rent", str(files / "job.yaml"), "--market", str(files / "market.yaml"), *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def answer(files: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    status, out, err = rent(files, capsys, *options, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    found: dict[str, Any] = json.loads(out)
    return found


def test_for_programs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(files, capsys, "--budget", "2.2", "--seed", "3")
    assert sum(entry["count"] * entry["price_per_hour"] for entry in found["fleet"]) <= 2.2
    assert found["price_per_hour"] <= found["budget_per_hour"] == 2.2
    assert found["seed"] == 3 and found["truncated"] is False
    nodes = {replica["node"] for p in found["plan"]["pipelines"] for s in p["stages"] for replica in s["replicas"]}
    assert len(nodes) == sum(entry["count"] for entry in found["fleet"])
    assert 0 < found["tokens_per_s"] <= found["plan"]["predicted"]["tokens_per_s"]


def test_for_people(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = rent(files, capsys, "--budget", "2.2", "--held", "a40=1", "--held", "rtx4090=2")
    assert (status, err) == (0, "")
    for words in ("OFFER", "OTHER FLEETS", "expected:", "USD per million tokens", "of the 3 nodes that are rented"):
        assert words in out


def test_objective_deadline_and_survival(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = answer(files, capsys, "--budget", "3")
    cheap = answer(files, capsys, "--budget", "3", "--objective", "cost")
    assert cheap["usd_per_million_tokens"] <= fast["usd_per_million_tokens"]
    timely = answer(files, capsys, "--budget", "3", "--objective", "cost", "--deadline", str(fast["hours"] * 1.001))
    assert timely["hours"] <= fast["hours"] * 1.001
    safe = answer(files, capsys, "--budget", "1.1", "--survive")
    assert any(entry["offer"] == "a40" for entry in safe["fleet"])


def test_a_history_goes_before_what_is_usual(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {
        name: answer(files, capsys, "--budget", "0.54", "--history", f"rtx4090={files / name}")["goodput"]
        for name in ("calm.csv", "rough.csv")
    }
    assert rates["calm.csv"]["interruptions_per_h"] < 0.01
    assert rates["rough.csv"]["interruptions_per_h"] > 0.5


def test_histories_of_other_pools_say_what_pools_are_like(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rate(*histories: str) -> dict[str, Any]:
        options = [text for name in histories for text in ("--history", name)]
        found: dict[str, Any] = answer(files, capsys, "--budget", "0.54", *options)["rates"][0]
        return found

    others = [str(files / f"calm-{index}.csv") for index in range(3)]
    for name in others:
        Path(name).write_text("t_s,available\n0,4\n1800000,3\n3600000,4\n7200000,4\n")
    usual, few, enough = rate(), rate(*others), rate(*others, str(files / "calm.csv"))
    assert usual["pool"] == "rtx4090" and "public recordings" in usual["source"]
    assert few == usual  # three pools do not tell how much pools differ
    assert enough["per_node_h"] < 0.01 and "the 4 pools whose history is given" in enough["source"]


def test_what_is_done_need_not_be_paid_again(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = answer(files, capsys, "--budget", "2.2", "--held", "a40=1")
    half = answer(files, capsys, "--budget", "2.2", "--held", "a40=1", "--done", "2500")
    assert half["fleet"] == whole["fleet"]
    assert half["hours"] == pytest.approx(whole["hours"] / 2) and half["usd"] == pytest.approx(whole["usd"] / 2)
    status, out, _ = rent(files, capsys, "--budget", "2.2", "--done", "2500")
    assert status == 0 and "hours for the 2,500 steps that are left" in out and "KNOWN FROM" in out


def test_a_search_that_is_cut_short_says_so(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = rent(files, capsys, "--budget", "2.2", "--time-limit", "0.001")
    assert status == 0 and "expected:" in out
    assert "the search was cut short" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", "0.2"), "budget = 0.2: buys nothing: the cheapest offer, rtx4090, costs 0.53 an hour"),
        (("--budget", "-1"), "budget = -1.0: must be more than zero"),
        (("--budget", "nan"), "budget = nan"),
        (("--budget", "x"), "'--budget'"),
        ((), "'--budget'"),
        (("--budget", "2", "--objective", "luck"), "'--objective'"),
        (("--budget", "2", "--deadline", "0"), "deadline = 0.0: must be more than zero"),
        (("--budget", "2", "--deadline", "0.001"), "no fleet within 2 USD an hour is done in 0.001 hours; the fastest"),
        (("--budget", "2", "--held", "t4=1"), "'t4' is not an offer of the market; known: a40, rtx4090"),
        (("--budget", "2", "--held", "a40=x"), "--held a40=x: must be OFFER=COUNT"),
        (("--budget", "2", "--held", "a40"), "--held a40: must be OFFER=COUNT"),
        (("--budget", "2", "--held", "a400=1"), "'a400' is not an offer of the market; did you mean 'a40'?"),
        (("--budget", "2", "--done", "5000"), "done = 5000: must be fewer steps than the job has (5,000), or none"),
        (("--budget", "2", "--done", "-1"), "done = -1: must be fewer steps"),
        (("--budget", "2", "--history", "a40=CALM", "--history", "a40=CALM"), "--history: a40 is given twice"),
        (("--budget", "2", "--history", "a40=nowhere.csv"), "nowhere.csv: cannot be read"),
        (("--budget", "2", "--history", "a40=JOB"), "must be t_s,available or t_s,op,node"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_status_2(
    files: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    options = tuple(
        option.replace("JOB", str(files / "job.yaml")).replace("CALM", str(files / "calm.csv")) for option in options
    )
    status, out, err = rent(files, capsys, *options)
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_a_market_that_cannot_be_read(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "market.yaml").write_text("offers:\n  - {name: a, device: A41, available: 1, price_per_hour: 1}\n")
    status, _, err = rent(files, capsys, "--budget", "2")
    assert status == 2
    assert "market.yaml: offers[0].device = 'A41': is not a known device type; did you mean" in err


def test_a_model_that_no_fleet_holds(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {**JOB, "model": {"layers": 96, "hidden": 12288, "heads": 96, "ffn": 33024, "vocab": 32000}}
    (files / "job.yaml").write_text(yaml.safe_dump(large))
    status, out, err = rent(files, capsys, "--budget", "20")
    assert (status, out) == (2, "")
    assert "no fleet within 20 USD an hour fits the job; not even 2 x a40 + 3 x rtx4090: " in err
    assert "nor does any fleet of a single offer that was tried, whatever it costs" in err


def test_a_budget_that_is_too_small_says_what_would_do(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    larger = {**JOB, "model": {"layers": 72, "hidden": 2048, "heads": 16, "ffn": 5504, "vocab": 32000}}
    (files / "job.yaml").write_text(yaml.safe_dump(larger))
    status, out, err = rent(files, capsys, "--budget", "0.53")
    assert (status, out) == (2, "")
    assert "the cheapest fleet of a single offer that fits, 1 x a40, costs 0.55 USD an hour" in err
