#!/bin/sh
# Makes sure that what tests of deployments run is there, beside the interpreter of the virtual environment (PYTHON): a
# Prometheus with its promtool, and a Redis. They are Debian's, of which files are unpacked and nothing is installed, so
# none of them runs by itself. Does nothing where they are, and never fails a test run: without them the tests are
# skipped, with the reason.
set -eu
python=${PYTHON:-python3}
target=$(dirname "$python")
here() {
    [ -x "$target/$1" ] || command -v "$1" >/dev/null 2>&1
}
can_fetch() {
    command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1
}
# Packages, with those that they need and that are not installed here, into $work/tree. Needs no root: nothing is locked.
fetched() {
    apt-get install -qq -y --reinstall --download-only --no-install-recommends -o Debug::NoLocking=1 \
        -o Dir::Cache::archives="$work" "$@" >/dev/null 2>&1
}
unpacked() {
    mkdir -p "$work/partial"
    fetched "$@" || { apt-get update -qq >/dev/null 2>&1 && fetched "$@"; } || return 1
    for package in "$work"/*.deb; do
        dpkg-deb --extract "$package" "$work/tree" || return 1
    done
}
placed() {
    install -m 755 "$1" "$target/.$2" && mv "$target/.$2" "$target/$2"
}
prometheus() {
    unpacked prometheus && placed "$work/tree/usr/bin/prometheus" prometheus && placed "$work/tree/usr/bin/promtool" promtool
}
# Needs libraries that are not everywhere: they stay beside it.
redis() {
    unpacked redis-server redis-tools && rm -rf "$target/../redis" && mv "$work/tree" "$target/../redis" || return 1
    cat >"$work/start" <<'END'
#!/bin/sh
tree=$(dirname "$(dirname "$(readlink -f "$0")")")/redis/usr
LD_LIBRARY_PATH=$(echo "$tree"/lib/*-linux-gnu) exec "$tree/bin/redis-server" "$@"
END
    placed "$work/start" redis-server
}
brought() {
    work=$(mktemp -d)
    if ! { can_fetch && "$2"; }; then
        echo "tests/deploy: $1 could not be had; tests that need it will be skipped" >&2
    fi
    rm -rf "$work"
}
{ here prometheus && here promtool; } || brought Prometheus prometheus
here redis-server || brought Redis redis
