#!/usr/bin/env bash
# A base image from Debian's own packages, for machines that reach no image registry: images/base.sh [NAME]
# Needs root, debootstrap and a running Docker engine; takes some minutes, 300 MB.
set -euo pipefail
name=${1:-cloudtrain-base:bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,procps,iproute2 bookworm "$folder/root" "$mirror" >"$folder/log" 2>&1 ||
  { tail -5 "$folder/log" >&2; exit 1; }
rm -rf "$folder"/root/var/cache/apt/archives/*.deb "$folder"/root/var/lib/apt/lists/*
tar -C "$folder/root" -c . | docker import - "$name" >/dev/null
echo "$name"
