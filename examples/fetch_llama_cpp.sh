#!/usr/bin/env bash
# Gets llama.cpp (MIT), builds its library for the CPU and prints the folder where it is installed, for CMAKE_PREFIX_PATH.
#
#   examples/fetch_llama_cpp.sh           the library
#   examples/fetch_llama_cpp.sh --peers   also llama-lookahead and llama-lookup, in bin/, for bench/llama_cpp
#
# The sources come from the package llama-cpp-python of PyPI (77 MB), pinned by checksum. Everything stays in
# ${XDG_CACHE_HOME:-~/.cache}/lookahead/llama.cpp; a second call builds nothing and needs no network. An interrupted
# build goes on where it was; of two calls at once one waits. CMAKE_BUILD_PARALLEL_LEVEL bounds the jobs. Whatever is
# not the path goes to standard error.
set -euo pipefail

case "$*" in
  "") programs=() ;;
  --peers) programs=(llama-lookahead llama-lookup) ;;
  *)
    echo "usage: examples/fetch_llama_cpp.sh [--peers]" >&2
    exit 2
    ;;
esac

package=llama-cpp-python==0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF)
# Virtual machines that announce AMX and lose its state end programs that use it with an illegal instruction.
if [ "$(uname -m)" = x86_64 ]; then
  no_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  options+=("-DCMAKE_C_FLAGS=$no_amx" "-DCMAKE_CXX_FLAGS=$no_amx")
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/lookahead
folder=$cache/llama.cpp

fail() {
  echo "fetch_llama_cpp.sh: $*" >&2
  exit 1
}

for tool in cmake ninja g++ flock; do
  command -v "$tool" >/dev/null || fail "$tool is missing; on Debian: apt-get install cmake ninja-build g++ util-linux"
done

# It is built for this processor: a cache that moves to another one, or a new compiler, has a build of its own.
key=$({
  echo "$sha256" "${options[@]}"
  g++ -dumpfullversion
  grep -m 1 '^flags' /proc/cpuinfo || uname -m
} | sha256sum | cut -c 1-12)
source=$folder/source-${sha256:0:12}
build=$folder/build-$key
prefix=$folder/install-$key

# Each part appears by one move on the same file system, so that no half of one is ever used.
fetch() {
  python3 -m pip --version >/dev/null 2>&1 ||
    fail "python3 with pip is missing; on Debian: apt-get install python3-pip"
  echo "downloading $package (77 MB) to $folder"
  # pip compares the checksum before it reads the package.
  echo "$package --hash=sha256:$sha256" >"$work/requirements.txt"
  python3 -m pip download --no-deps --no-cache-dir --no-binary llama-cpp-python --quiet --dest "$work" \
    --requirement "$work/requirements.txt" || fail "pip could not download $package; check the network"
  mkdir "$work/source"
  tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work/source" --strip-components=3 --no-same-owner \
    --exclude='*/llama.cpp/'{docs,media,models,tools/ui} --wildcards '*/vendor/llama.cpp'
  mv -T -- "$work/source" "$source"
}

# configure ON or OFF: with the programs or without; the objects of the library are the same.
configure() {
  cmake -S "$source" -B "$build" -G Ninja "${options[@]}" "-DLLAMA_BUILD_COMMON=$1" "-DLLAMA_BUILD_EXAMPLES=$1" \
    "-DLLAMA_BUILD_TOOLS=$1" "-DLLAMA_TOOLS_INSTALL=$1"
}

get() {
  mkdir -p -- "$folder"
  exec {lock}>"$folder/lock"
  flock "$lock"
  work=$(mktemp -d -- "$folder/work.XXXXXX")
  trap 'rm -rf -- "$work"' EXIT
  export CCACHE_DIR=$cache/ccache
  [ -d "$source" ] || fetch
  if [ ! -d "$prefix" ]; then
    echo "building llama.cpp in $build: many minutes, once"
    configure OFF
    cmake --build "$build"
    cmake --install "$build" --prefix "$work/install" >/dev/null
    mv -T -- "$work/install" "$prefix"
  fi
  local missing=()
  for program in "${programs[@]}"; do [ -x "$prefix/bin/$program" ] || missing+=("$program"); done
  [ ${#missing[@]} -eq 0 ] && return
  configure ON
  cmake --build "$build" --target "${missing[@]}"
  mkdir -p -- "$prefix/bin"
  for program in "${missing[@]}"; do
    cp -- "$build/bin/$program" "$work/$program"
    mv -- "$work/$program" "$prefix/bin/$program"
  done
}

ready=true
[ -d "$prefix" ] || ready=false
for program in "${programs[@]}"; do [ -x "$prefix/bin/$program" ] || ready=false; done
"$ready" || get </dev/null >&2
echo "$prefix"
