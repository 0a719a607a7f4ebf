"""`python -m shoal_service`: the control plane alone, set up by SHOAL_ variables."""

from __future__ import annotations

import sys

from shoal_service.server import run
from shoal_service.settings import Settings

if __name__ == "__main__":
    try:
        run(Settings())
    except ValueError as error:
        sys.exit(f"shoal_service: {error}")
