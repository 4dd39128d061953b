#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What only a machine with a GPU can show: builds the CUDA backend, checks it, measures it; one JSON document.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out=gpu_check.json
seconds=
gpus=1
build=
model=
parts=
emulated=

# Name, most seconds it may take, what it does.
stages='
build     600 -Dcuda=enabled in build-cuda; spills in the reports of ptxas
parity     90 every operation beside its plain reference (parity --tier cuda)
golden     60 the whole model: greedy tokens beside the CPU backend, scores of policies (pytest tests/cuda)
memcheck   45 compute-sanitizer on small shapes: accesses out of bounds, misaligned
racecheck  45 the same: hazards in shared memory
synccheck  30 the same: barriers that not all threads reach
kernels    40 time of single operations (parity --time)
bench      90 bench: prefill, decode with the full cache and with h2o, batch 1, 8, 32
sums       45 with --gpus: sums between the devices by NCCL and through host memory: right, and time by size
ranks      60 with --gpus: tiny random models on 2 of them beside one; faults (tests/unit/test_parallel)
tokens     60 with --gpus: the whole model on all of them: greedy tokens beside the CPU backend (tests/cuda/test_model.py)
scaling   150 with --gpus: bench on one and on all, which add up in both ways
'

# Small shapes for the sanitizers, by name of a parity case (a part is enough), most telling first.
small_cases=("any shape" "linear q4_1" "append" "linear f16" "select rows" "score window" "sample greedy" "move_slots"
  "linear paths, wide" "network content" "summarise")

usage() {
  cat <<TEXT
usage: scripts/gpu_check.sh [--out FILE] [--seconds N] [--parts "NAME..."] [--gpus N] [--build FOLDER] [--model FILE] [--emulated yes]

Builds the program with -Dcuda=enabled and runs on the first CUDA device, with --gpus also on several as one:

$(printf '%s' "$stages" | sed -n 's/^\([a-z][a-z]*\) *[0-9]* /  \1: /p')

What bench and parity measured is set beside the limits of the card: bytes/s and FLOP/s achieved, and the part of the
limit (scripts/roofline.py computes what to expect). No GPU has run this script yet: it was written and checked on a
machine without one, with hand-made results.

  --out FILE       the document with everything (default: gpu_check.json); a summary goes to standard output
  --seconds N      for all that comes after the build (default: 330, with --gpus 645); what does not fit any more is
                   skipped, and the document says so. Building takes about two minutes on 16 cores: less than eight in
                   all, or thirteen
  --gpus N         2 to 8: the first N devices compute one model together (--tensor-parallel N), and are compared with
                   one. N must divide the model's KV heads, which for the default model only 3 does: else tokens and
                   scaling are skipped
  --parts NAMES    only these
  --build FOLDER   a finished build, made elsewhere, instead of building; no nvcc is needed then
  --model FILE     instead of the default model (or DISTILLCACHE_MODEL=FILE)
  --emulated yes   without a GPU: plays through build, parity, golden, sums, ranks and tokens on emulated devices
                   (-Dcuda=emulated in build-emulated), in small shapes; a test of this script, not of a card. The other
                   parts are skipped

Exit status: 0 nothing failed (skipped is not failed), 1 something failed or an option is wrong, 3 no GPU that can be used,
or fewer than --gpus, 4 no CUDA toolkit. There is no document with 3 and 4.
TEXT
}

check_parts() {
  local part
  for part in $parts; do
    declare -F "stage_$part" >/dev/null || die "--parts: there is no \"$part\"; see --help"
  done
}

# compute-sanitizer, in the toolkit if it is nowhere else.
find_sanitizer() {
  local home
  command -v compute-sanitizer && return 0
  home=$(find_cuda) && ls "$home/bin/compute-sanitizer" 2>/dev/null
}

# Python with pytest: the machine's own, or the tests' environment.
find_python() {
  if python3 -c 'import pytest' 2>/dev/null; then
    echo python3
  else
    need_environment >&2
    echo "$root/.venv/bin/python"
  fi
}

needs_gpu() {
  [ -z "$emulated" ] || skip "needs a GPU"
}

needs_gpus() {
  [ "$gpus" -gt 1 ] || skip "needs --gpus"
  [ -z "$emulated" ] || export DISTILLCACHE_EMULATOR=fast
}

# The model on all devices.
needs_split() {
  local reason
  needs_gpus
  limited "$folder/distillcache" inspect "$model" --json >"$work/model.json"
  reason=$(python3 "$root/scripts/gpu_check.py" split "$work/model.json" "$gpus") || skip "$reason"
}

skip() {
  echo "$*" >"$work/$stage.skipped"
  exit 0
}

# limited COMMAND...: ends it when the stage's time is over (status 124).
limited() {
  local left=$((stage_end - $(date +%s))) status=0
  [ "$left" -gt 0 ] || return 124
  timeout -k 5 "$left" "$@" || status=$?
  [ "$status" != 137 ] || status=124
  return "$status"
}

parity() {
  limited "${prefix[@]}" "$folder/tests/parity/parity" --tier cuda "$@"
}
prefix=()

# Stages: each in a shell of its own, its output in $work/NAME.log.

stage_build() {
  [ -z "$build" ] || skip "--build: made elsewhere"
  need_packages "${program_packages[@]}" "${test_packages[@]}"
  if [ -n "$emulated" ]; then
    need_packages g++
    need_build build-emulated "$programs" --werror -Dtests=true -Dcuda=emulated
    return 0
  fi
  need_build build-cuda "$programs tests/model/prune_tool" --werror -Dtests=true -Dcuda=enabled -Dgpu_toolkit="$cuda_home"
  # ptxas says "N bytes stack frame, N bytes spill stores, N bytes spill loads" of every function.
  ! grep -lE '[1-9][0-9]* bytes spill' "$folder"/cuda/*.ptxas.txt
}

stage_parity() {
  local name
  if [ -z "$emulated" ]; then
    parity
    return
  fi
  for name in "${small_cases[@]:1:3}"; do
    parity --only "$name"
  done
}

# golden_tests FILE...: with an emulated device only the model's start.
golden_tests() {
  local python device=real chosen=("${@/#/$root/tests/cuda/}")
  python=$(find_python)
  [ -z "$emulated" ] || device=emulated chosen=(-k device "$root/tests/cuda/test_model.py")
  DISTILLCACHE_TEST_BUILD=$folder DISTILLCACHE_TEST_MODEL=$model DISTILLCACHE_TEST_DEVICE=$device PYTHONDONTWRITEBYTECODE=1 \
    limited "$python" -m pytest -rs -q -p no:cacheprovider --color=no "${chosen[@]}"
}

stage_golden() { golden_tests test_model.py test_policies.py; }

# sanitize TOOL: the cases one by one, until the time is over; only the first must get that far.
sanitize() {
  local tool=$1 sanitizer name done_count=0 status
  needs_gpu
  sanitizer=$(find_sanitizer) || skip "compute-sanitizer is not installed"
  prefix=("$sanitizer" --tool "$tool" --error-exitcode 86 --print-limit 20)
  for name in "${small_cases[@]}"; do
    echo "== $name"
    status=0
    parity --only "$name" || status=$?
    if [ "$status" = 124 ] && [ "$done_count" -gt 0 ]; then
      echo "not reached in time: \"$name\" and what follows it"
      return 0
    fi
    [ "$status" = 0 ] || return "$status"
    done_count=$((done_count + 1))
  done
}

stage_memcheck() { sanitize memcheck; }
stage_racecheck() { sanitize racecheck; }
stage_synccheck() { sanitize synccheck; }

stage_kernels() {
  local name
  needs_gpu
  for name in "time linear q4_0" "time linear q4_1" "time linear q4_k" "time linear f16" "attend any shape" "rms_norm" "sample greedy"; do
    parity --time --seconds 0.1 --only "$name"
  done
}

stage_bench() {
  needs_gpu
  limited "$folder/distillcache" inspect "$model" --json >"$work/model.json"
  limited "$folder/distillcache" bench --model "$model" --backend cuda --json --profile --pairs 3 --prefill 2048 --decode 64 \
    --batch 1,8,32 --depth 512,4096 --kv-memory 6G --kv-policy h2o --kv-ratio 0.25 >"$work/bench.json"
}

# Several devices. Without NCCL "auto" adds up through host memory.

stage_sums() {
  needs_gpus
  if [ -n "$emulated" ]; then
    limited "$folder/tests/cuda/time_sums" "$gpus" 1 8
  else
    limited "$folder/tests/cuda/time_sums" "$gpus" 200 512
  fi
}

stage_ranks() {
  local way
  needs_gpus
  for way in auto host; do
    DISTILLCACHE_TEST_BACKEND=cuda DISTILLCACHE_TEST_RANKS=2 DISTILLCACHE_TEST_DEVICES=$gpus DISTILLCACHE_TEST_ALL_REDUCE=$way \
      limited "$folder/tests/unit/test_parallel"
  done
}

stage_tokens() {
  local way
  needs_split
  for way in auto host; do
    DISTILLCACHE_TEST_RANKS=$gpus DISTILLCACHE_TEST_ALL_REDUCE=$way golden_tests test_model.py
  done
}

stage_scaling() {
  local way
  needs_gpu
  needs_split
  bench_full >"$work/scaling_one.json"
  for way in auto host; do
    bench_full --tensor-parallel "$gpus" --all-reduce "$way" >"$work/scaling_$way.json"
  done
}

bench_full() {
  limited "$folder/distillcache" bench --model "$model" --backend cuda --json --pairs 3 --prefill 2048 --decode 64 \
    --batch 1,8,32 --depth 512,4096 --kv-memory 6G "$@"
}

# run_stage NAME LIMIT: leaves NAME.log, NAME.result (status, seconds), NAME.skipped with the reason.
run_stage() {
  local status started limit=$2
  stage=$1
  [ -z "$emulated" ] || limit=$((10 * limit)) # how fast this machine is does not matter
  started=$(date +%s)
  stage_end=$((started + limit))
  if [ "$stage" != build ] && [ "$stage_end" -gt "$all_end" ]; then
    stage_end=$all_end
  fi
  if [ "$stage" != build ] && [ "$all_end" -le "$started" ]; then
    echo "no time left" >"$work/$stage.skipped"
    return 0
  fi
  say "$stage"
  # A shell of its own, so that set -e holds inside.
  set +e
  (
    set -e
    "stage_$stage"
  ) >"$work/$stage.log" 2>&1 </dev/null
  status=$?
  set -e
  echo "$status $(($(date +%s) - started))" >"$work/$stage.result"
}

read_options "out seconds parts gpus build model emulated" "$@"
[[ $gpus =~ ^[1-8]$ ]] || die "--gpus: \"$gpus\" is not a number from 1 to 8"
programs="distillcache tests/parity/parity"
[ "$gpus" = 1 ] || programs+=" tests/cuda/time_sums tests/unit/test_parallel"
seconds=${seconds:-$([ "$gpus" = 1 ] && echo 330 || echo 645)}
need_number --seconds "$seconds"
[ ${#options[@]} = 0 ] || die "nothing goes behind --"
check_parts
[[ $emulated =~ ^(yes)?$ ]] || die "--emulated: \"$emulated\" is not yes"
command -v python3 >/dev/null || die "python3 is needed"
for variable in ${!DISTILLCACHE_*}; do
  [ "$variable" = DISTILLCACHE_MODEL ] || unset "$variable"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 "$root/scripts/gpu_check.py" "${emulated:+emulated-}device" "$gpus" >"$work/device.json" || exit 3
if [ -n "$build" ]; then
  folder=$(realpath "$build")
  for file in $programs; do
    [ -x "$folder/$file" ] || die "--build: there is no program $file in $build"
  done
elif [ -n "$emulated" ]; then
  folder=$root/build-emulated
else
  folder=$root/build-cuda
  cuda_home=$(find_cuda) || {
    say "no CUDA toolkit with cuBLASLt by CUDA_HOME, nvcc in PATH, /usr/local/cuda or /opt/cuda: install it, or give a finished build by --build"
    exit 4
  }
  "$cuda_home/bin/nvcc" --version >"$work/nvcc.txt"
fi
model=${model:-${DISTILLCACHE_MODEL:-}}
if [ -z "$model" ]; then
  need_default_model
  model=$model_file
fi
[ -r "$model" ] || die "cannot read the model $model"
model=$(realpath "$model")

all_end=
while read -r name limit _; do
  [ -n "$name" ] || continue
  if [ "$name" != build ] && [ -z "$all_end" ]; then
    all_end=$(($(date +%s) + seconds))
  fi
  case " ${parts:-$name} build " in *" $name "*) run_stage "$name" "$limit" ;; esac
  [ "$name" != build ] || [ -e "$work/build.skipped" ] || [ "$(cut -d' ' -f1 "$work/build.result")" = 0 ] || break
done <<<"$stages"

python3 "$root/scripts/gpu_check.py" report "$work" "$folder" "$out"
