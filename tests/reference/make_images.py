"""Fixtures of Pillow: resized images, and what `convert("RGB")` and EXIF orientations give.

    python tests/reference/make_images.py [OUT_DIR]        (default: tests/fixtures/images)
"""
import pathlib
import sys

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "fixtures" / "images")

FILTERS = {
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
SIZES = [(37, 23), (18, 11), (9, 40), (64, 64), (37, 5), (3, 23), (1, 1), (100, 31)]


def make_image(width, height, seed):
    """Smooth colours with sharp edges and some noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    smooth = np.stack([128 + 100 * np.sin(x / 5), 128 + 100 * np.cos(y / 4), (x * 7 + y * 3) % 256], -1)
    smooth[(x // 6 + y // 6) % 3 == 0] = (255, 0, 40)
    return np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    tensors = {}

    def put(name, image):
        tensors[name] = torch.from_numpy(np.array(image.convert("RGB")).copy())

    base = Image.fromarray(make_image(37, 23, 1))
    put("base", base)
    for name, resample in FILTERS.items():
        for width, height in SIZES:
            put(f"resize:{name}:{width}x{height}", base.resize((width, height), resample))

    # Tall ones: Pillow resizes the other axis first where that leaves fewer pixels.
    tall = Image.fromarray(make_image(16, 50, 4))
    put("tall", tall)
    for name, resample in FILTERS.items():
        for width, height in [(16, 20), (15, 20), (8, 33), (8, 35), (20, 41), (24, 44), (5, 10)]:
            put(f"tall:{name}:{width}x{height}", tall.resize((width, height), resample))

    rgb = make_image(21, 13, 2)
    alpha = (np.arange(21 * 13).reshape(13, 21) % 256).astype(np.uint8)
    gray16 = (rgb[..., 0].astype(np.uint16) * 257 + 31).astype(np.uint16)
    files = {
        "rgb.png": Image.fromarray(rgb),
        "rgba.png": Image.fromarray(np.dstack([rgb, alpha])),
        "gray.png": Image.fromarray(rgb[..., 0]),
        "gray_alpha.png": Image.merge("LA", [Image.fromarray(rgb[..., 0]), Image.fromarray(alpha)]),
        "bilevel.png": Image.fromarray(rgb[..., 0]).convert("1"),
        "palette.png": Image.fromarray(rgb).quantize(17),
        "gray16.png": Image.fromarray(gray16),
        "rgb.webp": Image.fromarray(rgb),
        "rgba.webp": Image.fromarray(np.dstack([rgb, alpha])),
    }
    for name, image in files.items():
        if name.endswith("webp"):
            image.save(OUT / name, lossless=True, exact=True)
        else:
            image.save(OUT / name)
        if name == "gray16.png":
            # Pillow's convert("RGB") clips to 255, which leaves a white image; the upper byte is what is meant.
            put(f"file:{name}", Image.fromarray((gray16 >> 8).astype(np.uint8)))
        else:
            put(f"file:{name}", Image.open(OUT / name))
    smooth = Image.fromarray(make_image(64, 48, 3)).resize((96, 64), Image.Resampling.BICUBIC)
    for name, options in {
        "444.jpg": {"quality": 95, "subsampling": 0},
        "420.jpg": {"quality": 90, "subsampling": 2},
        "progressive.jpg": {"quality": 90, "progressive": True, "subsampling": 0},
    }.items():
        smooth.save(OUT / name, **options)
        put(f"file:{name}", Image.open(OUT / name))
    # Colour at half the size under hard edges, odd sides: where decoders differ most.
    rough = Image.fromarray(make_image(51, 45, 7))
    for name, subsampling in (("rough422.jpg", 1), ("rough420.jpg", 2)):
        rough.save(OUT / name, quality=85, subsampling=subsampling)
        put(f"file:{name}", Image.open(OUT / name))
    smooth.convert("L").save(OUT / "gray.jpg", quality=95)
    put("file:gray.jpg", Image.open(OUT / "gray.jpg"))
    smooth.save(OUT / "lossy.webp", quality=90)
    put("file:lossy.webp", Image.open(OUT / "lossy.webp"))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for name in (f"turned{orientation}.jpg", f"turned{orientation}.png", f"turned{orientation}.webp"):
            options = {"quality": 95, "subsampling": 0} if name.endswith("jpg") else {}
            if name.endswith("webp"):
                options = {"lossless": True, "exact": True}
            Image.fromarray(rgb).save(OUT / name, exif=exif, **options)
            put(f"file:{name}", ImageOps.exif_transpose(Image.open(OUT / name)))
    save_file(tensors, OUT / "pillow.safetensors")


if __name__ == "__main__":
    main()
