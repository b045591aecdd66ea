//! Resizes images with the same bytes as Pillow: the same fixed-point weights, one axis after the other.

use image::RgbImage;

/// Resampling filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// `Image.BOX`
    Box,
    /// `Image.BILINEAR`
    Bilinear,
    /// `Image.BICUBIC`
    Bicubic,
    /// `Image.LANCZOS`
    Lanczos,
}

impl Filter {
    fn support(self) -> f64 {
        match self {
            Self::Box => 0.5,
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let sinc = |x: f64| {
            let x = x * std::f64::consts::PI;
            if x == 0.0 { 1.0 } else { x.sin() / x }
        };
        match self {
            Self::Box if x > -0.5 && x <= 0.5 => 1.0,
            Self::Bilinear if x.abs() < 1.0 => 1.0 - x.abs(),
            Self::Bicubic => {
                const A: f64 = -0.5;
                let x = x.abs();
                if x < 1.0 {
                    ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
                } else if x < 2.0 {
                    (((x - 5.0) * x + 8.0) * x - 4.0) * A
                } else {
                    0.0
                }
            }
            Self::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            _ => 0.0,
        }
    }
}

/// Fractional bits of a fixed-point weight.
const PRECISION: u32 = 32 - 8 - 2;

/// The source pixels of one output pixel and their weights.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// The taps of every output pixel along one axis.
fn taps(old: usize, new: usize, filter: Filter) -> Vec<Taps> {
    let scale = old as f64 / new as f64;
    let filter_scale = scale.max(1.0);
    let support = filter.support() * filter_scale;
    let inverse = 1.0 / filter_scale;
    (0..new)
        .map(|i| {
            let center = (i as f64 + 0.5) * scale;
            let first = ((center - support + 0.5) as i64).max(0) as usize;
            let end = ((center + support + 0.5) as usize).min(old);
            let raw: Vec<f64> = (first..end)
                .map(|x| filter.weight((x as f64 - center + 0.5) * inverse))
                .collect();
            let sum: f64 = raw.iter().sum();
            let fixed = |w: &f64| {
                let w = if sum == 0.0 { *w } else { w / sum } * f64::from(1 << PRECISION);
                if w < 0.0 { (w - 0.5) as i32 } else { (w + 0.5) as i32 }
            };
            Taps {
                first,
                weights: raw.iter().map(fixed).collect(),
            }
        })
        .collect()
}

/// Converts a fixed-point sum to a byte.
fn to_byte(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

/// Resizes an image with the same bytes as Pillow's `image.resize((width, height), filter)`. A size of 0 gives an empty
/// image.
#[must_use]
pub fn resize(image: &RgbImage, width: u32, height: u32, filter: Filter) -> RgbImage {
    let (old_width, old_height) = (image.width() as usize, image.height() as usize);
    let (width, height) = (width as usize, height as usize);
    if old_width == 0 || old_height == 0 || width == 0 || height == 0 {
        return RgbImage::new(width as u32, height as u32);
    }
    let resize_rows = |pixels: Vec<u8>| {
        if width == old_width {
            pixels
        } else {
            resize_rows(&pixels, old_width, width, filter)
        }
    };
    let resize_columns = |pixels: Vec<u8>, row| {
        if height == old_height {
            pixels
        } else {
            resize_columns(&pixels, row, old_height, height, filter)
        }
    };
    let pixels = image.as_raw().clone();
    // Each axis rounds to bytes, so the order matters. Pillow 13 first resizes the axis that shrinks more.
    let (width_loss, height_loss) = (old_width as i64 - width as i64, old_height as i64 - height as i64);
    let pixels = if height_loss > 0 && height_loss > 2 * width_loss {
        resize_rows(resize_columns(pixels, 3 * old_width))
    } else {
        resize_columns(resize_rows(pixels), 3 * width)
    };
    RgbImage::from_raw(width as u32, height as u32, pixels).unwrap_or_default()
}

/// The initial value of every sum: one half, so that truncation rounds.
const HALF: i32 = 1 << (PRECISION - 1);

/// Resizes rows of `old` pixels to rows of `new` pixels.
fn resize_rows(pixels: &[u8], old: usize, new: usize, filter: Filter) -> Vec<u8> {
    let taps = taps(old, new, filter);
    let mut out = vec![0u8; pixels.len() / old * new];
    for (old, new) in pixels.chunks_exact(3 * old).zip(out.chunks_exact_mut(3 * new)) {
        for (tap, pixel) in taps.iter().zip(new.chunks_exact_mut(3)) {
            let mut sums = [HALF; 3];
            for (source, weight) in old[3 * tap.first..].chunks_exact(3).zip(&tap.weights) {
                for (sum, value) in sums.iter_mut().zip(source) {
                    *sum = sum.wrapping_add(i32::from(*value) * weight);
                }
            }
            for (value, sum) in pixel.iter_mut().zip(sums) {
                *value = to_byte(sum);
            }
        }
    }
    out
}

/// Resizes `old` rows of `row` bytes to `new` rows.
fn resize_columns(pixels: &[u8], row: usize, old: usize, new: usize, filter: Filter) -> Vec<u8> {
    let taps = taps(old, new, filter);
    let mut out = vec![0u8; row * new];
    let mut sums = vec![0i32; row];
    for (tap, new) in taps.iter().zip(out.chunks_exact_mut(row)) {
        sums.fill(HALF);
        for (old, weight) in pixels[row * tap.first..].chunks_exact(row).zip(&tap.weights) {
            for (sum, value) in sums.iter_mut().zip(old) {
                *sum = sum.wrapping_add(i32::from(*value) * weight);
            }
        }
        for (value, sum) in new.iter_mut().zip(&sums) {
            *value = to_byte(*sum);
        }
    }
    out
}
