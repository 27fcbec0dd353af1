#!/bin/sh
# Removes caches, builds and the environment that `make` made: clean.sh VENV. Runs and data are left alone.
set -eu

venv=$1
if [ -e "$venv/.made-by-metapretrain" ]; then
    rm -rf "$venv"
elif [ -e "$venv" ]; then
    rm -f "$venv"/.metapretrain-*
    printf '%s\n' "left alone: $venv, which make did not make"
fi
rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
find metapretrain benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
