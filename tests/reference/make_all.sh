#!/usr/bin/env bash
# Writes every fixture under tests/fixtures again. One command:
#   python3 -m venv .venv && .venv/bin/pip install -r tests/reference/requirements.txt
#   PYTHON=.venv/bin/python tests/reference/make_all.sh
# The base models (tiny_*.py) come first. The other scripts write their own files and read those of the base models;
# make_pipelines_{sdxl,sd35,flux}.py also read the LoRAs of make_lora_{sdxl,sd35,flux}.py, which run before them.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-python3}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

for script in "$here"/tiny_*.py "$here"/make_*.py "$here"/check_*.py; do
    echo "== $(basename "$script")"
    "$python" "$script"
done
