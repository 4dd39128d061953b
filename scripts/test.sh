#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up what is missing and runs every test, stage by stage.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Name, seconds of CPU it should take (more is told, never a failure), what it does. In the order of starting, two at a
# time from the third on; those marked + run only with --full or when named.
stages='
setup        90 packages, the default model, a Python environment in .venv
build       300 everything with -Werror
sanitizers  700 unit, parity and API tests with address and undefined-behaviour sanitizers
cuda        300 the CUDA backend against an emulated device: emulator, parity, graphs, engine and scheduler, the whole model (pytest tests/cuda)
logits      450 pytest tests/model: tokenizer and logits beside other implementations
nvcc        370 the CUDA backend as nvcc builds it: registers of sm_89 (--full: sm_80, 89, 90), the program without a device (pytest tests/nvcc)
unit        300 unit, model and parity tests (meson)
fuzz        280 seeded mutations of files and requests, 20 seconds each of 13 kinds (--full: 60), with sanitizers
tsan        250 thread sanitizer over scheduler, queues, loop, threads, log, statistics, and clients that leave a whole server
api         200 pytest tests/api: real clients against the server (--full: lm-eval too, in a Python environment of its own)
bench        60 pytest tests/bench: what bench prints
eval         40 pytest tests/eval: what eval measures, beside the reference and recomputation
template     40 pytest tests/template: chat templates beside jinja2 of Python
scripts      40 pytest tests/scripts: words of the scripts, and paper_tables.sh in tiny sizes
deploy       40 pytest tests/deploy: replicas behind nginx, the dashboard beside Prometheus, manifests (--full: the steps of the image, in a fresh Debian)
readme       50 pytest tests/readme: the examples of README.md as printed
format       20 clang-format, where version 14 of it is installed
+reference  120 pytest tests/reference: the checks of the reference itself
+tidy       300 clang-tidy, where it is installed
'

usage() {
  cat <<TEXT
usage: scripts/test.sh [--stage NAME]... [--full] [--list] [-- PYTEST OPTIONS]

Installs missing packages (as root; otherwise says which), fetches the default model, builds, and runs the tests.
The last line is "N passed, N failed", counted over all stages. Exit status 1 when anything failed.

  --stage NAME   only this stage (repeatable), with the setup and the builds it needs
  --full         the slow extras too
  --list         the stages, then exit
  --help         this text
  -- ...         passed on to pytest, e.g. -- -k stream

Of several stages two run at a time; what one prints comes when it has ended.
Builds: build-test (release, with an emulated CUDA device), build-cuda-89 (nvcc), build-asan, build-tsan. DISTILLCACHE_TEST_MODEL=FILE instead of the default model.
TEXT
}

list_stages() {
  local name budget help
  printf '%s' "$stages" | while read -r name budget help; do
    [ -n "$name" ] || continue
    case $name in
    +*) printf '%-11s %s (only with --full or by name)\n' "${name#+}" "$help" ;;
    *) printf '%-11s %s\n' "$name" "$help" ;;
    esac
  done
}

# Needs of stages. Each is met once.

setup_done=
need_setup() {
  [ -z "$setup_done" ] || return 0
  need_packages "${program_packages[@]}" "${test_packages[@]}"
  if [ -z "${DISTILLCACHE_TEST_MODEL:-}" ]; then
    need_default_model
    export DISTILLCACHE_TEST_MODEL=$model_file
  fi
  need_environment
  setup_done=1
}

# The emulator of a CUDA device wants AVX2. No CUDA toolkit: kernels are compiled as C++ (cuda/README.md).
can_emulate() {
  grep -qw avx2 /proc/cpuinfo
}

# One build for the CPU and for CUDA: the CPU backend is the same code in both, and is what a program that emulates a device
# runs on unless told otherwise. The builds with sanitizers have no CUDA backend.
need_test_build() {
  need_setup
  local cuda=disabled
  if can_emulate; then
    cuda=emulated
    need_packages g++
  fi
  need_build build-test "" --werror -Dtests=true -Dcuda=$cuda
}

# -g1: lines for stack traces, without the variables, which take a sixth of the time to compile. At -O1 it is half as long
# as at -O2, where each copy of a loop that was unrolled or inlined is checked anew.
need_asan_build() {
  need_setup
  need_build build-asan "" --werror -Dtests=true -Db_sanitize=address,undefined -Db_lundef=false \
    -Dsanitizer_strict=true --optimization=1 -Ddebug=true -Dc_args=-g1
}

# The tests with several threads; the thread sanitizer has nothing to say about the others. Nor does it find more in each
# copy of an unrolled loop, which take minutes to compile (engine/cpu/linear.h).
thread_tests=(hosts log parallel scheduler server_loop store threads)

need_tsan_build() {
  need_setup
  need_build build-tsan "distillcache tests/unit/fake_server tests/model/network_tool tests/parity/parity ${thread_tests[*]/#/tests/unit/test_}" --werror -Dtests=true -Db_sanitize=thread \
    -Db_lundef=false --optimization=1 -Ddebug=true '-Dc_args=-g1 -DCPU_COMPACT'
}

# For requests whose answers need no meaning: a model with less arithmetic; its code is the same. Sets slim_model.
slim_model=
need_slim_model() {
  need_setup
  slim_model=$root/models/slim-$(basename "$DISTILLCACHE_TEST_MODEL")
  with_lock make_slim_model
}

make_slim_model() {
  if [ "$slim_model" -nt "$DISTILLCACHE_TEST_MODEL" ] && [ "$slim_model" -nt "$root/tests/slim_model.py" ]; then
    return 0
  fi
  "$root/.venv/bin/python" "$root/tests/slim_model.py" "$DISTILLCACHE_TEST_MODEL" "$slim_model"
}

# Runners.

# Everything a test writes goes to standard output and to this file, in which results are counted.
output=

# run_meson FOLDER OPTION...
run_meson() {
  local folder=$1
  shift
  meson test -C "$root/$folder" --no-rebuild --print-errorlogs "$@" 2>&1 | tee -a "$output"
}

# run_pytest BUILD PATH OPTION...: nothing when there is no such path.
run_pytest() {
  local folder=$1 path=$2
  shift 2
  [ -e "$root/$path" ] || {
    echo "there is no $path"
    return 0
  }
  local status=0
  # What is imported is compiled once, beside the environment. Plugins that packages bring are of no use here, and take
  # five seconds to load. With a thread for each core, BLAS would wait for the other stage.
  DISTILLCACHE_TEST_BUILD=$root/$folder DISTILLCACHE_TEST_SERVER=$root/$folder/distillcache OPENBLAS_NUM_THREADS=1 \
    PYTHONPYCACHEPREFIX=$root/.venv/pycache PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$root/.venv/bin/python" \
    -m pytest -rs --durations=5 -p no:cacheprovider --color=no --junitxml="$output.xml" \
    "$root/$path" "$@" ${pytest_options[@]+"${pytest_options[@]}"} || status=$?
  # Counted from the file, since -q may leave out the line that says it.
  grep -o '<testsuite [^>]*>' "$output.xml" >>"$output" || true
  rm -f "$output.xml"
  [ "$status" = 0 ] || [ "$status" = 5 ] # 5: the options left no test here
}

# run_api BUILD MARK...: the API's tests with each of these marks, on the true model where its words must have a meaning.
run_api() {
  local folder=$1 mark model status=0
  shift
  need_slim_model
  for mark; do
    model=$slim_model
    [ "$mark" != speaks ] || model=$DISTILLCACHE_TEST_MODEL
    DISTILLCACHE_TEST_MODEL=$model run_pytest "$folder" tests/api -m "$mark" || status=1
  done
  return "$status"
}

# A server under a sanitizer must not read a finding as a mere exit: it is reported in its log and by its status.
sanitizer_environment() {
  export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1:abort_on_error=1
  export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
}

# Stages.

stage_setup() {
  need_setup
}

stage_build() {
  need_test_build
}

stage_format() {
  local formatter
  formatter=$(command -v clang-format-14 || command -v clang-format || true)
  if [ -z "$formatter" ] || ! "$formatter" --version | grep -q 'version 14\.'; then
    echo "clang-format 14 is not installed: not checked"
    return 0
  fi
  (cd "$root" && git ls-files -z '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' | xargs -0 "$formatter" --dry-run -Werror) 2>&1 | tail -n 40
}

stage_unit() {
  need_test_build
  run_meson build-test --suite unit --suite ranks --suite model --suite parity
}

stage_logits() {
  need_test_build
  DISTILLCACHE_TEST_FULL=${full:+1} run_pytest build-test tests/model
}

stage_api() {
  need_test_build
  if [ -n "$full" ]; then
    need_environment lm-eval
    export DISTILLCACHE_TEST_LM_EVAL=$root/.venv-lm-eval/bin/python
  fi
  DISTILLCACHE_TEST_FULL=${full:+1} run_api build-test "not speaks" speaks
}

stage_template() {
  need_test_build
  DISTILLCACHE_TEST_FULL=${full:+1} run_pytest build-test tests/template
}

stage_bench() {
  need_test_build
  need_slim_model
  DISTILLCACHE_TEST_SLIM_MODEL=$slim_model run_pytest build-test tests/bench
}

stage_eval() {
  need_test_build
  need_slim_model
  DISTILLCACHE_TEST_SLIM_MODEL=$slim_model run_pytest build-test tests/eval
}

stage_scripts() {
  need_test_build
  need_slim_model
  DISTILLCACHE_TEST_FULL=${full:+1} DISTILLCACHE_TEST_SLIM_MODEL=$slim_model run_pytest build-test tests/scripts
}

stage_readme() {
  need_test_build
  run_pytest build-test tests/readme
}

stage_deploy() {
  need_test_build
  need_unpacked nginx prometheus
  if [ -n "$full" ] && [ "$(id -u)" = 0 ]; then
    need_packages debootstrap
  fi
  DISTILLCACHE_TEST_TOOLS=$unpacked DISTILLCACHE_TEST_FULL=${full:+1} run_pytest build-test tests/deploy
}

stage_cuda() {
  if ! can_emulate; then
    say "cuda: skipped, the emulator needs a processor with AVX2"
    return 0
  fi
  need_test_build
  DISTILLCACHE_TEST_FULL=${full:+1} run_meson build-test --timeout-multiplier 3 --suite emulator --suite cuda \
    ${full:+--suite cuda_full}
  DISTILLCACHE_TEST_FULL=${full:+1} run_pytest build-test tests/cuda
}

# With a toolkit of this machine, or one of PyPI's wheels. One folder each, since the default has one architecture. The
# host's C is at -O1, since build-test has it at -O3; kernels are at nvcc's -O3.
stage_nvcc() {
  local architectures=89 folder=build-cuda-89
  [ -z "$full" ] || architectures=80,89,90 folder=build-cuda
  need_setup
  need_packages g++
  need_cuda
  need_build "$folder" "distillcache tests/parity/parity" --werror -Dtests=true -Dcuda=enabled -Dgpu_toolkit="$cuda_home" \
    -Dgpu_architectures="$architectures" --optimization=1
  DISTILLCACHE_TEST_ARCHITECTURES=${architectures//,/ } run_pytest "$folder" tests/nvcc
}

stage_sanitizers() {
  need_asan_build
  sanitizer_environment
  DISTILLCACHE_TEST_FULL=${full:+1} run_meson build-asan --suite unit --suite parity --timeout-multiplier ${full:+2}5
  if [ -n "$full" ]; then
    run_api build-asan "not speaks" speaks
  else
    run_api build-asan "not speaks and not repeats"
  fi
}

stage_tsan() {
  need_tsan_build
  sanitizer_environment
  DISTILLCACHE_TEST_FULL=${full:+1} run_meson build-tsan --timeout-multiplier ${full:+4}10 "${thread_tests[@]}" parity_threads
  need_slim_model
  DISTILLCACHE_TEST_MODEL=$slim_model run_pytest build-tsan tests/api/test_cancel.py
}

stage_fuzz() {
  need_asan_build
  sanitizer_environment
  run_meson build-asan --suite fuzz --timeout-multiplier 5 ${full:+--test-args='--seconds 60'}
}

stage_reference() {
  need_setup
  REFERENCE_MODEL=$DISTILLCACHE_TEST_MODEL run_pytest build-test tests/reference
}

stage_tidy() {
  local tidy
  tidy=$(command -v clang-tidy-14 || command -v clang-tidy || true)
  if [ -z "$tidy" ]; then
    echo "clang-tidy is not installed: not checked"
    return 0
  fi
  need_test_build
  (cd "$root" && git ls-files -z '*.c' | grep -zvE '^tests/' | xargs -0 -n 8 -P "$(nproc)" "$tidy" -p build-test --quiet)
}

# Counting.

# sum_found NAME...: the sum of the numbers that the runners gave under these names ("Ok:   3", failures="3").
sum_found() {
  local name
  for name; do
    sed -nE "s/^$name: +([0-9]+) *\$/\\1/p; s/^<testsuite (.* )?$name=\"([0-9]+)\".*/\\2/p" "$output"
  done | awk '{ sum += $1 } END { print sum + 0 }'
}

count_failed() {
  sum_found Fail 'Unexpected Pass' Timeout failures errors
}

count_passed() {
  local meson pytest
  meson=$(sum_found Ok 'Expected Fail')
  pytest=$(($(sum_found tests) - $(sum_found failures errors skipped)))
  echo $((meson + pytest))
}

# run_stage NAME BUDGET: runs it, and leaves its line of the summary and its counts in files. Called in a shell of its own,
# whose children's seconds of CPU, user and system, are the stage's.
run_stage() {
  local name=$1 budget=$2 status=0 result=ok started seconds cpu passed failed
  output=$work/$name.output
  printf '\n==== %s\n' "$name"
  : >"$output"
  started=$(date +%s)
  # A shell within, so that set -e holds inside: it does not in a function whose status is looked at.
  set +e
  (
    set -e
    "stage_$name"
  )
  status=$?
  set -e
  seconds=$(($(date +%s) - started))
  times >"$work/$name.times"
  cpu=$(awk 'NR == 2 { gsub(/[ms]/, " "); print int($1 * 60 + $2 + $3 * 60 + $4 + 0.5) }' "$work/$name.times")
  passed=$(count_passed)
  failed=$(count_failed)
  if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
    failed=1 # the stage itself: a build, a setup, a runner that did not start
  fi
  [ "$failed" = 0 ] || result=FAILED
  printf '%-11s %-7s %5d passed %4d failed %5d s, %5d of %4d s of CPU%s\n' "$name" "$result" "$passed" "$failed" \
    "$seconds" "$cpu" "$budget" "$([ "$cpu" -le "$budget" ] || echo '  over budget')" >"$work/$name.line"
  echo "$passed $failed" >"$work/$name.counts"
}

# Stages that run: process and name. What they print goes to files while there may be two.
declare -A running=()

# start_stage NAME BUDGET: in a process group of its own, that an interrupted run can end as a whole.
start_stage() {
  set -m
  run_stage "$@" </dev/null >"$work/$1.log" 2>&1 &
  set +m
  running[$!]=$1
}

# wait_stage: until one of those running has ended; prints what it said.
wait_stage() {
  local ended
  wait -n -p ended "${!running[@]}" || true
  cat "$work/${running[$ended]}.log"
  unset "running[$ended]"
}

end_run() {
  local group
  for group in "${!running[@]}"; do
    kill -- "-$group" 2>/dev/null || true
  done
  rm -rf "$work"
}

chosen=()
full=
pytest_options=()
while [ $# -gt 0 ]; do
  case $1 in
  --stage)
    [ $# -ge 2 ] || die "--stage needs a name: see --list"
    chosen+=("$2")
    shift
    ;;
  --stage=*) chosen+=("${1#--stage=}") ;;
  --full) full=1 ;;
  --list)
    list_stages
    exit 0
    ;;
  --help | -h)
    usage
    exit 0
    ;;
  --)
    shift
    pytest_options=("$@")
    break
    ;;
  *)
    say "unknown option $1"
    usage >&2
    exit 2
    ;;
  esac
  shift
done

for name in ${chosen[@]+"${chosen[@]}"}; do
  declare -F "stage_$name" >/dev/null || die "unknown stage $name: see --list"
done

# Options of the program that the caller's environment holds are no business of the tests.
DISTILLCACHE_TEST_MODEL=${DISTILLCACHE_TEST_MODEL:-${DISTILLCACHE_MODEL:-}}
[ -n "$DISTILLCACHE_TEST_MODEL" ] && DISTILLCACHE_TEST_MODEL=$(realpath "$DISTILLCACHE_TEST_MODEL")
export DISTILLCACHE_TEST_MODEL
for variable in ${!DISTILLCACHE_*}; do
  case $variable in DISTILLCACHE_TEST_*) ;; *) unset "$variable" ;; esac
done

work=$(mktemp -d)
trap end_run EXIT
trap 'exit 130' INT TERM

plan=()
budgets=()
while read -r name budget _; do
  [ -n "$name" ] || continue
  plain=${name#+}
  if [ ${#chosen[@]} -gt 0 ]; then
    case " ${chosen[*]} " in *" $plain "*) ;; *) continue ;; esac
  elif [ "$name" != "$plain" ] && [ -z "$full" ]; then
    continue
  fi
  plan+=("$plain")
  budgets+=("$budget")
done <<<"$stages"

for i in "${!plan[@]}"; do
  case ${plan[i]} in
  setup | build) # what all others need
    (run_stage "${plan[i]}" "${budgets[i]}")
    continue
    ;;
  esac
  if [ ${#plan[@]} = 1 ]; then
    (run_stage "${plan[i]}" "${budgets[i]}")
    continue
  fi
  [ ${#running[@]} -lt 2 ] || wait_stage
  start_stage "${plan[i]}" "${budgets[i]}"
done
while [ ${#running[@]} -gt 0 ]; do
  wait_stage
done

echo
total_passed=0
total_failed=0
for name in ${plan[@]+"${plan[@]}"}; do
  if [ -f "$work/$name.counts" ]; then
    cat "$work/$name.line"
    read -r passed failed <"$work/$name.counts"
  else
    printf '%-11s FAILED  its shell ended early\n' "$name"
    passed=0 failed=1
  fi
  total_passed=$((total_passed + passed))
  total_failed=$((total_failed + failed))
done
printf '\n%d passed, %d failed\n' "$total_passed" "$total_failed"
[ "$total_failed" = 0 ]
