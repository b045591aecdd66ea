#!/usr/bin/env bash
# Builds aitk with CUDA, on a machine that needs no card, no driver, no CUDA and no root for it.
#
#   deploy/build/cuda.sh            the programs aitk and aitk-worker, in target/cuda/release
#   deploy/build/cuda.sh --ci       what CI does: kernels, types and lints, no programs; nothing if nothing changed
#   deploy/build/cuda.sh run ...    any command, with what a build needs in its environment
#
# Settings, as environment variables:
#   CUDA_COMPUTE_CAP   the oldest card that the programs are for. 80 (default): everything since Ampere (RTX 30, A100), later
#                      cards included, because the driver translates the kernels for the card when they are first used.
#                      75: Turing (RTX 20) and later, without bf16. 90, 100 and 120 are for that generation alone.
#   CUDA_HOME          a CUDA tool kit to build with. Default: that of the nvcc in PATH, else packages from PyPI, which go
#                      into the target folder (1.2 GB).
#   CARGO_TARGET_DIR   as cargo knows it.
#
# Exit codes: 0 done, 1 something does not build, 3 the tools cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."

say() { printf 'cuda.sh: %s\n' "$*" >&2; }

mode=${1:-build}
case $mode in
build | --ci) ;;
run) shift ;;
*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac

target=${CARGO_TARGET_DIR:-$PWD/target}
tools=$target/gpu-tools
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}

# nvcc and the libraries to link with. 13.0: its output runs with drivers of the 580 series, and later.
packages=(
  'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*'
  'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-nvrtc==13.0.*' 'nvidia-cublas==13.0.*' 'nvidia-curand==10.4.0.*'
)

# The packages as a tool kit: under the names that linkers look for.
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

# libcuda belongs to the driver. An empty one is enough to link with; each function in it answers
# CUDA_ERROR_STUB_LIBRARY (34), so that a program that finds it as its driver says so. It is never shipped.
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

# Everything that goes into what --ci compiles.
fingerprint() {
  {
    printf '%s\n' "$CUDA_COMPUTE_CAP" "${CUDA_HOME:-}" "$(rustc --version)"
    cat "$0" Cargo.lock Cargo.toml clippy.toml
    find common engine -type f ! -path '*/tests/*' -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

# Machine code out of the kernels' PTX, as a driver would make it: for the card that they are for, or another.
assemble() {
  local architecture=${1:-} kernels=0 ptx
  while IFS= read -r -d '' ptx; do
    [ -n "$architecture" ] || architecture=$(sed -n 's/^\.target \(sm_[0-9a-z]*\).*/\1/p' "$ptx")
    ptxas -O0 -arch="$architecture" -o /dev/null "$ptx"
    kernels=$((kernels + 1))
  done < <(find "$CARGO_TARGET_DIR"/release/build/*/out -name '*.ptx' -print0)
  [ "$kernels" -gt 0 ] || { say "there are no kernels to assemble" && return 1; }
  say "$kernels files of kernels assemble for $architecture"
}

if [ "$mode" = --ci ]; then
  now=$(fingerprint)
  if [ "$(cat "$tools/cuda-checked" 2>/dev/null)" = "$now" ]; then
    say "nothing that it compiles has changed since the last check"
    exit 0
  fi
fi

if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
  CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
fi
if [ -z "${CUDA_HOME:-}" ] && ! install_toolkit; then
  say "CUDA cannot be built: there is no nvcc here, and its packages cannot be installed from PyPI"
  exit 3
fi
export CUDA_HOME CUDA_PATH=$CUDA_HOME CUDA_ROOT=$CUDA_HOME PATH=$CUDA_HOME/bin:$PATH
make_stub
export LIBRARY_PATH=$stub${LIBRARY_PATH:+:$LIBRARY_PATH}
# Kernels at once; by default half as many as there are CPUs.
CUDAFORGE_THREADS=${CUDAFORGE_THREADS:-$(nproc)}
export CUDAFORGE_THREADS

case $mode in
--ci)
  # Kernels hardly optimised, which takes a third of the time: so a target folder of its own, where no build finds them.
  export CARGO_TARGET_DIR=$target/cuda-check
  NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} -Xcicc -O1 -Xptxas -O1" \
    cargo clippy --release --locked --quiet -p aitk-engine --features cuda -- -D warnings
  # nvcc has assembled some of them for that card itself; these are what the driver translates, for it and a later one.
  assemble
  [ "${CUDA_COMPUTE_CAP%%[a-z]*}" -ge 90 ] || assemble sm_90
  printf '%s\n' "$now" >"$tools/cuda-checked"
  ;;
build)
  # A folder of its own: what was built without CUDA stays.
  export CARGO_TARGET_DIR=$target/cuda
  cargo build --release --locked -p aitk -p aitk-worker --features aitk/cuda,aitk-worker/cuda
  # It starts, with the empty driver: no library is missing, and what it finds is the CPU.
  LD_LIBRARY_PATH=$stub:$CUDA_HOME/lib64 "$CARGO_TARGET_DIR/release/aitk-worker" probe
  say "built $CARGO_TARGET_DIR/release/aitk and aitk-worker"
  say "they start where NVIDIA's driver (580 or later) is, and need in LD_LIBRARY_PATH: $CUDA_HOME/lib"
  ;;
run)
  exec "$@"
  ;;
esac
