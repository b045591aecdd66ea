//! The network of a loss of features (`train.latent_feature_extractor_path`).

use super::{Job, Model, WorkKind};
use crate::job::feature_extractor::VGG16_REPOSITORY;
use crate::plan::json::text;
use crate::plan::memory_options::MemoryOptions;
use crate::plan::slider::SliderKind;
use crate::plan::walk::build::{Builder, ComponentOptions};
use crate::plan::walk::{Backend, FeatureExtractor, MetaTensor, Walk};

impl Job<'_> {
    /// The networks that the loss of features may have: the planner does not see which one a file has. The bytes are those of their weights.
    pub(super) fn feature_extractors(&self, backend: Backend) -> Vec<(FeatureExtractor, f64)> {
        let key = |key: &str| text(self.body, key).filter(|path| !path.is_empty());
        let path =
            key("/train/diffusion_feature_extractor_path").or_else(|| key("/train/latent_feature_extractor_path"));
        let Some(path) = path.filter(|_| self.kind == WorkKind::Training && SliderKind::of(self.body).is_none()) else {
            return Vec::new();
        };
        let options = ComponentOptions {
            width: 4.0,
            cpu: backend.is_cpu(),
            ..ComponentOptions::default()
        };
        // The numbers of its layers matter to adapters alone.
        let mut vgg = Builder::new(options.clone(), 1 << 20);
        let mut networks = vec![(FeatureExtractor::vgg16(&mut vgg), vgg.weights.resident)];
        if path != VGG16_REPOSITORY {
            let mut velocities = Builder::new(options, 1 << 20);
            let channels = f64::from(self.shapes.vae.latent_channels);
            let network = FeatureExtractor::velocities(&mut velocities, channels);
            networks.push((network, velocities.weights.resident));
        }
        networks
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
