#!/bin/sh
# Makes sure that the browser of tests/browser is there: Debian's chromium and one font. Does nothing where it is, and
# never fails a test run: without root the tests are skipped, with the reason.
set -eu
if [ -x /usr/bin/chromium ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "tests/browser: no apt-get here, so no chromium; the browser tests will be skipped" >&2
    exit 0
fi
as_root=""
if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "tests/browser: installing chromium needs root; the browser tests will be skipped" >&2
        exit 0
    fi
    as_root="sudo -n"
fi
export DEBIAN_FRONTEND=noninteractive
if ! { $as_root apt-get update -qq && $as_root apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; } >/dev/null; then
    echo "tests/browser: chromium could not be installed; the browser tests will be skipped" >&2
fi
