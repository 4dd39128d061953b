#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tables of the DistillCache paper, measured on this model: one command each, Markdown on standard output.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<TEXT
usage: scripts/paper_tables.sh TABLE [options] [-- OPTIONS OF distillcache]

Measures one table and prints it in Markdown on standard output; figures are SVG files in the state folder.

  budgets     KL, perplexity and tasks: every policy at 50, 25, 12.5 and 5 % of the tokens
  trained     KL of ranker and distillcache as part of h2o's, and perplexity, at the same four budgets
  lengths     the same at 25 %, for contexts of 1K, 2K, 4K and 7K tokens
  hybrid      the same, for policies alone and in the heads of hybrid that do not keep everything (E.3)
  rewards     trains with stage kl by each reward, from the same warm start, and compares (E.2)
  features    trains with alpha alone, alpha and H, the paper's five features, and content, and compares (F.6)
  paper       trains by the paper's own recipe (its five features, its single stage) and compares with the shipped policy
  transfer    trains on another model (--from) and on this one, and compares both on this one (the paper's transfer)
  errors      what pruned answers are instead of right, and their length (F.3, F.5)
  positions   which positions of a prompt stay: sinks, recent tokens, the others (F.2); figures
  curves      trains and shows the run (F.1); figures
  latency     milliseconds of a decode step by phase (Table 3)

Options that a table does not use are refused. Defaults take at most about ten minutes of two idle cores.

  --text FILE       text of articles (WikiText's form): its first half is trained on, prompts come from the second
                    (default: generated)
  --questions FILE  {"question", "answer"} a line, to be trained on as well
  --limit N         prompts or items of each kind
  --length N,...    tokens of context
  --ratio R,...     parts of the tokens that are kept
  --policies "P..." policies, with options as for --kv-policy, separated by spaces
  --tasks "T..."    tasks of distillcache eval, separated by spaces
  --seed N          which prompts and items (default 1)
  --seeds N,...     trains once with each (default 1); means over them are compared
  --steps N         steps of the stages that are compared
  --rank-steps N    rewards: steps of the warm start
  --from FILE       transfer: the model that networks come from (default: the default model)
  --sequences N     sequences that are recorded for training
  --depth N         latency: tokens seen before the steps that are timed
  --batch N         latency: sequences
  --pairs N         latency: repetitions
  --state DIR       where results, figures and trained policies are kept; a second start goes on from there, with the
                    same options or other ones (default build/paper-tables)
  --program FILE    the program, built before (default: builds build/distillcache)
  -- ...            to distillcache train for rewards, features, paper, transfer, curves; to bench for latency; to eval for
                    the others

DISTILLCACHE_MODEL=FILE instead of the default model.
TEXT
}

all_policies='random streaming h2o h2o,interval=16 h2o_mean scissorhands tova snapkv pyramidkv adakv criticalkv keydiff knorm
  keyformer expected_attention cake laprox restkv rlkv hybrid ranker distillcache'
base=h2o,interval=16 # at distillcache's interval, so that only what is kept differs

text='' questions='' limit='' length='' ratio='' policies='' tasks='' seed=1 seeds=1 steps='' rank_steps='' sequences=''
from='' depth=7000 batch=8 pairs=1 state=$root/build/paper-tables

# Measuring.

labels=() # --label POLICY=WORDS for paper_tables.py

# Results depend on the text and on the number of prompts: a file of their own for each. Sets results.
name_results() {
  local sum=prose
  [ -z "$text" ] || sum=$(cksum <"$text" | tr ' ' -)
  results=$state/results/$1-$sum-$limit.jsonl
}

# eval_task TASK OPTION...: one evaluation of policies at the ratios; adds its document to documents.
documents=()
eval_task() {
  local task=$1 chosen=() data=() policy document
  for policy in $policies; do
    chosen+=(--kv-policy "$policy")
  done
  if [ "$task" = kl ] && [ -n "$text" ]; then
    data=(--data "$text")
  fi
  name_results "$task"
  document=$state/$table-$task.json
  say "$table: $task, $limit items"
  "$program" eval --model "$model" --kv-memory 1536M --json --task "$task" ${data[@]+"${data[@]}"} "${chosen[@]}" \
    --kv-ratio "$ratio" --length "$length" --limit "$limit" --seed "$seed" --resume "$results" "${@:2}" \
    ${options[@]+"${options[@]}"} >"$document"
  documents+=("$document")
}

# train_one NAME SEED OPTION...: trains a policy, unless that was done; sets policy to it.
train_one() {
  local name=$1-seed$2 data=() said
  policy=$state/trained/$name.safetensors
  said="$(cksum <"$model") $([ -z "$text" ] || cksum <"$state/trained/data.jsonl") ${*:2} ${options[*]-}"
  [ "$(cat "$policy.done" 2>/dev/null)" != "$said" ] || return 0
  [ -z "$text" ] || data=(--data "$state/trained/data.jsonl")
  if [ "$(cat "$policy.options" 2>/dev/null)" != "$said" ]; then # another run's checkpoint is of no use
    rm -rf "$policy" "$policy.run" "$policy.events"
    printf '%s' "$said" >"$policy.options"
  fi
  say "$table: training $name"
  "$program" train --model "$model" --kv-memory 1536M --json ${data[@]+"${data[@]}"} --seed "$2" --out "$policy" --resume \
    --plot "${policy%.safetensors}.svg" "${@:3}" ${options[@]+"${options[@]}"} >>"$policy.events"
  printf '%s' "$said" >"$policy.done"
}

prepare_training() {
  mkdir -p "$state/trained"
  rm -f "$state/trained/data.jsonl"
  [ -n "$text" ] || [ -z "$questions" ] || die "--questions goes with --text"
  [ -z "$text" ] || make_training_data "$state/trained/data.jsonl" "$text" "$questions"
  [[ $seeds =~ ^[0-9]+(,[0-9]+)*$ ]] || die "--seeds: \"$seeds\" is not a list of whole numbers"
}

# train_row WORDS NAME OPTION...: trains it with every seed, as one row of the table.
train_row() {
  local one policy
  for one in ${seeds//,/ }; do
    train_one "$2" "$one" "${@:3}"
    policies+=" distillcache:$policy"
    labels+=(--label "distillcache:$policy=$1")
  done
}

# The options of distillcache eval are not those that follow --, where these are of train.
eval_without_options() {
  local options=()
  eval_task "$@"
}

print_table() {
  python3 "$root/scripts/paper_tables.py" "$table" ${labels[@]+"${labels[@]}"} "$@" "${documents[@]}"
}

print_relative() {
  print_table --base "$base" --results "$results"
}

# What the others are compared with is the first policy, unless it was chosen by hand.
add_base() {
  case " ${policies//$'\n'/ } " in
  *" $base "*) ;;
  *) policies="$base $policies" ;;
  esac
}

# Tables.

table_budgets() {
  local task
  for task in $tasks; do
    eval_task "$task"
  done
  print_table
}

table_errors() {
  table_budgets
}

# table_trained [OPTION...]: KL beside the base's.
table_trained() {
  add_base
  eval_task kl "$@"
  print_relative
}

table_lengths() {
  table_trained --continuation 32
}

table_hybrid() {
  table_trained
}

table_rewards() {
  prepare_training
  local common=(--set "sequences=$sequences" --set "rank_steps=$rank_steps" --set parameter_steps=0 --set prompt_most=512
    --set warmup_steps=$((steps / 10)) --set valid_prompts=4)
  policies=$base
  train_row "warm start alone" warm "${common[@]}" --set kl_steps=0 --set pruned_steps=0
  train_row "kl" kl "${common[@]}" --set "kl_steps=$steps" --set reward=kl
  train_row "kl, no entropy bonus" kl-beta0 "${common[@]}" --set "kl_steps=$steps" --set reward=kl --set entropy=0
  train_row "rollout8" rollout8 "${common[@]}" --set "kl_steps=$steps" --set reward=rollout8
  train_row "ranking" ranking "${common[@]}" --set "kl_steps=$steps" --set reward=ranking
  eval_without_options kl
  print_relative
}

table_features() {
  prepare_training
  local common=(--steps "$steps" --set "sequences=$sequences" --set valid_prompts=4)
  policies=$base
  train_row "alpha" alpha "${common[@]}" --set features=paper --set inputs=mean
  train_row "alpha and H" alpha-entropy "${common[@]}" --set features=paper --set inputs=mean,entropy
  train_row "the paper's five" five "${common[@]}" --set features=paper
  train_row "content" content "${common[@]}"
  train_row "content, without reinforcement" ranker "${common[@]}" --method ranker
  eval_without_options kl
  print_relative
}

# The recipe's steps are 10,000 of prompts up to 4,096 tokens: days on two cores. Here fewer and shorter ones.
table_paper() {
  prepare_training
  policies="$base h2o distillcache"
  labels+=(--label "h2o=h2o at the paper's interval, 1" --label "distillcache=the shipped policy")
  train_row "recipe paper" paper --recipe paper --set "kl_steps=$steps" --set "warmup_steps=$(((steps + 19) / 20))" \
    --set prompt_most=1024 --set "valid_every=$(((steps + 9) / 10))" --set valid_prompts=4
  eval_without_options kl
  print_relative
}

# What is learned of keys is one model's own: only networks of statistics can be carried over.
table_transfer() {
  prepare_training
  [ -n "$from" ] || need_default_model
  local common=(--steps "$steps" --set "sequences=$sequences" --set valid_prompts=4 --set valid_every=0)
  policies="$base $policies"
  train_on_source "the paper's five, trained on the other model" five-from --set features=paper
  train_on_source "statistics, trained on the other model" statistics-from --set content=0
  train_row "the paper's five, trained on this model" five-own "${common[@]}" --set features=paper
  train_row "content, trained on this model" content-own "${common[@]}"
  eval_without_options kl
  print_relative
}

# train_on_source WORDS NAME OPTION...: train_row on the model that --from names.
train_on_source() {
  local model=${from:-$model_file}
  train_row "$1" "$2" "${common[@]}" "${@:3}"
}

table_positions() {
  eval_task kl --continuation 2 --svg "$state/positions"
  print_table
  say "figures: $state/positions/positions-${length%%,*}.svg, retained-POLICY.svg, kept-POLICY.html"
}

table_curves() {
  local one policy events=()
  prepare_training
  for one in ${seeds//,/ }; do
    train_one curves "$one" --steps "$steps" --set "sequences=$sequences" --set "valid_every=$(((steps + 9) / 10))" \
      --set valid_prompts=4
    events+=("$policy.events")
    say "figure: ${policy%.safetensors}.svg"
  done
  documents=("${events[@]}")
  print_table
}

table_latency() {
  local chosen=() policy
  for policy in $policies; do
    chosen+=(--kv-policy "$policy")
  done
  "$program" bench --model "$model" --kv-memory 3G --json --prefill 512 --decode 32 --batch "$batch" --depth "$depth" \
    --pairs "$pairs" "${chosen[@]}" --kv-ratio "$ratio" --profile ${options[@]+"${options[@]}"} >"$state/latency.json"
  documents=("$state/latency.json")
  print_table
}

# set_default NAME VALUE
set_default() {
  [ -n "${!1}" ] || printf -v "$1" '%s' "$2"
}

case ${1-} in
--help | -h)
  usage
  exit 0
  ;;
'') die "which table? see --help" ;;
esac
table=$1
shift
shared='state program'
kl_options="$shared text limit length ratio policies seed"
train_options="$shared text questions limit length ratio seed seeds steps sequences"
kl_defaults() {
  set_default limit "$1"
  set_default length 1024
  set_default ratio 0.5,0.25,0.125,0.05
}
case $table in
budgets)
  read_options "$kl_options tasks" "$@"
  kl_defaults 6
  set_default policies "$all_policies"
  set_default tasks 'kl needle multi-needle kv-retrieval'
  ;;
trained)
  read_options "$kl_options" "$@"
  kl_defaults 24
  set_default policies 'ranker distillcache'
  ;;
lengths)
  read_options "$kl_options" "$@"
  set_default length 1024,2048,4096,7168
  set_default ratio 0.25
  kl_defaults 4
  set_default policies 'streaming snapkv,interval=16 ranker distillcache'
  ;;
hybrid)
  read_options "$kl_options" "$@"
  kl_defaults 16
  set_default policies 'hybrid,base=h2o,interval=16 snapkv,interval=16 hybrid,base=snapkv,interval=16 distillcache
    hybrid,base=distillcache,interval=16 hybrid,base=distillcache,interval=16,full_heads=0.1'
  ;;
rewards)
  read_options "$train_options rank-steps" "$@"
  set_default ratio 0.25,0.125,0.05
  kl_defaults 12
  set_default steps 30
  set_default rank_steps 600
  set_default sequences 40
  need_number --rank-steps "$rank_steps"
  ;;
features)
  read_options "$train_options" "$@"
  set_default ratio 0.25,0.125,0.05
  kl_defaults 12
  set_default steps 600
  set_default sequences 40
  ;;
paper)
  read_options "$shared text questions limit length ratio seed seeds steps" "$@"
  set_default ratio 0.5,0.25,0.125,0.05
  kl_defaults 12
  set_default steps 600
  ;;
transfer)
  read_options "$train_options policies from" "$@"
  set_default ratio 0.25,0.125,0.05
  kl_defaults 8
  set_default steps 400
  set_default sequences 40
  set_default policies 'streaming snapkv,interval=16 tova,interval=16'
  [ -z "$from" ] || [ -r "$from" ] || die "--from: cannot read $from"
  ;;
errors)
  read_options "$shared limit length ratio policies seed tasks" "$@"
  set_default ratio 0.5,0.25
  kl_defaults 20
  set_default policies 'streaming h2o snapkv keydiff expected_attention ranker distillcache'
  set_default tasks 'needle multi-needle kv-retrieval'
  ;;
positions)
  read_options "$kl_options" "$@"
  kl_defaults 8
  set_default policies 'streaming h2o snapkv expected_attention ranker distillcache'
  ;;
curves)
  read_options "$shared text questions seeds steps sequences" "$@"
  set_default steps 600
  set_default sequences 40
  ;;
latency)
  read_options "$shared ratio policies depth batch pairs" "$@"
  set_default ratio 0.25
  set_default policies 'streaming h2o,interval=16 distillcache'
  need_number --depth "$depth"
  need_number --batch "$batch"
  need_number --pairs "$pairs"
  ;;
*) die "there is no table \"$table\": budgets, trained, lengths, hybrid, rewards, features, paper, transfer, errors, positions, curves, latency" ;;
esac
for name in limit steps sequences; do
  [ -z "${!name}" ] || need_number "--$name" "${!name}"
done
[ -z "$text" ] || [ -r "$text" ] || die "--text: cannot read $text"

need_program
mkdir -p "$state/results"
state=$(cd "$state" && pwd)
[[ $state != *[[:space:],]* ]] || die "--state: $state has a space or a comma, which names of policies cannot have"
"table_$table"
