#!/bin/sh
# Gathers all wheels that a machine without the internet needs: sh deploy/bundle.sh control-plane|worker FOLDER
# Run it with Python 3.12 on Linux as `python3`, or say which with PYTHON; TORCH_INDEX is the index of the wanted build of
# torch, as in the Dockerfile.
set -eu
if [ $# -ne 2 ] || { [ "$1" != control-plane ] && [ "$1" != worker ]; }; then
    echo "usage: sh deploy/bundle.sh control-plane|worker FOLDER" >&2
    exit 2
fi
part=$1
mkdir -p "$2/wheels"
folder=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

"$python" -m pip download --quiet --no-deps --require-hashes --dest "$folder/wheels" -r "deploy/requirements/$part.txt"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" .
sed -n -e 's/ *\\$//' -e '/^[A-Za-z0-9]/p' "deploy/requirements/$part.txt" >"$folder/requirements.txt"
if [ "$part" = worker ]; then
    torch=$(sed -n 's/^ARG TORCH_VERSION=//p' deploy/Dockerfile)
    "$python" -m pip download --quiet --dest "$folder/wheels" \
        --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "torch==$torch"
    echo "torch==$torch" >>"$folder/requirements.txt"
fi
echo shoal >>"$folder/requirements.txt"
echo "$(find "$folder/wheels" -type f | wc -l) files in $folder/wheels"
