#!/usr/bin/env bash
# Builds aitk with CUDA. The machine needs no GPU, no driver, no CUDA toolkit and no root access.
#
#   deploy/build/cuda.sh            the programs aitk and aitk-worker, in target/cuda/release
#   deploy/build/cuda.sh --ci       the check of CI: kernels, types and lints of the workspace, no programs; skipped if nothing has changed
#   deploy/build/cuda.sh run ...    any command, with the environment of a build
#
# Settings, as environment variables:
#   CUDA_COMPUTE_CAP   the oldest supported compute capability. 80 (default): Ampere (RTX 30, A100) and all later cards, because
#                      the driver compiles the kernels for the card when they are first used.
#                      75: Turing (RTX 20) and later, without bf16. 90, 100 and 120 support only that generation.
#   CUDA_HOME          the CUDA toolkit to build with. Default: that of the nvcc in PATH, else packages from PyPI, which are
#                      installed into the target folder (1.2 GB).
#   CARGO_TARGET_DIR   as for cargo.
#
# Exit codes: 0 done, 1 a build or check failed, 3 the tools cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
# From here, whatever the folder was in which it was called.
this_script=deploy/build/cuda.sh

say() { printf 'cuda.sh: %s\n' "$*" >&2; }

mode=${1:-build}
case $mode in
build | --ci) ;;
run) shift ;;
*)
  sed -n '2,/^set /s/^# \{0,1\}//p' "$this_script"
  exit 2
  ;;
esac

target=${CARGO_TARGET_DIR:-$PWD/target}
tools=$target/gpu-tools
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}

# nvcc and the libraries to link with. The output of 13.0 runs with drivers of the 580 series and later.
packages=(
  'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*'
  'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-nvrtc==13.0.*' 'nvidia-cublas==13.0.*' 'nvidia-curand==10.4.0.*'
)

# Installs the packages as a toolkit, with the library names that the linker expects.
install_toolkit() {
  local python=$tools/cuda-13.0 root library
  if [ ! -e "$python/complete" ]; then
    say "installing nvcc 13.0 and its libraries from PyPI into $python"
    rm -rf "$python"
    python3 -m venv "$python" || return 1
    "$python/bin/pip" install --quiet --disable-pip-version-check --no-deps "${packages[@]}" || return 1
    root=$(echo "$python"/lib/python3.*/site-packages/nvidia/cu13)
    [ -x "$root/bin/nvcc" ] || return 1
    for library in "$root"/lib/*.so.*; do
      ln -sf "${library##*/}" "${library%%.so.*}.so"
    done
    ln -sfn lib "$root/lib64"
    touch "$python/complete"
  fi
  CUDA_HOME=$(echo "$python"/lib/python3.*/site-packages/nvidia/cu13)
}

# libcuda is part of the driver. This stub is enough to link with; each of its functions returns
# CUDA_ERROR_STUB_LIBRARY (34), so that a program that loads it reports that error. It is never shipped.
make_stub() {
  stub=$tools/stub
  [ ! -e "$stub/libcuda.so" ] || return 0
  mkdir -p "$stub"
  cc -E -I"$CUDA_HOME/include" -include cuda.h -x c /dev/null | grep -o '\bcu[A-Z][A-Za-z0-9_]* *(' | sort -u |
    sed 's/^/int /; s/ *($/(void) { return 34; }/' >"$stub/stub.c"
  cc -shared -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.new" "$stub/stub.c"
  ln -sf libcuda.so "$stub/libcuda.so.1"
  mv "$stub/libcuda.so.new" "$stub/libcuda.so"
}

# Hashes all inputs of the --ci check.
fingerprint() {
  {
    printf '%s\n' "$CUDA_COMPUTE_CAP" "${CUDA_HOME:-}" "$(rustc --version)"
    cat "$this_script" Cargo.lock Cargo.toml clippy.toml
    find cli common coordinator engine kernels proto tests worker -type f ! -path '*/fixtures/*' ! -path '*/target/*' -print0 | sort -z |
      xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

# Assembles the kernels' PTX to machine code, as a driver does: for their own architecture, or for another one. Of each crate with
# kernels, those of its last build.
assemble() {
  local architecture=${1:-} kernels=0 crate ptx folder
  for crate in candle-kernels aitk-kernels; do
    folder=$(find "$CARGO_TARGET_DIR/release/build" -path "*/$crate-*/out/*.ptx" -printf '%T@ %h\n' | sort -rn | head -n 1 | cut -d' ' -f2-)
    [ -n "$folder" ] || { say "no kernels of $crate were found to assemble" && return 1; }
    while IFS= read -r -d '' ptx; do
      [ -n "$architecture" ] || architecture=$(sed -n 's/^\.target \(sm_[0-9a-z]*\).*/\1/p' "$ptx")
      ptxas -O0 -arch="$architecture" -o /dev/null "$ptx"
      kernels=$((kernels + 1))
    done < <(find "$folder" -name '*.ptx' -print0)
  done
  say "$kernels files of kernels assemble for $architecture"
}

if [ "$mode" = --ci ]; then
  now=$(fingerprint)
  if [ "$(cat "$tools/cuda-checked" 2>/dev/null)" = "$now" ]; then
    say "the sources have not changed since the last check"
    exit 0
  fi
fi

if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
  CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
fi
if [ -z "${CUDA_HOME:-}" ] && ! install_toolkit; then
  say "CUDA cannot be built: there is no nvcc on this machine, and its packages cannot be installed from PyPI"
  exit 3
fi
export CUDA_HOME CUDA_PATH=$CUDA_HOME CUDA_ROOT=$CUDA_HOME PATH=$CUDA_HOME/bin:$PATH
make_stub
export LIBRARY_PATH=$stub${LIBRARY_PATH:+:$LIBRARY_PATH}
# Number of kernels compiled in parallel; cudaforge's default is half of the CPUs.
CUDAFORGE_THREADS=${CUDAFORGE_THREADS:-$(nproc)}
export CUDAFORGE_THREADS

case $mode in
--ci)
  # Kernels are compiled with little optimisation, in a third of the time. No build can use them: the two crates that have kernels get
  # settings of their own. Everything else, such as libraries in C, build scripts and macros, is shared with the builds in this folder.
  export CARGO_TARGET_DIR=$target
  NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} -Xcicc -O1 -Xptxas -O1" \
    cargo clippy --release --workspace --all-targets --locked --quiet --features aitk/cuda,aitk-worker/cuda \
    --config profile.release.package.candle-kernels.opt-level=1 --config profile.release.package.aitk-kernels.opt-level=1 -- -D warnings
  # Assemble the PTX that a driver would compile, for this architecture and for a later one.
  assemble
  [ "${CUDA_COMPUTE_CAP%%[a-z]*}" -ge 90 ] || assemble sm_90
  printf '%s\n' "$now" >"$tools/cuda-checked"
  ;;
build)
  # A separate target folder, so that builds without CUDA are kept.
  export CARGO_TARGET_DIR=$target/cuda
  cargo build --release --locked -p aitk -p aitk-worker --features aitk/cuda,aitk-worker/cuda
  # Check that the program starts with the stub driver: no library is missing, and it finds the CPU.
  LD_LIBRARY_PATH=$stub:$CUDA_HOME/lib64 "$CARGO_TARGET_DIR/release/aitk-worker" probe
  say "built $CARGO_TARGET_DIR/release/aitk and aitk-worker"
  say "they need NVIDIA's driver (580 or later), and this folder in LD_LIBRARY_PATH: $CUDA_HOME/lib"
  ;;
run)
  exec "$@"
  ;;
esac
