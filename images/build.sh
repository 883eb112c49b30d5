#!/usr/bin/env bash
# The image of the shared trainer: images/build.sh [NAME]
#   KIND=cpu|gpu     which lock is installed (cpu)
#   BASE=IMAGE       with Python 3.11 and its venv module; where none is given, base.sh makes one of Debian's packages
#   TOOLKIT=1        with SageMaker's training toolkit too, for options.sagemaker.entry: toolkit (needs a C compiler here)
#   PYTHON=python3   whose pip fetches the wheels, as it is configured: for KIND=cpu it must find torch for CPUs
#                    (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu), or the image holds CUDA too
# An image that was built of the same files is left as it is (its label says of which).
set -euo pipefail
cd "$(dirname "$0")"
kind=${KIND:-cpu}
toolkit=${TOOLKIT:+sagemaker-training==5.1.4}
name=${1:-cloudtrain-train:$kind${TOOLKIT:+-toolkit}}
base=${BASE:-cloudtrain-base:bookworm}
python=${PYTHON:-python3}
[ -f "$kind.lock" ] || { echo "there is no $kind.lock: KIND is cpu or gpu" >&2; exit 2; }
inputs=$(cat Dockerfile "$kind.lock" base.sh ../constraints.txt <(echo "$base $toolkit") | sha256sum | cut -d' ' -f1)
[ "$(docker image inspect --format '{{index .Config.Labels "cloudtrain.inputs"}}' "$name" 2>/dev/null)" = "$inputs" ] && exit
docker image inspect "$base" >/dev/null 2>&1 || { [ -z "${BASE:-}" ] && ./base.sh "$base"; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The toolkit comes as source, with a C extension, and so does one that it pins: made into wheels first, by a Python of
# the image's version.
[ -z "$toolkit" ] || "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" "$toolkit" inotify_simple==1.2.1
"$python" -m pip download --quiet --dest "$folder/wheels" --find-links "$folder/wheels" --python-version 3.11 \
  --only-binary :all: -r "$kind.lock" $toolkit -c ../constraints.txt
cp Dockerfile "$kind.lock" "$folder"
DOCKER_BUILDKIT=0 docker build --quiet --network none --build-arg "BASE=$base" --build-arg "LOCK=$kind.lock" --build-arg "TOOLKIT=$toolkit" \
  --label "cloudtrain.inputs=$inputs" --tag "$name" "$folder"
