#!/usr/bin/env bash
# Makes the base image that the Dockerfile builds on, from this machine's Debian mirror: base-image.sh TAG
#
# It stands for a public python image where none can be pulled: Debian with python3 and venv, and with what this machine
# needs to reach its registries (certificates, apt's and pip's settings). Needs root, debootstrap and a docker daemon.
set -euo pipefail

tag=${1:?usage: base-image.sh TAG}
suite=bookworm
certificates=/etc/ssl/certs/ca-certificates.crt

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root" # it becomes the container's /

# The mirror that apt uses here; debootstrap's own choice on other systems.
# shellcheck disable=SC2016 # apt expands these
mirror=$(apt-get indextargets --format '$(SITE) $(RELEASE)' 'Created-By: Packages' 2>/dev/null |
    awk -v suite="$suite" '$2 == suite {print $1; exit}' || true)
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" ${mirror:+"$mirror"}

rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*

# How to reach the registries; settings about anything else, such as hooks, stay outside.
grep -lE '^Acquire::' /etc/apt/apt.conf /etc/apt/apt.conf.d/* 2>/dev/null |
    xargs -r cp -t "$root/etc/apt/apt.conf.d/" || true
changes=()
if [[ -e $certificates ]]; then
    install -D -m 644 "$certificates" "$root$certificates"
    changes+=(--change "ENV PIP_CERT=$certificates")
fi
index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
if [[ -n $index ]]; then
    changes+=(--change "ENV PIP_INDEX_URL=$index")
fi

tar --numeric-owner -C "$root" -c . | docker import "${changes[@]}" - "$tag"
