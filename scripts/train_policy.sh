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
read_options "text questions method out seed" "$@"
[ -n "$text" ] || die "--text is needed; see --help"

need_program
if [ -z "$out" ]; then
  fingerprint=$("$program" inspect "$model" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["fingerprint"])')
  out=$root/policy/trained/$fingerprint.safetensors
  [ "$method" = distillcache ] || out=${out%.safetensors}-$method.safetensors
fi
mkdir -p "$out.run"
make_training_data "$out.run/data.jsonl" "$text" "$questions"
"$program" train --model "$model" --data "$out.run/data.jsonl" --out "$out" \
  --method "$method" --seed "$seed" \
  --kv-memory 1536M --resume ${options[@]+"${options[@]}"}
say "wrote $out"
