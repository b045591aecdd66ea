"""Runs the Python code of docs/randomness.md -> tests/fixtures/train/randomness.{json,safetensors}."""
import json
import re
from pathlib import Path

from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
OUT = ROOT / "fixtures" / "train"
code = re.search(r"```python\n(.+?)```", (ROOT.parent / "docs" / "randomness.md").read_text(), re.S)[1]
exec(code)  # noqa: S102 - our own document

if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    cases, tensors = [], {}
    for number, case in enumerate([
        dict(seed=42, step=0, micro=0, shape=(2, 4, 8, 8)),
        dict(seed=42, step=137, micro=3, shape=(1, 4, 4, 6), kind="content"),
        dict(seed=2**40 + 1, step=9, micro=0, shape=(3, 4, 2, 2), kind="style", low=100, high=700),
        dict(seed=7, step=5, micro=1, shape=(2, 4, 3, 5), noise_offset=0.1, captions=["a,b,c,d,e", "one,two"]),
        dict(seed=42, step=3, micro=0, shape=(4, 16, 2, 2), flow=dict(timestep_type="sigmoid"), captions=["a,b,c"]),
        dict(seed=5, step=8, micro=1, shape=(3, 16, 2, 4), flow=dict(timestep_type="linear"), kind="content", low=10, high=800),
        dict(seed=42, step=4, micro=0, shape=(4, 16, 2, 2), flow=dict(timestep_type="shift", mu=0.63)),
        dict(seed=42, step=5, micro=0, shape=(4, 16, 2, 2), flow=dict(timestep_type="shift", shift=3.0), kind="style"),
        dict(seed=42, step=6, micro=0, shape=(4, 16, 2, 2), flow=dict(timestep_type="lognorm_blend"), noise_offset=0.05),
        dict(seed=42, step=7, micro=0, shape=(4, 16, 2, 2), flow=dict(timestep_type="eight_step")),
        dict(seed=42, step=7, micro=0, shape=(4, 16, 2, 2), flow=dict(timestep_type="two_step")),
    ]):
        times, noise, shuffled = micro_batch(**case)  # noqa: F821
        tensors[f"noise.{number}"] = noise
        cases.append({**case, "timesteps": times.tolist(), "shuffled": shuffled})
    orders = [{"seed": s, "epoch": e, "order": epoch_order(s, e, 13).tolist()} for s, e in [(42, 0), (42, 7), (1, 0)]]  # noqa: F821
    (OUT / "randomness.json").write_text(json.dumps({"cases": cases, "orders": orders}, indent=1))
    save_file(tensors, OUT / "randomness.safetensors")
