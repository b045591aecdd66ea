//! Classifier-free guidance: what the model predicts with and without the prompt, and how the two are joined.

use super::{GenerateRequest, Pipeline};
use crate::error::{EngineError, Result};
use candle_core::{D, DType, Tensor};

/// The encoded prompts of a batch, and how strongly they count.
pub(super) struct Guidance {
    /// [negative prompts, prompts] with guidance, else the prompts alone: [2b or b, tokens, width].
    context: Tensor,
    guided: bool,
    scale: f64,
    rescale: f64,
}

impl Guidance {
    pub(super) fn new(pipeline: &Pipeline<'_>, request: &GenerateRequest) -> Result<Self> {
        let batch = request.prompts.len();
        if batch == 0 {
            return Err(EngineError::bad_input("there is no prompt"));
        }
        let encode = |texts: &[&str]| -> Result<Tensor> {
            let ids = pipeline.model.tokenizer.encode(texts)?.to_device(&pipeline.device)?;
            pipeline.model.text_encoder.forward(&ids)
        };
        let prompts: Vec<&str> = request.prompts.iter().map(String::as_str).collect();
        let mut context = encode(&prompts)?;
        let guided = request.guidance_scale > 1.0;
        if guided {
            let mut negative: Vec<&str> = request.negative.iter().map(String::as_str).collect();
            if negative.len() <= 1 {
                negative = vec![negative.first().copied().unwrap_or(""); batch];
            }
            if negative.len() != batch {
                return Err(EngineError::bad_input(format!(
                    "{} negative prompts for {batch} prompts: give one, or one for each",
                    negative.len()
                )));
            }
            context = Tensor::cat(&[encode(&negative)?, context], 0)?;
        }
        Ok(Self {
            context,
            guided,
            scale: request.guidance_scale,
            rescale: request.guidance_rescale,
        })
    }

    /// The model's output, in f32, for what the sampler shows it at time step `t`.
    pub(super) fn predict(&self, pipeline: &Pipeline<'_>, input: &Tensor, t: f64) -> Result<Tensor> {
        let input = input.to_dtype(pipeline.dtype)?;
        let ask = |input: &Tensor, context: &Tensor| -> Result<Tensor> {
            let timesteps = Tensor::full(t as f32, input.dim(0)?, &pipeline.device)?;
            let output = pipeline.model.unet.forward(input, &timesteps, context)?;
            Ok(output.to_dtype(DType::F32)?)
        };
        if !self.guided {
            return ask(&input, &self.context);
        }
        let (without, with) = if pipeline.model.sequential_cfg {
            let contexts = self.context.chunk(2, 0)?;
            (ask(&input, &contexts[0])?, ask(&input, &contexts[1])?)
        } else {
            let halves = ask(&Tensor::cat(&[&input, &input], 0)?, &self.context)?.chunk(2, 0)?;
            (halves[0].clone(), halves[1].clone())
        };
        let (without, with) = (&without, &with);
        let joined = (without + ((with - without)? * self.scale)?)?;
        if self.rescale > 0.0 {
            return rescaled(&joined, with, self.rescale);
        }
        Ok(joined)
    }
}

/// Pulls the spread of the joined prediction towards that of the prompt's own (section 3.4 of "Common Diffusion Noise
/// Schedules and Sample Steps are Flawed").
fn rescaled(joined: &Tensor, with: &Tensor, share: f64) -> Result<Tensor> {
    let spread = |x: &Tensor| -> candle_core::Result<Tensor> {
        let flat = x.flatten_from(1)?;
        let count = flat.dim(1)?.max(2);
        let centred = flat.broadcast_sub(&flat.mean_keepdim(D::Minus1)?)?;
        (centred.sqr()?.sum_keepdim(D::Minus1)? / (count - 1) as f64)?.sqrt()
    };
    let ratio = (spread(with)? / spread(joined)?)?.reshape((joined.dim(0)?, 1, 1, 1))?;
    let matched = joined.broadcast_mul(&ratio)?;
    Ok(((matched * share)? + (joined * (1.0 - share))?)?)
}
