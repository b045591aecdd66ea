//! Blurring and sharpening, as OpenCV computes them for 8 bits per channel: outside of the image it is mirrored.

use super::geometry::mirrored;
use image::RgbImage;

/// The side of a blur's kernel: a number of the range drawn with `share` (from 0 to 1), and the next odd one if it is even.
pub(super) fn odd_side([low, high]: [u32; 2], share: f64) -> u32 {
    let count = high.saturating_sub(low) + 1;
    let side = low + ((share * f64::from(count)) as u32).min(count - 1);
    match side != 0 && side.is_multiple_of(2) {
        // `high` is odd, so this is not above it.
        true => side + 1,
        false => side,
    }
}

/// Gaussian blur. `side`: of the kernel in pixels; 0: it follows from `sigma`. `sigma`: the standard deviation in pixels; 0: it
/// follows from `side`.
pub(super) fn gaussian_blur(image: &RgbImage, side: u32, sigma: f64) -> RgbImage {
    let side = match side {
        0 => (sigma * 6.0 + 1.0).round_ties_even() as u32 | 1,
        side => side,
    };
    let weights = gaussian(side, sigma);
    let radius = i64::from(side / 2);
    let (width, height) = (i64::from(image.width()), i64::from(image.height()));
    let blur = |values: &[[f64; 3]], length: i64, at: &dyn Fn(i64) -> usize, position: i64| {
        let mut sum = [0.0; 3];
        for (tap, weight) in weights.iter().enumerate() {
            let pixel = values[at(mirrored(position + tap as i64 - radius, length))];
            for (sum, value) in sum.iter_mut().zip(pixel) {
                *sum += weight * value;
            }
        }
        sum
    };
    let pixels: Vec<[f64; 3]> = image.pixels().map(|pixel| pixel.0.map(f64::from)).collect();
    let mut rows = Vec::with_capacity(pixels.len());
    for y in 0..height {
        for x in 0..width {
            rows.push(blur(&pixels, width, &|x| (y * width + x) as usize, x));
        }
    }
    RgbImage::from_fn(image.width(), image.height(), |x, y| {
        let (x, y) = (i64::from(x), i64::from(y));
        image::Rgb(blur(&rows, height, &|y| (y * width + x) as usize, y).map(to_byte))
    })
}

/// The weights of OpenCV's `getGaussianKernel`.
fn gaussian(side: u32, sigma: f64) -> Vec<f64> {
    let fixed: &[f64] = match side {
        1 => &[1.0],
        3 => &[0.25, 0.5, 0.25],
        5 => &[0.0625, 0.25, 0.375, 0.25, 0.0625],
        7 => &[0.03125, 0.109375, 0.21875, 0.28125, 0.21875, 0.109375, 0.03125],
        _ => &[],
    };
    if sigma <= 0.0 && !fixed.is_empty() {
        return fixed.to_vec();
    }
    let middle = (f64::from(side) - 1.0) / 2.0;
    let sigma = match sigma > 0.0 {
        true => sigma,
        false => 0.3 * (middle - 1.0) + 0.8,
    };
    let weights = (0..side).map(|tap| (-(f64::from(tap) - middle).powi(2) / (2.0 * sigma * sigma)).exp());
    let weights: Vec<f64> = weights.collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// A mix of the image and of the image minus its neighbours: `alpha` is the share of the second.
pub(super) fn sharpen(image: &RgbImage, alpha: f64, lightness: f64) -> RgbImage {
    let (centre, neighbour) = ((1.0 - alpha) + alpha * (8.0 + lightness), -alpha);
    let (width, height) = (i64::from(image.width()), i64::from(image.height()));
    RgbImage::from_fn(image.width(), image.height(), |x, y| {
        let mut sum = [0.0; 3];
        for (dx, dy) in (-1..=1).flat_map(|dy| (-1..=1).map(move |dx| (dx, dy))) {
            let weight = if (dx, dy) == (0, 0) { centre } else { neighbour };
            let (x, y) = (mirrored(i64::from(x) + dx, width), mirrored(i64::from(y) + dy, height));
            let pixel = image.get_pixel(x as u32, y as u32);
            for (sum, value) in sum.iter_mut().zip(pixel.0) {
                *sum += weight * f64::from(value);
            }
        }
        image::Rgb(sum.map(to_byte))
    })
}

fn to_byte(value: f64) -> u8 {
    value.round_ties_even().clamp(0.0, 255.0) as u8
}
