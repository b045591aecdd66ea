//! The network of an `adapter` section.

use super::{Job, Model, WorkKind};
use crate::job::limits::{MAX_ADAPTER_BLOCKS, MAX_ADAPTER_CHANNELS};
use crate::plan::json::{number, text};
use crate::plan::walk::build::{Builder, ComponentOptions, WeightTotals};
use crate::plan::walk::{
    Backend, Conditions, ImageAdapter, ImageAdapterOptions, MetaTensor, T2iKind, T2iOptions, Walk,
};
use serde_json::Value;

impl Job<'_> {
    /// Whether a network beside the U-Net is trained.
    pub(super) fn trains_image_adapter(&self) -> bool {
        self.kind == WorkKind::Training && self.image_adapter_options().is_some()
    }

    fn image_adapter_options(&self) -> Option<ImageAdapterOptions> {
        let adapter = self.body.get("adapter").filter(|adapter| !adapter.is_null())?;
        if text(adapter, "/type") == Some("control_net") {
            return Some(ImageAdapterOptions::ControlNet);
        }
        let channels = adapter.get("channels").and_then(Value::as_array);
        let channels: Vec<f64> = match channels {
            Some(channels) => channels.iter().filter_map(Value::as_f64).collect(),
            None => vec![320.0, 640.0, 1280.0, 1280.0],
        };
        let is_xl = self.shapes.unet.additional > 0;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let resnets = number(adapter, "/num_res_blocks").unwrap_or(2.0) as usize;
        Some(ImageAdapterOptions::T2i(T2iOptions {
            channels: channels
                .into_iter()
                .take(MAX_ADAPTER_BLOCKS)
                .map(|channels| channels.clamp(1.0, f64::from(MAX_ADAPTER_CHANNELS)))
                .collect(),
            resnets: resnets.min(MAX_ADAPTER_BLOCKS),
            factor: number(adapter, "/downscale_factor").unwrap_or(8.0).clamp(1.0, 64.0),
            network: match text(adapter, "/adapter_type") {
                Some("light_adapter") => T2iKind::Light,
                Some("full_adapter_xl") => T2iKind::FullXl,
                _ if is_xl => T2iKind::FullXl,
                _ => T2iKind::Full,
            },
        }))
    }

    /// Builds the network, whose layers are numbered after `last_index`. Its tensors are added to the trained ones of the denoiser.
    pub(super) fn image_adapter(
        &self,
        weights: &mut WeightTotals,
        (last_index, scale): (u64, f64),
        backend: Backend,
    ) -> Option<ImageAdapter> {
        if !self.trains_image_adapter() || self.shapes.has_transformer() {
            return None;
        }
        let options = ComponentOptions {
            trained: Some(Default::default()),
            width: 4.0,
            cpu: backend.is_cpu(),
            ..ComponentOptions::default()
        };
        let mut builder = Builder::new(options, last_index);
        let adapter = ImageAdapter::new(&mut builder, &self.image_adapter_options()?, &self.shapes.unet, scale);
        // The weights themselves are counted with the optimizer's state, as those of a LoRA.
        weights.trained.append(&mut builder.weights.trained);
        Some(adapter)
    }

    /// The conditions with what the network adds to the features of the U-Net.
    pub(super) fn with_image_adapter(
        &self,
        walk: &Walk,
        model: &Model,
        latents: &MetaTensor,
        conditions: Conditions,
        checkpointed: bool,
    ) -> Conditions {
        match &model.image_adapter {
            Some(adapter) => Conditions {
                residuals: adapter.forward(walk, latents, &conditions.text, (model.vae.scale(), checkpointed)),
                ..conditions
            },
            None => conditions,
        }
    }
}
