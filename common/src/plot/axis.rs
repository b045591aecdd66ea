//! Ticks and labels of an axis.

/// Computes round tick values from `from` to `to`, about `count` of them.
#[must_use]
pub fn ticks(from: f64, to: f64, count: usize) -> Vec<f64> {
    #[allow(clippy::cast_precision_loss)]
    let rough = (to - from) / count.max(1) as f64;
    if !(rough.is_finite() && rough > 0.0) {
        return Vec::new();
    }
    let magnitude = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .map(|factor| factor * magnitude)
        .into_iter()
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    let first = (from / step).ceil();
    // Multiplied, not summed, so that rounding errors do not accumulate. Bounded, because very large numbers do not change by a step.
    let ticks = (0..=2 * count).map(|i| {
        #[allow(clippy::cast_precision_loss)]
        let tick = (first + i as f64) * step;
        // Rounded, because 3 * 0.1 is 0.30000000000000004.
        (tick / step).round() * step
    });
    ticks.take_while(|tick| *tick <= to + step * 1e-9).collect()
}

/// Formats a tick value: `0.15`, `2000`, `1.5M`, `3e-5`.
#[must_use]
pub fn label(value: f64) -> String {
    let size = value.abs();
    let short = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    if size == 0.0 {
        "0".to_owned()
    } else if !(1e-3..1e9).contains(&size) {
        let text = format!("{value:.2e}");
        match text.split_once('e') {
            Some((digits, power)) => format!("{}e{power}", short(digits.to_owned())),
            None => text,
        }
    } else if size >= 1e6 {
        format!("{}M", short(format!("{:.2}", value / 1e6)))
    } else if size >= 10.0 {
        short(format!("{value:.1}"))
    } else {
        short(format!("{value:.4}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 1000.0, 5), [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        let labels: Vec<String> = ticks(0.093, 0.31, 5).into_iter().map(label).collect();
        assert_eq!(labels, ["0.1", "0.15", "0.2", "0.25", "0.3"]);
        assert_eq!(ticks(1.0, 1.0, 5), [0.0; 0]);
        assert_eq!(ticks(f64::NAN, 1.0, 5), [0.0; 0]);
        assert!(ticks(-1e300, 1e300, 5).len() <= 11);
    }

    #[test]
    fn labels_are_short() {
        let cases = [
            (0.0, "0"),
            (0.15, "0.15"),
            (2000.0, "2000"),
            (1_500_000.0, "1.5M"),
            (3e-5, "3e-5"),
            (12.5, "12.5"),
        ];
        for (value, text) in cases {
            assert_eq!(label(value), text);
        }
    }
}
