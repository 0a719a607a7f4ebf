"""Whether the control plane of this container answers; exit status 0 or 1. Needs nothing but Python."""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request


def main() -> int:
    secure = "SHOAL_TLS_CERT" in os.environ
    url = f"http{'s' if secure else ''}://127.0.0.1:{os.environ.get('SHOAL_PORT', '8700')}/healthz"
    # The certificate is for the name by which others know this machine, and nothing secret is said.
    context = ssl._create_unverified_context() if secure else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if secure else [])
    )
    try:
        with opener.open(url, timeout=4):
            return 0
    except (urllib.error.URLError, OSError):
        return 1


if __name__ == "__main__":
    sys.exit(main())
