"""The autoencoder in tiles -> tests/fixtures/models/vae_tiles.safetensors, from the model of tiny_sd.py."""
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file

FIXTURES = Path(__file__).parents[1] / "fixtures"


@torch.no_grad()
def main():
    vae = AutoencoderKL.from_pretrained(FIXTURES / "tiny_sd" / "vae").eval()
    vae.enable_tiling()
    g = torch.Generator().manual_seed(5)
    # Tiles are 64 pixels, 32 latents: neither a multiple of a tile's step, one side with a short last tile.
    latents = torch.randn((1, 4, 40, 75), generator=g)
    images = torch.rand((1, 3, 146, 80), generator=g) * 2 - 1
    distribution = vae.encode(images).latent_dist
    tensors = {
        "latents": latents,
        "decoded": vae.decode(latents).sample,
        "images": images,
        "mean": distribution.mean,
        "logvar": distribution.logvar,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FIXTURES / "models" / "vae_tiles.safetensors")


if __name__ == "__main__":
    main()
