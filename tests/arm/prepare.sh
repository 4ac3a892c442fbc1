#!/bin/sh
# Puts what the loader needs on AArch64 into FOLDER: Python, its libraries, and the loader's packages.
#
#   prepare.sh FOLDER PYTHON
#
# Nothing is installed: Debian's packages and wheels for AArch64 are unpacked there, and run by qemu's
# user emulation. Wants a Debian machine with qemu-user. Leaves a finished folder as it is.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd) python=$2
[ -e "$folder/finished" ] && exit 0
rm -rf "$folder/root" "$folder/site" "$folder/debs" "$folder/wheels" "$folder/apt"
mkdir -p "$folder/root" "$folder/site" "$folder/debs" "$folder/wheels" \
    "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial"
touch "$folder/apt/status"

for_arm() {
    program=$1
    shift
    "$program" -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 \
        -o APT::Sandbox::User=root -o Dir::State="$folder/apt" -o Dir::State::Lists="$folder/apt/lists" \
        -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt/cache" "$@"
}

for_arm apt-get update
version=$(for_arm apt-cache depends python3-minimal | sed -n 's/.*Depends: \(python3\.[0-9]*\)-minimal/\1/p')
(cd "$folder/debs" && for_arm apt-get download libbz2-1.0 libc6 libexpat1 libffi8 libgcc-s1 liblzma5 \
    "lib$version-minimal" "lib$version-stdlib" libssl3 libstdc++6 "$version-minimal" zlib1g)
for package in "$folder"/debs/*.deb; do
    dpkg-deb -x "$package" "$folder/root"
done

installed() {
    "$python" -c "from importlib.metadata import version; print(version('$1'))"
}

platforms=$(for glibc in 17 24 27 28; do echo "--platform manylinux_2_${glibc}_aarch64"; done)
# shellcheck disable=SC2086  # the platforms are separate words
"$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp $platforms \
    --platform manylinux2014_aarch64 --python-version "${version#python}" -d "$folder/wheels" \
    "apache-tvm-ffi==$(installed apache-tvm-ffi)" click "ml-dtypes==$(installed ml-dtypes)" \
    "numpy==$(installed numpy)" typing-extensions
for wheel in "$folder"/wheels/*.whl; do
    "$python" -m zipfile -e "$wheel" "$folder/site"
done
ln -s "$version" "$folder/root/usr/bin/python3"
rm -rf "$folder/debs" "$folder/wheels" "$folder/apt"
touch "$folder/finished"
