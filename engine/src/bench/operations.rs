//! Benchmarks of single operations, of an optimizer step and of loading a file.

use crate::autograd::gradients;
use crate::device::Compute;
use crate::error::{EngineError, Result};
use crate::nn::{self, Attention};
use crate::optim::{Grads, Param, build};
use crate::rng::TorchGenerator;
use crate::training::optim_error;
use crate::weights::Weights;
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Tensor, Var};
use std::collections::BTreeMap;

/// One run of a benchmark; its weights and inputs are captured.
pub(super) type Iteration = Box<dyn FnMut() -> Result<()> + Send>;

/// Normal random numbers with a fixed seed, in the dtype of `compute`.
pub(super) fn normal(compute: &Compute, shape: &[usize]) -> Result<Tensor> {
    Ok(normal_f32(compute, shape)?.to_dtype(compute.dtype)?)
}

/// The same numbers in f32.
pub(super) fn normal_f32(compute: &Compute, shape: &[usize]) -> Result<Tensor> {
    let numbers = TorchGenerator::manual_seed(3).randn(shape.iter().product());
    Ok(Tensor::from_vec(numbers, shape, &compute.device)?)
}

/// Runs the forward pass and the backward pass of the mean of the output's squares.
pub(super) fn forward_and_backward(forward: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<()> {
    gradients(|| forward()?.sqr()?.mean_all())?;
    Ok(())
}

fn variable(compute: &Compute, shape: &[usize]) -> Result<Var> {
    Ok(Var::from_tensor(&normal(compute, shape)?)?)
}

pub(super) fn conv(compute: &Compute) -> Result<Iteration> {
    let x = variable(compute, &[1, 320, 64, 64])?;
    let weight = variable(compute, &[320, 320, 3, 3])?;
    let bias = variable(compute, &[320])?;
    Ok(Box::new(move || {
        forward_and_backward(|| nn::conv2d(&x, &weight, Some(&bias), 1, 1))
    }))
}

pub(super) fn attention(compute: &Compute, keys: usize) -> Result<Iteration> {
    const HEADS: usize = 8;
    const WIDTH: usize = 40;
    let q = variable(compute, &[1, 4096, HEADS * WIDTH])?;
    let k = variable(compute, &[1, keys, HEADS * WIDTH])?;
    let v = variable(compute, &[1, keys, HEADS * WIDTH])?;
    Ok(Box::new(move || {
        forward_and_backward(|| Attention::new(HEADS).forward(&q, &k, &v))
    }))
}

pub(super) fn adamw(compute: &Compute, eight_bit: bool) -> Result<Iteration> {
    let mut params = Vec::new();
    let mut grads: Grads = Vec::new();
    for i in 0..32 {
        // Trained parameters and their gradients are f32 in every dtype.
        let var = Var::from_tensor(&normal_f32(compute, &[1 << 20])?)?;
        grads.push(Some(normal_f32(compute, &[1 << 20])?));
        params.push(Param {
            name: i.to_string(),
            var,
        });
    }
    let name = if eight_bit {
        OptimizerName::AdamW8Bit
    } else {
        OptimizerName::AdamW
    };
    let mut optimizer = build(name, params, &serde_json::Map::new(), 1e-4).map_err(optim_error)?;
    Ok(Box::new(move || optimizer.step(&grads, 1e-4).map_err(optim_error)))
}

pub(super) fn load(compute: &Compute) -> Result<Iteration> {
    const TENSORS: usize = 32;
    const NUMBERS: usize = 1 << 22;
    let io = |error: std::io::Error| EngineError::io(std::env::temp_dir(), error);
    let folder = tempfile::tempdir().map_err(io)?;
    let file = folder.path().join("weights.safetensors");
    let zeros = Tensor::zeros(NUMBERS, DType::F32, &candle_core::Device::Cpu)?;
    let tensors: BTreeMap<String, &Tensor> = (0..TENSORS).map(|i| (format!("t{i}"), &zeros)).collect();
    let bytes = safetensors::serialize(tensors, None).map_err(|error| EngineError::Internal(error.to_string()))?;
    std::fs::write(&file, bytes).map_err(io)?;
    let (device, dtype) = (compute.device.clone(), compute.dtype);
    Ok(Box::new(move || {
        // Keeps the temporary folder until the last run.
        let _ = &folder;
        let weights = Weights::open(&file, dtype, &device)?;
        // All tensors are in memory at once, as those of a model are.
        let all = (0..TENSORS).map(|i| weights.get(NUMBERS, &format!("t{i}")));
        all.collect::<Result<Vec<_>>>()?;
        Ok(())
    }))
}
