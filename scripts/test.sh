#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up what is missing and runs every test, stage by stage.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Name, seconds it should take on two cores (a longer time is told, never a failure), what it does.
# In the order of running; those marked + run only with --full or when named.
stages='
setup       180 packages, the default model, a Python environment in .venv
build       150 everything with -Werror
format       10 clang-format, where version 14 of it is installed
unit        120 unit, model and parity tests (meson)
logits      180 pytest tests/model: tokenizer and logits beside other implementations
api          60 pytest tests/api: real clients against the server
bench       120 pytest tests/bench: what bench prints
eval        120 pytest tests/eval: what eval measures, beside the reference and recomputation
scripts      60 pytest tests/scripts: words of the scripts, and paper_tables.sh in tiny sizes
readme       30 pytest tests/readme: the examples of README.md as printed
cuda        240 the CUDA backend against an emulated device: emulator, parity, the whole model (pytest tests/cuda)
sanitizers  420 unit, parity and API tests with address and undefined-behaviour sanitizers
tsan        180 thread sanitizer over scheduler, queues, loop, threads, log, statistics, and clients that leave a whole server
fuzz         60 seeded mutations of files and requests, with sanitizers
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

Builds: build-test (release), build-emulated (CUDA), build-asan, build-tsan. DISTILLCACHE_TEST_MODEL=FILE instead of the default model.
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

need_test_build() {
  need_setup
  need_build build-test "" --werror -Dtests=true
}

need_asan_build() {
  need_setup
  need_build build-asan "" --werror -Dtests=true -Db_sanitize=address,undefined -Db_lundef=false \
    -Dsanitizer_strict=true --optimization=2 -Ddebug=true
}

# The tests with several threads; the thread sanitizer has nothing to say about the others.
thread_tests=(log scheduler server_loop store threads)

# The tests of the CUDA emulator itself.
emulator_tests=(cublaslt faults kernels traffic)

need_tsan_build() {
  need_setup
  need_build build-tsan "distillcache tests/unit/fake_server tests/model/network_tool tests/parity/parity ${thread_tests[*]/#/tests/unit/test_}" --werror -Dtests=true -Db_sanitize=thread \
    -Db_lundef=false --optimization=2 -Ddebug=true
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

# run_pytest BUILD PATH: nothing when there is no such path.
run_pytest() {
  local folder=$1 path=$2
  [ -e "$root/$path" ] || {
    echo "there is no $path"
    return 0
  }
  local status=0
  DISTILLCACHE_TEST_BUILD=$root/$folder DISTILLCACHE_TEST_SERVER=$root/$folder/distillcache PYTHONDONTWRITEBYTECODE=1 \
    "$root/.venv/bin/python" -m pytest -rs --durations=5 -p no:cacheprovider --color=no --junitxml="$output.xml" \
    "$root/$path" ${pytest_options[@]+"${pytest_options[@]}"} || status=$?
  # Counted from the file, since -q may leave out the line that says it.
  grep -o '<testsuite [^>]*>' "$output.xml" >>"$output" || true
  rm -f "$output.xml"
  [ "$status" = 0 ] || [ "$status" = 5 ] # 5: the options left no test here
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
  run_meson build-test --suite unit --suite model --suite parity
}

stage_logits() {
  need_test_build
  run_pytest build-test tests/model
}

stage_api() {
  need_test_build
  run_pytest build-test tests/api
}

stage_bench() {
  need_test_build
  run_pytest build-test tests/bench
}

stage_eval() {
  need_test_build
  run_pytest build-test tests/eval
}

stage_scripts() {
  need_test_build
  run_pytest build-test tests/scripts
}

stage_readme() {
  need_test_build
  run_pytest build-test tests/readme
}

# No CUDA toolkit: kernels are compiled as C++ (cuda/README.md). The emulator itself wants AVX2.
stage_cuda() {
  if ! grep -qw avx2 /proc/cpuinfo; then
    say "cuda: skipped, the emulator needs a processor with AVX2"
    return 0
  fi
  need_setup
  need_packages g++
  need_build build-emulated "distillcache tests/parity/parity ${emulator_tests[*]/#/tests/emulator/unit/test_emulator_}" --werror -Dtests=true -Dcuda=emulated
  run_meson build-emulated --timeout-multiplier 3 "${emulator_tests[@]/#/emulator_}" parity_cuda
  run_pytest build-emulated tests/cuda
}

stage_sanitizers() {
  need_asan_build
  sanitizer_environment
  run_meson build-asan --suite unit --suite parity --timeout-multiplier 5
  run_pytest build-asan tests/api
}

stage_tsan() {
  need_tsan_build
  sanitizer_environment
  run_meson build-tsan --timeout-multiplier 10 "${thread_tests[@]}" parity_threads
  run_pytest build-tsan tests/api/test_cancel.py
}

stage_fuzz() {
  need_asan_build
  sanitizer_environment
  run_meson build-asan --suite fuzz --timeout-multiplier 5
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

# run_stage NAME BUDGET: runs it, and appends a line to the summary.
summary=
total_passed=0
total_failed=0
run_stage() {
  local name=$1 budget=$2 status=0 result=ok started seconds passed failed
  printf '\n==== %s\n' "$name"
  : >"$output"
  started=$(date +%s)
  # A shell of its own, so that set -e holds inside: it does not in a function whose status is looked at.
  set +e
  (
    set -e
    "stage_$name"
  )
  status=$?
  set -e
  seconds=$(($(date +%s) - started))
  passed=$(count_passed)
  failed=$(count_failed)
  if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
    failed=1 # the stage itself: a build, a setup, a runner that did not start
  fi
  [ "$failed" = 0 ] || result=FAILED
  total_passed=$((total_passed + passed))
  total_failed=$((total_failed + failed))
  summary+=$(printf '%-11s %-7s %5d passed %4d failed %5d s of %4d s%s' "$name" "$result" "$passed" "$failed" \
    "$seconds" "$budget" "$([ "$seconds" -le "$budget" ] || echo '  over budget')")$'\n'
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

output=$(mktemp)
trap 'rm -f "$output" "$output.xml"' EXIT
while read -r name budget _; do
  [ -n "$name" ] || continue
  plain=${name#+}
  if [ ${#chosen[@]} -gt 0 ]; then
    case " ${chosen[*]} " in *" $plain "*) run_stage "$plain" "$budget" ;; esac
  elif [ "$name" = "$plain" ] || [ -n "$full" ]; then
    run_stage "$plain" "$budget"
  fi
done <<<"$stages"

printf '\n%s\n%d passed, %d failed\n' "$summary" "$total_passed" "$total_failed"
[ "$total_failed" = 0 ]
