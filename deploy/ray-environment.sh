# shellcheck shell=bash
# What the start scripts have in common. Sourced by start-head.sh and start-worker.sh, which say in `drain_s` how long jobs
# may take to leave the node; sets `python` and Ray's variables.

if ! command -v ray >/dev/null 2>&1; then
    echo "$0: no ray program on PATH: install shoal[worker] from its wheel, or put its virtual environment's bin on PATH" >&2
    exit 1
fi
# The interpreter that Ray was installed for, of which `ray` may be a link elsewhere.
# shellcheck disable=SC2034 # those who source this use it
python=$(dirname "$(readlink -f "$(command -v ray)")")/python

# Nobody without the token starts anything in this cluster: Ray runs code of whoever asks.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
    echo "$0: no Ray token in ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}: make one with 'ray get-auth-token --generate'," \
        "and bring the same one to every node; or set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN" >&2
    exit 1
fi

# After a SIGTERM Ray drains its node for so long before it ends: jobs leave it meanwhile. Whoever sends the SIGTERM has to
# wait longer than that; units, compose and clouds here wait 90 s.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-$drain_s}"
# Ray would have training give way to everything else on the machine.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
# Ranks keep their memory between steps. Where they find this they need no environment of their own, and start a second sooner.
export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-1}"
# How long a node waits for a head that is away: as long as jobs step on without one (SHOAL_WORKER_ORPHANED_S). Ray's own
# minute is less than it takes to start a machine anew.
export RAY_gcs_rpc_server_reconnect_timeout_s="${RAY_gcs_rpc_server_reconnect_timeout_s:-600}"
# Many sockets: a connection for each pair of ranks, and one of each to agents and supervisor.
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -H -n)"
