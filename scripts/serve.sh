#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up what is missing (packages, the default model, the program) and serves.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/serve.sh [options of distillcache serve]

Installs missing Debian packages (as root; otherwise says which), fetches and checks the default model
(SmolLM2-135M-Instruct) unless another is chosen, builds build/distillcache, and serves on 127.0.0.1:8080.
What is done already is skipped. All options go to the program:

  --model FILE, DISTILLCACHE_MODEL=FILE, or `model:` in the file of --config   another model; nothing is fetched
  --help       this text, and the program's options once it is built
TEXT
  if [ -x "$root/build/distillcache" ]; then
    echo
    "$root/build/distillcache" serve --help
  fi
}

# Whether the user chose a model: on the command line, in the environment, or in the configuration file.
model_chosen() {
  local file=${DISTILLCACHE_CONFIG:-}
  [ -n "${DISTILLCACHE_MODEL+set}" ] && return 0
  while [ $# -gt 0 ]; do
    case $1 in
    --model | --model=*) return 0 ;;
    --config) file=${2:-} ;;
    --config=*) file=${1#--config=} ;;
    --) break ;;
    esac
    shift
  done
  [ -n "$file" ] && [ -f "$file" ] && grep -q '^model[[:space:]]*:' "$file"
}

for argument; do
  case $argument in
  --help | -h)
    usage
    exit 0
    ;;
  --) break ;;
  esac
done

need_packages "${program_packages[@]}"
choice=()
if ! model_chosen "$@"; then
  need_default_model
  choice=(--model "$model_file")
fi
need_build build distillcache -Dtests=false
exec "$root/build/distillcache" serve "${choice[@]}" "$@"
