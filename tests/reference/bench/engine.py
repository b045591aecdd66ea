"""`aitk bench engine` and PyTorch (diffusers, peft) on the same shapes, in turns, on the same machine; writes a table.

    cargo build --release --bin aitk
    python tests/reference/bench/engine.py [--rounds 3] [--only NAME] [--table docs/benchmarks.md]

Both sides run each piece of work in a process of its own: weights and inputs are made first, one run is not counted, then
the median of the runs counts. Peak memory is of the whole process from there on. `--flops` only counts operations, with
PyTorch's counter and no arithmetic, and checks that aitk counts the same.
"""
import argparse
import datetime
import gc
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
SECONDS = 3.0


def sd15_unet():
    from diffusers import UNet2DConditionModel
    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768)


def with_lora(unet, checkpointing):
    import torch
    from peft import LoraConfig
    unet.requires_grad_(False)
    layers = [
        name for name, layer in unet.named_modules()
        if isinstance(layer, torch.nn.Linear) or (isinstance(layer, torch.nn.Conv2d) and layer.kernel_size == (1, 1))]
    unet.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=layers))
    if checkpointing:
        unet.enable_gradient_checkpointing()
    return unet.train()


def unet_forward(side):
    import torch
    unet = sd15_unet().eval()
    x, context = torch.randn(1, 4, side, side), torch.randn(1, 77, 768)
    time_step = torch.tensor([500.0])

    def run():
        with torch.no_grad():
            unet(x, time_step, context).sample
    return run


def lora_step(side, checkpointing):
    import torch
    unet = with_lora(sd15_unet(), checkpointing)
    params = [p for p in unet.parameters() if p.requires_grad]
    meta = params[0].is_meta
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=not meta, foreach=False if meta else None)
    x, noise, context = torch.randn(1, 4, side, side), torch.randn(1, 4, side, side), torch.randn(1, 77, 768)
    time_step = torch.tensor([500.0])

    def run():
        loss = (unet(x, time_step, context).sample - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return run


def vae(decode):
    import torch
    from diffusers import AutoencoderKL
    blocks = ["UpDecoderBlock2D"] * 4
    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=blocks, block_out_channels=[128, 256, 512, 512],
        layers_per_block=2, latent_channels=4, sample_size=512).eval()
    x = torch.randn(1, 4, 64, 64) if decode else torch.randn(1, 3, 512, 512)

    def run():
        with torch.no_grad():
            model.decode(x).sample if decode else model.encode(x).latent_dist.mean
    return run


def text_encoder():
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel
    model = CLIPTextModel(CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12, projection_dim=768)).eval()
    ids = torch.full((1, 77), 320)

    def run():
        with torch.no_grad():
            model(ids).last_hidden_state
    return run


def sdxl_block(step):
    import torch
    from diffusers.models.transformers.transformer_2d import Transformer2DModel
    model = Transformer2DModel(
        num_attention_heads=20, attention_head_dim=64, in_channels=1280, num_layers=1, cross_attention_dim=2048,
        use_linear_projection=True)
    x, context = torch.randn(1, 1280, 32, 32), torch.randn(1, 77, 2048)

    def forward():
        with torch.no_grad():
            model(x, context).sample

    def both():
        model(x, context).sample.square().mean().backward()
        model.zero_grad()
    return both if step else forward


def conv():
    import torch
    model = torch.nn.Conv2d(320, 320, 3, padding=1)
    x = torch.randn(1, 320, 64, 64, requires_grad=True)

    def run():
        model(x).square().mean().backward()
        model.zero_grad()
        x.grad = None
    return run


def attention(keys):
    import torch
    q, k, v = (torch.randn(1, 8, rows, 40, requires_grad=True) for rows in (4096, keys, keys))

    def run():
        torch.nn.functional.scaled_dot_product_attention(q, k, v).square().mean().backward()
        q.grad = k.grad = v.grad = None
    return run


def adamw():
    import torch
    params = [torch.nn.Parameter(torch.randn(1 << 20)) for _ in range(32)]
    for p in params:
        p.grad = torch.randn(1 << 20)
    meta = params[0].is_meta
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=not meta, foreach=False if meta else None)
    return optimizer.step


def load():
    import torch
    from safetensors.torch import load_file, save_file
    folder = tempfile.TemporaryDirectory()
    file = pathlib.Path(folder.name) / "weights.safetensors"
    save_file({f"t{i}": torch.zeros(1 << 22) for i in range(32)}, file)

    def run(folder=folder):
        # Touched, as whoever computes with them will: a mapping alone has read nothing.
        sum(float(t.sum()) for t in load_file(file).values())
    return run


WORKS = {
    "text_encoder_sd15_forward": text_encoder,
    "unet_sd15_forward_32": lambda: unet_forward(32),
    "unet_sd15_forward_64": lambda: unet_forward(64),
    "unet_sd15_lora_step_64": lambda: lora_step(64, False),
    "unet_sd15_lora_step_64_recomputed": lambda: lora_step(64, True),
    "vae_sd15_encode_512": lambda: vae(False),
    "vae_sd15_decode_512": lambda: vae(True),
    "sdxl_block_forward": lambda: sdxl_block(False),
    "sdxl_block_step": lambda: sdxl_block(True),
    "conv_320_64_step": conv,
    "attention_self_4096_step": lambda: attention(4096),
    "attention_cross_4096_77_step": lambda: attention(77),
    "adamw_step_32m": adamw,
    # The same work as adamw_step_32m: what 8-bit state has to keep up with.
    "adamw8bit_step_32m": adamw,
    "safetensors_load_512mib": load,
}


def count(name):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    if name == "safetensors_load_512mib":
        return 0
    with torch.device("meta"):
        run = WORKS[name]()
        counter = FlopCounterMode(display=False)
        with counter:
            run()
    return counter.get_total_flops()


def reset_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def peak():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def measure_here(name):
    import torch
    torch.manual_seed(0)
    run = WORKS[name]()
    gc.collect()
    reset_peak()
    run()
    times, began = [], time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - began < SECONDS and len(times) < 1000):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    print(json.dumps({"work": name, "seconds": statistics.median(times), "peak_bytes": peak()}))


def spawn(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    found = json.loads(done.stdout)
    return found[0] if isinstance(found, list) else found


def machine():
    import torch
    cpu = platform.processor()
    if pathlib.Path("/proc/cpuinfo").exists():
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return f"{cpu}, {os.cpu_count()} cores; PyTorch {torch.__version__}, {torch.get_num_threads()} threads"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aitk", default=str(ROOT / "target/release/aitk"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--flops", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        return measure_here(args.here)
    names = [name for name in WORKS if args.only in name]
    if args.flops:
        for name in names:
            print(f"{name} {count(name)}", flush=True)
        return
    rows = []
    for name in names:
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(spawn([args.aitk, "bench", "engine", "--only", name, "--json"]))
            theirs.append(spawn([sys.executable, __file__, "--here", name]))
        seconds = [statistics.median(r["seconds"] for r in side) for side in (ours, theirs)]
        memory = [max(r["peak_bytes"] for r in side) / 2**30 for side in (ours, theirs)]
        rate = ours[0]["flops"] / seconds[0] / 1e9
        rows.append(
            f"| `{name}` | {seconds[0]:.3f} | {seconds[1]:.3f} | {seconds[1] / seconds[0]:.2f} | {rate:.0f} | "
            f"{memory[0]:.2f} | {memory[1]:.2f} |")
        print(rows[-1], flush=True)
    text = "\n".join([
        f"{datetime.date.today()}, {machine()}, float32, median of {args.rounds} rounds in turns:", "",
        "| work | aitk, s | PyTorch, s | speed, PyTorch = 1 | aitk, GFLOP/s | aitk, GiB | PyTorch, GiB |",
        "|---|---|---|---|---|---|---|", *rows, ""])
    if args.table:
        args.table.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
