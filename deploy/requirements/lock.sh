#!/bin/sh
# Writes the exact versions, with hashes, of what the images install: from the ranges in pyproject.toml, for the Python of
# the images. Needs uv. Run it for each release, or to take an update: sh deploy/requirements/lock.sh [--upgrade]
#
# torch and what it needs of CUDA are left out: the Dockerfile takes them from the index of the wanted build.
set -eu
cd "$(dirname "$0")/../.."

lock() {
    output=$1
    shift
    uv pip compile "$@" --universal --python-version 3.12 --generate-hashes --no-annotate --quiet \
        --custom-compile-command "sh deploy/requirements/lock.sh" --output-file "deploy/requirements/$output"
}

without_torch=""
for package in torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc \
    nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse \
    nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx; do
    without_torch="$without_torch --no-emit-package $package"
done

lock control-plane.txt pyproject.toml --extra server --extra oidc --extra otel --extra trackers "$@"
# shellcheck disable=SC2086 # a list of options
lock worker.txt pyproject.toml --extra worker $without_torch "$@"
lock build.txt deploy/requirements/build.in "$@"
for cloud in gcp azure; do
    lock "cloud-$cloud.txt" "deploy/requirements/cloud-$cloud.in" --constraint deploy/requirements/worker.txt "$@"
done
