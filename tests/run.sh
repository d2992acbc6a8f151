#!/usr/bin/env bash
# Builds and tests everything. On Debian 12 it installs what is missing.
#
#   tests/run.sh          all: g++ and clang, address, undefined-behaviour and thread sanitizers, nvcc where it is
#                         installed, format, names
#   tests/run.sh --quick  g++ alone and few random cases, for the inner loop
#
# Every failing step is reported, the last line counts tests and steps, and any failure gives exit status 1. With
# CI=true a skip is a failure. A million random cases, after a run:  ctest --preset long
# Compiled files are cached in ${XDG_CACHE_HOME:-~/.cache}/lookahead.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
exec </dev/null

case "$*" in
  "") presets="gcc clang asan tsan" ;;
  --quick) presets="gcc" ;;
  *)
    echo "usage: tests/run.sh [--quick]" >&2
    exit 2
    ;;
esac

jobs=$(nproc)
passed=0
failed=0
skipped=0
failures=()

note_failure() {
  failed=$((failed + 1))
  failures+=("$1")
  echo "FAILED: $1"
}

note_skip() {
  skipped=$((skipped + 1))
  echo "SKIPPED: $1"
  if [ "${CI:-}" = true ]; then note_failure "$1 (a skip fails where CI=true)"; fi
}

# step NAME COMMAND...: runs the command and counts it.
step() {
  local name=$1 start=$SECONDS
  shift
  echo
  echo "== $name"
  if "$@"; then
    passed=$((passed + 1))
    echo "== $name: ok, $((SECONDS - start)) s"
  else
    note_failure "$name"
  fi
}

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
      apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

build() {
  cmake --preset "$1" && cmake --build --preset "$1" -j "$jobs" -- -k 0
}

# The tests of one preset, each counted on its own.
run_tests() {
  local preset=$1 name=$2 junit=$PWD/build/$2.xml start=$SECONDS
  echo
  echo "== $name"
  mkdir -p build
  : >"$junit"
  "${no_aslr[@]}" ctest --preset "$preset" -j "$jobs" --output-junit "$junit"
  local status=$?
  cases_with() { grep -c "^[[:space:]]*<$1" "$junit"; }
  local good skips bad
  good=$(cases_with 'testcase .* status="run"')
  skips=$(cases_with 'skipped message="SKIP_RETURN_CODE')
  bad=$(($(cases_with 'testcase ') - good - skips))
  passed=$((passed + good))
  if [ "$status" -ne 0 ] || [ "$bad" -gt 0 ]; then
    note_failure "$name"
    if [ "$bad" -gt 1 ]; then failed=$((failed + bad - 1)); fi
  fi
  # ctest has named them above.
  for ((; skips > 0; --skips)); do note_skip "a test of $name"; done
  echo "== $name: $((SECONDS - start)) s"
}

# It needs a GPU for anything but saying so.
gpu_tests() {
  tests/gpu/run.sh
  local status=$?
  [ $status -eq 0 ] || [ $status -eq 77 ]
}

format() {
  find include examples tests bench \( -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 clang-format-14 --dry-run -Werror
}

# What it prints is searched by every configuration below.
get_llama_cpp() {
  local folder
  folder=$(examples/fetch_llama_cpp.sh) && export CMAKE_PREFIX_PATH=$folder
}

tidy() {
  clang-tidy-14 --quiet -p build/clang build/clang/tests/headers/every_header.cpp
}

packages=(g++ cmake ninja-build ccache doctest-dev libbenchmark-dev libcli11-dev nlohmann-json3-dev libpcre2-dev
  libtbb-dev python3-pip)
# llvm-14 has the symbolizer: without it a sanitizer's report names no function.
[ "$presets" = gcc ] || packages+=(clang-14 libclang-rt-14-dev llvm-14 clang-format-14 clang-tidy-14 libtorch-dev)
if command -v apt-get >/dev/null; then
  step "packages" install_missing "${packages[@]}"
else
  note_skip "packages: no apt-get here; what follows needs what Debian calls ${packages[*]}"
fi

# Relative to the checkout, so that a fresh clone elsewhere finds what an older one compiled.
export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
export CCACHE_DIR=${XDG_CACHE_HOME:-$HOME/.cache}/lookahead/ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=true
export CCACHE_MAXSIZE=2G
# The sanitizers of clang 14 cannot place their shadow memory under the wide address randomisation of newer kernels.
no_aslr=()
setarch -R true 2>/dev/null && no_aslr=(setarch -R)

[ "$presets" = gcc ] || step "llama.cpp, built once a cache" get_llama_cpp
for preset in $presets; do
  step "build $preset" build "$preset" # Whatever could be built is tested all the same.
  if [ "$presets" = gcc ]; then run_tests quick "test $preset"; else run_tests "$preset" "test $preset"; fi
done

if [ "$presets" != gcc ]; then
  if command -v nvcc >/dev/null; then step "build nvcc" build nvcc; else note_skip "build nvcc: nvcc is not on PATH"; fi
  step "device tests, where there is a device" gpu_tests
  step "format" format
  step "names and common mistakes (clang-tidy)" tidy
fi

echo
echo "${SECONDS} s in all"
for failure in "${failures[@]}"; do echo "FAILED: $failure"; done
if [ "$skipped" -gt 0 ]; then
  echo "$passed passed, $failed failed, $skipped skipped"
else
  echo "$passed passed, $failed failed"
fi
[ "$failed" -eq 0 ]
