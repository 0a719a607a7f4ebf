#!/bin/sh
# Makes sure that the Prometheus of tests and its promtool are there, beside the interpreter of the virtual environment
# (PYTHON): Debian's, of which two files are unpacked and nothing is installed. Does nothing where they are, and never
# fails a test run: without them the tests are skipped, with the reason.
set -eu
python=${PYTHON:-python3}
target=$(dirname "$python")
here() {
    [ -x "$target/$1" ] || command -v "$1" >/dev/null 2>&1
}
if here prometheus && here promtool; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg-deb >/dev/null 2>&1; then
    echo "tests/deploy: no apt-get here, so no Prometheus; tests that need it will be skipped" >&2
    exit 0
fi
work=$(mktemp -d)
fetched() {
    (cd "$work" && apt-get download -qq prometheus) >/dev/null 2>&1
}
placed() {
    install -m 755 "$work/unpacked/usr/bin/$1" "$target/.$1" && mv "$target/.$1" "$target/$1"
}
if { fetched || { apt-get update -qq >/dev/null 2>&1 && fetched; }; } &&
    dpkg-deb --extract "$work"/prometheus_*.deb "$work/unpacked" && placed prometheus && placed promtool; then
    :
else
    echo "tests/deploy: Prometheus could not be had; tests that need it will be skipped" >&2
fi
rm -rf "$work"
