#!/bin/sh
# Check bundles on a machine with a GPU: sh tests/gpu/run.sh FOLDER
#
# FOLDER is what tests/gpu/prepare.sh makes: bundles.tar.gz, and site/ with the loader for a Python
# that has none. Prints one line for each bundle, and goes on after failures. The exit code is the
# number of failures. Needs Python 3.10 or later with numpy, and nothing of the compiler.
set -u
folder=$(cd "${1:-$(dirname "$0")}" && pwd)
python=${PYTHON:-python3}
limit=${LIMIT:-60}
PYTHONPATH=$folder/site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -c "import tarfile, sys; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" \
    "$folder/bundles.tar.gz" "$work" || exit 1
"$python" -m hybridc doctor | grep -v missing
failed=0
for bundle in "$work"/*; do
    timeout -k 5 "$limit" "$python" "$folder/check.py" "$bundle"
    code=$?
    [ $code -eq 0 ] || failed=$((failed + 1))
    [ $code -lt 2 ] || echo "$(basename "$bundle") FAILED: exit code $code (124: over $limit s)"
done
for check in refusals threads two_models memory on_device; do
    timeout -k 5 "$limit" "$python" "$folder/loader.py" "$work" $check || {
        failed=$((failed + 1))
        echo "loader: $check ended with a failure or was stopped after $limit s"
    }
done
echo "$failed failures"
exit $failed
