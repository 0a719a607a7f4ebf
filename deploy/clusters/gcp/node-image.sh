#!/usr/bin/env bash
# Makes a machine with NVIDIA's driver, of Ubuntu's accelerator images on Google Cloud, into what run-node.sh needs: Docker,
# NVIDIA's container toolkit, rsync. Run it there as root, once, and make an image of the disk (docs/clouds.md).
set -euo pipefail
keyring=/usr/share/keyrings/nvidia-container-toolkit.gpg
repository=https://nvidia.github.io/libnvidia-container
export DEBIAN_FRONTEND=noninteractive

curl --fail --silent --show-error --location "$repository/gpgkey" | gpg --dearmor --yes --output "$keyring"
echo "deb [signed-by=$keyring] $repository/stable/deb/$(dpkg --print-architecture) /" \
    >/etc/apt/sources.list.d/nvidia-container-toolkit.list
apt-get update
apt-get install --yes --no-install-recommends docker.io nvidia-container-toolkit rsync
# Half an update of the driver, its libraries and not the module that runs, would take the devices from a job.
apt-get purge --yes unattended-upgrades
nvidia-ctk runtime configure --runtime=docker
systemctl enable docker
systemctl restart docker
docker info --format '{{json .Runtimes}}' | grep --quiet nvidia
command -v nvidia-smi
