"""`python -m shoal_service`: the control plane alone, set up by SHOAL_ variables."""

from __future__ import annotations

import argparse
import sys

from shoal_service.server import run
from shoal_service.settings import Settings

_ABOUT = "The control plane alone. It takes no arguments: SHOAL_ variables set it up (docs/cli.md)."

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m shoal_service", description=_ABOUT).parse_args()
    try:
        run(Settings())
    except ValueError as error:
        sys.exit(f"shoal_service: {error}")
