#!/bin/sh
# Installs aitk's programs, and the worker or coordinator as a service: systemd on Linux, launchd on a Mac. See usage below.
set -eu

usage() {
  cat <<'END'
usage: deploy/install.sh [worker] [coordinator] [aitk] [OPTIONS]

Installs the given programs (default: worker aitk) into PREFIX/bin, and a service for a worker or a coordinator.
Nothing is started; the next steps are printed. Run it again to install a newer version.

  --prefix DIR    install programs into DIR/bin (default: /usr/local as root, else ~/.local)
  --from DIR      install programs that were built already (default: build them with cargo)
  --cpu           build for the CPU only (default: with CUDA if nvcc is found, else for the CPU if there is no NVIDIA card; with Metal on
                  an Apple Silicon Mac)
  --no-service    install programs only
  --destdir DIR   install everything below DIR, for a package; do not change users and services of this machine
  --uninstall     remove programs and services that this script installed; keep configuration and data
  --dry-run       only print what would be done
  --help          print this help

Configuration is in /etc/aitk/worker.env and coordinator.env (on a Mac ~/.config/aitk/worker.env); an existing file is never overwritten.

Exit codes: 0 done, 1 an operation failed, 2 wrong usage, 3 a requirement is missing (rights, cargo, systemd, ...)
END
}

say() { printf '%s\n' "$*"; }
fail() { # CODE MESSAGE
  printf 'install.sh: %s\n' "$2" >&2
  exit "$1"
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P) || fail 1 "cannot determine the folder of this script"
source_root=$(dirname -- "$here")
# Only service files with this line are replaced and removed.
mark='Written by install.sh of aitk'

# ---------------------------------------------------------------- arguments
parts='' prefix='' from='' cpu=no service=yes destdir='' action=install dry=no
value() { # OPTION VALUE...: fails if the value is missing
  if [ "$#" -lt 2 ] || [ -z "$2" ]; then fail 2 "$1 needs a value (--help)"; fi
}
while [ "$#" -gt 0 ]; do
  case $1 in
  worker | coordinator | aitk) case " $parts " in *" $1 "*) ;; *) parts="$parts $1" ;; esac ;;
  --prefix) value "$@"; prefix=$2; shift ;;
  --prefix=*) prefix=${1#*=}; value --prefix "$prefix" ;;
  --from) value "$@"; from=$2; shift ;;
  --from=*) from=${1#*=}; value --from "$from" ;;
  --destdir) value "$@"; destdir=$2; shift ;;
  --destdir=*) destdir=${1#*=}; value --destdir "$destdir" ;;
  --cpu) cpu=yes ;;
  --no-service) service=no ;;
  --uninstall) action=uninstall ;;
  --dry-run) dry=yes ;;
  -h | --help) usage; exit 0 ;;
  *) fail 2 "unknown argument \`$1\` (--help)" ;;
  esac
  shift
done
if [ -z "$parts" ]; then
  if [ "$action" = uninstall ]; then parts='worker coordinator aitk'; else parts='worker aitk'; fi
fi
if [ "$action" = uninstall ] && { [ -n "$from" ] || [ "$cpu" = yes ]; }; then
  fail 2 "--uninstall takes neither --from nor --cpu"
fi
if [ -n "$from" ] && [ "$cpu" = yes ]; then fail 2 "--cpu cannot be used with --from, which builds nothing"; fi

system=$(uname -s)
case $system in
Linux | Darwin) ;;
*) fail 3 "$system is not supported, only Linux and macOS; \`cargo install --locked --path cli\` installs the command line on other systems" ;;
esac
root=no
if [ "$(id -u)" = 0 ]; then root=yes; fi

# The parts that are services on this system.
services=''
for part in $parts; do
  case $system,$part in
  *,aitk) ;;
  # There is no coordinator service for a Mac.
  Darwin,coordinator) ;;
  *) services="$services $part" ;;
  esac
done
if [ "$service" = no ]; then services=''; fi
if [ -n "$services" ] && [ -z "$destdir" ] && [ "$dry" = no ]; then
  if [ "$system" = Linux ]; then
    [ "$root" = yes ] || fail 3 "installing a service needs root: sudo $0 ..., or --no-service for programs only"
    [ -d /run/systemd/system ] || fail 3 "systemd is not running: --no-service installs programs only"
  else
    [ "$root" = no ] || fail 3 "do not use sudo: on a Mac the worker runs as your user, because only that user may use the GPU"
  fi
fi

if [ -z "$prefix" ]; then
  if [ "$root" = yes ] || { [ "$system" = Linux ] && [ -n "$services" ]; }; then prefix=/usr/local; else prefix=${HOME:?}/.local; fi
fi
case $prefix in
/*) ;;
*) prefix=$(pwd -P)/$prefix ;;
esac
prefix=${prefix%/}
case $destdir in
'' | /*) destdir=${destdir%/} ;;
*) destdir=$(pwd -P)/${destdir%/} ;;
esac
# The prefix is written into service files, where other characters would need escaping.
case $prefix in
*[!A-Za-z0-9_./+@-]*) fail 2 "--prefix $prefix: only letters, digits and _ . / + @ - (it is written into service files)" ;;
esac
bin=$destdir$prefix/bin
if [ "$action,$system" = install,Linux ] && [ -n "$services" ]; then
  for hidden in home root tmp var/tmp; do
    case $prefix/ in
    "/$hidden"/*) fail 2 "--prefix $prefix: services cannot read this folder (ProtectHome, PrivateTmp); use /usr/local or /opt/aitk, or --no-service" ;;
    esac
  done
fi

# ---------------------------------------------------------------- running commands, or printing them with --dry-run
run() {
  if [ "$dry" = yes ]; then
    say "would run: $*"
  else
    "$@" || fail 1 "failed: $*"
  fi
}

remove() {
  run rm -f -- "$1"
  if [ "$dry" = no ]; then say "removed $1"; fi
}

program_of() {
  case $1 in
  aitk) say aitk ;;
  *) say "aitk-$1" ;;
  esac
}

unit_of() {
  if [ "$system" = Linux ]; then
    say "$destdir/etc/systemd/system/aitk-$1.service"
  else
    say "$destdir${HOME:?}/Library/LaunchAgents/dev.aitk.$1.plist"
  fi
}

config_of() {
  if [ "$system" = Linux ]; then say "$destdir/etc/aitk/$1.env"; else say "$destdir${HOME:?}/.config/aitk/$1.env"; fi
}

# FILE MODE: writes standard input to the file atomically.
write() {
  if [ "$dry" = yes ]; then
    cat >/dev/null
    say "would write: $1"
    return
  fi
  mkdir -p -- "$(dirname -- "$1")" || fail 1 "cannot create the folder of $1"
  if ! (umask 077 && cat >"$1.new") || ! chmod "$2" "$1.new" || ! mv -f -- "$1.new" "$1"; then
    rm -f -- "$1.new"
    fail 1 "cannot write $1"
  fi
  say "wrote $1"
}

# ---------------------------------------------------------------- programs
# Builds the packages, with the feature for this machine's GPU.
build() {
  command -v cargo >/dev/null ||
    fail 3 "this user has no cargo: install Rust (https://rustup.rs), or build as another user and install the programs with --from target/release"
  command -v cc >/dev/null || fail 3 "there is no C compiler (cc): install one (Debian: build-essential, macOS: xcode-select --install)"
  feature=''
  # The coordinator alone does not compute.
  if [ "$cpu" = no ] && [ -n "${parts# coordinator}" ]; then
    case $system,$(uname -m) in
    Darwin,arm64) feature=metal ;;
    Linux,*)
      for nvcc in "$(command -v nvcc || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" /usr/local/cuda/bin/nvcc; do
        if [ -n "$nvcc" ] && [ -x "$nvcc" ]; then
          feature=cuda
          break
        fi
      done
      if [ -z "$feature" ] && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        fail 3 "this machine has an NVIDIA card, but no nvcc to build for it: install the CUDA toolkit, or run deploy/build/cuda.sh and use --from target/cuda/release, or use --cpu"
      fi
      ;;
    esac
  fi
  if [ "$feature" = cuda ]; then
    if [ -z "${CUDA_COMPUTE_CAP:-}" ] && ! command -v nvidia-smi >/dev/null; then
      fail 3 "found $nvcc, but no nvidia-smi to detect the GPU: set CUDA_COMPUTE_CAP (80: A100, 89: RTX 40, 90: H100), or use --cpu"
    fi
    PATH=$(dirname -- "$nvcc"):$PATH
    export PATH
  fi
  packages='' features=''
  for part in $parts; do
    package=$(program_of "$part")
    packages="$packages -p $package"
    if [ -n "$feature" ] && [ "$part" != coordinator ]; then features="$features${features:+,}$package/$feature"; fi
  done
  say "building$packages${feature:+ with $feature}"
  # $packages is a list of arguments.
  # shellcheck disable=SC2086
  run cargo build --release --locked --manifest-path "$source_root/Cargo.toml" $packages ${features:+--features "$features"}
  from=${CARGO_TARGET_DIR:-$source_root/target}/release
}

install_programs() {
  if [ -n "$from" ]; then
    [ -d "$from" ] || fail 2 "--from $from: no such folder"
    for part in $parts; do
      [ -x "$from/$(program_of "$part")" ] || fail 2 "--from $from: there is no program $(program_of "$part") in this folder"
    done
  else
    build
  fi
  for part in $parts; do
    program=$(program_of "$part")
    if [ "$dry" = no ]; then
      # Check now that the program starts: it may be built for another machine, or need CUDA libraries.
      version=$("$from/$program" --version 2>&1) || fail 3 "$from/$program does not start on this machine: $version"
      mkdir -p -- "$bin" || fail 1 "cannot create $bin"
      # Write a new file and rename it, so that a running program is not disturbed.
      if ! cp -- "$from/$program" "$bin/.$program.new" || ! chmod 755 "$bin/.$program.new" || ! mv -f -- "$bin/.$program.new" "$bin/$program"; then
        rm -f -- "$bin/.$program.new"
        fail 1 "cannot write $bin/$program"
      fi
      say "installed $bin/$program ($version)"
    else
      say "would install: $bin/$program"
    fi
  done
}

# ---------------------------------------------------------------- services
check_units() {
  for part in $services; do
    unit=$(unit_of "$part")
    if [ -e "$unit" ] && ! grep -q "$mark" "$unit"; then
      fail 1 "$unit exists and was not written by this script: move it away, or use --no-service"
    fi
  done
}

# Prints the service file of a part, with the folder of the programs.
unit_text() {
  if [ "$system" = Linux ]; then
    say "# $mark, which replaces it. Put changes into a drop-in: systemctl edit aitk-$1"
    sed "s|/usr/local/bin/|$prefix/bin/|g" "$here/systemd/aitk-$1.service"
  else
    sed -e "s|/usr/local/bin/|$prefix/bin/|g" -e "s|^<plist |<!-- $mark, which replaces it. -->\\
&|" "$here/launchd/dev.aitk.$1.plist"
  fi
}

config_text() {
  say "# Options of aitk-$1, one NAME=VALUE per line; \`aitk-$1 --help\` lists them. Never overwritten by install.sh."
  case $1 in
  worker) printf '%s\n' '#AITK_DEVICES=cuda:0' '#AITK_CACHE_GIB=100' '#AITK_LABELS=zone=lab' ;;
  coordinator) printf '%s\n' '#AITK_BIND=0.0.0.0:7420' '#AITK_DATABASE=postgres://aitk@db.lab/aitk?sslmode=verify-full' '#AITK_KEEP_JOBS_DAYS=90' ;;
  esac
}

# The user of a service: worker and coordinator cannot read each other's files.
user_of() {
  case $1 in
  coordinator) say aitk ;;
  *) say "aitk-$1" ;;
  esac
}

make_user() { # NAME: also the name of its folder
  if ! id "$1" >/dev/null 2>&1; then
    run useradd --system --home-dir "/var/lib/$1" --create-home --shell /usr/sbin/nologin "$1"
    run chmod 0700 "/var/lib/$1"
  elif [ ! -d "/var/lib/$1" ]; then
    # The user is kept by --uninstall, and its data was removed. A service does not start without its folder.
    run install -d -m 0700 -o "$1" -g "$(id -gn "$1")" "/var/lib/$1"
  fi
  if [ "$1" = aitk-worker ]; then
    # Some distributions let only these groups use GPUs.
    for group in video render; do
      if getent group "$group" >/dev/null 2>&1; then run usermod --append --groups "$group" "$1"; fi
    done
  fi
}

install_services() {
  for part in $services; do
    if [ "$system" = Linux ] && [ -z "$destdir" ]; then make_user "$(user_of "$part")"; fi
    unit_text "$part" | write "$(unit_of "$part")" 644
    config=$(config_of "$part")
    if [ -e "$config" ]; then
      say "not changed: $config"
    else
      config_text "$part" | write "$config" 600
    fi
  done
  if [ -n "$services" ] && [ "$system" = Linux ] && [ -z "$destdir" ]; then run systemctl daemon-reload; fi
}

next_steps() {
  say ""
  case ":$PATH:" in
  *":$prefix/bin:"*) ;;
  *) say "$prefix/bin is not on your PATH." ;;
  esac
  for part in $services; do
    case $system,$part in
    Linux,coordinator)
      say "Coordinator, the first time (for other machines also AITK_BIND=0.0.0.0:7420 in $(config_of coordinator)):"
      say "  sudo -u aitk $prefix/bin/aitk-coordinator init --data-dir /var/lib/aitk --hostname NAME"
      say "  sudo systemctl enable --now aitk-coordinator"
      say "then for each user: sudo -u aitk $prefix/bin/aitk-coordinator token create USER --role submitter --data-dir /var/lib/aitk"
      ;;
    Linux,worker)
      say "Worker, the first time, with a token from the server (there: sudo -u aitk aitk-coordinator worker join-token --data-dir /var/lib/aitk):"
      if [ -e /var/lib/aitk/worker/identity.json ] && [ ! -e /var/lib/aitk-worker/identity.json ]; then
        say "  (this machine has a worker of an earlier version in /var/lib/aitk/worker: deploy/README.md describes how to move it)"
      fi
      say "  sudo -u aitk-worker $prefix/bin/aitk-worker join https://SERVER:7420 TOKEN --name NAME --data-dir /var/lib/aitk-worker"
      say "  sudo systemctl enable --now aitk-worker"
      ;;
    Darwin,worker)
      say "Worker, the first time, with a token from the server (there: sudo -u aitk aitk-coordinator worker join-token --data-dir /var/lib/aitk):"
      say "  $prefix/bin/aitk-worker join https://SERVER:7420 TOKEN"
      say "  launchctl load -w $(unit_of worker)"
      ;;
    esac
    if [ "$system" = Linux ]; then
      say "After an update: sudo systemctl try-restart aitk-$part"
    else
      say "After an update: launchctl kickstart -k gui/$(id -u)/dev.aitk.$part"
    fi
  done
}

# ---------------------------------------------------------------- uninstall
uninstall() {
  kept=''
  for part in $services; do
    unit=$(unit_of "$part")
    [ -e "$unit" ] || continue
    if ! grep -q "$mark" "$unit"; then
      say "not removed, and its program neither, because this script did not write it: $unit"
      kept="$kept $part"
      continue
    fi
    if [ -z "$destdir" ]; then
      # Stop the service first, so that a worker saves its running jobs.
      if [ "$system" = Linux ]; then
        run systemctl disable --now "aitk-$part"
      elif launchctl list "dev.aitk.$part" >/dev/null 2>&1; then
        run launchctl unload -w "$unit"
      fi
    fi
    remove "$unit"
    if [ -z "$destdir" ] && [ "$system" = Linux ]; then run systemctl daemon-reload; fi
  done
  for part in $parts; do
    case " $kept " in *" $part "*) continue ;; esac
    program=$bin/$(program_of "$part")
    if [ -e "$program" ]; then remove "$program"; fi
  done
  if [ "$system" = Linux ] && [ -e "$destdir/etc/systemd/system/aitk-backup.timer" ]; then
    say "not removed, because this script did not write it: $destdir/etc/systemd/system/aitk-backup.timer (deploy/README.md)"
  fi
  say "Configuration, data and users are kept: /etc/aitk, /var/lib/aitk and /var/lib/aitk-worker (on a Mac ~/.config/aitk and ~/.local/share/aitk)."
}

if [ "$action" = uninstall ]; then
  uninstall
else
  check_units
  install_programs
  install_services
  if [ "$dry" = no ] && [ -z "$destdir" ]; then next_steps; fi
fi
