#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Explores the fuzz targets by libFuzzer, one after the other (clang). What it finds is left in build-fuzz/explore.
set -euo pipefail

usage() {
  cat <<TEXT
usage: tests/fuzz/explore.sh [--seconds N] [TARGET]...

Builds the targets with clang's libFuzzer and sanitizers in build-fuzz, and runs each for N seconds [600], from its seeds and
from what earlier runs have found. TARGET: gguf, http, ... [all]. Prints one line a target; exit status 1 when one failed.

In build-fuzz/explore are, for each target, corpus-TARGET/, TARGET.log, and what failed as TARGET-crash-..., TARGET-timeout-...,
TARGET-leak-... or TARGET-oom-...: build-fuzz/tests/fuzz/fuzz_TARGET FILE repeats it.
TEXT
}

seconds=600
targets=()
while [ $# -gt 0 ]; do
  case $1 in
  --seconds)
    seconds=${2:?--seconds needs a number}
    shift
    ;;
  --help | -h)
    usage
    exit 0
    ;;
  -*)
    usage >&2
    exit 2
    ;;
  *) targets+=("$1") ;;
  esac
  shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ ${#targets[@]} = 0 ]; then
  for file in tests/fuzz/fuzz_*.c; do
    target=${file##*/fuzz_}
    targets+=("${target%.c}")
  done
fi
# Kernels are not what is looked at here, and take long to compile when each copy of a loop is checked.
[ -d build-fuzz ] || CC=clang meson setup build-fuzz -Dfuzz=true -Db_sanitize=address,undefined -Db_lundef=false \
  -Dsanitizer_strict=true --optimization=1 -Ddebug=true '-Dc_args=-g1 -DCPU_COMPACT'
ninja -C build-fuzz "${targets[@]/#/tests/fuzz/fuzz_}"

export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export DISTILLCACHE_TEST_DATA=$PWD/tests/data
mkdir -p build-fuzz/explore
cd build-fuzz/explore
failed=0
for target in "${targets[@]}"; do
  mkdir -p "corpus-$target"
  program=../tests/fuzz/fuzz_$target
  DISTILLCACHE_TEST_SEEDS=corpus-$target "$program"
  result=ok
  "$program" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=3000 -print_final_stats=1 -artifact_prefix="$target-" \
    "corpus-$target" >"$target.log" 2>&1 || result=FAILED failed=1
  printf '%-12s %-6s %s\n' "$target" "$result" \
    "$(sed -nE 's/^stat::number_of_executed_units: *([0-9]+)/\1 inputs/p' "$target.log")"
done
exit "$failed"
