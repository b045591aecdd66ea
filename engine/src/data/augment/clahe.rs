//! Contrast-limited adaptive histogram equalisation of the lightness (`CLAHE`), as OpenCV computes it.

use super::geometry::mirrored;
use image::RgbImage;

/// Equalises the lightness of an image whose channels are taken for red, green and blue. `clip`: how many times the mean a bin of a
/// tile's histogram may have. `tiles`: across and down.
pub(super) fn equalize_lightness(mut image: RgbImage, clip: f64, tiles: [u32; 2]) -> RgbImage {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let mut lab: Vec<[u8; 3]> = image.pixels().map(|pixel| to_lab(pixel.0)).collect();
    let lightness: Vec<u8> = lab.iter().map(|color| color[0]).collect();
    let equal = equalize(
        &lightness,
        [width, height],
        clip,
        tiles.map(|count| count.max(1) as usize),
    );
    for ((pixel, color), lightness) in image.pixels_mut().zip(&mut lab).zip(equal) {
        color[0] = lightness;
        pixel.0 = from_lab(*color);
    }
    image
}

/// The equalised values of an image of one channel, row by row.
pub(super) fn equalize(values: &[u8], [width, height]: [usize; 2], clip: f64, [across, down]: [usize; 2]) -> Vec<u8> {
    // Outside of the image it is mirrored, so that all tiles have the same size. If one side does not divide, OpenCV extends both.
    let divides = width.is_multiple_of(across) && height.is_multiple_of(down);
    let side = |length: usize, count: usize| length / count + usize::from(!divides);
    let (tile_width, tile_height) = (side(width, across), side(height, down));
    let mut tables = Vec::with_capacity(across * down);
    for (row, column) in (0..down).flat_map(|row| (0..across).map(move |column| (row, column))) {
        let mut histogram = [0usize; 256];
        for y in row * tile_height..(row + 1) * tile_height {
            for x in column * tile_width..(column + 1) * tile_width {
                let (x, y) = (mirrored(x as i64, width as i64), mirrored(y as i64, height as i64));
                histogram[usize::from(values[y as usize * width + x as usize])] += 1;
            }
        }
        tables.push(table(histogram, tile_width * tile_height, clip));
    }
    let neighbours = |position: usize, side: usize, count: usize| {
        let tile = position as f64 / side as f64 - 0.5;
        let first = tile.floor();
        let last = count as f64 - 1.0;
        let index = |tile: f64| tile.clamp(0.0, last) as usize;
        [(index(first), 1.0 - (tile - first)), (index(first + 1.0), tile - first)]
    };
    let mut equal = Vec::with_capacity(values.len());
    for (index, value) in values.iter().enumerate() {
        let columns = neighbours(index % width, tile_width, across);
        let mut sum = 0.0;
        for (row, row_share) in neighbours(index / width, tile_height, down) {
            for (column, share) in columns {
                sum += row_share * share * f64::from(tables[row * across + column][usize::from(*value)]);
            }
        }
        equal.push(sum.round_ties_even().clamp(0.0, 255.0) as u8);
    }
    equal
}

/// The new value of each value of a tile of `count` pixels.
fn table(mut histogram: [usize; 256], count: usize, clip: f64) -> [u8; 256] {
    let limit = ((clip * count as f64 / 256.0) as usize).max(1);
    let mut above = 0;
    for bin in &mut histogram {
        above += bin.saturating_sub(limit);
        *bin = (*bin).min(limit);
    }
    let (each, rest) = (above / 256, above % 256);
    histogram.iter_mut().for_each(|bin| *bin += each);
    if let Some(step) = 256_usize.checked_div(rest) {
        histogram.iter_mut().step_by(step).take(rest).for_each(|bin| *bin += 1);
    }
    let scale = 255.0 / count as f64;
    let mut sum = 0;
    histogram.map(|bin| {
        sum += bin;
        (sum as f64 * scale).round_ties_even().clamp(0.0, 255.0) as u8
    })
}

/// Red, green and blue of the white point, and the matrix to CIE XYZ (ITU-R BT.709, D65).
const TO_XYZ: [[f64; 3]; 3] = [
    [0.412453, 0.357580, 0.180423],
    [0.212671, 0.715160, 0.072169],
    [0.019334, 0.119193, 0.950227],
];
const FROM_XYZ: [[f64; 3]; 3] = [
    [3.240479, -1.53715, -0.498535],
    [-0.969256, 1.875991, 0.041556],
    [0.055648, -0.204043, 1.057311],
];
const WHITE: [f64; 3] = [0.950456, 1.0, 1.088754];

fn multiply(matrix: &[[f64; 3]; 3], vector: [f64; 3]) -> [f64; 3] {
    matrix.map(|row| row.iter().zip(vector).map(|(weight, value)| weight * value).sum())
}

/// CIE L*a*b* of 8 bits: the lightness from 0 to 255, the others plus 128.
pub(super) fn to_lab(color: [u8; 3]) -> [u8; 3] {
    let linear = color.map(|value| {
        let value = f64::from(value) / 255.0;
        match value <= 0.04045 {
            true => value / 12.92,
            false => ((value + 0.055) / 1.055).powf(2.4),
        }
    });
    let xyz = multiply(&TO_XYZ, linear);
    let relative = [xyz[0] / WHITE[0], xyz[1], xyz[2] / WHITE[2]];
    let [x, y, z] = relative.map(|value| match value > 0.008856 {
        true => value.cbrt(),
        false => 7.787 * value + 16.0 / 116.0,
    });
    let lightness = match relative[1] > 0.008856 {
        true => 116.0 * y - 16.0,
        false => 903.3 * relative[1],
    };
    let numbers = [lightness * 2.55, 500.0 * (x - y) + 128.0, 200.0 * (y - z) + 128.0];
    numbers.map(|number| number.round_ties_even().clamp(0.0, 255.0) as u8)
}

/// Red, green and blue of [`to_lab`].
pub(super) fn from_lab(lab: [u8; 3]) -> [u8; 3] {
    let lightness = f64::from(lab[0]) / 2.55;
    let (relative_y, y) = match lightness <= 8.0 {
        true => (lightness / 903.3, 7.787 * lightness / 903.3 + 16.0 / 116.0),
        false => (((lightness + 16.0) / 116.0).powi(3), (lightness + 16.0) / 116.0),
    };
    let relative = |value: f64| match value <= 6.0 / 29.0 {
        true => (value - 16.0 / 116.0) / 7.787,
        false => value.powi(3),
    };
    let x = relative(y + (f64::from(lab[1]) - 128.0) / 500.0);
    let z = relative(y - (f64::from(lab[2]) - 128.0) / 200.0);
    multiply(&FROM_XYZ, [x * WHITE[0], relative_y, z * WHITE[2]]).map(|value| {
        let value = match value <= 0.0031308 {
            true => 12.92 * value,
            false => 1.055 * value.powf(1.0 / 2.4) - 0.055,
        };
        (value * 255.0).round_ties_even().clamp(0.0, 255.0) as u8
    })
}
