#!/bin/sh
# Installs the system packages the build and the tests need, where apt and root are at hand; otherwise names them.
# `compiler` asks for what a build needs only.
set -eu
missing=""
want() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
want gcc gcc
want make make
if [ "${1:-}" != compiler ]; then
    want objdump binutils
    want qemu-x86_64 qemu-user
fi
[ -n "$missing" ] || exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "installing system packages:$missing"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    echo "system packages are missing:$missing (on Debian: sudo apt-get install$missing)" >&2
    exit 1
fi
