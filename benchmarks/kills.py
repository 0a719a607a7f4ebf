"""The control plane is killed (SIGKILL) at random moments under a stream of submissions, on SQLite and on PostgreSQL.

Usage: python -m benchmarks.kills [--json] [--kills N] [--seed N]

Two clients submit without a pause and two clusters bring journals while a real server in a process of its own is killed
and started again, N times for each database. `acknowledged.*` jobs were answered with 201; `lost.*` of them are not
there afterwards, `twice.*` jobs were begun by more than one cluster or created more than once, `gaps.*` jobs have a
history that is not what their cluster told. `unanswered.*` counts requests that a kill cut off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.reporting import answer

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # no package: tests and benchmarks start the same servers
from postgres import start_postgres
from service_campaign import Campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=100, help="of each database's server")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results: dict[str, float | None] = {}
    server = start_postgres()
    try:
        for name, url in (("sqlite", None), ("postgresql", server.new_database())):
            found = _killed(url, arguments.kills, arguments.seed)
            results |= {f"{figure}.{name}": value for figure, value in found.items()}
    finally:
        server.close()
    answer("kills", results, {"seed": arguments.seed})


def _killed(url: str | None, kills: int, seed: int) -> dict[str, int]:
    settings = {"plan_time_limit_s": "2"} | ({"database_url": url} if url else {})
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(data_dir=Path(folder), settings=settings, seed=seed)
        try:
            campaign.run(kills)
            assert campaign.complaints == [], campaign.complaints
            found: dict[str, int] = campaign.counts()
        finally:
            if campaign.plane is not None:
                campaign.plane.stop()
    return {"kills": kills} | found


if __name__ == "__main__":
    main()
