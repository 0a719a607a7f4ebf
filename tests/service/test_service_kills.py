"""The control plane is killed at random moments while jobs are submitted and run: nothing that it acknowledged is lost,
nothing is begun twice, and every history is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from service_campaign import Campaign

Record = Callable[[str, object], None]


def campaign(tmp_path: Path, database_url: str, kills: int, record_property: Record) -> Campaign:
    settings = {"database_url": database_url, "plan_time_limit_s": "2"}
    found = Campaign(data_dir=tmp_path / "data", settings=settings, seed=kills)
    try:
        found.run(kills)
        record_property("judged", found.judge())
    finally:
        if found.plane is not None:
            found.plane.stop()
    return found


@pytest.mark.timeout(900)
def test_a_few_kills(tmp_path: Path, database_url: str, record_property: Record) -> None:
    found = campaign(tmp_path, database_url, 3, record_property)
    assert found.acknowledged and found.num_unanswered


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_kills(tmp_path: Path, database_url: str, record_property: Record) -> None:
    found = campaign(tmp_path, database_url, 100, record_property)
    assert len(found.acknowledged) >= 100 and found.num_unanswered
