#!/bin/sh
# Installs the system packages the build and the tests need, where apt and root are at hand; otherwise names them.
# `compiler` asks for what a build needs only. PYTHON: the interpreter that environments are made with.
set -eu
PYTHON=${PYTHON:-python3}
missing=""
want() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
can() { "$PYTHON" -c "$1" >/dev/null 2>&1 || missing="$missing $2"; }
want gcc gcc
want make make
want "$PYTHON" python3
# Debian's `venv` is there without python3-venv, but has no pip to put into an environment
can 'import ensurepip, venv' python3-venv
can 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' python3-dev
if [ "${1:-}" != compiler ]; then
    want objdump binutils
    want g++ g++
    [ -z "${FERMI_SOAK:-}" ] || want valgrind valgrind
    command -v clang-14 >/dev/null 2>&1 || want clang clang
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
