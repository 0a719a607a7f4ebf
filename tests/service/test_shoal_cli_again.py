"""Lists that are shown anew, and curves in a line of text."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from shoal import cli_again
from shoal.cli import run
from shoal.cli_again import show_list
from shoal.cli_sparks import show_curves, sparkline


def shown(found: Sequence[Any]) -> None:
    sys.stdout.write(" ".join(found) + "\n")


def test_a_list_is_shown_until_somebody_has_seen_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, pauses = iter([["one"], ["one", "two"]]), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli_again.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        show_list(lambda: next(asked), shown, as_json=False, watch=True)
    assert capsys.readouterr().out == "one\none two\n"
    assert pauses == [2.0, 2.0]


def test_a_list_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    show_list(lambda: ["one"], shown, as_json=False, watch=False)
    show_list(lambda: ["one"], shown, as_json=True, watch=False)
    assert capsys.readouterr().out == 'one\n{"items": ["one"]}\n'


def test_a_program_is_told_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "of no importance")
    for command in ("list", "nodes"):
        assert run([command, "--watch", "--json"]) == 2
        said = capsys.readouterr()
        assert said.out == "" and "leave out one of --watch and --json" in said.err


def test_a_curve_in_a_line() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], "01234567") == "01234567"
    assert sparkline([7, 0], "01234567") == "70"
    assert sparkline([2, 2, 2], "01234567") == "000"
    assert sparkline([*range(1000)], "0123", width=4) == "0123"


def test_curves_of_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [{"loss": 4.0, "lr": 1.0}, {"loss": None}, {"loss": float("nan")}, {"loss": 2.0}]
    for encoding, curve in (("utf-8", "\u2588\u2581"), ("ascii", "#_")):
        written = io.BytesIO()
        text = io.TextIOWrapper(written, encoding=encoding, write_through=True)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", text)
            show_curves(points, ["loss", "lr", "grad_norm"])
        assert written.getvalue().decode(encoding).split() == ["loss", "4", curve, "2"]
