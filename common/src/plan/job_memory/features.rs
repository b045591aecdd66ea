//! The network of a loss of features (`train.latent_feature_extractor_path`).

use super::{Job, Model, WorkKind};
use crate::job::feature_extractor::{
    DINOV3_REPOSITORY, SAPIENS_REPOSITORY, SIGLIP2_NAFLEX_REPOSITORY, SIGLIP2_SQUARE_REPOSITORY, TIPS_REPOSITORY,
    VGG16_REPOSITORY,
};
use crate::plan::json::text;
use crate::plan::memory_options::MemoryOptions;
use crate::plan::slider::SliderKind;
use crate::plan::walk::build::{Builder, ComponentOptions};
use crate::plan::walk::{
    Backend, DINOV3_H_PLUS, FeatureExtractor, MetaTensor, SAPIENS2_1B, SIGLIP2_NAFLEX, SIGLIP2_SQUARE, TIPS_B14,
    VisionSizes, Walk,
};

/// A network that a path may name. That of version 1 is smaller than that of version 2.
enum Candidate {
    Vgg16,
    Velocities,
    Vision(VisionSizes),
    /// With a second path.
    SiglipAndVgg16,
    Tips,
}

impl Candidate {
    /// The networks that a path may name. A file has no config beside it, which other vision transformers than Sapiens need; that is known by
    /// its name.
    fn of(path: &str, has_second: bool) -> Vec<Self> {
        match path {
            SIGLIP2_SQUARE_REPOSITORY => vec![Self::SiglipAndVgg16],
            TIPS_REPOSITORY => vec![Self::Tips],
            _ if has_second => vec![Self::SiglipAndVgg16, Self::Tips],
            VGG16_REPOSITORY => vec![Self::Vgg16],
            SIGLIP2_NAFLEX_REPOSITORY => vec![Self::Vision(SIGLIP2_NAFLEX)],
            DINOV3_REPOSITORY => vec![Self::Vision(DINOV3_H_PLUS)],
            SAPIENS_REPOSITORY => vec![Self::Vision(SAPIENS2_1B)],
            file if file.ends_with(".safetensors") && file.to_lowercase().contains("sapiens") => {
                vec![Self::Vision(SAPIENS2_1B)]
            }
            file if file.ends_with(".safetensors") => vec![Self::Vgg16, Self::Velocities],
            _ => vec![
                Self::Vgg16,
                Self::Velocities,
                Self::Vision(SIGLIP2_NAFLEX),
                Self::Vision(DINOV3_H_PLUS),
                Self::Vision(SAPIENS2_1B),
            ],
        }
    }

    /// Whether its weights are in float32 whatever the dtype of the model is.
    fn is_wide(&self) -> bool {
        matches!(self, Self::Vgg16 | Self::Velocities)
    }
}

impl Job<'_> {
    /// The networks that the loss of features may have: the planner does not see which one a file has. The bytes are those of their weights.
    pub(super) fn feature_extractors(&self, backend: Backend) -> Vec<(FeatureExtractor, f64)> {
        let key = |key: &str| text(self.body, key).filter(|path| !path.is_empty());
        let path =
            key("/train/diffusion_feature_extractor_path").or_else(|| key("/train/latent_feature_extractor_path"));
        let Some(path) = path.filter(|_| self.kind == WorkKind::Training && SliderKind::of(self.body).is_none()) else {
            return Vec::new();
        };
        let candidates = Candidate::of(path, key("/train/latent_feature_extractor_second_path").is_some());
        let made = candidates.iter().map(|candidate| {
            let options = ComponentOptions {
                width: if candidate.is_wide() { 4.0 } else { backend.width },
                cpu: backend.is_cpu(),
                ..ComponentOptions::default()
            };
            // The numbers of its layers matter to adapters alone.
            let mut b = Builder::new(options, 1 << 20);
            let network = match candidate {
                Candidate::Vgg16 => FeatureExtractor::vgg16(&mut b),
                Candidate::Velocities => {
                    FeatureExtractor::velocities(&mut b, f64::from(self.shapes.vae.latent_channels))
                }
                Candidate::Vision(sizes) => FeatureExtractor::vision(&mut b, *sizes),
                Candidate::Tips => FeatureExtractor::vision_and_heads(&mut b, TIPS_B14),
                Candidate::SiglipAndVgg16 => FeatureExtractor::vision_and_vgg16(&mut b, SIGLIP2_SQUARE),
            };
            (network, b.weights.resident)
        });
        made.collect()
    }

    /// The bytes of the weights of the loss of features.
    pub(super) fn feature_extractor_weights(&self, backend: Backend) -> f64 {
        let networks = self.feature_extractors(backend);
        networks.iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max)
    }

    /// The loss of a prediction with that of its features.
    pub(super) fn with_features(
        &self,
        walk: &Walk,
        model: &Model,
        network: Option<&FeatureExtractor>,
        [latents, predicted]: [&MetaTensor; 2],
        (options, checkpointed): (&MemoryOptions, bool),
    ) -> Option<MetaTensor> {
        let network = network?;
        let stepped = walk.add(&walk.rearranged(predicted, latents.dims()), latents);
        let of_features = match network.sees_pixels() {
            true => {
                let image = model
                    .vae
                    .decode_with_gradients(walk, &stepped, options.vae_tiled, checkpointed)?;
                let pixels = walk.tensor(image.dims(), false);
                network.loss(walk, [&image, &pixels], checkpointed)
            }
            false => network.loss(walk, [&stepped, latents], checkpointed),
        }?;
        Some(walk.add(&walk.rearranged(predicted, [1.0; 4]), &of_features))
    }
}
