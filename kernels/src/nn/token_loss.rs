//! The loss of language models: cross entropy over the vocabulary, in chunks of tokens.
//!
//! The logits of a batch have as many numbers as its tokens times the vocabulary: 1.6 GB for 8192 tokens of StarCoder2 in float32. Here they
//! exist for some tokens at a time. On a CPU the forward pass computes the gradients too, while the logits are there, as Liger Kernel does
//! (P. Hsu and others, arXiv:2410.10989); on other devices the backward pass computes the logits again. torch:
//! `cross_entropy(hidden @ weight.T, targets)`.

use super::cpu::{self, Function, Mat, MatMut, Simd, map_serial};
use crate::autograd::{Input, Operation, apply};
use candle_core::{DType, Device, Result, Shape, Tensor};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Numbers of the logits that exist at a time: 64 MiB of float32. The planner counts them (`plan/language_model.rs` of aitk-common).
const CHUNK_NUMBERS: usize = 16 << 20;
/// Tokens of a chunk at least, so that products of matrices stay fast, and at most.
const CHUNK_TOKENS: [usize; 2] = [16, 1024];

/// `factor` times the sum of the cross entropies of `targets`, a scalar of float32. `hidden` [.., width] are the states of all tokens, of which
/// those at `positions` predict the tokens of `targets`; `weight` [vocabulary, width] is that of the output layer. Both may be tracked.
///
/// # Errors
/// When the shapes do not match, or a position or target is too large.
pub fn token_loss(
    hidden: &Tensor,
    weight: &Tensor,
    (positions, targets): (&[u32], &[u32]),
    factor: f64,
) -> Result<Tensor> {
    let (vocabulary, width) = weight.dims2()?;
    if hidden.dims().last() != Some(&width) {
        candle_core::bail!(
            "token loss: states {:?} do not match the output layer {:?}",
            hidden.dims(),
            weight.dims()
        );
    }
    let rows = hidden.elem_count() / width.max(1);
    if positions.len() != targets.len()
        || positions.iter().any(|position| *position as usize >= rows)
        || targets.iter().any(|target| *target as usize >= vocabulary)
    {
        candle_core::bail!(
            "token loss: a position or a target is out of range ({rows} tokens, {vocabulary} in the vocabulary)"
        );
    }
    let operation = TokenLoss {
        positions: positions.to_vec(),
        targets: targets.to_vec(),
        factor,
        is_tracked: [hidden.track_op(), weight.track_op()],
        computed: Mutex::new(None),
    };
    apply([&hidden.reshape((rows, width))?, weight], operation)
}

struct TokenLoss {
    positions: Vec<u32>,
    targets: Vec<u32>,
    factor: f64,
    /// Which inputs get a gradient.
    is_tracked: [bool; 2],
    /// The gradients that the forward pass computed, for the first backward pass.
    computed: Mutex<Option<Gradients>>,
}

/// The gradients of both inputs, where they are needed.
type Gradients = [Option<Vec<f32>>; 2];

/// The number of tokens of a chunk.
fn chunk_tokens(vocabulary: usize) -> usize {
    let [min, max] = CHUNK_TOKENS;
    (CHUNK_NUMBERS / vocabulary.max(1)).clamp(min, max)
}

impl TokenLoss {
    /// The positions and targets of each chunk.
    fn chunks(&self, vocabulary: usize) -> impl Iterator<Item = (&[u32], &[u32])> {
        let tokens = chunk_tokens(vocabulary);
        self.positions.chunks(tokens).zip(self.targets.chunks(tokens))
    }

    /// Calls `each` with the states [tokens, width], the logits [tokens, vocabulary], the positions and the targets of each chunk.
    fn for_each_chunk(
        &self,
        hidden: &[f32],
        weight: &[f32],
        width: usize,
        mut each: impl FnMut(&[f32], &mut [f32], &[u32], &[u32]) -> Result<()>,
    ) -> Result<()> {
        let vocabulary = weight.len() / width.max(1);
        let max = chunk_tokens(vocabulary).min(self.positions.len());
        let (mut states, mut logits) = (vec![0f32; max * width], vec![0f32; max * vocabulary]);
        for (positions, targets) in self.chunks(vocabulary) {
            let tokens = positions.len();
            let (states, logits) = (&mut states[..tokens * width], &mut logits[..tokens * vocabulary]);
            for (state, position) in states.chunks_exact_mut(width).zip(positions) {
                let at = *position as usize * width;
                state.copy_from_slice(&hidden[at..at + width]);
            }
            cpu::gemm(
                MatMut::new(logits, tokens, vocabulary),
                Mat::new(states, tokens, width),
                Mat::new(weight, vocabulary, width).t(),
                1.0,
                0.0,
                cpu::threads(),
            )?;
            each(states, logits, positions, targets)?;
        }
        Ok(())
    }

    /// The loss, and its gradients where they are `needed`, for the states `hidden` and the output layer `weight`.
    fn compute(
        &self,
        hidden: &[f32],
        weight: &[f32],
        weight_shape: &Shape,
        needed: [bool; 2],
    ) -> Result<(f64, Gradients)> {
        let (vocabulary, width) = weight_shape.dims2()?;
        let scale = self.factor as f32;
        let (mut sum, mut products) = (0f64, Vec::new());
        let zeros = |is_needed: bool, count: usize| is_needed.then(|| vec![0f32; count]);
        let mut hidden_gradient = zeros(needed[0], hidden.len());
        let mut weight_gradient = zeros(needed[1], weight.len());
        self.for_each_chunk(hidden, weight, width, |states, logits, positions, targets| {
            let rows = logits.par_chunks_exact_mut(vocabulary).zip(targets);
            let losses: Vec<f64> = rows
                .map(|(logits, target)| {
                    let logit = f64::from(logits[*target as usize]);
                    let (largest, sum) = exponentials(logits);
                    if needed != [false; 2] {
                        // In place: the gradients of the logits.
                        let factor = (self.factor / sum) as f32;
                        logits.iter_mut().for_each(|logit| *logit *= factor);
                        logits[*target as usize] -= scale;
                    }
                    largest + sum.ln() - logit
                })
                .collect();
            // In the order of the tokens, whatever the number of threads.
            sum += losses.into_iter().sum::<f64>();
            let tokens = positions.len();
            if let Some(out) = &mut hidden_gradient {
                products.resize(tokens * width, 0.0);
                cpu::gemm(
                    MatMut::new(&mut products, tokens, width),
                    Mat::new(logits, tokens, vocabulary),
                    Mat::new(weight, vocabulary, width),
                    1.0,
                    0.0,
                    cpu::threads(),
                )?;
                for (product, position) in products.chunks_exact(width).zip(positions) {
                    let at = *position as usize * width;
                    let row = out[at..at + width].iter_mut().zip(product);
                    row.for_each(|(sum, value)| *sum += value);
                }
            }
            if let Some(out) = &mut weight_gradient {
                cpu::gemm(
                    MatMut::new(out, vocabulary, width),
                    Mat::new(logits, tokens, vocabulary).t(),
                    Mat::new(states, tokens, width),
                    1.0,
                    1.0,
                    cpu::threads(),
                )?;
            }
            Ok(())
        })?;
        Ok((sum * self.factor, [hidden_gradient, weight_gradient]))
    }
}

/// `e^(x - largest)`.
#[derive(Clone, Copy)]
struct Exponential {
    largest: f32,
}

impl Function<1> for Exponential {
    #[inline(always)]
    fn eval<S: Simd>(self, [x]: [S::V; 1]) -> S::V {
        S::exp(S::sub(x, S::splat(self.largest)))
    }
}

/// Sums, and largest numbers, of every eighth number: the compiler makes vectors of them.
const LANES: usize = 8;

/// The largest number; those that are not a number are left out.
fn largest_of(numbers: &[f32]) -> f32 {
    let (lanes, rest) = numbers.as_chunks::<LANES>();
    let mut largest = [f32::NEG_INFINITY; LANES];
    for numbers in lanes {
        for (largest, number) in largest.iter_mut().zip(numbers) {
            *largest = if *number > *largest { *number } else { *largest };
        }
    }
    largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

fn sum_of(numbers: &[f32]) -> f64 {
    let (lanes, rest) = numbers.as_chunks::<LANES>();
    let mut sums = [0f64; LANES];
    for numbers in lanes {
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum += f64::from(*number);
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|number| f64::from(*number)).sum::<f64>()
}

/// Replaces a token's logits by `e^(x - largest)`. Returns the largest logit and the sum of the exponentials, whose logarithms add up to that of
/// the sum of `e^x`. Both are NaN if a logit is NaN or no logit is finite.
fn exponentials(logits: &mut [f32]) -> (f64, f64) {
    /// Numbers that are copied at a time, because a function does not work in place.
    const BLOCK: usize = 1024;
    let largest = largest_of(logits);
    // A sum is NaN if one of its terms is; infinite terms are found by the largest.
    if !largest.is_finite() || sum_of(logits).is_nan() {
        logits.fill(f32::NAN);
        return (f64::NAN, f64::NAN);
    }
    let mut block = [0f32; BLOCK];
    let mut sum = 0f64;
    for logits in logits.chunks_mut(BLOCK) {
        let block = &mut block[..logits.len()];
        block.copy_from_slice(logits);
        map_serial(Exponential { largest }, [&*block], logits);
        sum += sum_of(logits);
    }
    (f64::from(largest), sum)
}

impl Operation<2> for TokenLoss {
    const NAME: &'static str = "token-loss";

    fn saved_inputs(&self, _: [bool; 2]) -> [bool; 2] {
        [true, true]
    }

    fn forward(&self, [hidden, weight]: [&[f32]; 2], [_, weight_shape]: [&Shape; 2]) -> Result<(Vec<f32>, Shape)> {
        let (loss, gradients) = self.compute(hidden, weight, weight_shape, self.is_tracked)?;
        if self.is_tracked.contains(&true) {
            *self.computed.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradients);
        }
        Ok((vec![loss as f32], Shape::from(())))
    }

    fn backward(&self, [hidden, weight]: [&Input; 2], gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let scale = gradient.to_scalar::<f32>()?;
        let computed = self.computed.lock().unwrap_or_else(PoisonError::into_inner).take();
        let [hidden_gradient, weight_gradient] = match computed {
            Some(gradients) => gradients,
            // A second backward pass over candle's graph.
            None => {
                let needed = [hidden.requires_grad(), weight.requires_grad()];
                let computed = hidden
                    .with(|states| weight.with(|numbers| self.compute(states, numbers, weight.shape(), needed)))???;
                computed.1
            }
        };
        let tensor = |numbers: Option<Vec<f32>>, shape: &Shape| {
            let Some(mut numbers) = numbers else { return Ok(None) };
            if scale != 1.0 {
                let numbers = numbers.par_iter_mut().with_min_len(1 << 14);
                numbers.for_each(|number| *number *= scale);
            }
            Tensor::from_vec(numbers, shape, &Device::Cpu).map(Some)
        };
        Ok([
            tensor(hidden_gradient, hidden.shape())?,
            tensor(weight_gradient, weight.shape())?,
        ])
    }

    fn forward_tensors(&self, [hidden, weight]: [&Tensor; 2]) -> Result<Tensor> {
        let transposed = weight.t()?;
        let mut sum: Option<Tensor> = None;
        for (positions, targets) in self.chunks(weight.dim(0)?) {
            let (positions, targets) = indices(positions, targets, hidden.device())?;
            let logits = hidden
                .index_select(&positions, 0)?
                .matmul(&transposed)?
                .to_dtype(DType::F32)?;
            let of_targets = logits.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?;
            let loss = (logits.log_sum_exp(1)? - of_targets)?.sum_all()?;
            sum = Some(match sum {
                Some(sum) => (sum + loss)?,
                None => loss,
            });
        }
        match sum {
            Some(sum) => sum * self.factor,
            None => Tensor::zeros((), DType::F32, hidden.device()),
        }
    }

    fn backward_tensors(&self, [hidden, weight]: [&Input; 2], gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (hidden_values, weight_values) = (hidden.tensor()?, weight.tensor()?);
        let (device, dtype) = (hidden_values.device(), hidden_values.dtype());
        let transposed = weight_values.t()?;
        let scale = (gradient.to_dtype(DType::F32)? * self.factor)?;
        let mut hidden_gradient = match hidden.requires_grad() {
            true => Some(Tensor::zeros(hidden.shape(), DType::F32, device)?),
            false => None,
        };
        let mut weight_gradient: Option<Tensor> = None;
        for (positions, targets) in self.chunks(weight_values.dim(0)?) {
            let tokens = positions.len();
            let (positions, targets) = indices(positions, targets, device)?;
            let states = hidden_values.index_select(&positions, 0)?;
            let logits = states.matmul(&transposed)?.to_dtype(DType::F32)?;
            let total = logits.log_sum_exp(1)?.unsqueeze(1)?;
            let probabilities = logits.broadcast_sub(&total)?.exp()?;
            let ones = Tensor::full(-1f32, (tokens, 1), device)?;
            let difference = probabilities.scatter_add(&targets.unsqueeze(1)?, &ones, 1)?;
            let difference = difference.broadcast_mul(&scale)?.to_dtype(dtype)?;
            if let Some(sum) = hidden_gradient.take() {
                let product = difference.matmul(weight_values)?.to_dtype(DType::F32)?;
                hidden_gradient = Some(sum.index_add(&positions, &product, 0)?);
            }
            if weight.requires_grad() {
                let product = difference.t()?.contiguous()?.matmul(&states)?.to_dtype(DType::F32)?;
                weight_gradient = Some(match weight_gradient {
                    Some(sum) => (sum + product)?,
                    None => product,
                });
            }
        }
        if weight.requires_grad() && weight_gradient.is_none() {
            weight_gradient = Some(Tensor::zeros(weight.shape(), DType::F32, device)?);
        }
        Ok([hidden_gradient, weight_gradient])
    }
}

/// Positions and targets as tensors, [tokens] each.
fn indices(positions: &[u32], targets: &[u32], device: &Device) -> Result<(Tensor, Tensor)> {
    let tensor = |numbers: &[u32]| Tensor::from_slice(numbers, numbers.len(), device);
    Ok((tensor(positions)?, tensor(targets)?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::token_loss;
    use crate::autograd::gradients;
    use crate::testing::{fixtures, formula, gap, in_portable_mode, largest};
    use candle_core::{DType, Device, Tensor, Var};
    use serde_json::Value;

    /// The numbers of a formula, which Python computes too.
    fn variable(name: &str, shape: &[usize]) -> Var {
        let numbers = formula(name, shape.iter().product(), 0.5);
        Var::from_tensor(&Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()).unwrap()
    }

    fn numbers(value: &Value) -> Vec<f32> {
        serde_json::from_value(value.clone()).unwrap()
    }

    /// The largest difference, relative to the largest number.
    fn relative(found: &Tensor, expected: &Tensor) -> f32 {
        gap(found, expected) / largest(expected)
    }

    /// `tests/reference/make_lm.py` computes the loss and its gradients with torch.
    fn check(vocabulary: usize, key: &str) {
        let expected: Value =
            serde_json::from_slice(&std::fs::read(fixtures().join("lm_training.json")).unwrap()).unwrap();
        let expected = &expected["token_loss"][key];
        let (hidden, weight) = (variable("hidden", &[2, 24, 8]), variable("weight", &[vocabulary, 8]));
        let positions: Vec<u32> = (0..48).filter(|position| position % 5 != 3).collect();
        let targets: Vec<u32> = positions
            .iter()
            .map(|position| position * 7 % vocabulary as u32)
            .collect();
        let loss = || token_loss(hidden.as_tensor(), weight.as_tensor(), (&positions, &targets), 0.5);
        let (loss, found) = gradients(loss).unwrap();
        let reference = expected["loss"].as_f64().unwrap();
        assert!((f64::from(loss.to_scalar::<f32>().unwrap()) - reference).abs() < 1e-4 * reference);
        // Sums with random weights.
        let probe = Tensor::from_vec(formula("probe", 16, 1.0), (8, 2), &Device::Cpu).unwrap();
        let hidden_gradient = found.get(hidden.as_tensor()).unwrap().reshape((48, 8)).unwrap();
        let sums = hidden_gradient.matmul(&probe).unwrap();
        let reference = Tensor::from_vec(numbers(&expected["hidden"]), (48, 2), &Device::Cpu).unwrap();
        assert!(relative(&sums, &reference) < 1e-4);
        // Of the weight's gradient, sums over the first rows, and over all rows with random weights.
        let weight_gradient = found.get(weight.as_tensor()).unwrap();
        let numbered = Tensor::arange(1f32, 9f32, &Device::Cpu)
            .unwrap()
            .reshape((8, 1))
            .unwrap();
        let first = weight_gradient.narrow(0, 0, 40).unwrap().matmul(&numbered).unwrap();
        let random = Tensor::from_vec(formula("rows", vocabulary, 1.0), (1, vocabulary), &Device::Cpu).unwrap();
        for (name, sums) in [
            ("weight_rows", first),
            ("weight_columns", random.matmul(weight_gradient).unwrap()),
        ] {
            let reference = Tensor::from_vec(numbers(&expected[name]), sums.shape(), &Device::Cpu).unwrap();
            assert!(relative(&sums, &reference) < 1e-4, "{name}");
        }
    }

    #[test]
    fn loss_and_gradients_are_those_of_torch() {
        check(50, "small");
        // With so large a vocabulary a chunk has 16 tokens, so that there are several.
        check(1_100_000, "chunked");
    }

    /// A factor by which the loss is multiplied reaches the gradients. candle's own graph, whose backward pass can run twice, gives the gradients
    /// of a recording.
    #[test]
    fn gradients_follow_the_gradient_of_the_loss() {
        let (hidden, weight) = (variable("hidden", &[1, 6, 8]), variable("weight", &[20, 8]));
        let loss = || token_loss(hidden.as_tensor(), weight.as_tensor(), (&[0, 2, 3], &[5, 19, 0]), 0.5);
        let (_, plain) = gradients(loss).unwrap();
        let scaled = loss().unwrap().affine(-3.0, 1.0).unwrap();
        for pass in 0..2 {
            let found = scaled.backward().unwrap();
            for input in [hidden.as_tensor(), weight.as_tensor()] {
                let expected = plain.get(input).unwrap().affine(-3.0, 0.0).unwrap();
                assert!(relative(found.get(input).unwrap(), &expected) < 1e-6, "pass {pass}");
            }
        }
    }

    #[test]
    fn without_tokens_the_loss_is_zero_and_wrong_targets_are_refused() {
        let (hidden, weight) = (variable("hidden", &[1, 3, 8]), variable("weight", &[5, 8]));
        let loss = |positions: &[u32], targets: &[u32]| {
            token_loss(hidden.as_tensor(), weight.as_tensor(), (positions, targets), 1.0)
        };
        assert_eq!(
            loss(&[], &[])
                .unwrap()
                .to_dtype(DType::F32)
                .unwrap()
                .to_scalar::<f32>()
                .unwrap(),
            0.0
        );
        for (positions, targets) in [(&[3][..], &[0][..]), (&[0], &[5]), (&[0, 1], &[0])] {
            assert!(loss(positions, targets).unwrap_err().to_string().contains("token loss"));
        }
    }

    in_portable_mode!(
        loss_and_gradients_are_those_of_torch,
        gradients_follow_the_gradient_of_the_loss,
        without_tokens_the_loss_is_zero_and_wrong_targets_are_refused,
    );
}
