//! What a device can do, found by trying: each operation that models are made of, forwards and backwards, on small
//! tensors in each dtype, compared with what the processor computes in f32.

use crate::nn;
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
            nn::attention(&x, &keys, &x, 2, 0.5, true)
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

/// The picture as tokens: [2, 36, 8].
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

/// The result of an operation and the gradient of its input, as f32 on the processor.
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

/// How far off a result may be, as a share of the largest one: operations of several roundings each, of 8 bits in bf16
/// and of 11 in f16.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 1.0 / 24.0,
        DType::F16 => 1.0 / 192.0,
        _ => 1e-4,
    }
}

/// The first thing that `device` does not do right in `dtype`, as `conv2d: …`; none when all of it works.
#[must_use]
pub fn fault(device: &Device, dtype: DType) -> Option<String> {
    let tried = |name: &str, outcome: Option<candle_core::Result<Option<f32>>>| match outcome {
        Some(Ok(None)) => None,
        Some(Ok(Some(gap))) => Some(format!("{name}: wrong by {:.2} % of the largest value", gap * 100.0)),
        Some(Err(error)) => Some(format!("{name}: {}", first_line(&error.to_string()))),
        None => Some(format!("{name}: the driver failed")),
    };
    let product = || product(device, dtype).map(|(got, expected)| gap(&got, &expected, tolerance(dtype)));
    tried("product", quietly(product)).or_else(|| {
        OPERATIONS.iter().find_map(|operation| {
            tried(
                operation.name,
                quietly(|| {
                    let expected = run(operation, &Device::Cpu, DType::F32)?;
                    let got = run(operation, device, dtype)?;
                    let pairs = got.iter().zip(&expected);
                    Ok(pairs
                        .filter_map(|(got, expected)| gap(got, expected, tolerance(dtype)))
                        .reduce(f32::max))
                }),
            )
        })
    })
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

/// A matrix product on the device, and by plain loops: what everything else stands on owes nothing to candle.
fn product(device: &Device, dtype: DType) -> candle_core::Result<(Vec<f32>, Vec<f32>)> {
    const ROWS: usize = 8;
    const INNER: usize = 16;
    const COLUMNS: usize = 4;
    let like = Tensor::zeros(1, dtype, device)?;
    let got = values(&[ROWS, INNER], 7, &like)?.matmul(&values(&[INNER, COLUMNS], 3, &like)?)?;
    let of = |row: usize, column: usize| {
        (0..INNER)
            .map(|k| entry(row * INNER + k, 7) * entry(k * COLUMNS + column, 3))
            .sum()
    };
    let expected = (0..ROWS * COLUMNS).map(|at| of(at / COLUMNS, at % COLUMNS)).collect();
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
            Some(fault) => faults.push(format!("{name}: {fault}")),
        }
    }
    (dtypes, faults)
}

/// The dtypes that work on the processor.
#[must_use]
pub fn cpu_dtypes() -> Vec<String> {
    working_dtypes(&Device::Cpu).0
}

/// What a binding to a driver panics about, as a value.
pub(super) fn quietly<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Weights;

    #[test]
    fn the_processor_computes_in_every_dtype() {
        let (dtypes, faults) = working_dtypes(&Device::Cpu);
        assert_eq!(faults, [""; 0]);
        assert_eq!(dtypes, ["f32", "bf16", "f16"]);
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
    fn softmax_in_half_precision_adds_up_in_f32() {
        // A sum of 4096 equal shares stops growing at 256 in bf16, and at 2048 in f16.
        for dtype in [DType::BF16, DType::F16] {
            let query = Tensor::ones((1, 1, 8), dtype, &Device::Cpu).unwrap();
            let keys = Tensor::ones((1, 4096, 8), dtype, &Device::Cpu).unwrap();
            let mean = nn::attention(&query, &keys, &keys, 1, 1.0, false).unwrap();
            let expected = Tensor::ones((1, 1, 8), DType::F32, &Device::Cpu).unwrap();
            assert!(error(&mean, &expected) < 0.01, "{dtype:?}: {mean}");
        }
    }
}
