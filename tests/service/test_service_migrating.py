"""`shoal migrate`: the tables of this version are there before a server of it starts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from postgres import RunningPostgres

from shoal.cli import run


def test_a_database_gets_its_tables_once_and_again_without_harm(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert run(["migrate", "--database-url", database_url, "--data-dir", str(tmp_path / "data")]) == 0
        assert "the database has the tables of this version" in capsys.readouterr().err
    assert not (tmp_path / "data" / "admin.token").exists()


def test_without_a_url_it_is_the_file_that_a_server_would_take(tmp_path: Path) -> None:
    assert run(["migrate", "--data-dir", str(tmp_path / "new")]) == 0
    with sqlite3.connect(tmp_path / "new" / "shoal.db") as database:
        assert database.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
    database.close()


def test_a_database_that_lets_nobody_in_is_told(postgres: RunningPostgres, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{postgres.new_database()}-that-is-not-there"
    assert run(["migrate", "--database-url", url]) == 2
    assert "database_url: the database refuses" in capsys.readouterr().err
    assert run(["migrate", "--database-url", "mysql://somewhere/else"]) == 2
    assert "must be postgresql:// or sqlite://" in capsys.readouterr().err
