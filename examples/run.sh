#!/usr/bin/env bash
# Builds the demo, if need be, and runs it. Every option is passed on; --help lists them.
#
#   examples/run.sh                              the bundled model, inflated to a size at which steps cost what they do
#   examples/run.sh "def mean(data):"            in use: 0.3 billion parameters, 0.7 GB of memory
#   examples/run.sh --smollm2 "question"         SmolLM2-135M-Instruct, a small chat model; the first time it downloads
#   examples/run.sh --smollm2 --raw "prompt"     93 MB; --raw completes the prompt as it is
#   examples/run.sh --model MODEL.gguf "prompt"  your own
#   examples/run.sh --llama-cpp "question"       the demo on llama.cpp, with SmolLM2 or the --model that is given: any
#                                                GGUF file; the first time it downloads and builds llama.cpp, 77 MB
#                                                and many minutes
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

prepare() {
  if command -v apt-get >/dev/null; then
    install_missing g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libpcre2-dev ||
      echo "not everything could be installed; trying to build all the same"
  fi
}

# build TARGET CMAKE_ARGUMENT...
build() {
  local target=$1
  shift
  if [ -x "$build/examples/$target" ] &&
    grep -qsxF "CMAKE_HOME_DIRECTORY:INTERNAL=$root" "$build/CMakeCache.txt"; then
    cmake --build "$build" --target "$target" -- --quiet | sed '/no work to do/d'
  else
    echo "building the demo in $build"
    cmake --fresh --preset demo -S "$root" -B "$build" "$@"
    cmake --build "$build" --target "$target"
  fi
}

prepare </dev/null >&2
# Options that come first are defaults: of those that are given twice the last one counts.
target=generate
options=(--inflate "1024,22,4096")
arguments=()
for argument in "$@"; do
  case $argument in
    --llama-cpp) target=llama_cpp_generate ;;
    --smollm2)
      model=$(bash "$root/examples/models/fetch.sh")
      # Its own types are twice as fast, but activations are rounded then, and the capital of France is a near tie.
      options=(--model "$model" --weights f16)
      ;;
    --model | --model=* | --help | -h) options=() ;;&
    *) arguments+=("$argument") ;;
  esac
done
if [ "$target" = llama_cpp_generate ]; then
  if [ ${#options[@]} -gt 0 ]; then
    model=$(bash "$root/examples/models/fetch.sh")
    options=(--model "$model")
  fi
  folder=$(bash "$root/examples/fetch_llama_cpp.sh")
  build=$root/build/demo_llama_cpp # configured otherwise
  build "$target" "-DCMAKE_PREFIX_PATH=$folder" </dev/null >&2
else
  build "$target" </dev/null >&2
fi
exec "$build/examples/$target" "${options[@]}" "${arguments[@]}"
