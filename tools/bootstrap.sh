#!/bin/sh
# Prints the path of a Python (>= 3.11) that can make virtual environments. Where there is none, it
# installs one with apt-get if it runs as root, and otherwise says what to install.
# `PYTHON=/path/to/python3` chooses one. Only the path goes to standard output.
set -eu

say() { echo "bootstrap: $*" >&2; }

suitable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Debian splits ensurepip off into python3-venv: a venv that imports may still not be made.
complete() {
    suitable "$1" && "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if "$1" "$PYTHON"; then command -v "$PYTHON"; fi
        return 0
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$1" "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
}

install() {
    export DEBIAN_FRONTEND=noninteractive
    say "installing $* with apt-get"
    apt-get update -q >&2
    apt-get install -q -y --no-install-recommends "$@" >&2
}

python=$(find_python complete)
if [ -z "$python" ] && [ -n "${PYTHON:-}" ]; then
    say "PYTHON=$PYTHON is not a Python >= 3.11 with the modules venv and ensurepip."
    exit 1
fi
if [ -z "$python" ]; then
    base=$(find_python suitable)
    wanted=python3-venv
    # A python3.12 beside an older python3 has a package of its own for the missing half.
    if [ -n "$base" ] && [ "$(basename "$base")" != python3 ]; then
        wanted=$(basename "$base")-venv
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        install python3 "$wanted"
        python=$(find_python complete)
    fi
fi
if [ -z "$python" ]; then
    say "no Python >= 3.11 that can make virtual environments was found."
    say "On Debian or Ubuntu: sudo apt-get install python3 ${wanted:-python3-venv}"
    say "Elsewhere: install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"
    exit 1
fi
# The incast laboratory builds networks with these. Without them its tests are skipped, and it says so itself.
if ! { command -v ip && command -v tc && command -v ethtool; } >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        install iproute2 ethtool || say "iproute2 and ethtool could not be installed; the laboratory needs them."
    else
        say "for the incast laboratory, as root: apt-get install iproute2 ethtool"
    fi
fi
echo "$python"
