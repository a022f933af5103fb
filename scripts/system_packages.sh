#!/bin/sh
# Installs the Debian packages that building and testing need, and only those that are missing.
# Usage: system_packages.sh PYTHON. A machine that has everything is left alone and needs no root.
set -eu
python=$1

"$python" - <<'CHECK' || exit 1
import sys
if sys.version_info < (3, 11):
    version = sys.version.split()[0]
    sys.exit(f"fold3d needs Python 3.11 or newer, but {sys.executable} is {version}: run make PYTHON=/path/to/python3.11")
CHECK

missing=
need() { # package, command that succeeds when it is there
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
need g++ g++ --version
need python3-dev "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")'
need python3-venv "$python" -c 'import ensurepip, venv'
need libgtest-dev test -e /usr/include/gtest/gtest.h
need libgmock-dev test -e /usr/include/gmock/gmock.h
need iproute2 test -x /sbin/tc -o -x /usr/sbin/tc
# Tests of rounds on Slurm are skipped without these, so nobody who may not install them is held up.
if command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || command -v sudo >/dev/null; }; then
    need slurmctld test -x /usr/sbin/slurmctld
    need slurmd test -x /usr/sbin/slurmd
    need slurm-client test -x /usr/bin/sbatch
    need slurm-wlm-basic-plugins test -e "/usr/lib/$(uname -m)-linux-gnu/slurm-wlm/select_cons_tres.so"
fi
[ -n "$missing" ] || exit 0

echo "installing system packages:$missing"
if ! command -v apt-get >/dev/null; then
    echo "no apt-get here: install what corresponds to$missing with this system's own tool, then run make again" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null; then
    as_root=sudo
else
    echo "not root and no sudo: ask an administrator for$missing, then run make again" >&2
    exit 1
fi
$as_root apt-get update -qq
# shellcheck disable=SC2086  # one word per package
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
