#!/bin/sh
# Make the folder that tests/gpu/run.sh checks on a machine with a GPU:
#
#     sh tests/gpu/prepare.sh FOLDER [PYTHON_VERSION [MODEL...]]
#
# Compiles the bundles, and collects the loader for the Python version of that machine (3.12).
# PYTHON is a Python with the compiler installed; no GPU is needed.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
folder=$1
version=${2:-3.12}
shift; [ $# -eq 0 ] || shift
mkdir -p "$folder"
bundles=$(mktemp -d)
trap 'rm -rf "$bundles"' EXIT
"$python" -m tests.gpu.bundles "$bundles" "$@" --target "${TARGET:-cuda:sm_80,sm_90}" || true
tar -C "$bundles" --sort=name --mtime=@0 -czf "$folder/bundles.tar.gz" .
rm -rf "$folder/site"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$folder/wheel" .
"$python" -m pip install --quiet --no-compile --target "$folder/site" --no-deps "$folder"/wheel/*.whl
rm -rf "$folder/wheel"
"$python" -m pip install --quiet --no-compile --target "$folder/site" --no-deps \
    --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --upgrade "apache-tvm-ffi==0.1.14.post1" click typing_extensions "nvidia-cuda-runtime>=13,<13.1"
# What only building against these packages needs.
rm -rf "$folder"/site/nvidia/*/include "$folder"/site/nvidia/*/lib/*.a \
    "$folder"/site/tvm_ffi/include "$folder"/site/tvm_ffi/3rdparty "$folder"/site/tvm_ffi/src
cp tests/gpu/run.sh tests/gpu/check.py tests/gpu/loader.py "$folder/"
du -sh "$folder"/*
