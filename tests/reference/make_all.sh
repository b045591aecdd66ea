#!/usr/bin/env bash
# Writes every fixture under tests/fixtures again. One command:
#   python3 -m venv venv && venv/bin/pip install -r tests/reference/requirements.txt
#   PYTHON=venv/bin/python tests/reference/make_all.sh
# Each script below writes its own folder and depends on tiny_sd.py only, which therefore runs first.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-python3}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$python" "$here/tiny_sd.py"

for script in "$here"/*.py; do
    [ "$(basename "$script")" = tiny_sd.py ] && continue
    echo "== $(basename "$script")"
    "$python" "$script"
done
