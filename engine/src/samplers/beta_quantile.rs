//! The quantiles of the beta distribution (`scipy.stats.beta.ppf`), in f64: the noise levels of "Beta Sampling is All You Need"
//! (H. Lee and others, arXiv:2407.12173).

/// The x at which the cumulative distribution of Beta(a, b) is `p`. `p` is from 0 to 1; a and b are positive.
#[must_use]
pub(super) fn beta_quantile(p: f64, a: f64, b: f64) -> f64 {
    if p <= 0.0 {
        return 0.0;
    }
    if p >= 1.0 {
        return 1.0;
    }
    // Halves the interval until no number lies inside: the distribution grows everywhere.
    let (mut low, mut high) = (0.0f64, 1.0f64);
    loop {
        let middle = 0.5 * (low + high);
        if middle <= low || middle >= high {
            return middle;
        }
        match regularized_incomplete_beta(middle, a, b) < p {
            true => low = middle,
            false => high = middle,
        }
    }
}

/// The cumulative distribution of Beta(a, b) at x: the regularised incomplete beta function I_x(a, b), by its continued
/// fraction (NIST Digital Library of Mathematical Functions, 8.17.22), evaluated with Lentz's method.
#[must_use]
fn regularized_incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    if x >= 1.0 {
        return 1.0;
    }
    // The fraction converges quickly on this side; the other side follows from I_x(a, b) = 1 - I_(1 - x)(b, a).
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - regularized_incomplete_beta(1.0 - x, b, a);
    }
    let log_front = a * x.ln() + b * (-x).ln_1p() - (ln_gamma(a) + ln_gamma(b) - ln_gamma(a + b));
    log_front.exp() / a * continued_fraction(x, a, b)
}

/// 1 / (1 + d1 / (1 + d2 / (1 + …))), where d(2m) = m (b - m) x / ((a + 2m - 1) (a + 2m)) and
/// d(2m + 1) = -(a + m) (a + b + m) x / ((a + 2m) (a + 2m + 1)).
fn continued_fraction(x: f64, a: f64, b: f64) -> f64 {
    const TINY: f64 = 1e-300;
    const MAX_TERMS: u32 = 1000;
    let nonzero = |value: f64| if value.abs() < TINY { TINY } else { value };
    let (mut fraction, mut numerator, mut denominator) = (1.0f64, 1.0f64, 0.0f64);
    for term in 0..MAX_TERMS {
        let m = f64::from(term / 2);
        let d = match term {
            0 => 1.0,
            even if even % 2 == 0 => m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m)),
            _ => -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0)),
        };
        denominator = 1.0 / nonzero(1.0 + d * denominator);
        numerator = nonzero(1.0 + d / numerator);
        let change = numerator * denominator;
        fraction *= change;
        if (change - 1.0).abs() < f64::EPSILON {
            break;
        }
    }
    // The fraction was started with 1 in the place of 0.
    fraction - 1.0
}

/// The logarithm of the gamma function of a positive number, by the approximation of C. Lanczos (1964) with g = 7 and nine terms,
/// whose relative error is below 1e-14.
fn ln_gamma(x: f64) -> f64 {
    const G: f64 = 7.0;
    const FIRST: f64 = 0.999_999_999_999_809_9;
    const TERMS: [f64; 8] = [
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    if x < 0.5 {
        // The reflection formula.
        return (std::f64::consts::PI / (std::f64::consts::PI * x).sin()).ln() - ln_gamma(1.0 - x);
    }
    let x = x - 1.0;
    let mut sum = FIRST;
    for (index, term) in TERMS.iter().enumerate() {
        sum += term / (x + index as f64 + 1.0);
    }
    let t = x + G + 0.5;
    0.5 * (2.0 * std::f64::consts::PI).ln() + (x + 0.5) * t.ln() - t + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gamma_has_its_known_values() {
        for (x, gamma) in [
            (1.0, 1.0),
            (0.5, std::f64::consts::PI.sqrt()),
            (5.0, 24.0),
            (0.6, 1.489_192_248_812_817),
            (10.0, 362_880.0),
        ] {
            assert!((ln_gamma(x).exp() / gamma - 1.0).abs() < 1e-13, "{x}");
        }
    }

    #[test]
    fn the_distribution_agrees_with_its_closed_forms() {
        for step in 0..=100 {
            let x = f64::from(step) / 100.0;
            let arcsine = 2.0 / std::f64::consts::PI * x.sqrt().asin();
            for (a, b, expected) in [
                (1.0, 1.0, x),
                (2.0, 1.0, x * x),
                (1.0, 3.0, 1.0 - (1.0 - x).powi(3)),
                (2.0, 2.0, x * x * (3.0 - 2.0 * x)),
                (0.5, 0.5, arcsine),
            ] {
                let found = regularized_incomplete_beta(x, a, b);
                assert!(
                    (found - expected).abs() < 1e-13,
                    "I_{x}({a}, {b}) = {found}, expected {expected}"
                );
            }
        }
    }

    #[test]
    fn a_quantile_is_the_inverse_of_the_distribution() {
        assert_eq!([beta_quantile(0.0, 0.6, 0.6), beta_quantile(1.0, 0.6, 0.6)], [0.0, 1.0]);
        assert!((beta_quantile(0.5, 0.6, 0.6) - 0.5).abs() < 1e-14);
        let mut last = 0.0;
        for step in 1..1000 {
            let p = f64::from(step) / 1000.0;
            let x = beta_quantile(p, 0.6, 0.6);
            assert!(x > last);
            last = x;
            assert!((regularized_incomplete_beta(x, 0.6, 0.6) - p).abs() < 1e-12);
            assert!((beta_quantile(1.0 - p, 0.6, 0.6) + x - 1.0).abs() < 1e-12);
        }
    }
}
