//! torchvision's `ColorJitter` and `RandomEqualize` of Pillow images, with the bytes of Pillow 11 (`ImageEnhance`, `ImageOps.equalize`
//! and its conversions to grey and to HSV).

use super::draws::{draw, shuffled, uniform};
use crate::rng::TorchGenerator;
use image::RgbImage;

/// ai-toolkit's `ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.03)`. Draws `randperm(4)` and 4 numbers.
pub(super) fn color_jitter(image: RgbImage, generator: &mut TorchGenerator) -> RgbImage {
    let order = shuffled(4, generator);
    let limits = [[0.8, 1.2], [0.8, 1.2], [0.8, 1.2], [-0.03, 0.03]];
    let factors = limits.map(|range| uniform(range, generator));
    order
        .into_iter()
        .fold(image, |image, step| jitter_step(image, step, factors[step]))
}

/// Step 0 changes the brightness, 1 the contrast, 2 the saturation and 3 the hue.
pub(super) fn jitter_step(image: RgbImage, step: usize, factor: f64) -> RgbImage {
    match step {
        0 => blend(image, |_| [0; 3], factor),
        1 => {
            let sum: u64 = image.pixels().map(|pixel| u64::from(gray(pixel.0))).sum();
            let count = (image.pixels().len() as f64).max(1.0);
            let mean = (sum as f64 / count + 0.5) as u8;
            blend(image, |_| [mean; 3], factor)
        }
        2 => blend(image, |pixel| [gray(pixel); 3], factor),
        _ => shift_hue(image, factor),
    }
}

/// `ImageOps.equalize` of one image of five. Draws one number.
pub(super) fn random_equalize(image: RgbImage, generator: &mut TorchGenerator) -> RgbImage {
    match draw(generator) < 0.2 {
        true => equalize(image),
        false => image,
    }
}

/// Each channel gets a flat histogram.
pub(super) fn equalize(mut image: RgbImage) -> RgbImage {
    for channel in 0..3 {
        let mut histogram = [0u64; 256];
        for pixel in image.pixels() {
            histogram[usize::from(pixel.0[channel])] += 1;
        }
        let used: Vec<u64> = histogram.iter().copied().filter(|count| *count > 0).collect();
        let last = used.last().copied().unwrap_or(0);
        let step = (used.iter().sum::<u64>() - last) / 255;
        if used.len() <= 1 || step == 0 {
            continue;
        }
        let mut sum = step / 2;
        let table = histogram.map(|count| {
            let value = (sum / step).min(255) as u8;
            sum += count;
            value
        });
        for pixel in image.pixels_mut() {
            pixel.0[channel] = table[usize::from(pixel.0[channel])];
        }
    }
    image
}

/// `Image.convert("L")`.
fn gray([red, green, blue]: [u8; 3]) -> u8 {
    let sum = u32::from(red) * 19595 + u32::from(green) * 38470 + u32::from(blue) * 7471 + 0x8000;
    (sum >> 16) as u8
}

/// `Image.blend(other, image, factor)`, in f32, which cuts off fractions.
fn blend(mut image: RgbImage, other: impl Fn([u8; 3]) -> [u8; 3], factor: f64) -> RgbImage {
    let factor = factor as f32;
    for pixel in image.pixels_mut() {
        let other = other(pixel.0);
        for (value, from) in pixel.0.iter_mut().zip(other) {
            let mixed = f32::from(from) + factor * (f32::from(*value) - f32::from(from));
            *value = mixed.clamp(0.0, 255.0) as u8;
        }
    }
    image
}

/// Adds a share of the circle to the hue, which has 256 steps.
fn shift_hue(mut image: RgbImage, factor: f64) -> RgbImage {
    let shift = (factor * 255.0) as i32 as u8;
    for pixel in image.pixels_mut() {
        let [hue, saturation, value] = to_hsv(pixel.0);
        pixel.0 = from_hsv([hue.wrapping_add(shift), saturation, value]);
    }
    image
}

/// Pillow's conversion to HSV.
fn to_hsv([red, green, blue]: [u8; 3]) -> [u8; 3] {
    let (max, min) = (red.max(green).max(blue), red.min(green).min(blue));
    if max == min {
        return [0, 0, max];
    }
    let range = f32::from(max - min);
    let below = |channel: u8| f32::from(max - channel) / range;
    let (r, g, b) = (below(red), below(green), below(blue));
    let sixths = if red == max {
        f64::from(b - g)
    } else if green == max {
        2.0 + f64::from(r) - f64::from(b)
    } else {
        4.0 + f64::from(g) - f64::from(r)
    };
    let hue = f64::from((((sixths as f32) as f64 / 6.0 + 1.0) % 1.0) as f32);
    let saturation = range / f32::from(max);
    [(hue * 255.0) as u8, (f64::from(saturation) * 255.0) as u8, max]
}

/// Pillow's conversion from HSV.
fn from_hsv([hue, saturation, value]: [u8; 3]) -> [u8; 3] {
    if saturation == 0 {
        return [value; 3];
    }
    let sixths = f64::from(f32::from(hue)) * 6.0 / 255.0;
    let sector = sixths.floor();
    let rest = f64::from((sixths - sector) as f32);
    let saturation = f64::from((f64::from(saturation) / 255.0) as f32);
    let of = |share: f64| (f64::from(value) * (1.0 - share)).round().clamp(0.0, 255.0) as u8;
    let (p, q, t) = (of(saturation), of(saturation * rest), of(saturation * (1.0 - rest)));
    match sector as u8 % 6 {
        0 => [value, t, p],
        1 => [q, value, p],
        2 => [p, value, t],
        3 => [p, q, value],
        4 => [t, p, value],
        _ => [value, p, q],
    }
}
