#!/bin/sh
# On the head of a Ray cluster: offers the cluster to a control plane, and tries again until that comes about. What it
# starts stays in the cluster by itself. $1: how often it is tried, each 5 s; without it, for ever.
#
# SHOAL_SERVER           URL of the control plane
# SHOAL_CLUSTER_ID       what it shall call this cluster (ray)
# SHOAL_TOKEN            a token with the role `connector` for that cluster; or
# SHOAL_TOKEN_FILE       the file that it stands in, which is read for each try
# SHOAL_CONNECT_ADDRESS  of the Ray cluster (auto: that of this machine)
set -eu
if [ -z "${SHOAL_SERVER:-}" ]; then
    echo "start-connector.sh: SHOAL_SERVER is not set: it must be the URL of the control plane" >&2
    exit 2
fi
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
left=${1:-}
while :; do
    if [ -n "${SHOAL_TOKEN_FILE:-}" ] && [ -r "$SHOAL_TOKEN_FILE" ]; then
        SHOAL_TOKEN=$(cat "$SHOAL_TOKEN_FILE")
        export SHOAL_TOKEN
    fi
    status=0
    shoal connect --server "$SHOAL_SERVER" --cluster-id "${SHOAL_CLUSTER_ID:-ray}" \
        --address "${SHOAL_CONNECT_ADDRESS:-auto}" || status=$?
    case $status in
    0 | 2) exit "$status" ;; # done, or wrong usage, which trying again does not mend
    esac
    if [ -n "$left" ]; then
        left=$((left - 1))
        [ "$left" -gt 0 ] || exit "$status"
    fi
    sleep 5
done
