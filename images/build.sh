#!/usr/bin/env bash
# The image of the shared trainer on CPUs: images/build.sh [NAME]; BASE=image with Python 3.11 and its venv module.
# An image that was built of the same files is left as it is (its label says of which).
# Where there is no BASE one is made by base.sh. The wheels are fetched by this machine's pip (PYTHON), as it is configured: it must find
# torch for CPUs (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu), or the image holds CUDA too.
set -euo pipefail
cd "$(dirname "$0")"
name=${1:-cloudtrain-train:cpu}
base=${BASE:-cloudtrain-base:bookworm}
inputs=$(cat Dockerfile cpu.lock base.sh ../constraints.txt <(echo "$base") | sha256sum | cut -d' ' -f1)
[ "$(docker image inspect --format '{{index .Config.Labels "cloudtrain.inputs"}}' "$name" 2>/dev/null)" = "$inputs" ] && exit
docker image inspect "$base" >/dev/null 2>&1 || { [ -z "${BASE:-}" ] && ./base.sh "$base"; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m pip download --quiet --dest "$folder/wheels" --python-version 3.11 --only-binary :all: -r cpu.lock -c ../constraints.txt
cp Dockerfile cpu.lock "$folder"
DOCKER_BUILDKIT=0 docker build --quiet --build-arg "BASE=$base" --label "cloudtrain.inputs=$inputs" --tag "$name" "$folder"
