//! What the transformers of FLUX.1 and Stable Diffusion 3.5 have in common, as `engine/src/models/mmdit`.

use super::build::{Builder, LayerSizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::Walk;
use super::tensors::{Activation, NormActivation};

/// Sinusoids of a timestep or a guidance scale.
pub(super) const SINUSOIDS: f64 = 256.0;

/// A layer norm without weight and bias.
pub(super) fn plain_norm(walk: &Walk, x: &MetaTensor) -> MetaTensor {
    walk.norm(x, Norm::PLAIN, NormActivation::None)
}

/// Two linear layers with SiLU between them.
pub(super) struct Embedder([Layer; 2]);

impl Embedder {
    pub(super) fn new(b: &mut Builder, name: &str, inputs: f64, width: f64) -> Self {
        Self([
            b.layer(&format!("{name}.linear_1"), LayerSizes::linear(inputs, width, true)),
            b.layer(&format!("{name}.linear_2"), LayerSizes::linear(width, width, true)),
        ])
    }

    pub(super) fn forward(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        let [first, second] = &self.0;
        walk.linear(second, &walk.activation(&walk.linear(first, x), Activation::Silu))
    }

    /// Embeds a number for each item.
    pub(super) fn forward_numbers(&self, walk: &Walk, batch: f64) -> MetaTensor {
        self.forward(walk, &walk.tensor([batch, 1.0, SINUSOIDS, 1.0], false))
    }
}

/// A layer norm whose shift and scale are projected from the conditioning vector, with `N - 2` further vectors.
pub(super) struct AdaNorm<const N: usize>(Layer);

impl<const N: usize> AdaNorm<N> {
    pub(super) fn new(b: &mut Builder, name: &str, width: f64) -> Self {
        let sizes = LayerSizes::linear(width, N as f64 * width, true);
        Self(b.layer(&format!("{name}.linear"), sizes))
    }

    /// The vectors of the conditioning, the first two of which are the shift and the scale.
    pub(super) fn vectors(&self, walk: &Walk, temb: &MetaTensor) -> [MetaTensor; N] {
        let vectors = walk.linear(&self.0, &walk.activation(temb, Activation::Silu));
        walk.chunks(&vectors)
    }

    /// x, normalised and modulated, and the vectors.
    pub(super) fn forward(&self, walk: &Walk, x: &MetaTensor, temb: &MetaTensor) -> (MetaTensor, [MetaTensor; N]) {
        let vectors = self.vectors(walk, temb);
        (walk.modulate(&plain_norm(walk, x), &vectors[1], &vectors[0]), vectors)
    }
}

/// The projections to queries, keys and values, and the norms over each head.
pub(super) struct Projections {
    layers: [Layer; 3],
    norms: Option<[Norm; 2]>,
}

impl Projections {
    pub(super) fn new(b: &mut Builder, name: &str, width: f64, norm_width: Option<f64>, names: [&str; 5]) -> Self {
        let [q, k, v, norm_q, norm_k] = names.map(|part| format!("{name}.{part}"));
        Self {
            layers: [q, k, v].map(|name| b.layer(&name, LayerSizes::linear(width, width, true))),
            norms: norm_width.map(|width| [norm_q, norm_k].map(|name| b.rms_norm(&name, width))),
        }
    }

    pub(super) fn of_image(b: &mut Builder, name: &str, width: f64, norm_width: Option<f64>) -> Self {
        let names = ["to_q", "to_k", "to_v", "norm_q", "norm_k"];
        Self::new(b, name, width, norm_width, names)
    }

    pub(super) fn of_text(b: &mut Builder, name: &str, width: f64, norm_width: Option<f64>) -> Self {
        let names = ["add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k"];
        Self::new(b, name, width, norm_width, names)
    }

    /// x -> queries, keys and values.
    pub(super) fn forward(&self, walk: &Walk, x: &MetaTensor) -> [MetaTensor; 3] {
        let [q, k, v] = [0, 1, 2].map(|i: usize| walk.linear(&self.layers[i], x));
        match self.norms {
            Some([norm_q, norm_k]) => [
                walk.norm(&q, norm_q, NormActivation::None),
                walk.norm(&k, norm_k, NormActivation::None),
                v,
            ],
            None => [q, k, v],
        }
    }
}

/// Two linear layers with GELU between them.
pub(super) struct FeedForward([Layer; 2]);

impl FeedForward {
    pub(super) fn new(b: &mut Builder, name: &str, width: f64) -> Self {
        let wide = 4.0 * width;
        Self([
            b.layer(&format!("{name}.net.0.proj"), LayerSizes::linear(width, wide, true)),
            b.layer(&format!("{name}.net.2"), LayerSizes::linear(wide, width, true)),
        ])
    }

    pub(super) fn forward(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        let [first, second] = &self.0;
        let wide = walk.linear(first, x);
        walk.linear(second, &walk.activation(&wide, Activation::GeluTanh))
    }
}

/// A norm, its modulation, and the feed-forward layers after attention.
pub(super) fn gated_feed_forward(
    walk: &Walk,
    ff: &FeedForward,
    x: &MetaTensor,
    [shift, scale, gate]: [&MetaTensor; 3],
) -> MetaTensor {
    let h = walk.modulate(&plain_norm(walk, x), scale, shift);
    walk.gated_residual(x, gate, &ff.forward(walk, &h))
}
