//! The step on image pairs: data sets with `unconditional_path`.

use super::run::Run;
use super::sliders::MicroBatchNumber;
use super::step::{ItemInputs, SampledBatch, add_gradients};
use crate::adapters::AdapterPass;
use crate::error::{EngineError, Result};
use crate::training::{PairedBatch, paired_noise, paired_strength};
use aitk_common::job::dataset::GuidanceType;
use candle_core::Tensor;

impl Run<'_> {
    /// Computes the loss and the gradients of a micro-batch of image pairs. An image and its pair have the same noise, timestep and
    /// caption, and pass through the model one after the other. Dropout has generators of its own.
    ///
    /// # Errors
    /// When a mask cannot be read or the arithmetic fails.
    pub(super) fn train_pairs(
        &mut self,
        guidance: GuidanceType,
        batch: &SampledBatch,
        MicroBatchNumber { step, micro }: MicroBatchNumber,
    ) -> Result<()> {
        let process = self.process;
        let strength = self.data.datasets[batch.step_batch.batch.dataset]
            .options
            .network_weight;
        let pairs = batch.inputs.control.clone();
        let pairs = pairs.ok_or_else(|| EngineError::Internal("an image has no pair".into()))?;
        let latents = [batch.inputs.latents.clone(), vec![pairs]];
        let draws = paired_noise(guidance, &latents, &batch.noise_draw)?;
        let mask = match guidance {
            GuidanceType::Direct => {
                let moves = batch.inputs.moves.iter().map(Vec::as_slice);
                let items = self.data.items_of(&batch.step_batch.batch).zip(moves);
                let mask = self.masks.get(items, self.model.codec())?;
                mask.map(|mask| mask.to_device(&self.compute.device)).transpose()?
            }
            _ => None,
        };
        let conditioning = self.encode_frozen_prompts(&batch.prompts.encoded)?;
        let inputs = ItemInputs {
            sizes: self.sizes_of(batch),
            control: None,
            // As in ai-toolkit, whatever `cfg_scale` is.
            scales: vec![1.0],
        };
        let times = self.timesteps_of(&batch.noise_draw)?;
        let handle = self.target.handle().cloned();
        let (model, objective, seed) = (&*self.model, &*self.objective, self.seed);
        let conditioning = inputs.add_to(process, model, conditioning)?;
        let [noisy_images, noisy_pairs] = [
            objective.noisy(&latents[0], &draws[0])?,
            objective.noisy(&latents[1], &draws[1])?,
        ];
        let predict = |noisy: &[Tensor], pass: AdapterPass| {
            let forward = || model.predict(noisy, &times, &conditioning);
            match &handle {
                Some(handle) => handle.in_pass(pass, forward),
                None => forward(),
            }
        };
        let base = match guidance.uses_base() {
            true => {
                let predicted = predict(&noisy_pairs, AdapterPass::inference(0.0))?;
                Some(predicted.iter().map(Tensor::detach).collect::<Vec<_>>())
            }
            false => None,
        };
        let training = |name: &str, strength: f64| AdapterPass {
            strength,
            dropout_seed: Some(format!("{seed}/{name}/{step}/{micro}").into()),
        };
        let paired = PairedBatch {
            guidance,
            targets: [
                objective.target(&latents[0], &draws[0])?,
                objective.target(&latents[1], &draws[1])?,
            ],
            latents,
            base,
            mask,
            weight: match guidance {
                GuidanceType::TargetedFlow => batch.step_batch.weight,
                // As in ai-toolkit, `reg_weight` has no effect on the others.
                _ => 1.0,
            },
        };
        let forward = || {
            let images = predict(&noisy_images, training("dropout", strength))?;
            match (paired_strength(guidance, strength), &paired.base) {
                // At strength 0 there is no adapter.
                (Some(0.0), Some(base)) => paired.loss(&images, Some(base)),
                (Some(strength), _) => {
                    let pairs = predict(&noisy_pairs, training("pair-dropout", strength))?;
                    paired.loss(&images, Some(&pairs))
                }
                (None, _) => paired.loss(&images, None),
            }
        };
        add_gradients(&mut self.trainer, process, step, forward)
    }
}
