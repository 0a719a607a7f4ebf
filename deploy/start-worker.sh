#!/usr/bin/env bash
# Makes this machine a worker of a Ray cluster, labelled so that Shoal knows what it has. Arguments go to `ray start`;
# with --block it stays in the foreground, as containers and systemd want it.
#
# SHOAL_HEAD_ADDRESS  HOST:PORT of the head; behind Ray's cluster launcher RAY_HEAD_IP says it
# SHOAL_NODE_...      what this machine is: docs/deploying.md
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
drain_s=75
# shellcheck source=deploy/ray-environment.sh
. "$here/ray-environment.sh"

head=${SHOAL_HEAD_ADDRESS:-${RAY_HEAD_IP:+$RAY_HEAD_IP:6379}}
if [ -z "$head" ]; then
    echo "start-worker.sh: SHOAL_HEAD_ADDRESS is not set: it must be HOST:PORT of the head, as 10.0.0.5:6379" >&2
    exit 2
fi
lines=$("$python" -m shoal_workers.node_options "$head")
mapfile -t options <<<"$lines"
exec ray start --address="$head" "${options[@]}" "$@"
