//! What a device can do, found by trying: each operation that models are made of, forwards and backwards, on small
//! tensors in each dtype, compared with what the CPU computes in f32.

use crate::nn::{self, Attention};
use candle_core::{D, DType, Device, Tensor, Var};

/// An operation, and its result for x [2, 8, 6, 6].
struct Operation {
    name: &'static str,
    run: fn(&Tensor) -> candle_core::Result<Tensor>,
}

const INPUT: [usize; 4] = [2, 8, 6, 6];

const OPERATIONS: [Operation; 8] = [
    Operation {
        name: "linear",
        run: |x| nn::linear(&tokens(x)?, &values(&[5, 8], 3, x)?, Some(&values(&[5], 2, x)?)),
    },
    Operation {
        name: "conv2d",
        run: |x| nn::conv2d(x, &values(&[4, 8, 3, 3], 3, x)?, Some(&values(&[4], 2, x)?), 1, 1),
    },
    Operation {
        name: "conv2d in steps of two",
        run: |x| nn::conv2d(x, &values(&[4, 8, 3, 3], 5, x)?, None, 2, 1),
    },
    Operation {
        name: "attention",
        run: |x| {
            let x = tokens(x)?;
            let keys = nn::linear(&x, &values(&[8, 8], 3, &x)?, None)?;
            let attention = Attention {
                causal: true,
                ..Attention::of(2)
            };
            attention.forward(&x, &keys, &x)
        },
    },
    Operation {
        name: "norm",
        // As nn's norms compute it on GPUs: in f32 whatever x is in.
        run: |x| {
            let x = tokens(x)?;
            let full = x.to_dtype(DType::F32)?;
            let centred = full.broadcast_sub(&full.mean_keepdim(D::Minus1)?)?;
            let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
            centred
                .broadcast_div(&(variance + 1e-5)?.sqrt()?)?
                .to_dtype(x.dtype())?
                .broadcast_mul(&values(&[8], 3, &x)?)
        },
    },
    Operation {
        name: "activations",
        run: |x| nn::silu(&nn::gelu(x)?)? + nn::quick_gelu(x)?,
    },
    Operation {
        name: "enlarging",
        run: |x| nn::upsample_nearest(x, 12, 12),
    },
    Operation {
        name: "joining and picking",
        run: |x| {
            let gated = nn::geglu(&tokens(x)?)?;
            let joined = Tensor::cat(&[&gated, &tokens(x)?.narrow(D::Minus1, 2, 3)?], 2)?;
            let rows = Tensor::new(&[3u32, 0, 3, 7], x.device())?;
            joined.transpose(0, 1)?.contiguous()?.index_select(&rows, 0)
        },
    },
];

/// The image as tokens: [2, 36, 8].
fn tokens(x: &Tensor) -> candle_core::Result<Tensor> {
    x.flatten_from(2)?.transpose(1, 2)?.contiguous()
}

/// A tensor whose entries every dtype holds exactly, on x's device and in its dtype.
fn values(shape: &[usize], by: usize, x: &Tensor) -> candle_core::Result<Tensor> {
    let count = shape.iter().product();
    let entries: Vec<f32> = (0..count).map(|at| entry(at, by)).collect();
    Tensor::from_vec(entries, shape, &Device::Cpu)?
        .to_dtype(x.dtype())?
        .to_device(x.device())
}

fn entry(at: usize, by: usize) -> f32 {
    ((at * by % 11) as f32 - 5.0) / 8.0
}

/// The result of an operation and the gradient of its input, as f32 on the CPU.
fn run(operation: &Operation, device: &Device, dtype: DType) -> candle_core::Result<[Vec<f32>; 2]> {
    let like = Tensor::zeros(1, dtype, device)?;
    let x = Var::from_tensor(&values(&INPUT, 7, &like)?)?;
    let y = (operation.run)(x.as_tensor())?;
    let probe = values(y.dims(), 4, &y)?;
    let grads = (&y * &probe)?.sum_all()?.backward()?;
    let Some(dx) = grads.get(x.as_tensor()) else {
        candle_core::bail!("no gradient reaches its input");
    };
    Ok([plain(&y)?, plain(dx)?])
}

fn plain(x: &Tensor) -> candle_core::Result<Vec<f32>> {
    x.to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1()
}

/// How far off a result may be, as a share of the largest one. What is told here is a kernel that works from one that
/// does not, and some that work add up 72 products in half precision: 8 bits in bf16, 11 in f16.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 1.0 / 8.0,
        DType::F16 => 1.0 / 64.0,
        _ => 1e-3,
    }
}

/// The first thing that `device` does not do right in `dtype`, as `conv2d: …`; none when all of it works.
#[must_use]
pub fn fault(device: &Device, dtype: DType) -> Option<String> {
    // One row takes other kernels.
    let products = [
        ("product", 8, 16),
        ("product of 4096 terms", 8, 4096),
        ("product of one row and 4096 terms", 1, 4096),
    ];
    // Their entries are exact in every dtype: added up in f32, only the result is rounded.
    let once = tolerance(dtype) / 16.0;
    let wrong = |rows, inner| product(device, dtype, rows, inner).map(|(got, expected)| gap(&got, &expected, once));
    products
        .into_iter()
        .find_map(|(name, rows, inner)| told(name, catch_panic(|| wrong(rows, inner))))
        .or_else(|| OPERATIONS.iter().find_map(|operation| operation.fault(device, dtype)))
}

impl Operation {
    fn fault(&self, device: &Device, dtype: DType) -> Option<String> {
        let wrong = || {
            let expected = run(self, &Device::Cpu, DType::F32)?;
            let got = run(self, device, dtype)?;
            let pairs = got.iter().zip(&expected);
            Ok(pairs
                .filter_map(|(got, expected)| gap(got, expected, tolerance(dtype)))
                .reduce(f32::max))
        };
        told(self.name, catch_panic(wrong))
    }
}

/// What is wrong, in words; none if nothing is.
fn told(name: &str, outcome: Option<candle_core::Result<Option<f32>>>) -> Option<String> {
    match outcome {
        Some(Ok(None)) => None,
        Some(Ok(Some(gap))) => Some(format!("{name}: wrong by {:.2} % of the largest value", gap * 100.0)),
        Some(Err(error)) => Some(format!("{name}: {}", first_line(&error.to_string()))),
        None => Some(format!("{name}: the driver failed")),
    }
}

/// The largest difference as a share of the largest value expected, if it exceeds the tolerance.
fn gap(got: &[f32], expected: &[f32], tolerance: f32) -> Option<f32> {
    let scale = expected.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
    let differences = got
        .iter()
        .zip(expected)
        .map(|(got, expected)| (got - expected).abs() / scale);
    // What is no number counts as infinitely far off.
    let most = differences.fold(
        0.0,
        |most: f32, gap| if gap.is_nan() { f32::INFINITY } else { most.max(gap) },
    );
    let most = if got.len() == expected.len() {
        most
    } else {
        f32::INFINITY
    };
    (most > tolerance).then_some(most)
}

/// A matrix product on the device, and by plain loops: what everything else stands on owes nothing to candle. Many
/// terms of one sign also show whether they are added up in f32: a sum in f16 hardly grows in the end.
fn product(device: &Device, dtype: DType, rows: usize, inner: usize) -> candle_core::Result<(Vec<f32>, Vec<f32>)> {
    const COLUMNS: usize = 4;
    let like = Tensor::zeros(1, dtype, device)?;
    let share = 16.0 / inner as f64;
    let left = (values(&[rows, inner], 7, &like)? * share)?;
    let got = (left.abs()? + share)?.matmul(&values(&[inner, COLUMNS], 3, &like)?.abs()?)?;
    let of = |row: usize, column: usize| {
        let terms = (0..inner).map(|k| {
            let left = entry(row * inner + k, 7).abs() + 1.0;
            f64::from(left * entry(k * COLUMNS + column, 3).abs()) * share
        });
        terms.sum::<f64>() as f32
    };
    let expected = (0..rows * COLUMNS).map(|at| of(at / COLUMNS, at % COLUMNS)).collect();
    Ok((plain(&got)?, expected))
}

/// Errors of drivers go on with a backtrace.
fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// The dtypes in which everything works on `device`, some of `f32`, `bf16`, `f16`; and for the others, why not.
pub(super) fn working_dtypes(device: &Device) -> (Vec<String>, Vec<String>) {
    let (mut dtypes, mut faults) = (Vec::new(), Vec::new());
    for (dtype, name) in [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")] {
        match fault(device, dtype) {
            None => dtypes.push(name.to_owned()),
            Some(fault) => {
                tracing::debug!(?device, "{name} does not work: {fault}");
                faults.push(format!("{name}: {fault}"));
            }
        }
    }
    (dtypes, faults)
}

/// The dtypes that work on the CPU.
#[must_use]
pub fn cpu_dtypes() -> Vec<String> {
    working_dtypes(&Device::Cpu).0
}

/// What a binding to a driver panics about, as a value.
pub(super) fn catch_panic<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Weights;

    #[test]
    fn the_cpu_computes_in_f32_and_says_why_not_in_others() {
        let (dtypes, faults) = working_dtypes(&Device::Cpu);
        assert_eq!(dtypes, ["f32"]);
        // candle has no convolution in bf16 there, and adds up in f16 where there is one row.
        assert!(faults[0].starts_with("bf16: conv2d: unsupported"), "{faults:?}");
        assert!(
            faults[1].starts_with("f16: product of one row and 4096 terms: wrong by"),
            "{faults:?}"
        );
    }

    #[test]
    fn what_gpus_run_comes_out_right_in_half_precision() {
        for operation in &OPERATIONS {
            assert_eq!(operation.fault(&Device::Cpu, DType::F16), None);
            // On the CPU candle has no convolution in bf16, and none for the gradient of enlarging.
            let fault = operation.fault(&Device::Cpu, DType::BF16);
            let convolves = operation.name.starts_with("conv2d") || operation.name == "enlarging";
            let missing = |fault: &String| convolves && fault.contains("unsupported dtype BF16 for op matmul");
            assert!(fault.as_ref().is_none_or(missing), "{fault:?}");
        }
    }

    #[test]
    fn wrong_results_are_seen() {
        let right = [1.0, -4.0, 2.0];
        assert_eq!(gap(&[1.0, -4.0, 2.1], &right, 0.05), None);
        assert!(gap(&[1.0, -4.0, 2.4], &right, 0.05).is_some_and(|gap| (gap - 0.1).abs() < 1e-6));
        assert_eq!(gap(&[1.0, f32::NAN, 2.0], &right, 0.05), Some(f32::INFINITY));
        assert_eq!(gap(&[f32::NAN, -3.0, 2.0], &right, 0.05), Some(f32::INFINITY));
        assert_eq!(gap(&[1.0, -4.0], &right, 0.05), Some(f32::INFINITY));
        assert!(gap(&[0.0; 3], &right, 0.05).is_some(), "a kernel that did not run");
    }

    /// How far off the second is, as a share of its largest value.
    fn error(got: &Tensor, expected: &Tensor) -> f32 {
        crate::testing::gap(&got.to_dtype(DType::F32).unwrap(), expected) / crate::testing::largest(expected)
    }

    #[test]
    fn norms_in_half_precision_add_up_in_f32() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("norm.safetensors");
        let like = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        let parts =
            [("weight", 3), ("bias", 2)].map(|(name, by)| (name.to_owned(), values(&[512], by, &like).unwrap()));
        candle_core::safetensors::save(&std::collections::HashMap::from(parts), &file).unwrap();
        let full = Weights::open(&file, DType::F32, &Device::Cpu).unwrap();
        // Far from zero beside how far they are apart: what a mean in half precision loses.
        let far = ((values(&[2, 512, 4], 7, &like).unwrap() * 8.0).unwrap() + 30.0).unwrap();
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
    fn softmax_in_bf16_adds_up_in_f32() {
        // A sum of 4096 equal shares stops growing at 256 in bf16. Not tried in f16, whose products add up in f16 here.
        let query = Tensor::ones((1, 1, 8), DType::BF16, &Device::Cpu).unwrap();
        let keys = Tensor::ones((1, 4096, 8), DType::BF16, &Device::Cpu).unwrap();
        let mean = Attention::of(1).forward(&query, &keys, &keys).unwrap();
        let expected = Tensor::ones((1, 1, 8), DType::F32, &Device::Cpu).unwrap();
        assert!(error(&mean, &expected) < 0.01, "{mean}");
    }
}
