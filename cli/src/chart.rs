//! Renders a curve in the terminal: losses as dots, their average as a line, in braille or ASCII characters.

use aitk_common::plot::{Curve, label, ticks};

/// Columns of the numbers on the y axis.
const LABEL_COLUMNS: usize = 9;
/// Lines of the chart.
const HEIGHT: usize = 16;

/// The style of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Width in columns.
    pub width: usize,
    /// ASCII characters instead of braille.
    pub ascii: bool,
    /// The average is coloured.
    pub color: bool,
}

/// A cell of the chart, as bits of its braille dots: dots of losses and dots of the average.
#[derive(Clone, Copy, Default)]
struct Cell {
    raw: u8,
    smooth: u8,
}

/// Renders the lines of a chart; `None` without a finite loss.
#[must_use]
pub fn chart(curve: &Curve, style: Style) -> Option<Vec<String>> {
    let ((first, last), (min, max)) = (curve.steps()?, curve.losses()?);
    let columns = style.width.saturating_sub(LABEL_COLUMNS + 2).clamp(16, 400);
    // A braille cell has two dots by four.
    let (dots_per_column, dots_per_row) = if style.ascii { (1, 1) } else { (2, 4) };
    let (dots_x, dots_y) = (columns * dots_per_column, HEIGHT * dots_per_row);
    let span = last.saturating_sub(first).max(1);
    #[allow(clippy::cast_precision_loss)]
    let x_of = |step: u64| ((step - first) as f64 / span as f64 * (dots_x - 1) as f64).round() as usize;
    #[allow(clippy::cast_precision_loss)]
    let y_of = |loss: f64| {
        let height = ((loss - min) / (max - min)).clamp(0.0, 1.0);
        ((1.0 - height) * (dots_y - 1) as f64).round() as usize
    };
    let mut cells = vec![Cell::default(); columns * HEIGHT];
    let mut dot = |x: usize, y: usize, smooth: bool| {
        let bit = if style.ascii {
            1
        } else {
            braille_bit(x % dots_per_column, y % dots_per_row)
        };
        if let Some(cell) = cells.get_mut((y / dots_per_row) * columns + x / dots_per_column) {
            match smooth {
                true => cell.smooth |= bit,
                false => cell.raw |= bit,
            }
        }
    };
    // Without colour, many dots would hide the line of the average.
    let dots = style.ascii || style.color || curve.points.len() <= columns;
    for (step, loss) in curve.points.iter().filter(|(_, loss)| dots && loss.is_finite()) {
        dot(x_of(*step), y_of(*loss), false);
    }
    let smoothed: Vec<(usize, usize)> = curve
        .smoothed()
        .iter()
        .map(|(step, loss)| (x_of(*step), y_of(*loss)))
        .collect();
    for pair in smoothed.windows(2) {
        let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
        let steps = x1.abs_diff(x0).max(y1.abs_diff(y0)).max(1);
        for i in 0..=steps {
            let between = |a: usize, b: usize| {
                #[allow(clippy::cast_precision_loss)]
                let place = a as f64 + (b as f64 - a as f64) * i as f64 / steps as f64;
                place.round() as usize
            };
            dot(between(x0, x1), between(y0, y1), true);
        }
    }

    let mut labels = vec![String::new(); HEIGHT];
    for tick in ticks(min, max, 5) {
        if let Some(line) = labels.get_mut(y_of(tick) / dots_per_row) {
            *line = label(tick);
        }
    }
    let mut lines = Vec::new();
    for (row, label) in labels.iter().enumerate() {
        let cells = &cells[row * columns..(row + 1) * columns];
        let axis = if label.is_empty() { '|' } else { '+' };
        let text: String = cells.iter().map(|cell| cell_text(*cell, style)).collect();
        lines.push(format!("{label:>LABEL_COLUMNS$} {axis}{}", text.trim_end()));
    }
    lines.push(format!("{:>LABEL_COLUMNS$} +{}", "", "-".repeat(columns)));
    let mut below = vec![' '; columns];
    let mut free = 0;
    #[allow(clippy::cast_precision_loss)]
    let steps = ticks(first as f64, last as f64, columns / 12);
    for tick in steps.into_iter().filter(|tick| tick.fract() == 0.0) {
        #[allow(clippy::cast_sign_loss, clippy::cast_possible_truncation)]
        let at = x_of((tick as u64).clamp(first, last)) / dots_per_column;
        let text = label(tick);
        let begin = at
            .saturating_sub(text.len() / 2)
            .min(columns.saturating_sub(text.len()));
        if begin >= free && begin + text.len() <= columns {
            for (place, letter) in below[begin..].iter_mut().zip(text.chars()) {
                *place = letter;
            }
            free = begin + text.len() + 1;
        }
    }
    let below: String = below.into_iter().collect();
    lines.push(format!("{:>LABEL_COLUMNS$}  {}", "step", below.trim_end()));
    Some(lines)
}

/// Returns the bit of a dot in a braille character.
fn braille_bit(x: usize, y: usize) -> u8 {
    match (x, y) {
        (0, 3) => 0x40,
        (_, 3) => 0x80,
        (0, y) => 1 << y,
        (_, y) => 8 << y,
    }
}

fn cell_text(cell: Cell, style: Style) -> String {
    if style.ascii {
        return match (cell.smooth, cell.raw) {
            (0, 0) => " ",
            (0, _) => ".",
            _ => "*",
        }
        .to_owned();
    }
    let letter = |bits: u8| char::from_u32(0x2800 + u32::from(bits)).unwrap_or(' ');
    match (cell.smooth, cell.raw, style.color) {
        (0, 0, _) => " ".to_owned(),
        (0, raw, true) => format!("\x1b[2m{}\x1b[0m", letter(raw)),
        (smooth, raw, true) => format!("\x1b[1;36m{}\x1b[0m", letter(smooth | raw)),
        (smooth, raw, false) => letter(smooth | raw).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unicode_width::UnicodeWidthStr;

    fn falling(count: u64) -> Curve {
        Curve {
            title: String::new(),
            metric: String::new(),
            points: (1..=count).map(|step| (step, 1.0 / step as f64)).collect(),
        }
    }

    #[test]
    fn a_chart_fits_its_width_and_shows_falling_losses() {
        for (width, ascii) in [(80, true), (80, false), (40, true), (200, false)] {
            let style = Style {
                width,
                ascii,
                color: false,
            };
            let lines = chart(&falling(500), style).unwrap();
            assert_eq!(lines.len(), HEIGHT + 2);
            assert!(lines.iter().all(|line| line.width() <= width), "{width}: {lines:#?}");
            assert_eq!(lines.iter().all(|line| line.is_ascii()), ascii);
        }
        let style = Style {
            width: 80,
            ascii: false,
            color: false,
        };
        let lines = chart(&falling(3000), style).unwrap();
        assert!(
            lines.iter().all(|line| line.width() <= 80) && lines[HEIGHT + 1].ends_with("3000"),
            "{lines:#?}"
        );
        let style = Style {
            width: 60,
            ascii: true,
            color: false,
        };
        let lines = chart(&falling(500), style).unwrap();
        let first = |line: &String| line.find(['*', '.'].as_slice());
        assert!(first(&lines[0]) < first(&lines[HEIGHT - 1]), "{lines:#?}");
        assert!(
            lines[HEIGHT + 1].contains("step") && lines[HEIGHT + 1].contains("400"),
            "{lines:#?}"
        );
        assert!(
            lines.iter().any(|line| line.trim_start().starts_with("0.4 +")),
            "{lines:#?}"
        );
    }

    #[test]
    fn charts_of_one_loss_or_none_do_not_panic() {
        let style = Style {
            width: 80,
            ascii: false,
            color: true,
        };
        assert_eq!(chart(&falling(0), style), None);
        assert!(chart(&falling(1), style).is_some());
        let lost = Curve {
            title: String::new(),
            metric: String::new(),
            points: vec![(1, f64::NAN)],
        };
        assert_eq!(chart(&lost, style), None);
    }
}
