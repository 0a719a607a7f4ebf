"""`shoal connect --stay` and `shoal pre-stop`, as far as they go without Ray."""

from __future__ import annotations

import pytest
from control_plane import ControlPlane

from shoal.cli import run


def test_who_stays_gives_up_at_once_where_no_waiting_helps(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "a token that nobody has made")
    assert run(["connect", "--stay", "--server", plane.url]) == 1
    assert "the token is not known here" in capsys.readouterr().err
    assert run(["connect", "--stay", "--server", "shoal.example.org:8700"]) == 2
    assert "SHOAL_SERVER" in capsys.readouterr().err


def test_a_node_without_ranks_is_left_soon(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pre-stop", "0"]) == 0
    assert run(["pre-stop", "soon"]) == 2
    assert "SECONDS" in capsys.readouterr().err
