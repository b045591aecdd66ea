//! The loss curve, rendered as an image or in the terminal.
//!
//! The image depends only on the steps and losses, so that a run that resumed on another machine has the same one.

mod axis;
mod canvas;

pub use axis::{label, ticks};

use canvas::{Canvas, Rgb};

/// The smallest weight of a new loss in the moving average.
const MIN_SMOOTHING_WEIGHT: f64 = 0.01;
/// Width and height of the image.
const SIZE: (usize, usize) = (1200, 675);
/// Margins for labels in pixels: left, top, right, bottom.
const MARGIN: (usize, usize, usize, usize) = (110, 56, 56, 70);

const BACKGROUND: Rgb = [255, 255, 255];
const INK: Rgb = [40, 44, 52];
const GRID: Rgb = [228, 230, 235];
const RAW: Rgb = [158, 190, 232];
const SMOOTH: Rgb = [24, 90, 188];
const NON_FINITE: Rgb = [205, 50, 47];

/// Losses, or values of another metric, by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// The title above the curve.
    pub title: String,
    /// The name of the metric, above the axis of the values.
    pub metric: String,
    /// Steps in ascending order and their losses, which may be NaN or infinite.
    pub points: Vec<(u64, f64)>,
}

impl Curve {
    /// Smooths the finite losses with an exponential moving average over about a twentieth of them.
    #[must_use]
    pub fn smoothed(&self) -> Vec<(u64, f64)> {
        let finite: Vec<(u64, f64)> = self
            .points
            .iter()
            .copied()
            .filter(|(_, loss)| loss.is_finite())
            .collect();
        #[allow(clippy::cast_precision_loss)]
        let new_weight = (20.0 / (finite.len() as f64).max(1.0)).clamp(MIN_SMOOTHING_WEIGHT, 0.5);
        let (mut sum, mut weight) = (0.0, 0.0);
        let mut out = Vec::with_capacity(finite.len());
        for (step, loss) in finite {
            // Divided by the sum of the weights, so that the first values are not biased towards zero.
            sum = sum * (1.0 - new_weight) + loss * new_weight;
            weight = weight * (1.0 - new_weight) + new_weight;
            out.push((step, sum / weight));
        }
        out
    }

    /// The smallest and the largest step. None without points.
    #[must_use]
    pub fn steps(&self) -> Option<(u64, u64)> {
        let steps = self.points.iter().map(|(step, _)| *step);
        Some((steps.clone().min()?, steps.max()?))
    }

    /// The smallest and the largest displayed loss. A few outliers are excluded. None without a finite loss.
    #[must_use]
    pub fn losses(&self) -> Option<(f64, f64)> {
        let mut losses: Vec<f64> = self
            .points
            .iter()
            .map(|(_, loss)| *loss)
            .filter(|loss| loss.is_finite())
            .collect();
        losses.sort_by(f64::total_cmp);
        let (min, max) = (*losses.first()?, *losses.last()?);
        let usual = *losses.get(losses.len().saturating_sub(1) * 99 / 100)?;
        let highest = self.smoothed().iter().map(|(_, loss)| *loss).fold(min, f64::max);
        let max = max.min(min + (usual - min) * 1.3).max(highest);
        match max > min {
            true => Some((min, max)),
            // All losses are equal; the range must not be empty.
            false => Some((min - min.abs().max(1e-6) * 0.5, min + min.abs().max(1e-6) * 0.5)),
        }
    }

    /// Renders a PNG with the losses, their moving average and labelled axes. A red mark at the bottom shows each non-finite
    /// loss. None without points.
    #[must_use]
    pub fn png(&self) -> Option<Vec<u8>> {
        let (first, last) = self.steps()?;
        let mut canvas = Canvas::new(SIZE.0, SIZE.1, BACKGROUND);
        let (left, top) = (MARGIN.0, MARGIN.1);
        let (right, bottom) = (SIZE.0 - MARGIN.2, SIZE.1 - MARGIN.3);
        #[allow(clippy::cast_precision_loss)]
        let (x0, x1, y0, y1) = (left as f64, right as f64, top as f64, bottom as f64);
        #[allow(clippy::cast_precision_loss)]
        let (from, to) = (first as f64, (last as f64).max(first as f64 + 1.0));
        #[allow(clippy::cast_precision_loss)]
        let x_of = |step: f64| x0 + (step - from) / (to - from) * (x1 - x0);
        let losses = self.losses().unwrap_or((0.0, 1.0));
        let y_of = |loss: f64| {
            let height = ((loss - losses.0) / (losses.1 - losses.0)).clamp(0.0, 1.0);
            y1 - height * (y1 - y0)
        };

        for tick in ticks(losses.0, losses.1, 6) {
            let y = y_of(tick);
            canvas.line((x0, y), (x1, y), 1.0, GRID);
            let text = label(tick);
            canvas.text_right(left - 12, y as usize, &text, 2, INK);
        }
        for tick in ticks(from, to, 8).into_iter().filter(|tick| tick.fract() == 0.0) {
            let x = x_of(tick);
            canvas.line((x, y0), (x, y1 + 6.0), 1.0, GRID);
            canvas.text_middle(x as usize, bottom + 14, &label(tick), 2, INK);
        }
        #[allow(clippy::cast_precision_loss)]
        let to_pixel = |(step, loss): &(u64, f64)| (x_of(*step as f64), y_of(*loss));
        let (finite, non_finite): (Vec<_>, Vec<_>) = self.points.iter().partition(|(_, loss)| loss.is_finite());
        let raw: Vec<(f64, f64)> = finite.into_iter().map(to_pixel).collect();
        canvas.curve(&raw, 1.2, RAW);
        let smoothed: Vec<(f64, f64)> = self.smoothed().iter().map(to_pixel).collect();
        canvas.curve(&smoothed, 2.6, SMOOTH);
        for (step, _) in non_finite {
            #[allow(clippy::cast_precision_loss)]
            let x = x_of(*step as f64);
            canvas.line((x, y1 - 10.0), (x, y1), 2.0, NON_FINITE);
        }
        canvas.line((x0, y0), (x0, y1), 2.0, INK);
        canvas.line((x0, y1), (x1, y1), 2.0, INK);
        // A long name moves the title to the right.
        let title_start = left.max(16 + (self.metric.chars().count() + 1) * 16);
        canvas.text(title_start, 20, &self.title, 2, INK);
        canvas.text_middle((left + right) / 2, SIZE.1 - 28, "step", 2, INK);
        canvas.text(16, 20, &self.metric, 2, INK);
        canvas.png()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(u64, f64)]) -> Curve {
        Curve {
            title: "cat".into(),
            metric: "loss".into(),
            points: points.to_vec(),
        }
    }

    #[test]
    fn smoothing_keeps_a_constant_and_reduces_noise() {
        let flat = curve(&(1..200).map(|step| (step, 0.25)).collect::<Vec<_>>());
        assert!(flat.smoothed().iter().all(|(_, loss)| (loss - 0.25).abs() < 1e-12));
        let noisy = curve(
            &(1..2000)
                .map(|step| (step, if step % 2 == 0 { 0.0 } else { 1.0 }))
                .collect::<Vec<_>>(),
        );
        assert!(
            noisy.smoothed()[100..]
                .iter()
                .all(|(_, loss)| (loss - 0.5).abs() < 0.05)
        );
        let with_gaps = curve(&[(1, 0.5), (2, f64::NAN), (3, f64::INFINITY), (4, 0.5)]);
        assert_eq!(with_gaps.smoothed(), [(1, 0.5), (4, 0.5)]);
    }

    #[test]
    fn an_outlier_does_not_extend_the_loss_range() {
        let mut points: Vec<(u64, f64)> = (1..=1000)
            .map(|step| (step, 0.1 + f64::from(step as u32 % 10) / 100.0))
            .collect();
        points[500].1 = 1e6;
        let (min, max) = curve(&points).losses().unwrap();
        assert!(min == 0.1 && max < 1e5, "{min} {max}");
        assert_eq!(curve(&[]).losses(), None);
        let (min, max) = curve(&[(1, 0.0)]).losses().unwrap();
        assert!(min < max);
    }

    #[test]
    fn the_image_depends_only_on_the_points() {
        let points: Vec<(u64, f64)> = (1..=300).map(|step| (step, 1.0 / step as f64)).collect();
        let one = curve(&points).png().unwrap();
        assert!(one.starts_with(b"\x89PNG") && one.len() > 2000);
        assert_eq!(one, curve(&points).png().unwrap());
        assert_ne!(one, curve(&points[..299]).png().unwrap());
        let lr = Curve {
            metric: "lr".into(),
            ..curve(&points)
        };
        assert_ne!(one, lr.png().unwrap(), "the image names the metric");
        assert!(curve(&[]).png().is_none());
        for odd in [
            vec![(7, f64::NAN)],
            vec![(7, 0.5)],
            vec![(u64::MAX, 1e300), (0, -1e300)],
        ] {
            assert!(curve(&odd).png().is_some(), "{odd:?}");
        }
    }
}
