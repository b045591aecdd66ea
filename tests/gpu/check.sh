#!/usr/bin/env bash
# Checks aitk on a machine with a GPU, and compares its speed with PyTorch's where Python has one for this GPU.
#
#   tests/gpu/check.sh [PROGRAM]
#
# PROGRAM is `aitk`, or `aitk.xz`; default: target/cuda/release/aitk (deploy/build/cuda.sh builds it), else target/release/aitk.
# Nothing is built here, so that a prebuilt program can be taken to the machine with this folder and tests/reference/bench.
#
# Results are written to $OUT (default: target/gpu-check): doctor.txt and doctor.json, the report of `aitk doctor --thorough`;
# float32.md and bf16.md, tables for docs/benchmarks.md.
#
# Settings, as environment variables:
#   DEVICE   the device (default: cuda, or metal on a Mac). cpu:portable tests this script without a GPU and without PyTorch.
#   PYTHON   a Python with torch, diffusers, transformers, peft (default: python3)
#   ONLY     benchmarks that are compared with PyTorch, by parts of their names (default: some of each kind)
#
# Exit codes: 0 everything is right, 1 something is not, 2 there is no program.
set -euo pipefail
cd "$(dirname "$0")/../.."

say() { printf 'check.sh: %s\n' "$*" >&2; }

out=${OUT:-target/gpu-check}
python=${PYTHON:-python3}
default_device=cuda
[ "$(uname)" = Darwin ] && default_device=metal
device=${DEVICE:-$default_device}
only=${ONLY:-unet_sd15_forward_64 unet_sd15_lora_step_64 vae_sd15_decode_512 sdxl_block flux_double_block attention_self conv_320}

program=${1:-}
for candidate in target/cuda/release/aitk target/release/aitk; do
  [ -n "$program" ] || { [ -x "$candidate" ] && program=$candidate; }
done
if [ ! -f "$program" ]; then
  say "no program: build it with deploy/build/cuda.sh, or give its path"
  exit 2
fi
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
case $program in
*.xz) xz --decompress --stdout "$program" >"$scratch/aitk" && program=$scratch/aitk ;;
*) cp "$program" "$scratch/aitk" && program=$scratch/aitk ;;
esac
chmod +x "$program"
# The CUDA libraries of the Python packages of NVIDIA, where the system has none.
libraries=$("$python" -c 'import glob, site; print(":".join(p for s in site.getsitepackages() for p in glob.glob(s + "/nvidia/*/lib")))' 2>/dev/null || true)
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}${libraries:+:$libraries}

status=0
say "aitk doctor --thorough --device $device"
"$program" doctor --thorough --device "$device" --report "$out/doctor.json" | tee "$out/doctor.txt" || status=1

torch_device=${device%%:*}
if [ "$torch_device" = cpu ]; then
  say "no GPU: no comparison with PyTorch (tests/reference/bench/engine.py compares on the CPU)"
  exit $status
fi
[ "$torch_device" = metal ] && torch_device=mps
if ! "$python" -c "import sys, torch; sys.exit(not getattr(torch, '$torch_device').is_available())" 2>/dev/null; then
  say "$python has no torch for $torch_device: no comparison with PyTorch"
  exit $status
fi
arguments=()
for name in $only; do arguments+=(--only "$name"); done
for dtype in float32 bf16; do
  say "benchmarks in $dtype, beside PyTorch"
  "$python" tests/reference/bench/engine.py --aitk "$program" --device "$device" --dtype "$dtype" --repeat 2 "${arguments[@]}" \
    --table "$out/$dtype.md" || status=1
done
exit $status
