# shellcheck shell=bash
# Helpers shared by the scripts in this folder. Source this file, don't run it:
#
#     source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
#
# It sets -euo pipefail, changes to the repository's root, and installs one EXIT trap that stops
# the processes started with start_bg, removes the folders made with make_temp, and undoes what
# need_packages changed. Functions whose result is a value put it in a variable named in their
# comment: command substitution would run them in a subshell, where the trap's lists are copies.

set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$REPO_ROOT"
# cargo takes a relative CARGO_TARGET_DIR from the current folder, which is the root now.
TARGET_DIR="${CARGO_TARGET_DIR:-$REPO_ROOT/target}"
export DEBIAN_FRONTEND=noninteractive

_pids=()         # children to stop at exit, in the order of their start
_temps=()        # folders to remove at exit
_policy_state="" # what guard_services did: "", created, moved

# --- output -----------------------------------------------------------------------------------

if [[ -t 1 && -z "${NO_COLOR:-}" ]]; then
    _bold=$'\e[1m' _red=$'\e[31m' _reset=$'\e[0m'
else
    _bold="" _red="" _reset=""
fi

# say TEXT...: one line of progress.
say() { printf '%s\n' "$*"; }
# step TEXT...: heading of a step.
step() { printf '%s== %s%s\n' "$_bold" "$*" "$_reset"; }
warn() { printf '%swarning:%s %s\n' "$_red" "$_reset" "$*" >&2; }
# die TEXT...: message on standard error, exit status 1.
die() {
    printf '%serror:%s %s\n' "$_red" "$_reset" "$*" >&2
    exit 1
}

# --- cleaning up ------------------------------------------------------------------------------

_cleanup() {
    local status=$? i
    trap - EXIT
    set +e
    for ((i = ${#_pids[@]} - 1; i >= 0; i--)); do stop_pid "${_pids[i]}"; done
    unguard_services
    for i in "${_temps[@]}"; do rm -rf -- "$i"; done
    exit "$status"
}
trap _cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# make_temp: a new private folder, removed at exit; its name is in TEMP_DIR. It lies in /dev/shm
# where that is possible, as runtime files of xsmc are mapped and should not be written to disk.
make_temp() {
    local base=/dev/shm
    [[ -d $base && -w $base ]] || base="${TMPDIR:-/tmp}"
    TEMP_DIR="$(mktemp -d "$base/xsmc-XXXXXX")"
    _temps+=("$TEMP_DIR")
}

# --- processes --------------------------------------------------------------------------------

# start_bg LOGFILE COMMAND...: starts a child in the background; its pid is in LAST_PID.
start_bg() {
    local log="$1"
    shift
    "$@" </dev/null >"$log" 2>&1 &
    LAST_PID=$!
    _pids+=("$LAST_PID")
}

# stop_pid PID: asks a child of this shell to stop, by the signal STOP_SIGNAL, and kills it after
# STOP_SECONDS. The child is not reaped before we wait for it, so the pid can't be another's.
STOP_SIGNAL=TERM
STOP_SECONDS=5
stop_pid() {
    local pid="$1" left=$((STOP_SECONDS * 20)) i
    for i in "${!_pids[@]}"; do
        [[ ${_pids[i]} == "$pid" ]] && unset '_pids[i]'
    done
    _pids=("${_pids[@]}")
    if kill -s "$STOP_SIGNAL" "$pid" 2>/dev/null; then
        while ((left-- > 0)) && _running "$pid"; do sleep 0.05; done
        _running "$pid" && kill -KILL "$pid" 2>/dev/null
    fi
    wait "$pid" 2>/dev/null || true
}

# _running PID: true unless the child is gone or waits to be reaped.
_running() {
    local stat
    read -r stat 2>/dev/null <"/proc/$1/stat" || return 1
    stat="${stat##*) }"
    [[ ${stat:0:1} != Z && ${stat:0:1} != X ]]
}

# free_port: a TCP port of 127.0.0.1 on which nothing listens, in FREE_PORT. A port tried once isn't
# tried again by this script.
_next_port=$((20000 + $$ % 10000))
free_port() {
    local tries
    for ((tries = 0; tries < 2000; tries++)); do
        FREE_PORT=$((_next_port++))
        if ! port_open "$FREE_PORT"; then return 0; fi
    done
    die "no free TCP port found on 127.0.0.1"
}

port_open() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# wait_port PORT PID LOGFILE [SECONDS]: waits until something listens; dies with the log's end if
# the process ends before, or after SECONDS (default 10).
wait_port() {
    local port="$1" pid="$2" log="$3" left=$(((${4:-10}) * 20))
    while ! port_open "$port"; do
        if ! _running "$pid"; then
            tail -n 20 "$log" >&2
            die "a server ended before it listened on port $port (its last output is above)"
        fi
        if ((left-- <= 0)); then
            tail -n 20 "$log" >&2
            die "nothing listens on port $port after ${4:-10} s"
        fi
        sleep 0.05
    done
}

# --- packages ---------------------------------------------------------------------------------

# as_root COMMAND...: runs it as root, by sudo if need be; see check_root.
as_root() {
    if ((EUID == 0)); then
        "$@"
    else
        sudo -n "$@"
    fi
}

# check_root WHAT: dies unless as_root will work. May ask for sudo's password, so it is called
# before anything whose input isn't the terminal.
check_root() {
    if ((EUID == 0)); then return 0; fi
    command -v sudo >/dev/null || die "root or sudo is needed to run: $1"
    if [[ -t 0 ]]; then
        sudo -v || die "sudo refused; run as root: $1"
    else
        sudo -n true || die "sudo wants a password, and there is no terminal; run as root: $1"
    fi
}

# Debian starts the services that it installs, unless /usr/sbin/policy-rc.d says no (exit status
# 101). guard_services puts such a file there while packages are installed, so that no server of
# ours takes a port; unguard_services puts back what was there.
_policy=/usr/sbin/policy-rc.d
_policy_mark="made by xsmc's scripts for the time of one installation"

guard_services() {
    local kept="$_policy.before-xsmc" status=0
    # What an earlier run left when it was killed.
    if grep -qs "$_policy_mark" "$_policy"; then
        as_root rm -f "$_policy"
        [[ -e $kept ]] && as_root mv "$kept" "$_policy"
    fi
    if [[ -e $_policy ]]; then
        "$_policy" redis-server start >/dev/null 2>&1 || status=$?
        ((status == 101)) && return 0
        as_root mv "$_policy" "$kept"
        _policy_state=moved
    else
        _policy_state=created
    fi
    printf '#!/bin/sh\n# %s\nexit 101\n' "$_policy_mark" | as_root tee "$_policy" >/dev/null
    as_root chmod 755 "$_policy"
}

unguard_services() {
    case "$_policy_state" in
    created) as_root rm -f "$_policy" ;;
    moved) as_root mv "$_policy.before-xsmc" "$_policy" ;;
    esac
    _policy_state=""
}

# _installed PACKAGE
_installed() {
    [[ "$(dpkg-query -W -f='${Status}' "$1" 2>/dev/null)" == "install ok installed" ]]
}

# _apt LOGFILE ARGUMENTS...: apt-get with its output in a file; on a terminal, one line tells what
# it is doing. Prints the output's end if it fails.
_apt() {
    local log="$1" line
    shift
    if as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=300 \
        -o Dpkg::Use-Pty=0 "$@" </dev/null 2>&1 | tee "$log" | while IFS= read -r line; do
        case "$line" in
        Get:* | Unpacking* | "Setting up"*) _status_line "$line" ;;
        esac
    done; then
        _status_line ""
        return 0
    fi
    _status_line ""
    tail -n 15 "$log" >&2
    return 1
}

# _status_line TEXT: overwrites the current line of a terminal; nothing elsewhere.
_status_line() {
    if [[ -t 1 ]]; then printf '\r\e[K%.70s' "${1:+   $1}"; fi
}

# What scripts/lab needs.
# shellcheck disable=SC2034 # used by the scripts that source this file
LAB_PACKAGES=(
    qemu-system-x86 busybox-static kmod cpio zstd binutils gcc libc6-dev python3 util-linux # machines and their image
    iproute2 nftables bpftool rdma-core ibverbs-providers ibverbs-utils rdmacm-utils perftest # used inside of them
)

# need_packages PACKAGE...: installs those Debian packages that are missing, and starts none of
# their services.
need_packages() {
    local missing=() package log started=$SECONDS
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        die "this is not a Debian system; install by hand what these packages hold: $*"
    fi
    for package in "$@"; do
        _installed "$package" || missing+=("$package")
    done
    ((${#missing[@]} == 0)) && return 0
    say "installing Debian packages: ${missing[*]}"
    check_root "apt-get install ${missing[*]}"
    make_temp
    log="$TEMP_DIR/apt.log"
    _apt "$log" update || die "apt-get update failed (its last output is above)"
    guard_services
    if ! _apt "$log" install --no-install-recommends "${missing[@]}"; then
        die "apt-get could not install: ${missing[*]} (its last output is above)"
    fi
    unguard_services
    say "installed in $((SECONDS - started)) s"
}

# --- building ---------------------------------------------------------------------------------

# need_cargo: finds cargo, also where rustup puts it.
need_cargo() {
    if ! command -v cargo >/dev/null && [[ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]]; then
        PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    fi
    command -v cargo >/dev/null ||
        die "cargo is not installed: Rust $(_rust_version) or later is needed"
}

# need_components COMPONENT...: checks for parts of cargo such as fmt and clippy.
need_components() {
    local component
    for component in "$@"; do
        cargo "$component" --version >/dev/null 2>&1 ||
            die "cargo $component is missing: rustup component add ${component/#fmt/rustfmt}"
    done
}

_rust_version() { sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml; }

# What cargo needs besides Rust: the crate rdma-sys makes its types from the headers of libibverbs, and
# smctl/build.rs compiles eBPF programs by clang, with the kernel's headers.
# The programs don't need these packages where they run.
BUILD_PACKAGES=(gcc libc6-dev pkg-config clang libclang-dev linux-libc-dev libibverbs-dev librdmacm-dev)

# build_release: libxsmc.so and smctl, in $TARGET_DIR/release.
build_release() {
    local started
    need_packages "${BUILD_PACKAGES[@]}"
    need_cargo
    started=$SECONDS
    say "building libxsmc.so and smctl (release)"
    cargo build --release --locked || die "cargo build --release failed"
    [[ -f "$TARGET_DIR/release/libxsmc.so" ]] || die "the build made no $TARGET_DIR/release/libxsmc.so"
    say "built in $((SECONDS - started)) s"
}

# build_programs NAME...: C programs of tests/programs, in $TARGET_DIR/programs.
build_programs() {
    local name source out
    mkdir -p "$TARGET_DIR/programs"
    for name in "$@"; do
        source="tests/programs/$name.c"
        out="$TARGET_DIR/programs/$name"
        [[ $out -nt $source ]] && continue
        cc -std=gnu11 -O2 -g -Wall -Wextra -pthread -o "$out" "$source" -ldl ||
            die "cc could not compile $source"
    done
}
