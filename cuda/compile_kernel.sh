#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# compile_kernel.sh REPORT NVCC ARGUMENTS...: compiles and keeps what the compiler says (ptxas: registers, spills, shared
# memory) in REPORT; prints it when compiling fails or warns.
report=$1
shift
"$@" 2>"$report"
status=$?
if [ $status -ne 0 ] || grep -q warning "$report"; then
    cat "$report" >&2
fi
exit $status
