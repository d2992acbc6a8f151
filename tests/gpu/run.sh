#!/usr/bin/env bash
# Tests and benchmarks of the device side, for a machine with a GPU, nvcc and g++; nothing else is needed. On 16 cores
# it takes six minutes at most: what has not run by then counts as failed.
#
#   tests/gpu/run.sh            builds in build/gpu, runs all, prints a table last
#   tests/gpu/run.sh --prepare  copies doctest's header from this machine to tests/gpu/third_party, to take it along
#
# Exit status: 0, 1 where something failed, 77 where there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
exec </dev/null

third_party=tests/gpu/third_party
case "$*" in
  "") ;;
  --prepare)
    mkdir -p "$third_party" && cp -r /usr/include/doctest "$third_party/"
    exit
    ;;
  *)
    echo "usage: tests/gpu/run.sh [--prepare]" >&2
    exit 2
    ;;
esac

if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU' && ! [ -e /dev/nvidia0 ] && ! [ -e /dev/dxg ]; then
  echo "SKIPPED: this machine has no GPU for tests/gpu/run.sh: run it where nvidia-smi -L names one"
  exit 77
fi
if ! command -v nvcc >/dev/null; then
  echo "FAILED: nvcc is not on PATH: install the CUDA toolkit"
  exit 1
fi
if ! [ -e "$third_party/doctest/doctest.h" ] && ! [ -e /usr/include/doctest/doctest.h ]; then
  echo "FAILED: doctest/doctest.h is missing: install doctest-dev, or copy $third_party from where --prepare was run"
  exit 1
fi

most=360 # seconds
out=build/gpu
logs=$out/logs
rm -rf "$logs"
mkdir -p "$logs"
passed=0
failed=0
skipped=0
failures=()

# count NAME STATUS: the test's log is shown where it failed.
count() {
  case "$2" in
    0) passed=$((passed + 1)) && echo "ok: $1" ;;
    77) skipped=$((skipped + 1)) && echo "SKIPPED: $1" ;;
    *)
      failed=$((failed + 1))
      failures+=("$1")
      echo "FAILED ($2): $1"
      tail -n 40 "$logs/$1.log"
      ;;
  esac
}

# on_gpu NAME COMMAND...
on_gpu() {
  local name=$1 left=$((most - SECONDS))
  shift
  if [ "$left" -le 0 ]; then
    echo "not run: the $most seconds are over" >"$logs/$name.log"
    count "$name" 124
    return
  fi
  timeout $((left < 60 ? left : 60)) "$@" >"$logs/$name.log" 2>&1
  count "$name" $?
}

flags="-std=c++20 -O2 -arch=native -Iinclude -isystem $third_party"
export flags out logs most
compile() {
  local source=$1 name
  name=$(basename "${source%.*}")
  timeout $((most - 120)) nvcc $flags -c "$source" -o "$out/$name.o" >"$logs/build_$name.log" 2>&1 || echo "$name"
}
export -f compile
start=$SECONDS
broken=$(printf '%s\n' tests/gpu/*.cu tests/gpu/main.cpp | xargs -P "$(nproc)" -I{} bash -c 'compile {}')
for name in $broken; do count "build_$name" 1; done
echo "built in $((SECONDS - start)) s"

tests=()
for source in tests/gpu/test_*.cu; do
  name=$(basename "${source%.cu}")
  [ -e "$out/$name.o" ] && [ -e "$out/main.o" ] || continue
  if nvcc -arch=native "$out/$name.o" "$out/main.o" -o "$out/$name" >"$logs/link_$name.log" 2>&1; then
    tests+=("$name")
  else
    count "link_$name" 1
  fi
done

for name in "${tests[@]}"; do
  on_gpu "$name" env LOOKAHEAD_CASES="${LOOKAHEAD_CASES:-10000}" "$out/$name"
done
for name in "${tests[@]}"; do
  grep -q '"benchmark"' "tests/gpu/$name.cu" &&
    on_gpu "bench_${name#test_}" "$out/$name" --no-skip --test-case=benchmark --minimal
done
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
[ -n "$sanitizer" ] || count "compute-sanitizer: not found" 77
for name in "${tests[@]}"; do
  [ -n "$sanitizer" ] || break
  for tool in memcheck racecheck synccheck; do
    on_gpu "${name}_$tool" env LOOKAHEAD_CASES=100 "$sanitizer" --tool "$tool" --error-exitcode 1 "$out/$name"
  done
done

echo
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader 2>/dev/null
nvcc --version | tail -n 1
for log in "$logs"/bench_*.log; do
  [ -e "$log" ] && echo && grep -v '^\[doctest\]\|^=*$' "$log"
done
echo
echo "$SECONDS s in all"
for failure in "${failures[@]}"; do echo "FAILED: $failure"; done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
