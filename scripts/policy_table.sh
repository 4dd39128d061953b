#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares all eviction policies with the full cache, and prints a table in Markdown.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<TEXT
usage: scripts/policy_table.sh [--text FILE] [--limit N] [--length N] [--seed N] [--state DIR] [-- EVAL OPTIONS]

Runs distillcache eval on kl, needle, multi-needle and kv-retrieval under every policy that needs no training, keeping
50, 25, 12.5 and 5 % of the tokens, and prints one Markdown table on standard output.

  --text FILE    text that kl takes its prompts from (default: generated prose)
  --limit N      items a task (default 20: about 20 minutes of two cores)
  --length N     tokens of context (default 1024)
  --seed N       which items (default 1)
  --state DIR    where finished items are kept; a second start goes on from there (default build/policy-table)
  -- ...         passed on to distillcache eval, e.g. -- --threads 4

DISTILLCACHE_MODEL=FILE instead of the default model.
TEXT
}

policies='random streaming h2o h2o_mean scissorhands tova snapkv pyramidkv adakv criticalkv keydiff knorm keyformer
  expected_attention cake laprox restkv rlkv hybrid'
tasks='kl needle multi-needle kv-retrieval'
ratios=0.5,0.25,0.125,0.05
limit=20
length=1024
seed=1
text=
state=$root/build/policy-table
options=()

while [ $# -gt 0 ]; do
  case $1 in
  --text | --limit | --length | --seed | --state)
    [ $# -ge 2 ] || die "$1 needs a value"
    declare "${1#--}=$2"
    shift
    ;;
  --help | -h)
    usage
    exit 0
    ;;
  --)
    shift
    options=("$@")
    break
    ;;
  *)
    usage >&2
    die "unknown option $1"
    ;;
  esac
  shift
done

need_packages "${program_packages[@]}"
model=${DISTILLCACHE_MODEL:-}
if [ -z "$model" ]; then
  need_default_model
  model=$model_file
fi
need_build build ""
command -v python3 >/dev/null || die "python3 is needed to write the table"

mkdir -p "$state"
chosen=()
for policy in $policies; do
  chosen+=(--kv-policy "$policy")
done
documents=()
for task in $tasks; do
  data=()
  if [ "$task" = kl ] && [ -n "$text" ]; then
    data=(--data "$text")
  fi
  "$root/build/distillcache" eval --model "$model" --json --task "$task" ${data[@]+"${data[@]}"} "${chosen[@]}" \
    --kv-ratio "$ratios" --length "$length" --limit "$limit" --seed "$seed" --resume "$state/$task.jsonl" \
    ${options[@]+"${options[@]}"} >"$state/$task.json"
  documents+=("$state/$task.json")
done
python3 "$root/scripts/policy_table.py" "${documents[@]}"
