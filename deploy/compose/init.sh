#!/bin/sh
# Makes the secrets of compose.yaml, once: a file .env beside it that only you can read. Replaces none.
set -eu
cd "$(dirname "$0")"
if [ -e .env ]; then
    echo "init.sh: .env is there already; delete it, and the volumes that know its passwords, for new ones" >&2
    exit 1
fi
secret() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}
umask 077
cat >.env <<END
RAY_AUTH_TOKEN=$(secret)
POSTGRES_PASSWORD=$(secret)
S3_ACCESS_KEY=$(secret)
S3_SECRET_KEY=$(secret)
GRAFANA_PASSWORD=$(secret)
END
echo "wrote $PWD/.env"
