//! Tests which operations work on a device, and in which dtypes: each operation that the models need, forward and
//! backward, on small tensors, compared with the CPU in f32.

use super::portable::{not_portable, portable};
use crate::autograd::record;
use crate::nn::{self, Attention, matmul};
use candle_core::{D, DType, Device, Tensor, Var};

/// An operation that is tested on x [2, 8, 6, 6].
struct TestCase {
    name: &'static str,
    run: fn(&Tensor) -> candle_core::Result<Tensor>,
}

const INPUT: [usize; 4] = [2, 8, 6, 6];

const TEST_CASES: [TestCase; 16] = [
    TestCase {
        name: "linear",
        run: |x| {
            nn::linear(
                &tokens(x)?,
                &test_tensor(&[5, 8], 3, x)?,
                Some(&test_tensor(&[5], 2, x)?),
            )
        },
    },
    TestCase {
        name: "conv2d",
        run: |x| {
            nn::conv2d(
                x,
                &test_tensor(&[4, 8, 3, 3], 3, x)?,
                Some(&test_tensor(&[4], 2, x)?),
                1,
                1,
            )
        },
    },
    TestCase {
        name: "conv2d with stride 2",
        run: |x| nn::conv2d(x, &test_tensor(&[4, 8, 3, 3], 5, x)?, None, 2, 1),
    },
    TestCase {
        name: "attention",
        run: |x| {
            let x = tokens(x)?;
            let keys = nn::linear(&x, &test_tensor(&[8, 8], 3, &x)?, None)?;
            let attention = Attention {
                causal: true,
                ..Attention::new(2)
            };
            attention.forward(&x, &keys, &x)
        },
    },
    TestCase {
        // A number of keys for which kernels read several numbers at once.
        name: "attention to 64 keys",
        run: |x| {
            let keys = test_tensor(&[2, 64, 8], 3, x)?;
            Attention::new(2).forward(&tokens(x)?, &keys, &test_tensor(&[2, 64, 8], 5, x)?)
        },
    },
    TestCase {
        name: "layer norm",
        run: |x| nn::LayerNorm::plain(8, 1e-5, x.dtype(), x.device())?.forward(&tokens(x)?),
    },
    TestCase {
        name: "RMS norm of heads",
        run: |x| nn::RmsNorm::from_weight(test_tensor(&[4], 3, x)?, 1e-5)?.forward(&tokens(x)?),
    },
    TestCase {
        name: "group norm with SiLU",
        run: |x| {
            let [weight, bias] = [3, 2].map(|step| test_tensor(&[8], step, x));
            nn::GroupNorm::from_tensors(weight?, bias?, 2, 1e-5).forward_silu(x)
        },
    },
    TestCase {
        name: "modulation",
        run: |x| {
            let x = tokens(x)?;
            let [scale, shift, gate] = [3, 2, 4].map(|step| test_tensor(&[2, 8], step, &x));
            let y = nn::modulate(&x, &scale?, &shift?)?;
            nn::gated_residual(&x, &gate?, &y)
        },
    },
    TestCase {
        name: "rotary embedding",
        run: |x| {
            let rotate = |pairs| nn::Rotary::for_sequence(36, 4, 10_000.0, pairs);
            let x = rotate(nn::RotaryPairs::Halves)?.forward(&tokens(x)?)?;
            rotate(nn::RotaryPairs::Interleaved)?.forward(&x)
        },
    },
    TestCase {
        name: "gated activations",
        run: |x| nn::geglu(&tokens(x)?)? + nn::swiglu(&tokens(x)?)?,
    },
    TestCase {
        name: "norm",
        run: |x| {
            let x = tokens(x)?;
            let norm = nn::LayerNorm::plain(8, 1e-5, x.dtype(), x.device())?;
            norm.forward(&x)?.broadcast_mul(&test_tensor(&[8], 3, &x)?)
        },
    },
    TestCase {
        name: "activations",
        run: |x| nn::silu(&nn::gelu(x)?)? + (nn::quick_gelu(x)? + nn::Activation::GeluTanh.forward(x)?)?,
    },
    TestCase {
        name: "upsample_nearest",
        run: |x| nn::upsample_nearest(x, 12, 12),
    },
    TestCase {
        name: "upsample_nearest to an odd size",
        run: |x| nn::upsample_nearest(x, 11, 13),
    },
    TestCase {
        name: "cat and index_select",
        run: |x| {
            let gated = nn::geglu(&tokens(x)?)?;
            let joined = Tensor::cat(&[&gated, &tokens(x)?.narrow(D::Minus1, 2, 3)?], 2)?;
            let rows = Tensor::new(&[3u32, 0, 3, 7], x.device())?;
            joined.transpose(0, 1)?.contiguous()?.index_select(&rows, 0)
        },
    },
];

/// The image as a sequence of tokens: [2, 36, 8].
fn tokens(x: &Tensor) -> candle_core::Result<Tensor> {
    x.flatten_from(2)?.transpose(1, 2)?.contiguous()
}

/// A tensor with values that are exact in every dtype, with the device and the dtype of x.
fn test_tensor(shape: &[usize], step: usize, x: &Tensor) -> candle_core::Result<Tensor> {
    let count = shape.iter().product();
    let entries: Vec<f32> = (0..count).map(|at| test_value(at, step)).collect();
    Tensor::from_vec(entries, shape, &Device::Cpu)?
        .to_dtype(x.dtype())?
        .to_device(x.device())
}

fn test_value(at: usize, step: usize) -> f32 {
    ((at * step % 11) as f32 - 5.0) / 8.0
}

/// Runs an operation and returns its result and the gradient of its input, as f32 on the CPU.
fn run(case: &TestCase, device: &Device, dtype: DType) -> candle_core::Result<[Vec<f32>; 2]> {
    let like = Tensor::zeros(1, dtype, device)?;
    let x = Var::from_tensor(&test_tensor(&INPUT, 7, &like)?)?;
    let (y, tape) = record(|| (case.run)(x.as_tensor()))?;
    let grads = tape.backward_from([(y.clone(), test_tensor(y.dims(), 4, &y)?)])?;
    let Some(dx) = grads.get(x.as_tensor()) else {
        candle_core::bail!("the input gets no gradient");
    };
    Ok([to_f32_vec(&y)?, to_f32_vec(dx)?])
}

fn to_f32_vec(x: &Tensor) -> candle_core::Result<Vec<f32>> {
    x.to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1()
}

/// The relative error that is allowed, as a fraction of the largest value. It is large enough for kernels that sum 72
/// products in half precision (8 bits in bf16, 11 in f16) and small enough to find a kernel that does not work.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 1.0 / 8.0,
        DType::F16 => 1.0 / 64.0,
        _ => 1e-3,
    }
}

/// The first operation that fails on `device` in `dtype`, as `conv2d: …`; `None` when all operations work.
#[must_use]
pub fn first_failure(device: &Device, dtype: DType) -> Option<String> {
    // A matrix of one row uses other kernels.
    let products = [
        ("matmul", 8, 16),
        ("matmul over 4096 terms", 8, 4096),
        ("matmul of one row over 4096 terms", 1, 4096),
    ];
    // The inputs are exact in every dtype. If the sum is in f32, only the result is rounded.
    let rounding_tolerance = tolerance(dtype) / 16.0;
    let wrong = |rows, inner| {
        product(device, dtype, rows, inner).map(|(got, expected)| excessive_error(&got, &expected, rounding_tolerance))
    };
    products
        .into_iter()
        .find_map(|(name, rows, inner)| describe_failure(name, catch_panic(|| wrong(rows, inner))))
        .or_else(|| TEST_CASES.iter().find_map(|case| case.failure(device, dtype)))
}

impl TestCase {
    fn failure(&self, device: &Device, dtype: DType) -> Option<String> {
        let wrong = || {
            let expected = not_portable(|| run(self, &Device::Cpu, DType::F32))?;
            let got = run(self, device, dtype)?;
            let pairs = got.iter().zip(&expected);
            Ok(pairs
                .filter_map(|(got, expected)| excessive_error(got, expected, tolerance(dtype)))
                .reduce(f32::max))
        };
        describe_failure(self.name, catch_panic(wrong))
    }
}

/// Describes a failure; `None` when the operation works.
fn describe_failure(name: &str, outcome: Option<candle_core::Result<Option<f32>>>) -> Option<String> {
    match outcome {
        Some(Ok(None)) => None,
        Some(Ok(Some(error))) => Some(format!("{name}: wrong by {:.2} % of the largest value", error * 100.0)),
        Some(Err(error)) => Some(format!("{name}: {}", first_line(&error.to_string()))),
        None => Some(format!("{name}: the driver failed")),
    }
}

/// The largest difference as a fraction of the largest expected value, if it exceeds the tolerance.
fn excessive_error(got: &[f32], expected: &[f32], tolerance: f32) -> Option<f32> {
    let scale = expected
        .iter()
        .fold(f32::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
    let differences = got
        .iter()
        .zip(expected)
        .map(|(got, expected)| (got - expected).abs() / scale);
    // NaN counts as an infinite error.
    let largest = differences.fold(0.0, |largest: f32, error| {
        if error.is_nan() {
            f32::INFINITY
        } else {
            largest.max(error)
        }
    });
    let largest = if got.len() == expected.len() {
        largest
    } else {
        f32::INFINITY
    };
    (largest > tolerance).then_some(largest)
}

/// A matrix product on the device, and the same product by loops in f64, so that this test does not depend on candle.
/// Many terms of one sign also show whether the sum is in f32: a sum in f16 stops growing.
fn product(device: &Device, dtype: DType, rows: usize, inner: usize) -> candle_core::Result<(Vec<f32>, Vec<f32>)> {
    const COLUMNS: usize = 4;
    let like = Tensor::zeros(1, dtype, device)?;
    let share = 16.0 / inner as f64;
    let left = (test_tensor(&[rows, inner], 7, &like)? * share)?;
    let got = matmul(
        &(left.abs()? + share)?,
        &test_tensor(&[inner, COLUMNS], 3, &like)?.abs()?,
    )?;
    let of = |row: usize, column: usize| {
        let terms = (0..inner).map(|k| {
            let left = test_value(row * inner + k, 7).abs() + 1.0;
            f64::from(left * test_value(k * COLUMNS + column, 3).abs()) * share
        });
        terms.sum::<f64>() as f32
    };
    let expected = (0..rows * COLUMNS).map(|at| of(at / COLUMNS, at % COLUMNS)).collect();
    Ok((to_f32_vec(&got)?, expected))
}

/// The first line of an error: errors of drivers contain a backtrace.
fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// The dtypes in which all operations work on `device` (of `f32`, `bf16`, `f16`), and the failures of the others.
pub(super) fn working_dtypes(device: &Device) -> (Vec<String>, Vec<String>) {
    let (mut dtypes, mut failures) = (Vec::new(), Vec::new());
    for (dtype, name) in [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")] {
        match first_failure(device, dtype) {
            None => dtypes.push(name.to_owned()),
            Some(failure) => {
                tracing::debug!(?device, "{name} does not work: {failure}");
                failures.push(format!("{name}: {failure}"));
            }
        }
    }
    (dtypes, failures)
}

/// The dtypes in which all operations work on the CPU in portable mode.
#[must_use]
pub fn portable_dtypes() -> Vec<String> {
    portable(|| working_dtypes(&Device::Cpu)).0
}

/// The dtypes that the CPU computes in: f32, if its operations work.
#[must_use]
pub fn cpu_dtypes() -> Vec<String> {
    match first_failure(&Device::Cpu, DType::F32) {
        None => vec!["f32".to_owned()],
        Some(_) => Vec::new(),
    }
}

/// Runs `call` and returns `None` if it panics, as bindings to drivers do.
pub(super) fn catch_panic<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::portable::emulated_kernels;
    use crate::weights::Weights;

    #[test]
    fn the_cpu_computes_in_f32() {
        assert_eq!(cpu_dtypes(), ["f32"]);
    }

    #[test]
    fn every_dtype_works_in_portable_mode() {
        let (dtypes, failures) = portable(|| working_dtypes(&Device::Cpu));
        assert_eq!(
            (dtypes.as_slice(), failures),
            (["f32", "bf16", "f16"].map(String::from).as_slice(), vec![])
        );
    }

    #[test]
    fn every_dtype_works_with_emulated_kernels() {
        let (dtypes, failures) = emulated_kernels(|| working_dtypes(&Device::Cpu));
        assert_eq!(
            (dtypes.as_slice(), failures),
            (["f32", "bf16", "f16"].map(String::from).as_slice(), vec![])
        );
    }

    #[test]
    fn every_operation_has_a_form_for_half_precision() {
        for case in &TEST_CASES {
            for dtype in [DType::F16, DType::BF16] {
                assert_eq!(case.failure(&Device::Cpu, dtype), None);
            }
        }
    }

    #[test]
    fn wrong_results_are_found() {
        let right = [1.0, -4.0, 2.0];
        assert_eq!(excessive_error(&[1.0, -4.0, 2.1], &right, 0.05), None);
        assert!(excessive_error(&[1.0, -4.0, 2.4], &right, 0.05).is_some_and(|error| (error - 0.1).abs() < 1e-6));
        assert_eq!(
            excessive_error(&[1.0, f32::NAN, 2.0], &right, 0.05),
            Some(f32::INFINITY)
        );
        assert_eq!(
            excessive_error(&[f32::NAN, -3.0, 2.0], &right, 0.05),
            Some(f32::INFINITY)
        );
        assert_eq!(excessive_error(&[1.0, -4.0], &right, 0.05), Some(f32::INFINITY));
        assert!(
            excessive_error(&[0.0; 3], &right, 0.05).is_some(),
            "a kernel that did not run"
        );
    }

    /// The largest difference, as a fraction of the largest expected value.
    fn error(got: &Tensor, expected: &Tensor) -> f32 {
        crate::testing::gap(&got.to_dtype(DType::F32).unwrap(), expected) / crate::testing::largest(expected)
    }

    #[test]
    fn norms_in_half_precision_sum_in_f32() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("norm.safetensors");
        let like = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        let parts = [("weight", 3), ("bias", 2)]
            .map(|(name, step)| (name.to_owned(), test_tensor(&[512], step, &like).unwrap()));
        candle_core::safetensors::save(&std::collections::HashMap::from(parts), &file).unwrap();
        let full = Weights::open(&file, DType::F32, &Device::Cpu).unwrap();
        // The mean is large compared with the deviation: a mean in half precision would lose it.
        let far = ((test_tensor(&[2, 512, 4], 7, &like).unwrap() * 8.0).unwrap() + 30.0).unwrap();
        for (dtype, tolerance) in [(DType::BF16, 1.0 / 128.0), (DType::F16, 1.0 / 1024.0)] {
            let half = Weights::open(&file, dtype, &Device::Cpu).unwrap();
            let x = far.to_dtype(dtype).unwrap();
            let exact = x.to_dtype(DType::F32).unwrap();
            let group = |weights, x| nn::GroupNorm::new(weights, 4, 512, 1e-5).unwrap().forward(x).unwrap();
            assert!(
                error(&group(&half, &x), &group(&full, &exact)) < tolerance,
                "group norm in {dtype:?}"
            );
            let (x, exact) = (x.transpose(1, 2).unwrap(), exact.transpose(1, 2).unwrap());
            let layer = |weights, x| nn::LayerNorm::new(weights, 512, 1e-5).unwrap().forward(x).unwrap();
            assert!(
                error(&layer(&half, &x), &layer(&full, &exact)) < tolerance,
                "layer norm in {dtype:?}"
            );
        }
    }

    #[test]
    fn softmax_in_bf16_sums_in_f32() {
        // A sum of 4096 equal terms stops growing at 256 in bf16.
        let query = Tensor::ones((1, 1, 8), DType::BF16, &Device::Cpu).unwrap();
        let keys = Tensor::ones((1, 4096, 8), DType::BF16, &Device::Cpu).unwrap();
        let mean = Attention::new(1).forward(&query, &keys, &keys).unwrap();
        let expected = Tensor::ones((1, 1, 8), DType::F32, &Device::Cpu).unwrap();
        assert!(error(&mean, &expected) < 0.01, "{mean}");
    }
}
