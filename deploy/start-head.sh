#!/usr/bin/env bash
# Starts the head of a Ray cluster for Shoal on this machine and, where SHOAL_SERVER says to which, offers the cluster to a
# control plane. Arguments go to `ray start`; with --block it stays in the foreground, as containers and systemd want it.
#
# SHOAL_SERVER        URL of the control plane; none: `shoal connect` by hand, or not at all
# SHOAL_HEAD_PORT     port of the head (6379)
# SHOAL_HEAD_DIR      folder on a disk that keeps what the head knows, so that a head that is started again is the same one
#                     (~/.local/state/shoal/head); not used where RAY_REDIS_ADDRESS names a Redis that does
# SHOAL_CLUSTER_ID, SHOAL_TOKEN, SHOAL_TOKEN_FILE: as in start-connector.sh
# SHOAL_NODE_...      as in start-worker.sh, for a head that is to compute, too
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
drain_s=0 # there is nobody to leave a head that computes nothing
[ -z "${SHOAL_NODE_DEVICE:-}" ] || drain_s=75
# shellcheck source=deploy/ray-environment.sh
. "$here/ray-environment.sh"

if [ -z "${RAY_REDIS_ADDRESS:-}" ]; then
    export RAY_gcs_storage="${RAY_gcs_storage:-rocksdb}"
    export RAY_gcs_storage_path="${RAY_gcs_storage_path:-${SHOAL_HEAD_DIR:-$HOME/.local/state/shoal/head}}"
    mkdir -p "$RAY_gcs_storage_path"
fi
# A dead node is noticed within seconds: new actors would be placed on it meanwhile.
export RAY_health_check_initial_delay_ms="${RAY_health_check_initial_delay_ms:-5000}"
export RAY_health_check_period_ms="${RAY_health_check_period_ms:-1000}"
export RAY_health_check_timeout_ms="${RAY_health_check_timeout_ms:-3000}"
export RAY_health_check_failure_threshold="${RAY_health_check_failure_threshold:-3}"

port=${SHOAL_HEAD_PORT:-6379}
# What a head that has crashed leaves behind makes Ray believe, where a worker runs on this machine, too, that it lives.
if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    rm -f "${RAY_TMPDIR:-/tmp}/ray/ray_current_cluster"
fi
lines=$("$python" -m shoal_workers.node_options)
mapfile -t options <<<"$lines"

connect() {
    [ -z "${SHOAL_SERVER:-}" ] || SHOAL_CONNECT_ADDRESS="${SHOAL_NODE_ADDRESS:-127.0.0.1}:$port" "$here/start-connector.sh" "$@"
}
# What runs on nodes must not find the token: code of users runs there, too.
start=(env -u SHOAL_TOKEN -u SHOAL_TOKEN_FILE ray start --head --port="$port" "${options[@]}" "$@")
case " $* " in
*" --block "*)
    connect &
    exec "${start[@]}"
    ;;
*)
    "${start[@]}"
    connect 60
    ;;
esac
