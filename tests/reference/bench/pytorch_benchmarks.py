"""Every benchmark of `aitk bench engine` in PyTorch (diffusers, transformers, peft): the same shapes, random weights.

    python tests/reference/bench/pytorch_benchmarks.py NAME [--threads N] [--device cuda] [--dtype bf16] [--compile]

measures one and prints what `aitk bench engine --only NAME --json` prints: weights and inputs are made first, one run is
not counted, then runs are timed for three seconds, at least three; the median counts. Peak memory is the most that the
process held from there on (`VmHWM`), or with CUDA the most that tensors held on the card. `engine.py` starts this in turns
with aitk. With --compile models go through `torch.compile` first; two more runs are not counted then.

A benchmark is a function that makes weights and inputs and returns what is timed.
"""
import argparse
import gc
import json
import os
import pathlib
import resource
import sys
import tempfile
import time
from unittest import mock

# As in engine/src/bench/mod.rs.
MIN_DURATION, MIN_RUNS, MAX_RUNS = 3.0, 3, 1000
# Whether models are compiled; set by `main`.
COMPILE = False


def prepared(model):
    """The model as it is timed."""
    import torch
    return torch.compile(model) if COMPILE else model


def sd15_unet():
    from diffusers import UNet2DConditionModel
    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768)


def sdxl_unet():
    from diffusers import UNet2DConditionModel
    return UNet2DConditionModel(
        sample_size=128, cross_attention_dim=2048, block_out_channels=(320, 640, 1280), attention_head_dim=[5, 10, 20],
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=[1, 2, 10],
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816)


def conditions(unet):
    """The inputs of a U-Net besides sample and timestep."""
    import torch
    given = {"encoder_hidden_states": torch.randn(1, 77, unet.config.cross_attention_dim)}
    if unet.config.addition_embed_type is not None:
        sizes = torch.tensor([[512.0, 512.0, 0.0, 0.0, 512.0, 512.0]])
        given["added_cond_kwargs"] = {"text_embeds": torch.randn(1, 1280), "time_ids": sizes}
    return given


def adapter_config(kind, layers):
    """peft's, of rank 16."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig
    if kind in ("lora", "dora"):
        return LoraConfig(r=16, lora_alpha=16, target_modules=layers, use_dora=kind == "dora")
    return {"loha": LoHaConfig, "lokr": LoKrConfig}[kind](r=16, alpha=16, target_modules=layers)


def with_adapter(unet, kind, checkpointing):
    """Rank 16 on every linear layer and 1 x 1 convolution."""
    import torch
    from peft import inject_adapter_in_model
    unet.requires_grad_(False)
    layers = [
        name for name, layer in unet.named_modules()
        if isinstance(layer, torch.nn.Linear) or (isinstance(layer, torch.nn.Conv2d) and layer.kernel_size == (1, 1))]
    inject_adapter_in_model(adapter_config(kind, layers), unet)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    return unet.train()


def adamw_of(params):
    """torch's fused AdamW, with aitk's constants. Without numbers (`--flops`) the fused one cannot be had."""
    import torch
    meta = params[0].is_meta
    fused = {"foreach": False} if meta else {"fused": True}
    return torch.optim.AdamW(params, lr=1e-4, eps=1e-6, weight_decay=0.01, **fused)


def unet_forward(side, make=sd15_unet):
    import torch
    unet = make().requires_grad_(False).eval()
    x, given = torch.randn(1, 4, side, side), conditions(unet)
    unet = prepared(unet)
    timestep = torch.tensor([500.0])

    def run():
        with torch.no_grad():
            unet(x, timestep, **given).sample
    return run


def adapter_step(side, checkpointing, make=sd15_unet, kind="lora"):
    import torch
    unet = with_adapter(make(), kind, checkpointing)
    params = [p for p in unet.parameters() if p.requires_grad]
    optimizer = adamw_of(params)
    latents, noise = torch.randn(1, 4, side, side), torch.randn(1, 4, side, side)
    given, timestep = conditions(unet), torch.tensor([500.0])
    unet = prepared(unet)

    def run():
        noisy = 0.6 * latents + 0.8 * noise
        loss = (unet(noisy, timestep, **given).sample - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return run


def full_gradients(side):
    import torch
    unet = prepared(sd15_unet())
    x, context = torch.randn(1, 4, side, side), torch.randn(1, 77, 768)
    timestep = torch.tensor([500.0])

    def run():
        unet(x, timestep, context).sample.square().mean().backward()
        unet.zero_grad()
    return run


def vae(decode):
    import torch
    from diffusers import AutoencoderKL
    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512], layers_per_block=2, latent_channels=4, sample_size=512)
    model.requires_grad_(False).eval()
    part = prepared(model.decoder if decode else model.encoder)
    if COMPILE:
        if decode:
            model.decoder = part
        else:
            model.encoder = part
    x = torch.randn(1, 4, 64, 64) if decode else torch.randn(1, 3, 512, 512)

    def run():
        with torch.no_grad():
            model.decode(x).sample if decode else model.encode(x).latent_dist.mean
    return run


def text_encoder():
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel
    model = CLIPTextModel(CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12, projection_dim=768))
    model = prepared(model.requires_grad_(False).eval())
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
    model = prepared(model)
    x, context = torch.randn(1, 1280, 32, 32), torch.randn(1, 77, 2048)

    def forward():
        with torch.no_grad():
            model(x, context).sample

    def both():
        model(x, context).sample.square().mean().backward()
        model.zero_grad()
    return both if step else forward


def flux_block(double, step):
    import torch
    from diffusers.models.transformers import transformer_flux as flux
    kind = flux.FluxTransformerBlock if double else flux.FluxSingleTransformerBlock
    model = prepared(kind(3072, 24, 128))
    x, text, temb = torch.randn(1, 1024, 3072), torch.randn(1, 512, 3072), torch.randn(1, 3072)
    ids = torch.zeros(1536, 3)
    ids[512:, 1:] = torch.cartesian_prod(torch.arange(32.0), torch.arange(32.0))
    # Angles are numbers, also where nothing else is (`--flops`).
    rope = tuple(t.to(x.device) for t in flux.FluxPosEmbed(10000, [16, 56, 56])(ids.to(x.device)))

    def forward():
        with torch.no_grad():
            model(x, text, temb, rope)

    def both():
        torch.cat(model(x, text, temb, rope), 1).square().mean().backward()
        model.zero_grad()
    return both if step else forward


def sd3_block(step):
    import torch
    from diffusers.models.attention import JointTransformerBlock
    model = prepared(JointTransformerBlock(1536, 24, 64, qk_norm="rms_norm", use_dual_attention=True))
    x, text, temb = torch.randn(1, 1024, 1536), torch.randn(1, 333, 1536), torch.randn(1, 1536)

    def forward():
        with torch.no_grad():
            model(x, text, temb)

    def both():
        torch.cat(model(x, text, temb), 1).square().mean().backward()
        model.zero_grad()
    return both if step else forward


def text_layer(model, step, tokens=512, **inputs):
    import torch
    model = prepared(model.eval())
    ids = (torch.arange(tokens) % 512)[None]

    def forward():
        with torch.no_grad():
            model(ids, **inputs).last_hidden_state

    def both():
        model(ids, **inputs).last_hidden_state.square().mean().backward()
        model.zero_grad()
    return both if step else forward


def t5_layer(step):
    from transformers import T5Config, T5EncoderModel
    return text_layer(T5EncoderModel(T5Config(
        vocab_size=512, d_model=4096, d_kv=64, d_ff=10240, num_layers=1, num_heads=64, feed_forward_proj="gated-gelu",
        is_encoder_decoder=False, use_cache=False)), step)


def qwen3_layer(step):
    from transformers import Qwen3Config, Qwen3Model
    return text_layer(Qwen3Model(Qwen3Config(
        vocab_size=512, hidden_size=2560, intermediate_size=9728, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, use_cache=False)), step,
        # Without a mask for padding attention is causal, and no value of a tensor is asked for (`--flops`).
        attention_mask={"full_attention": None})


def starcoder2_layer(step):
    from transformers import Starcoder2Config, Starcoder2Model
    return text_layer(Starcoder2Model(Starcoder2Config(
        vocab_size=512, hidden_size=3072, intermediate_size=12288, num_hidden_layers=1, num_attention_heads=24,
        num_key_value_heads=2, sliding_window=4096, use_bias=True, use_cache=False)), step, tokens=1024)


def linear_one_row(dtype):
    """Four layers in turns, so that no weights stay in a cache."""
    import torch
    dtype = getattr(torch, dtype)
    layers = [torch.nn.Linear(3072, 12288, bias=False, dtype=dtype).requires_grad_(False) for _ in range(4)]
    x = torch.randn(1, 1, 3072, dtype=dtype)
    return lambda: sum(layer(x) for layer in layers)


def conv():
    import torch
    model = prepared(torch.nn.Conv2d(320, 320, 3, padding=1))
    x = torch.randn(1, 320, 64, 64, requires_grad=True)

    def run():
        model(x).square().mean().backward()
        model.zero_grad()
        x.grad = None
    return run


def attention(keys):
    import torch
    q, k, v = (torch.randn(1, rows, 320, requires_grad=True) for rows in (4096, keys, keys))

    def run():
        # Heads lie side by side in the rows, as a model's linear layers leave them and the next one wants them.
        heads = (t.view(1, -1, 8, 40).transpose(1, 2) for t in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(*heads)
        y.transpose(1, 2).reshape(1, -1, 320).square().mean().backward()
        q.grad = k.grad = v.grad = None
    return run


def adamw():
    import torch
    # Trained parameters are float32 in every dtype.
    numbers = {"dtype": torch.float32}
    params = [torch.nn.Parameter(torch.randn(1 << 20, **numbers)) for _ in range(32)]
    for p in params:
        p.grad = torch.randn(1 << 20, **numbers)
    return adamw_of(params).step


def load():
    import torch
    from safetensors.torch import load_file, save_file
    folder = tempfile.TemporaryDirectory()
    file = pathlib.Path(folder.name) / "weights.safetensors"
    save_file({f"t{i}": torch.zeros(1 << 22) for i in range(32)}, file)

    def run(folder=folder):
        # Reads every value, as a computation would: load_file only maps the file.
        sum(float(t.sum()) for t in load_file(file).values())
    return run


def page_cache():
    """What the system can do: the bytes of `load` from its page cache into memory that is there already, on all threads."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor
    import torch
    size, part = 512 << 20, 2 << 20
    file = tempfile.TemporaryFile()
    file.write(b"\1" * size)
    file.flush()
    room = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    room.write(b"\0" * size)
    room = memoryview(room)
    pool = ThreadPoolExecutor(torch.get_num_threads())

    def read(at):
        os.preadv(file.fileno(), [room[at:at + part]], at)

    return lambda: list(pool.map(read, range(0, size, part)))


UNET_64 = "1x4x64x64, text 77x768"
LORA_64 = UNET_64 + ", rank 16"
FLUX = "1x1024x3072, text 512x3072"
SD35 = "1x1024x1536, text 333x1536"
ADAMW = "32 x 1,048,576"
ONE_ROW = "4 layers 3072 to 12288"

# Name: (shape, what makes it).
WORKS = {
    "text_encoder_sd15_forward": ("1x77 tokens", text_encoder),
    "unet_sd15_forward_32": ("1x4x32x32, text 77x768", lambda: unet_forward(32)),
    "unet_sd15_forward_64": (UNET_64, lambda: unet_forward(64)),
    "unet_sd15_lora_step_64": (LORA_64, lambda: adapter_step(64, False)),
    "unet_sd15_lora_step_64_recomputed": (LORA_64, lambda: adapter_step(64, True)),
    "unet_sd15_dora_step_64": (LORA_64, lambda: adapter_step(64, False, kind="dora")),
    "unet_sd15_loha_step_64": (LORA_64, lambda: adapter_step(64, False, kind="loha")),
    "unet_sd15_lokr_step_64": (LORA_64, lambda: adapter_step(64, False, kind="lokr")),
    "unet_sd15_full_gradients_32": ("1x4x32x32, text 77x768", lambda: full_gradients(32)),
    "vae_sd15_encode_512": ("1x3x512x512", lambda: vae(False)),
    "vae_sd15_decode_512": ("1x4x64x64", lambda: vae(True)),
    "unet_sdxl_forward_64": ("1x4x64x64, text 77x2048", lambda: unet_forward(64, sdxl_unet)),
    "unet_sdxl_lora_step_64_recomputed": ("1x4x64x64, text 77x2048, rank 16", lambda: adapter_step(64, True, sdxl_unet)),
    "sdxl_block_forward": ("1x1280x32x32, text 77x2048", lambda: sdxl_block(False)),
    "sdxl_block_step": ("1x1280x32x32, text 77x2048", lambda: sdxl_block(True)),
    "flux_double_block_forward": (FLUX, lambda: flux_block(True, False)),
    "flux_double_block_step": (FLUX, lambda: flux_block(True, True)),
    "flux_single_block_forward": (FLUX, lambda: flux_block(False, False)),
    "flux_single_block_step": (FLUX, lambda: flux_block(False, True)),
    "sd35_block_forward": (SD35, lambda: sd3_block(False)),
    "sd35_block_step": (SD35, lambda: sd3_block(True)),
    "t5_layer_forward": ("1x512 tokens", lambda: t5_layer(False)),
    "t5_layer_step": ("1x512 tokens", lambda: t5_layer(True)),
    "qwen3_layer_forward": ("1x512 tokens", lambda: qwen3_layer(False)),
    "qwen3_layer_step": ("1x512 tokens", lambda: qwen3_layer(True)),
    "starcoder2_layer_forward": ("1x1024 tokens", lambda: starcoder2_layer(False)),
    "starcoder2_layer_step": ("1x1024 tokens", lambda: starcoder2_layer(True)),
    "linear_one_row_f32": (ONE_ROW, lambda: linear_one_row("float32")),
    "linear_one_row_bf16": (ONE_ROW, lambda: linear_one_row("bfloat16")),
    # torch has no product with weights in these forms: beside bfloat16.
    "linear_one_row_int8": (ONE_ROW, lambda: linear_one_row("bfloat16")),
    "linear_one_row_q8_0": (ONE_ROW, lambda: linear_one_row("bfloat16")),
    "linear_one_row_q4_k": (ONE_ROW, lambda: linear_one_row("bfloat16")),
    "conv_320_64_step": ("1x320x64x64 to 320, 3x3", conv),
    "attention_self_4096_step": ("8 heads, 4096 to 4096, 40", lambda: attention(4096)),
    "attention_cross_4096_77_step": ("8 heads, 4096 to 77, 40", lambda: attention(77)),
    "adamw_step_32m": (ADAMW, adamw),
    # The same work as adamw_step_32m: what 8-bit state has to keep up with.
    "adamw8bit_step_32m": (ADAMW, adamw),
    "safetensors_load_512mib": ("32 x 4,194,304", load),
}
# What only this side has: limits that other figures are to be seen beside.
LIMITS = {"page_cache_read_512mib": ("256 x 2 MiB", page_cache)}
# Names of dtypes on the command line, as aitk has them, and torch's names.
DTYPES = {"float32": "float32", "bf16": "bfloat16", "float16": "float16"}
# Works that bytes limit: aitk counts no operations of them.
UNCOUNTED = {"adamw_step_32m", "adamw8bit_step_32m", "safetensors_load_512mib"} | {
    name for name in WORKS if name.startswith("linear_one_row")}


def flops(name):
    """Floating-point operations of one run by PyTorch's own counter, without any arithmetic."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    if name in UNCOUNTED:
        return 0
    # peft's LoHa and LoKr ask a random number whether a module drops out.
    certain = mock.patch.object(torch, "rand", lambda *_: torch.ones(1, device="cpu"))
    with torch.device("meta"), certain:
        run = WORKS[name][1]()
        with FlopCounterMode(display=False) as counter:
            run()
    return counter.get_total_flops()


def forget_peak():
    """From here on the peak counts anew, where the system can do that: as aitk does."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak():
    """The most memory that this process held at once, in bytes."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Macs count bytes here; elsewhere it is KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def busy():
    """Seconds that the CPUs spent on anything so far; None where the system does not tell."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measure(name):
    import torch
    base = peak()
    torch.manual_seed(0)
    run = (WORKS | LIMITS)[name][1]()
    gc.collect()
    on_card = torch.get_default_device().type == "cuda"

    def synchronized():
        run()
        if on_card:
            torch.cuda.synchronize()

    forget_peak()
    for _ in range(3 if COMPILE else 1):
        synchronized()
    before, mine = busy(), time.process_time()
    times, began = [], time.perf_counter()
    while len(times) < MIN_RUNS or (time.perf_counter() - began < MIN_DURATION and len(times) < MAX_RUNS):
        start = time.perf_counter()
        synchronized()
        times.append(time.perf_counter() - start)
    took, mine = time.perf_counter() - began, time.process_time() - mine
    return {
        "work": name, "seconds": sorted(times)[len(times) // 2],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_card else peak(), "runs": len(times),
        # What `import torch` alone takes, and the part of the CPUs that other programs had while runs were timed.
        "base_bytes": base, "others": None if before is None else max(0.0, busy() - before - mine) / took / os.cpu_count()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORKS | LIMITS, metavar="NAME")
    parser.add_argument("--threads", type=int, help="default: as PyTorch likes")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps (cpu)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of weights and activations (float32)")
    parser.add_argument("--compile", action="store_true", help="compile models first")
    args = parser.parse_args()
    # No more libraries than the work needs: they count as memory.
    import torch
    if args.threads:
        torch.set_num_threads(args.threads)
    global COMPILE
    COMPILE = args.compile
    torch.set_default_device(args.device)
    torch.set_default_dtype(getattr(torch, DTYPES[args.dtype]))
    print(json.dumps([measure(args.work)]))


if __name__ == "__main__":
    main()
