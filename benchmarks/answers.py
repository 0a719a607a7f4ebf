"""Whether the API answers as it says of itself: schemathesis, all checks, against a real server on PostgreSQL.

Usage: python -m benchmarks.answers [--json] [--examples N] [--seed N]

Every field of every operation at its borders and beyond them, then N times at random, then one request after the other.
`cases` is how many requests were tried, `clean` 1 if no check of any of them failed (else 0, and `runs` has what was
said), and `errors` how many requests failed within the server, by its own log.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.reporting import answer

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # no package: tests and benchmarks start the same servers
from api_campaign import campaign  # type: ignore[import-not-found]
from postgres import start_postgres


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--examples", type=int, default=40, help="of each operation at random")
    parser.add_argument("--seed", type=int, default=2)
    arguments = parser.parse_args()
    server = start_postgres()
    try:
        with tempfile.TemporaryDirectory() as folder:
            asked = campaign(Path(folder), server.new_database(), arguments.seed, arguments.examples)
    finally:
        server.close()
    results: dict[str, float | None] = {
        "cases": asked.cases,
        "clean": int(asked.is_clean),
        "errors": asked.errors,
    }
    said = None if asked.is_clean and not asked.errors else asked.said
    answer("answers", results, {"seed": arguments.seed, "examples": arguments.examples, "said": said})


if __name__ == "__main__":
    main()
