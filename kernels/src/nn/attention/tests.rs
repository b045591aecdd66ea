//! Compares attention on every instruction set of this CPU with the definition in f64.

use super::kernel::{Backward, Bias, Forward, PackHead, PackedHead, Problem, Scratch, Statistics};
use super::panels::{Packed, PackedPairs};
use crate::nn::cpu::{Bf16Isa, Isa, Mat, available_bf16_isas, available_isas, run_bf16_on, run_on};
use half::bf16;
use std::marker::PhantomData;

fn numbers(seed: usize, length: usize) -> Vec<f32> {
    (0..length)
        .map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 501.5 - 2.0)
        .collect()
}

/// The gradient of the result is that of the definition times this number, and those of the inputs are divided by it. With it, one times
/// 1 / the least positive number is infinite.
const GRADIENT_FACTOR: f32 = 16.0;

/// y, dq, dk and dv in f32.
fn results_on(isa: Isa, problem: Problem<'_>) -> Vec<Vec<f32>> {
    results::<Packed>(
        problem,
        |kernel| run_on(isa, kernel),
        |kernel| run_on(isa, kernel),
        |kernel| run_on(isa, kernel),
    )
}

/// y, dq, dk and dv with products of bfloat16 numbers.
fn bf16_results_on(isa: Bf16Isa, problem: Problem<'_>) -> Vec<Vec<f32>> {
    results::<PackedPairs>(
        problem,
        |kernel| run_bf16_on(isa, kernel),
        |kernel| run_bf16_on(isa, kernel),
        |kernel| run_bf16_on(isa, kernel),
    )
}

fn results<P>(
    problem: Problem<'_>,
    pack: impl Fn(PackHead<'_, P>) -> PackedHead<P>,
    forward: impl Fn(Forward<'_, P>),
    backward: impl Fn(Backward<'_, P>) -> [Vec<f32>; 3],
) -> Vec<Vec<f32>> {
    let Problem {
        queries, keys, width, ..
    } = problem;
    let (q, k) = (numbers(1, queries * width), numbers(2, keys * width));
    let (v, dy) = (numbers(3, keys * width), numbers(4, queries * width));
    let q = Mat::new(&q, queries, width);
    let (k, v) = (Mat::new(&k, keys, width), Mat::new(&v, keys, width));
    let mut y = vec![0f32; queries * width];
    let panels = PhantomData;
    let head = pack(PackHead { k, v, panels });
    // In two parts. The second part does not begin at the start of a panel.
    let (first, second) = y.split_at_mut(queries / 2 * width);
    let (mut max, mut inverse) = (vec![0f32; queries], vec![0f32; queries]);
    let (first_max, second_max) = max.split_at_mut(queries / 2);
    let (first_inverse, second_inverse) = inverse.split_at_mut(queries / 2);
    for (start, y, max, inverse) in [
        (0, first, first_max, first_inverse),
        (queries / 2, second, second_max, second_inverse),
    ] {
        let (head, scratch) = (&head, &mut Scratch::default());
        forward(Forward {
            problem,
            q,
            head,
            start,
            y,
            statistics: Statistics { max, inverse },
            scratch,
        });
    }
    let dy: Vec<f32> = dy.into_iter().map(|dy| dy * GRADIENT_FACTOR).collect();
    let dy = Mat::new(&dy, queries, width);
    let scratch = &mut Scratch::default();
    let grads = backward(Backward {
        problem,
        q,
        k,
        v,
        y: Mat::new(&y, queries, width),
        dy,
        statistics: Statistics {
            max: &max,
            inverse: &inverse,
        },
        scratch,
        panels,
    });
    let grads = grads.map(|grad| grad.into_iter().map(|grad| grad / GRADIENT_FACTOR).collect());
    std::iter::once(y).chain(grads).collect()
}

/// The number that a product in f32 reads.
fn unrounded(number: f32) -> f64 {
    f64::from(number)
}

/// The number that a product in bfloat16 reads.
fn rounded(number: f32) -> f64 {
    bf16::from_f32(number).to_f64()
}

/// y, dq, dk and dv by definition, in f64. The products of the forward pass read their operands through `read`; that of the probabilities
/// reads the exponentials relative to the largest score of all keys.
fn exact_results(p: Problem<'_>, read: fn(f32) -> f64) -> Vec<Vec<f64>> {
    let (n, m, w) = (p.queries, p.keys, p.width);
    let wide = |seed, length| -> Vec<f64> { numbers(seed, length).into_iter().map(f64::from).collect() };
    let (q, k, v, dy) = (wide(1, n * w), wide(2, m * w), wide(3, m * w), wide(4, n * w));
    let scale = f64::from(p.scale);
    let scaled_q: Vec<f64> = numbers(1, n * w).iter().map(|x| read(x * p.scale)).collect();
    let [read_k, read_v] = [(2, m * w), (3, m * w)]
        .map(|(seed, length)| -> Vec<f64> { numbers(seed, length).into_iter().map(read).collect() });
    let dot = |a: &[f64], i: usize, b: &[f64], j: usize| -> f64 { (0..w).map(|d| a[i * w + d] * b[j * w + d]).sum() };
    let mut out = vec![vec![0.0; n * w], vec![0.0; n * w], vec![0.0; m * w], vec![0.0; m * w]];
    for i in 0..n {
        let seen = if p.causal { (i + 1).min(m) } else { m };
        let bias = |j: usize| match p.bias {
            Some(bias) if bias.per_query => f64::from(bias.data[i * m + j]),
            Some(bias) => f64::from(bias.data[j]),
            None => 0.0,
        };
        let scores: Vec<f64> = (0..seen).map(|j| dot(&scaled_q, i, &read_k, j) + bias(j)).collect();
        let largest = scores.iter().copied().fold(f64::from(f32::MIN), f64::max);
        let e: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        // The result is zero if all keys are masked.
        let sum = e.iter().sum::<f64>().max(1e-30);
        let mean: f64 = (0..seen).map(|j| e[j] / sum * dot(&dy, i, &v, j)).sum();
        for j in 0..seen {
            let probability = e[j] / sum;
            let ds = probability * (dot(&dy, i, &v, j) - mean) * scale;
            for d in 0..w {
                out[0][i * w + d] += read(e[j] as f32) / sum * read_v[j * w + d];
                out[1][i * w + d] += ds * k[j * w + d];
                out[2][j * w + d] += ds * q[i * w + d];
                out[3][j * w + d] += probability * dy[i * w + d];
            }
        }
    }
    out
}

/// Runs `check` on problems of many shapes, with and without masks and biases.
fn for_each_problem(check: impl Fn(Problem<'_>)) {
    // The bias masks some keys, and all keys for query 2.
    let table: Vec<f32> = (0..33 * 77)
        .map(|i| match (i / 77, i % 77) {
            (2, _) | (_, 0 | 50) => f32::NEG_INFINITY,
            _ => ((i * 31) % 17) as f32 / 8.0 - 1.0,
        })
        .collect();
    // Later blocks have larger scores, some whole blocks are masked, and all keys of query 4.
    let long: Vec<f32> = (0..9 * 900)
        .map(|i| match (i / 900, i % 900) {
            (4, _) | (_, 0..260) | (6, 500..) => f32::NEG_INFINITY,
            (_, key) => key as f32 / 200.0 + ((i * 31) % 17) as f32 / 8.0,
        })
        .collect();
    let bias = |data, per_query| Some(Bias { data, per_query });
    for (queries, keys, width, causal, bias) in [
        (1, 1, 1, false, None),
        (5, 3, 8, false, None),
        (33, 77, 40, false, None),
        (64, 130, 64, false, None),
        (77, 77, 64, true, None),
        (70, 600, 12, false, None),
        (40, 20, 5, true, None),
        (33, 77, 40, false, bias(table.as_slice(), true)),
        (33, 77, 40, false, bias(&table[..77], false)),
        (50, 77, 128, true, bias(&table[77..2 * 77], false)),
        (33, 77, 256, true, bias(table.as_slice(), true)),
        // Several blocks of keys.
        (600, 600, 40, true, None),
        (33, 253, 200, true, None),
        (9, 900, 16, false, bias(long.as_slice(), true)),
        (300, 521, 24, true, bias(&long[..521], false)),
    ] {
        let problem = Problem {
            queries,
            keys,
            width,
            causal,
            bias,
            scale: 1.0 / (width as f32).sqrt(),
        };
        check(problem);
    }
}

/// The largest error of each result, relative to its largest number.
fn errors<'a>(found: &'a [Vec<f32>], expected: &'a [Vec<f64>]) -> impl Iterator<Item = f64> + 'a {
    found.iter().zip(expected).map(|(found, expected)| {
        assert!(found.iter().all(|value| value.is_finite()));
        let largest = expected.iter().fold(1e-3, |max: f64, v| max.max(v.abs()));
        let error = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs());
        error.fold(0.0, f64::max) / largest
    })
}

#[test]
fn attention_is_correct_on_every_vector_unit() {
    for_each_problem(|problem| {
        let expected = exact_results(problem, unrounded);
        let Problem {
            queries, keys, width, ..
        } = problem;
        for isa in available_isas() {
            for (which, error) in errors(&results_on(isa, problem), &expected).enumerate() {
                assert!(
                    error < 1e-4,
                    "{isa:?}, {queries} x {keys} x {width}: result {which} is off by {error}"
                );
            }
        }
    });
}

/// Exponentials are rounded relative to the largest score of the blocks so far, and not of all keys as in the definition: with several
/// blocks of keys the roundings of the result differ, and only there.
#[test]
fn attention_in_bf16_is_that_of_rounded_operands() {
    for_each_problem(|problem| {
        let expected = exact_results(problem, rounded);
        let Problem {
            queries, keys, width, ..
        } = problem;
        let one_block = keys <= 84;
        for isa in available_bf16_isas() {
            for (which, error) in errors(&bf16_results_on(isa, problem), &expected).enumerate() {
                let limit = match which {
                    _ if one_block => 5e-4,
                    0 => 4e-3,
                    // The products of the backward pass are in f32, but it reads y.
                    _ => 3e-2,
                };
                assert!(
                    error < limit,
                    "{isa:?}, {queries} x {keys} x {width}: result {which} is off by {error}"
                );
            }
        }
    });
}
