//! Compares every instruction set of this CPU with scalar arithmetic.

use super::elementwise::Map;
use super::simd::{Isa, available_isas, run_on};
use super::*;
use proptest::prelude::*;

fn numbers(seed: usize, length: usize) -> Vec<f32> {
    (0..length)
        .map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0)
        .collect()
}

#[derive(Clone, Copy)]
struct Exp;

impl Function<1> for Exp {
    fn eval<S: Simd>(self, [x]: [S::V; 1]) -> S::V {
        S::exp(x)
    }
}

#[test]
fn exp_is_accurate_to_the_last_digits() {
    let x: Vec<f32> = (-8700..=8870).map(|i| i as f32 / 100.0).collect();
    for isa in available_isas() {
        let mut y = vec![0f32; x.len()];
        let (f, inputs) = (Exp, [&x[..]]);
        run_on(isa, Map { f, inputs, y: &mut y });
        for (x, y) in x.iter().zip(&y) {
            let exact = f64::from(*x).exp();
            let error = (f64::from(*y) - exact).abs() / exact;
            assert!(error < 3e-7, "{isa:?}: e^{x} is {exact}, not {y}");
        }
        let extremes = [f32::NEG_INFINITY, -200.0, 0.0, 100.0, f32::INFINITY, f32::NAN];
        let mut y = [1f32; 6];
        let inputs = [&extremes[..]];
        run_on(isa, Map { f, inputs, y: &mut y });
        assert_eq!(y[..5], [0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY], "{isa:?}");
        assert!(y[5].is_nan(), "{isa:?}");
    }
}

/// Computes the product on one unit and compares it with loops in f64. Returns the output.
fn check_product(isa: Isa, sizes: Sizes, transposed: (bool, bool), initial: u8, threads: usize) -> Vec<f32> {
    let Sizes { rows, cols, depth } = sizes;
    let (a, b, bias) = (numbers(1, rows * depth), numbers(2, depth * cols), numbers(3, rows));
    let at = |data: &[f32], transposed: bool, (i, j): (usize, usize), (n, m): (usize, usize)| {
        f64::from(if transposed { data[j * n + i] } else { data[i * m + j] })
    };
    let left = match transposed.0 {
        true => Mat::new(&a, depth, rows).t(),
        false => Mat::new(&a, rows, depth),
    };
    let right = match transposed.1 {
        true => Mat::new(&b, cols, depth).t(),
        false => Mat::new(&b, depth, cols),
    };
    let stride = cols + 3;
    let before = numbers(4, rows * stride);
    let mut out = before.clone();
    let product = Product {
        sizes,
        a: &left,
        b: &right,
        initial: match initial {
            0 => InitialValue::Zero,
            1 => InitialValue::Output,
            _ => InitialValue::PerRow(&bias),
        },
    };
    product.write_on(isa, &mut out, stride, threads);
    for i in 0..rows {
        for j in 0..cols {
            let sum: f64 = (0..depth)
                .map(|k| at(&a, transposed.0, (i, k), (rows, depth)) * at(&b, transposed.1, (k, j), (depth, cols)))
                .sum();
            let begin = match initial {
                0 => 0.0,
                1 => before[i * stride + j],
                _ => bias[i],
            };
            let (expected, got) = (f64::from(begin) + sum, f64::from(out[i * stride + j]));
            let close = (expected - got).abs() <= 1e-5 * (depth as f64).sqrt().max(1.0);
            assert!(close, "{isa:?}, {sizes:?} at {i}, {j}: {got}, not {expected}");
        }
        assert_eq!(
            out[i * stride + cols..][..3],
            before[i * stride + cols..][..3],
            "elements beyond the row are unchanged"
        );
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn products_equal_scalar_products(
        rows in 1usize..70, cols in 1usize..150, depth in 0usize..600,
        transposed in any::<(bool, bool)>(), initial in 0u8..3,
    ) {
        for isa in available_isas() {
            check_product(isa, Sizes { rows, cols, depth }, transposed, initial, 1);
        }
    }
}

#[test]
fn a_product_has_the_same_bits_for_any_number_of_threads() {
    let sizes = Sizes {
        rows: 333,
        cols: 1100,
        depth: 270,
    };
    for isa in available_isas() {
        let one = check_product(isa, sizes, (false, true), 2, 1);
        for threads in [2, 5] {
            assert_eq!(
                one,
                check_product(isa, sizes, (false, true), 2, threads),
                "{isa:?}, {threads} threads"
            );
        }
    }
}
