#!/bin/sh
# Makes or completes the environment of the Makefile: setup-env.sh VENV STAMP [PYTHON].
# Needs a Python 3.11 to 3.13; a C compiler only for learn2learn, which is left out without one.
set -eu

venv=$1
stamp=$2
asked=${3:-}

# Runs a command and says every 30 seconds that it goes on.
patiently() {
    doing=$1
    shift
    (
        passed=0
        while sleep "${SETUP_SECONDS:-30}" >/dev/null 2>&1; do  # a sleep that is left over holds no pipe
            passed=$((passed + ${SETUP_SECONDS:-30}))
            say "still $doing, after $passed s"
        done
    ) &
    clock=$!
    trap 'kill "$clock" 2>/dev/null' EXIT
    status=0
    "$@" || status=$?
    kill "$clock" 2>/dev/null || true
    wait "$clock" 2>/dev/null || true
    trap - EXIT
    return "$status"
}

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo "not a Python"; }

find_python() {
    if [ -n "$asked" ]; then
        fits "$asked" || fail "PYTHON=$asked is $(version_of "$asked"); give a Python 3.11, 3.12 or 3.13"
        python=$asked
        return
    fi
    for python in python3 python3.13 python3.12 python3.11 python; do
        if fits "$python"; then return; fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found (python3 is $(version_of python3)); install one, or name it: make PYTHON=..."
}

make_environment() {
    find_python
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; on Debian and Ubuntu install python3-venv"
    say "making the environment $venv with Python $(version_of "$python")"
    mkdir -p "$venv" 2>/dev/null || fail "the folder $venv cannot be made; name another with VENV=..."
    : > "$venv/.made-by-metapretrain" || fail "the folder $venv cannot be written; name another with VENV=..."
    "$python" -m venv "$venv"
}

build_learn2learn() {
    if ! command -v "${CC:-cc}" >/dev/null 2>&1 && ! command -v gcc >/dev/null 2>&1 &&
        ! command -v clang >/dev/null 2>&1; then
        say "note: no C compiler found: learn2learn, an optional extra, is left out"
        return
    fi
    log=$venv/learn2learn-build.log
    say "building learn2learn"
    # --no-deps: its requirements bring numpy below 2 and 44 packages that nothing here uses.
    # build_ext: its C files as shipped do not compile on Python 3.11 and later.
    # shellcheck disable=SC2086
    if ! "$venv/bin/python" -m pip install --no-deps ${PIP_ARGS:-} ${LEARN2LEARN_PIP_ARGS:-} \
        --config-settings="--build-option=build_ext" learn2learn==0.2.0 >"$log" 2>&1; then
        say "note: learn2learn, an optional extra, could not be built and is left out; the reason is in $log"
    fi
}

if [ ! -x "$venv/bin/python" ]; then
    if [ -e "$venv" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/.made-by-metapretrain" ]; then
        fail "$venv exists and is not a Python environment; name another with VENV=..."
    fi
    make_environment
fi
fits "$venv/bin/python" ||
    fail "the environment $venv has Python $(version_of "$venv/bin/python"), not 3.11 to 3.13; name another with VENV=..."

say "installing (a few minutes the first time: torch is large)"
rm -f "$venv"/.metapretrain-*
# A set-up that was stopped half-way, or another tool, can leave an environment without pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install -qq --upgrade ${PIP_ARGS:-} pip
# shellcheck disable=SC2086
patiently "installing" "$venv/bin/python" -m pip install -qq --no-warn-conflicts ${PIP_ARGS:-} -e '.[dev,learn2learn]'
build_learn2learn
touch "$stamp"
say "done; next: . $venv/bin/activate   puts metapretrain and tensorboard on the path"
