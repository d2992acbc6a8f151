#!/usr/bin/env bash
# Builds the demo, if need be, and runs it. Every option is passed on; --help lists them.
#
#   examples/run.sh
#   examples/run.sh "def mean(data):"
#   examples/run.sh --model MODEL.gguf "prompt"
#
# On Debian 12 it installs what is missing to build. Whatever is not the demo's own goes to standard error.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/demo

install_missing() {
  local package missing=()
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  echo "installing ${missing[*]}"
  local as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

build() {
  if command -v apt-get >/dev/null; then
    install_missing g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libpcre2-dev ||
      echo "not everything could be installed; trying to build all the same"
  fi
  if [ -x "$build/examples/generate" ] &&
    grep -qsxF "CMAKE_HOME_DIRECTORY:INTERNAL=$root" "$build/CMakeCache.txt"; then
    cmake --build "$build" --target generate -- --quiet | sed '/no work to do/d'
  else
    echo "building the demo in $build"
    cmake --fresh -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DLOOKAHEAD_BUILD_TESTS=OFF -DLOOKAHEAD_BUILD_BENCH=OFF
    cmake --build "$build" --target generate
  fi
}

build </dev/null >&2
exec "$build/examples/generate" "$@"
