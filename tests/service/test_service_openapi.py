"""What the API says of itself holds: schemathesis asks the running server, signed in, for whatever its description
allows and does not allow, and no answer is one that the description lacks, or an error of the server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from api_campaign import BEYOND_SCHEMAS, campaign, judged
from control_plane import ok
from postgres import RunningPostgres


@pytest.mark.timeout(600)
def test_answers_are_those_that_are_described(tmp_path: Path) -> None:
    """A few of each route, at random; what lies at the borders of every field is in the campaign."""
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    assert judged(campaign(tmp_path, url, 1, 1, "--phases", "fuzzing")) >= 100


@pytest.mark.parametrize("role", ["viewer", "member", "admin"])
@pytest.mark.timeout(600)
def test_answers_to_those_who_may_not_do_all_are_described_too(tmp_path: Path, role: str) -> None:
    """Whoever has a role in one project; but for revoking tokens, of which the one that asks is one."""
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    more = ("--phases", "fuzzing", "--exclude-path", "/v1/tokens/{token_id}")
    assert judged(campaign(tmp_path, url, 3, 1, *more, role=role)) >= 100


def test_what_is_refused_beyond_the_schemas_is_about_routes_that_there_are(http: httpx.Client) -> None:
    paths = ok(http.get("/openapi.json"))["paths"]
    there = {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}
    assert BEYOND_SCHEMAS.keys() <= there


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_five_thousand_answers_are_those_that_are_described(
    tmp_path: Path, postgres: RunningPostgres, migrated: str
) -> None:
    """Every field at its borders and beyond them, then at random, then one request after the other. On PostgreSQL,
    which takes fewer values than SQLite."""
    assert judged(campaign(tmp_path, postgres.new_database(migrated), 2, 40)) >= 5000
