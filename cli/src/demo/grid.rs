//! The demo's image grid: one row per stage, one column per prompt, labels in a bitmap font.

use font8x8::{BASIC_FONTS, UnicodeFonts};
use image::imageops::{FilterType, resize};
use image::{Rgb, RgbImage};

/// Side of an image in the grid, in pixels.
const CELL: u32 = 160;
const GAP: u32 = 12;
const TEXT: u32 = 16;
const LABEL_WIDTH: u32 = 150;
const PAPER: Rgb<u8> = Rgb([250, 250, 248]);
const INK: Rgb<u8> = Rgb([40, 40, 46]);

/// One row of the grid.
pub(crate) struct Row {
    /// Its label, in lines of at most 8 characters.
    pub(crate) label: Vec<String>,
    /// Its images.
    pub(crate) images: Vec<RgbImage>,
}

/// Renders the rows below the captions of the columns (each in lines of at most 10 characters).
pub(crate) fn render(captions: &[Vec<String>], rows: &[Row]) -> RgbImage {
    let columns = rows.iter().map(|row| row.images.len()).max().unwrap_or(0) as u32;
    let head = GAP + (TEXT + 2) * captions.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let width = LABEL_WIDTH + columns * (CELL + GAP) + GAP;
    let height = head + rows.len() as u32 * (CELL + GAP) + GAP;
    let mut paper = RgbImage::from_pixel(width, height, PAPER);
    for (column, lines) in (0..).zip(captions) {
        for (line, text) in (0..).zip(lines) {
            write(
                &mut paper,
                LABEL_WIDTH + column * (CELL + GAP),
                GAP / 2 + line * (TEXT + 2),
                text,
            );
        }
    }
    for (number, row) in (0..).zip(rows) {
        let top = head + number * (CELL + GAP);
        for (line, text) in (0..).zip(&row.label) {
            write(&mut paper, GAP, top + CELL / 2 - TEXT + line * (TEXT + 4), text);
        }
        for (column, image) in (0_i64..).zip(&row.images) {
            // Small images are enlarged without smoothing, to show the pixels that the model generated.
            let filter = if image.width() < CELL {
                FilterType::Nearest
            } else {
                FilterType::CatmullRom
            };
            let cell = resize(image, CELL, CELL, filter);
            let left = i64::from(LABEL_WIDTH) + column * i64::from(CELL + GAP);
            image::imageops::replace(&mut paper, &cell, left, i64::from(top));
        }
    }
    paper
}

fn write(paper: &mut RgbImage, left: u32, top: u32, text: &str) {
    for (place, character) in (0..).zip(text.chars()) {
        let glyph = BASIC_FONTS.get(character).unwrap_or_default();
        for (y, bits) in (0..).zip(glyph) {
            for x in 0..8_u32 {
                if bits & (1 << x) == 0 {
                    continue;
                }
                for (dx, dy) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
                    let (px, py) = (left + place * TEXT + x * 2 + dx, top + y * 2 + dy);
                    if px < paper.width() && py < paper.height() {
                        paper.put_pixel(px, py, INK);
                    }
                }
            }
        }
    }
}

/// Breaks a text into lines of at most `width` characters, at spaces.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_shows_every_image() {
        let red = RgbImage::from_pixel(64, 64, Rgb([255, 0, 0]));
        let blue = RgbImage::from_pixel(64, 64, Rgb([0, 0, 255]));
        let rows = [
            Row {
                label: vec!["before".into()],
                images: vec![red.clone(), red],
            },
            Row {
                label: vec!["after".into()],
                images: vec![blue.clone(), blue],
            },
        ];
        let grid = render(&[wrap("a red circle", 10), wrap("two", 10)], &rows);
        let count = |colour: [u8; 3]| grid.pixels().filter(|pixel| pixel.0 == colour).count() as u32;
        assert_eq!(count([255, 0, 0]), 2 * CELL * CELL);
        assert_eq!(count([0, 0, 255]), 2 * CELL * CELL);
        assert!(count(INK.0) > 100, "labels are drawn");
    }

    #[test]
    fn wrapping_keeps_words() {
        assert_eq!(wrap("a blue zorb on white", 10), ["a blue", "zorb on", "white"]);
    }
}
