//! Draws lines and text on an RGB image.

use font8x8::UnicodeFonts;

/// Red, green, blue.
pub(super) type Rgb = [u8; 3];

/// An RGB image to draw on.
pub(super) struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Canvas {
    pub(super) fn new(width: usize, height: usize, background: Rgb) -> Self {
        Self {
            width,
            height,
            pixels: background.repeat(width * height),
        }
    }

    /// Blends a colour into a pixel. Positions outside the image are ignored.
    fn blend(&mut self, x: usize, y: usize, colour: Rgb, alpha: f64) {
        if x >= self.width || y >= self.height {
            return;
        }
        let at = (y * self.width + x) * 3;
        if let Some(pixel) = self.pixels.get_mut(at..at + 3) {
            for (old, new) in pixel.iter_mut().zip(colour) {
                let blended = f64::from(*old) + (f64::from(new) - f64::from(*old)) * alpha.clamp(0.0, 1.0);
                *old = blended.round() as u8;
            }
        }
    }

    /// Computes how much of each pixel a line covers, from the pixel's distance to the line.
    fn cover(&self, from: (f64, f64), to: (f64, f64), width: f64, mut each: impl FnMut(usize, usize, f64)) {
        let margin = width / 2.0 + 1.0;
        let bound = |value: f64, max: usize| value.max(0.0).min(max as f64) as usize;
        let (x0, x1) = (from.0.min(to.0) - margin, from.0.max(to.0) + margin);
        let (y0, y1) = (from.1.min(to.1) - margin, from.1.max(to.1) + margin);
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let length = dx * dx + dy * dy;
        let radius = width / 2.0 + 0.5;
        for y in bound(y0, self.height)..=bound(y1, self.height - 1) {
            for x in bound(x0, self.width)..=bound(x1, self.width - 1) {
                let (px, py) = (x as f64 + 0.5 - from.0, y as f64 + 0.5 - from.1);
                let along = if length > 0.0 {
                    ((px * dx + py * dy) / length).clamp(0.0, 1.0)
                } else {
                    0.0
                };
                let (from_x, from_y) = (px - along * dx, py - along * dy);
                // Most pixels of the rectangle are far from a steep line.
                if from_x * from_x + from_y * from_y < radius * radius {
                    let share = radius - from_x.hypot(from_y);
                    each(x, y, share.clamp(0.0, 1.0));
                }
            }
        }
    }

    /// Draws a line of this width.
    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), width: f64, colour: Rgb) {
        let mut touched = Vec::new();
        self.cover(from, to, width, |x, y, share| touched.push((x, y, share)));
        for (x, y, share) in touched {
            self.blend(x, y, colour, share);
        }
    }

    /// Draws a line through all points. Where more than three points are in one pixel column, only the first, lowest, highest and last are used.
    pub(super) fn curve(&mut self, points: &[(f64, f64)], width: f64, colour: Rgb) {
        let mut thinned: Vec<(f64, f64)> = Vec::new();
        for column in points.chunk_by(|a, b| a.0.floor() == b.0.floor()) {
            if column.len() <= 3 {
                thinned.extend(column);
                continue;
            }
            let low = column.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1));
            let high = column.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1));
            let ends = [column.first().copied(), low, high, column.last().copied()];
            thinned.extend(ends.into_iter().flatten());
        }
        // Each pixel is blended once, so that overlapping segment ends are not darker.
        let mut shares = vec![0.0_f32; self.width * self.height];
        let mut join = |canvas: &Self, from, to| {
            canvas.cover(from, to, width, |x, y, share| {
                if let Some(old) = shares.get_mut(y * canvas.width + x) {
                    *old = old.max(share as f32);
                }
            });
        };
        match thinned.as_slice() {
            [one] => join(self, *one, *one),
            points => points.windows(2).for_each(|pair| join(self, pair[0], pair[1])),
        }
        for (at, share) in shares.into_iter().enumerate().filter(|(_, share)| *share > 0.0) {
            self.blend(at % self.width, at / self.width, colour, f64::from(share));
        }
    }

    /// Draws text with its upper left corner at (`x`, `y`). Letters are 8 × `scale` pixels high.
    pub(super) fn text(&mut self, x: usize, y: usize, text: &str, scale: usize, colour: Rgb) {
        for (at, letter) in text.chars().enumerate() {
            let fonts = font8x8::BASIC_FONTS
                .get(letter)
                .or_else(|| font8x8::LATIN_FONTS.get(letter));
            let Some(rows) = fonts.or_else(|| font8x8::BASIC_FONTS.get('?')) else {
                continue;
            };
            for (row, bits) in rows.into_iter().enumerate() {
                for column in (0..8).filter(|column| bits & (1 << column) != 0) {
                    for (dx, dy) in (0..scale * scale).map(|i| (i % scale, i / scale)) {
                        self.blend(x + (at * 8 + column) * scale + dx, y + row * scale + dy, colour, 1.0);
                    }
                }
            }
        }
    }

    /// Draws text that ends at `x` and is vertically centred at `y`.
    pub(super) fn text_right(&mut self, x: usize, y: usize, text: &str, scale: usize, colour: Rgb) {
        let width = text.chars().count() * 8 * scale;
        self.text(
            x.saturating_sub(width),
            y.saturating_sub(4 * scale),
            text,
            scale,
            colour,
        );
    }

    /// Draws text that is horizontally centred at `x`.
    pub(super) fn text_middle(&mut self, x: usize, y: usize, text: &str, scale: usize, colour: Rgb) {
        let width = text.chars().count() * 8 * scale;
        self.text(x.saturating_sub(width / 2), y, text, scale, colour);
    }

    /// Encodes the image as PNG. None if the encoder fails, which should not happen.
    pub(super) fn png(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        let (width, height) = (u32::try_from(self.width).ok()?, u32::try_from(self.height).ok()?);
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().ok()?;
        writer.write_image_data(&self.pixels).ok()?;
        writer.finish().ok()?;
        Some(bytes)
    }
}
