#!/usr/bin/env bash
# On a machine that Ray's cluster launcher has rented: runs it as head or worker, in the container that has Shoal. What
# lasts is in /var/lib/shoal and /var/tmp/shoal of the machine, which belong to the user of the image.
#   run-node.sh head|worker IMAGE [OPTION of ray start]...
#
# Beside this file: ray.token, the same on all nodes; node.env with what else the containers shall find in their
# environment (docs/clouds.md); and registry.json where the registry asks who pulls, as `docker login` writes it. Elastic
# Container Registry asks for the role of the machine instead. The launcher says who the head is, and what this node has.
set -euo pipefail
role=$1 image=$2
shift 2
# Asking also makes the files of devices that nothing has used yet. A machine that is paid for its GPUs and shows none must
# not become a node: the launcher ends one on which this fails.
gpus=()
if nvidia-smi --list-gpus >/dev/null 2>&1; then
    gpus=(--gpus all)
elif [[ ${RAY_OVERRIDE_LABELS:-} =~ \"shoal\.io/device\":\ *\"([^\"]+)\" && ${BASH_REMATCH[1]} != cpu-* ]]; then
    echo "$0: shoal.io/device = '${BASH_REMATCH[1]}': nvidia-smi lists no device here: this image has no driver for it" >&2
    exit 1
fi
here=$(dirname "$(readlink -f "$0")")
owner=(--owner=10001 --group=10001)
# Who logs in there need not be of the group that may use Docker; what the launcher has said must get through.
docker=(sudo "--preserve-env=RAY_HEAD_IP,RAY_OVERRIDE_RESOURCES,RAY_OVERRIDE_LABELS" docker --config /etc/shoal-registry)

sudo install --directory "${owner[@]}" --mode=700 /var/lib/shoal /var/lib/shoal/.ray /var/tmp/shoal
sudo install "${owner[@]}" --mode=600 "$here/ray.token" /var/lib/shoal/.ray/auth_token
for file in ray_bootstrap_config.yaml ray_bootstrap_key.pem; do
    [ ! -e "$HOME/$file" ] || sudo install "${owner[@]}" --mode=600 "$HOME/$file" "/var/lib/shoal/$file"
done
# This folder by the name that it has in the container, too: from there the head's autoscaler sends it to its workers.
sudo install --directory "${owner[@]}" --mode=700 "/var/lib/shoal/$(basename "$here")"
sudo install "${owner[@]}" --mode=600 "$here"/* "/var/lib/shoal/$(basename "$here")/"
if [ "$role" = worker ]; then # where code of users runs
    sudo rm --force "/var/lib/shoal/$(basename "$here")/registry.json"
fi

# Snapshots of the state live in shared memory: as much of it as they may need, of which nothing is taken before.
shared_kib=$(awk '/^MemTotal:/ {print int($2 * 3 / 4)}' /proc/meminfo)
sudo install --directory --mode=700 /etc/shoal-registry
if [ -e "$here/registry.json" ]; then
    sudo install --mode=600 "$here/registry.json" /etc/shoal-registry/config.json
fi
registry=${image%%/*}
if [[ $registry =~ ^[0-9]+\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?$ ]]; then
    aws ecr get-login-password --region "${BASH_REMATCH[1]}" |
        "${docker[@]}" login --username AWS --password-stdin "$registry"
fi
"${docker[@]}" pull --quiet "$image"
# What runs is let go first: jobs leave the node meanwhile.
"${docker[@]}" stop -t 90 shoal >/dev/null 2>&1 || true
"${docker[@]}" rm --force shoal >/dev/null 2>&1 || true
exec "${docker[@]}" run --detach --name shoal --restart unless-stopped --stop-timeout 90 --network host "${gpus[@]}" \
    --security-opt no-new-privileges --cap-drop ALL --ulimit nofile=65536 --shm-size "${shared_kib}k" \
    --env-file "$here/node.env" --env RAY_HEAD_IP --env RAY_OVERRIDE_RESOURCES --env RAY_OVERRIDE_LABELS \
    --log-opt max-size=20m --log-opt max-file=5 \
    --volume /var/lib/shoal:/var/lib/shoal --volume /var/tmp/shoal:/var/tmp/shoal \
    "$image" "start-$role.sh" --block "$@"
