//! The training of a decorator (`decorator`): tokens that FLUX.1's transformer reads after those of every prompt, after ai-toolkit's
//! `toolkit/models/decorator.py`.

use super::super::context::Context;
use crate::error::{EngineError, Result};
use crate::families::{Model, no_decorator};
use crate::optim::Param;
use crate::rng::generator_for;
use crate::weights::{Index, write_tensors};
use aitk_common::fsutil;
use aitk_common::job::decorator::DecoratorConfig;
use candle_core::{DType, Tensor, Var};
use std::collections::BTreeMap;
use std::path::Path;

/// The name of the tensor in files, as in ai-toolkit.
const WEIGHT: &str = "weight";

/// The trained tokens.
pub(super) struct TrainedDecorator {
    /// [tokens, features of T5], in float32.
    param: Param,
}

impl TrainedDecorator {
    /// Makes new tokens, each number from the standard normal distribution, and lets a model that was just loaded read them.
    pub(super) fn new(
        config: &DecoratorConfig,
        model: &mut dyn Model,
        seed: u64,
        cx: &mut Context<'_>,
    ) -> Result<Self> {
        let tokens = config.num_tokens as usize;
        let width = model
            .decorator_width()
            .ok_or_else(|| no_decorator(model.family().arch()))?;
        let numbers = generator_for(seed, "decorator", 0, 0).randn(tokens * width);
        let start = Tensor::from_vec(numbers, (tokens, width), model.device())?;
        let var = Var::from_tensor(&start)?;
        model.set_decorator(var.as_tensor().clone())?;
        cx.log(
            "info",
            format!("decorator: {tokens} tokens of {width} numbers after the text of every prompt"),
        );
        Ok(Self {
            param: Param {
                name: WEIGHT.to_owned(),
                var,
            },
        })
    }

    /// The trained parameter.
    pub(super) fn params(&self) -> &[Param] {
        std::slice::from_ref(&self.param)
    }

    /// Writes the tokens to a file.
    pub(super) fn write(&self, path: &Path, dtype: DType, metadata: &BTreeMap<String, String>) -> Result<()> {
        let tensor = self.param.var.as_detached_tensor().to_dtype(dtype)?;
        let tensors = BTreeMap::from([(WEIGHT.to_owned(), tensor)]);
        Ok(fsutil::write_atomic(path, |out| {
            write_tensors(out, &tensors, metadata)
        })?)
    }

    /// Reads the tokens of a save. If it does not fit, nothing changes.
    pub(super) fn load(&self, path: &Path) -> Result<()> {
        let var = &self.param.var;
        let read = || -> Result<Tensor> {
            let index = Index::open(path)?;
            index.check_shape(WEIGHT, var.shape())?;
            Ok(index.read(WEIGHT, DType::F32, var.device())?.contiguous()?)
        };
        let saved = read().map_err(|error| {
            EngineError::bad_input(format!(
                "{error}. It is the newest save of the run folder, with whose tokens the training goes on: set `decorator.num_tokens` to what \
                 it was, move the save away, or give the run another `config.name`"
            ))
        })?;
        Ok(var.set(&saved)?)
    }
}
