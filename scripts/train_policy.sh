#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains the policy that ships for the default model, or one for another model.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<TEXT
usage: scripts/train_policy.sh --text FILE [--questions FILE] [--method M] [--out FILE] [--seed N] [-- TRAIN OPTIONS]

Makes training data of the first half of a text of articles (WikiText's form) and of questions with answers (GSM8K's
form), trains, and writes the policy where the program looks for the one that ships for this model.

  --text FILE       articles; WikiText-2's validation set for the policy that ships
  --questions FILE  {"question", "answer"} a line; the first 3,000 of GSM8K's training set for the one that ships
  --method M        distillcache (default) or ranker
  --out FILE        default: policy/trained/FINGERPRINT.safetensors, FINGERPRINT-ranker.safetensors
  --seed N          default 1
  -- ...            passed on to distillcache train, e.g. -- --set rank_steps=6000 --plot curves.svg

Goes on where it was stopped. DISTILLCACHE_MODEL=FILE instead of the default model.
TEXT
}

text=
questions=
method=distillcache
out=
seed=1
options=()

while [ $# -gt 0 ]; do
  case $1 in
  --text | --questions | --method | --out | --seed)
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
[ -n "$text" ] || die "--text is needed; see --help"

need_packages "${program_packages[@]}"
model=${DISTILLCACHE_MODEL:-}
if [ -z "$model" ]; then
  need_default_model
  model=$model_file
fi
need_build build ""
command -v python3 >/dev/null || die "python3 is needed to make the training data"

if [ -z "$out" ]; then
  fingerprint=$("$root/build/distillcache" inspect "$model" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["fingerprint"])')
  out=$root/policy/trained/$fingerprint.safetensors
  [ "$method" = distillcache ] || out=${out%.safetensors}-$method.safetensors
fi
mkdir -p "$out.run"
python3 "$root/scripts/training_data.py" "$text" ${questions:+"$questions"} >"$out.run/data.jsonl"
"$root/build/distillcache" train --model "$model" --data "$out.run/data.jsonl" --out "$out" \
  --method "$method" --seed "$seed" --ratio 0.25,0.125,0.05 \
  --kv-memory 1536M --resume ${options[@]+"${options[@]}"}
say "wrote $out"
