//! Classifier-free guidance: combines the model's predictions with and without the prompt.

use super::{GenerateRequest, Pipeline};
use crate::error::{EngineError, Result};
use candle_core::{D, DType, Tensor};

/// The encoded prompts of a batch and the guidance scales.
pub(super) struct Guidance {
    /// [negative prompts, prompts] with guidance, else the prompts alone: [2b or b, tokens, width].
    context: Tensor,
    /// Whether the context has negative prompts: the guidance scale is above 1.
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

    /// The guided prediction at time step `t`, in f32. `input`: the scaled sample of the sampler.
    pub(super) fn predict(&self, pipeline: &Pipeline<'_>, input: &Tensor, t: f64) -> Result<Tensor> {
        let input = input.to_dtype(pipeline.dtype)?;
        let forward = |input: &Tensor, context: &Tensor| -> Result<Tensor> {
            let timesteps = Tensor::full(t as f32, input.dim(0)?, &pipeline.device)?;
            let output = pipeline.model.unet.forward(input, &timesteps, context)?;
            Ok(output.to_dtype(DType::F32)?)
        };
        if !self.guided {
            return forward(&input, &self.context);
        }
        let (unconditional, conditional) = if pipeline.model.sequential_cfg {
            let contexts = self.context.chunk(2, 0)?;
            (forward(&input, &contexts[0])?, forward(&input, &contexts[1])?)
        } else {
            let outputs = forward(&Tensor::cat(&[&input, &input], 0)?, &self.context)?.chunk(2, 0)?;
            (outputs[0].clone(), outputs[1].clone())
        };
        let (unconditional, conditional) = (&unconditional, &conditional);
        let guided = (unconditional + ((conditional - unconditional)? * self.scale)?)?;
        if self.rescale > 0.0 {
            return rescale_noise_cfg(&guided, conditional, self.rescale);
        }
        Ok(guided)
    }
}

/// Moves the standard deviation of the guided prediction towards that of the conditional one (section 3.4 of "Common
/// Diffusion Noise Schedules and Sample Steps are Flawed"; `rescale_noise_cfg` of diffusers). `rescale`: 0 is off, 1 is
/// all the way.
fn rescale_noise_cfg(guided: &Tensor, conditional: &Tensor, rescale: f64) -> Result<Tensor> {
    let std_dev = |x: &Tensor| -> candle_core::Result<Tensor> {
        let flat = x.flatten_from(1)?;
        let count = flat.dim(1)?.max(2);
        let centred = flat.broadcast_sub(&flat.mean_keepdim(D::Minus1)?)?;
        (centred.sqr()?.sum_keepdim(D::Minus1)? / (count - 1) as f64)?.sqrt()
    };
    let ratio = (std_dev(conditional)? / std_dev(guided)?)?.reshape((guided.dim(0)?, 1, 1, 1))?;
    let rescaled = guided.broadcast_mul(&ratio)?;
    Ok(((rescaled * rescale)? + (guided * (1.0 - rescale))?)?)
}
