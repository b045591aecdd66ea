"""Changes of colours and positions of one small image by albumentations 1.4.15, and by Pillow as torchvision calls it.

Writes augmentations.json: for each change its parameters and the result, as hexadecimal digits. The image is made by `image()`, which the Rust test
repeats. Requires albumentations==1.4.15 and albucore==0.0.16.
"""

import json
import os
import sys
import warnings

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
warnings.filterwarnings("ignore")

from importlib import import_module  # noqa: E402

import cv2  # noqa: E402
import numpy as np  # noqa: E402
from albumentations.augmentations.transforms import Sharpen  # noqa: E402
from PIL import Image, ImageEnhance, ImageOps  # noqa: E402

# `albumentations.augmentations.blur` is a function, too.
blur, colors, geometric = (
    import_module(f"albumentations.augmentations.{name}")
    for name in ("blur.functional", "functional", "geometric.functional")
)
WIDTH, HEIGHT = 8, 6


def image():
    """[6, 8, 3]: smooth, with three colours that reach from 0 to 255."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    for y in range(HEIGHT):
        for x in range(WIDTH):
            pixels[y, x] = (x * 255 // 7, y * 255 // 5, 255 - (x + y) * 255 // 12)
    return pixels


def affine(angle, scale, shift):
    """The matrix of `ShiftScaleRotate`."""
    centre = ((WIDTH - 1) / 2, (HEIGHT - 1) / 2)
    return geometric.create_affine_transformation_matrix(
        {"x": shift[0], "y": shift[1]}, {"x": 0, "y": 0}, {"x": scale[0], "y": scale[1]}, -angle, centre
    )


def hue(pillow, factor):
    """torchvision's `adjust_hue` of a Pillow image."""
    h, s, v = pillow.convert("HSV").split()
    shifted = np.array(h, dtype=np.uint8)
    shifted += np.int32(factor * 255).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(shifted, "L"), s, v)).convert("RGB")


def main(folder):
    bgr, pillow = image(), Image.fromarray(image(), "RGB")
    reflect = cv2.BORDER_REFLECT_101
    sharpening = Sharpen._Sharpen__generate_sharpening_matrix
    results = {
        "brightness_contrast 1.13 0.07": colors.brightness_contrast_adjust(bgr, 1.13, 0.07, True),
        "brightness_contrast_mean 0.9 -0.1": colors.brightness_contrast_adjust(bgr, 0.9, -0.1, False),
        "hsv 13.7 -25.4 11.2": colors.shift_hsv(bgr, 13.7, -25.4, 11.2),
        "hsv -9.3 18.9 -14.6": colors.shift_hsv(bgr, -9.3, 18.9, -14.6),
        "jitter 0 1.17": colors.adjust_brightness_torchvision(bgr, 1.17),
        "jitter 1 0.83": colors.adjust_contrast_torchvision(bgr, 0.83),
        "jitter 2 1.4": colors.adjust_saturation_torchvision(bgr, 1.4),
        "jitter 3 0.21": colors.adjust_hue_torchvision(bgr, 0.21),
        "gray": colors.to_gray(bgr, 3, "weighted_average"),
        "blur 5 0": blur.gaussian_blur(bgr, 5, 0),
        "blur 0 0.9": blur.gaussian_blur(bgr, 0, 0.9),
        "sharpen 0.3 0.7": colors.convolve(bgr, sharpening(np.float64(0.3), np.float64(0.7))),
        # `CLAHE` changes the first channel of L*a*b*.
        "clahe 2.5 2 4": cv2.createCLAHE(clipLimit=2.5, tileGridSize=(2, 4)).apply(np.ascontiguousarray(bgr[:, :, 2])),
        "lab": cv2.cvtColor(bgr, cv2.COLOR_RGB2LAB),
        "from_lab": cv2.cvtColor(cv2.cvtColor(bgr, cv2.COLOR_RGB2LAB), cv2.COLOR_LAB2RGB),
        "noise": colors.add_noise(bgr, np.linspace(-12.3, 12.3, bgr.size).reshape(bgr.shape)),
        "rotate 20": geometric.rotate(bgr, 20.0, cv2.INTER_LINEAR, reflect, None),
        "rotate_constant -35": geometric.rotate(bgr, -35.0, cv2.INTER_LINEAR, cv2.BORDER_CONSTANT, [10, 20, 30]),
        "shift_scale_rotate": geometric.warp_affine(
            bgr, affine(15.0, (1.2, 0.9), (1.5, -0.8)), cv2.INTER_LINEAR, 0, reflect, (HEIGHT, WIDTH)
        ),
        "pillow 0 1.13": ImageEnhance.Brightness(pillow).enhance(1.13),
        "pillow 1 0.85": ImageEnhance.Contrast(pillow).enhance(0.85),
        "pillow 1 1.2": ImageEnhance.Contrast(pillow).enhance(1.2),
        "pillow 2 1.17": ImageEnhance.Color(pillow).enhance(1.17),
        "pillow 3 0.027": hue(pillow, 0.027),
        "pillow 3 -0.03": hue(pillow, -0.03),
        "equalize": ImageOps.equalize(pillow.resize((32, 24), Image.NEAREST)).resize((8, 6), Image.NEAREST),
    }
    text = {name: bytes(np.asarray(result, dtype=np.uint8)).hex() for name, result in results.items()}
    with open(os.path.join(folder, "augmentations.json"), "w", encoding="utf-8") as file:
        json.dump(text, file, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..", "fixtures"))
