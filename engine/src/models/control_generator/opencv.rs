//! Resizing of images as OpenCV does it (`cv2.resize`, 5.0): without smoothing where an image becomes smaller, and with rounded weights.
//! The formulas are those of `interpolateLanczos4` and of the fixed-point code for 8-bit images in `modules/imgproc/src/resize.cpp`.

use image::{GrayImage, RgbImage};

/// Fractional bits of a weight.
const BITS: u32 = 11;

/// The values along an axis that a result is made of: their places and their weights in fractions of 2^[`BITS`].
type Taps = Vec<(usize, i64)>;

/// Eight values around each result, weighted by Lanczos' kernel of size 4 (`INTER_LANCZOS4`).
pub(super) fn resize_lanczos4(image: &RgbImage, (width, height): (u32, u32)) -> RgbImage {
    let sizes = [image.dimensions(), (width, height)];
    let pixels = resize::<3>(image.as_raw(), sizes, lanczos4, rounded);
    RgbImage::from_raw(width, height, pixels).unwrap_or_default()
}

/// Two values around each result (`INTER_LINEAR`).
pub(super) fn resize_linear(image: &GrayImage, (width, height): (u32, u32)) -> GrayImage {
    let sizes = [image.dimensions(), (width, height)];
    let pixels = resize::<1>(image.as_raw(), sizes, linear, rounded_in_steps);
    GrayImage::from_raw(width, height, pixels).unwrap_or_default()
}

/// Resizes pixels of `CHANNELS` values, row by row; sizes are width and height. `weights` gives the offset of the first place and the
/// weights at a distance between 0 and 1 from the place before a result; `finish` makes a result of sums along the rows and their weights.
fn resize<const CHANNELS: usize>(
    pixels: &[u8],
    [(old_width, old_height), (width, height)]: [(u32, u32); 2],
    weights: fn(f64) -> (i64, Vec<f64>),
    finish: fn(&mut dyn Iterator<Item = (i64, i64)>) -> i64,
) -> Vec<u8> {
    if (old_width, old_height) == (width, height) {
        return pixels.to_vec();
    }
    let columns = taps(old_width as usize, width as usize, weights);
    let rows = taps(old_height as usize, height as usize, weights);
    let mut wide: Vec<i64> = Vec::with_capacity(columns.len() * old_height as usize * CHANNELS);
    for row in pixels.chunks_exact((old_width as usize * CHANNELS).max(1)) {
        for taps in &columns {
            for channel in 0..CHANNELS {
                let value = |&(place, weight): &(usize, i64)| i64::from(row[place * CHANNELS + channel]) * weight;
                wide.push(taps.iter().map(value).sum());
            }
        }
    }
    let row_length = width as usize * CHANNELS;
    let mut out = Vec::with_capacity(rows.len() * row_length);
    for taps in &rows {
        for column in 0..row_length {
            let sum_and_weight = |&(place, weight): &(usize, i64)| (wide[place * row_length + column], weight);
            out.push(finish(&mut taps.iter().map(sum_and_weight)).clamp(0, 255) as u8);
        }
    }
    out
}

/// The weighted sum, rounded.
fn rounded(sums: &mut dyn Iterator<Item = (i64, i64)>) -> i64 {
    let sum: i64 = sums.map(|(sum, weight)| sum * weight).sum();
    (sum + (1 << (2 * BITS - 1))) >> (2 * BITS)
}

/// The weighted sum, of which parts are cut off first, as in `VResizeLinear` for 8-bit images.
fn rounded_in_steps(sums: &mut dyn Iterator<Item = (i64, i64)>) -> i64 {
    let sum: i64 = sums.map(|(sum, weight)| ((sum >> 4) * weight) >> 16).sum();
    (sum + 2) >> 2
}

/// The taps of each of `new` results of `old` values. Places outside are those of the first and the last value.
fn taps(old: usize, new: usize, weights: fn(f64) -> (i64, Vec<f64>)) -> Vec<Taps> {
    let scale = old as f64 / new.max(1) as f64;
    let last = old.saturating_sub(1) as i64;
    let of_result = |i: usize| {
        // OpenCV computes the position in float32.
        let at = f64::from(((i as f64 + 0.5) * scale - 0.5) as f32);
        let (offset, weights) = weights(at - at.floor());
        let first = at.floor() as i64 + offset;
        let places = (first..).map(|place| place.clamp(0, last) as usize);
        let fixed = |weight: f64| (weight * f64::from(1 << BITS)).round_ties_even() as i64;
        places.zip(weights.into_iter().map(fixed)).collect()
    };
    (0..new).map(of_result).collect()
}

fn linear(share: f64) -> (i64, Vec<f64>) {
    (0, vec![1.0 - share, share])
}

/// sinc(x) sinc(x / 4) at the eight places, divided by their sum.
fn lanczos4(share: f64) -> (i64, Vec<f64>) {
    let sinc = |x: f64| match x == 0.0 {
        true => 1.0,
        false => (std::f64::consts::PI * x).sin() / (std::f64::consts::PI * x),
    };
    let raw = (-3..=4).map(|place| f64::from(place) - share);
    let raw: Vec<f64> = raw.map(|x| sinc(x) * sinc(x / 4.0)).collect();
    let sum: f64 = raw.iter().sum();
    (-3, raw.into_iter().map(|weight| weight / sum).collect())
}
