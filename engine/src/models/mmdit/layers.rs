//! The layers of blocks: adaptive norms, projections to queries, keys and values, feed-forward.

use crate::error::Result;
use crate::nn::{self, Activation, LayerMut, LayerNorm, Linear, RmsNorm};
use crate::weights::Weights;
use candle_core::Tensor;

/// The epsilon of all norms.
pub(in crate::models) const EPS: f64 = 1e-6;

/// What is called with each layer of a block.
pub(in crate::models) type Visitor<'f> = dyn FnMut(&str, LayerMut<'_>) -> Result<()> + 'f;

/// A layer norm whose shift and scale are projected from the conditioning vector, with `N - 2` further vectors (diffusers'
/// `AdaLayerNormZero`: 6, `AdaLayerNormZeroSingle`: 3, `SD35AdaLayerNormZeroX`: 9).
#[derive(Clone, Debug)]
pub(in crate::models) struct AdaLayerNorm<const N: usize> {
    pub(in crate::models) linear: Linear,
    pub(in crate::models) norm: LayerNorm,
}

impl<const N: usize> AdaLayerNorm<N> {
    pub(in crate::models) fn new(weights: &Weights, width: usize) -> Result<Self> {
        let linear = Linear::new(&weights.pp("linear"), width, N * width, true)?;
        let norm = LayerNorm::plain(width, EPS, linear.weight.dtype(), linear.weight.device())?;
        Ok(Self { linear, norm })
    }

    /// Normalises and modulates x [b, n, c] with temb [b, c]. Returns the result and the `N - 2` other vectors [b, c].
    pub(in crate::models) fn forward(&self, x: &Tensor, temb: &Tensor) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
        let (normalised, shift, scale, rest) = self.forward_unmodulated(x, temb)?;
        Ok((nn::modulate(&normalised, &scale, &shift)?, rest))
    }

    /// Normalises x [b, n, c]. Returns the result, and the vectors [b, c] of temb [b, c]: the shift, the scale, and the `N - 2`
    /// others.
    pub(in crate::models) fn forward_unmodulated(
        &self,
        x: &Tensor,
        temb: &Tensor,
    ) -> candle_core::Result<(Tensor, Tensor, Tensor, Vec<Tensor>)> {
        let vectors = self.linear.forward(&nn::silu(temb)?)?.chunk(N, 1)?;
        let [shift, scale, rest @ ..] = vectors.as_slice() else {
            candle_core::bail!(
                "an adaptive layer norm needs at least two vectors, found {}",
                vectors.len()
            );
        };
        Ok((self.norm.forward(x)?, shift.clone(), scale.clone(), rest.to_vec()))
    }
}

/// A layer norm whose scale and shift, in this order, are projected from the conditioning vector (diffusers'
/// `AdaLayerNormContinuous`).
#[derive(Clone, Debug)]
pub(in crate::models) struct AdaLayerNormContinuous {
    pub(in crate::models) linear: Linear,
    norm: LayerNorm,
}

impl AdaLayerNormContinuous {
    pub(in crate::models) fn new(weights: &Weights, width: usize) -> Result<Self> {
        let linear = Linear::new(&weights.pp("linear"), width, 2 * width, true)?;
        let norm = LayerNorm::plain(width, EPS, linear.weight.dtype(), linear.weight.device())?;
        Ok(Self { linear, norm })
    }

    /// Normalises and modulates x [b, n, c] with temb [b, c].
    pub(in crate::models) fn forward(&self, x: &Tensor, temb: &Tensor) -> candle_core::Result<Tensor> {
        let vectors = self.linear.forward(&nn::silu(temb)?)?.chunk(2, 1)?;
        let [scale, shift] = vectors.as_slice() else {
            candle_core::bail!("an adaptive layer norm needs two vectors, found {}", vectors.len());
        };
        nn::modulate(&self.norm.forward(x)?, scale, shift)
    }
}

/// The projections to queries, keys and values. Models with a norm of queries and keys have one over each head.
#[derive(Clone, Debug)]
pub(in crate::models) struct Projections {
    pub(in crate::models) q: Linear,
    pub(in crate::models) k: Linear,
    pub(in crate::models) v: Linear,
    norms: Option<[RmsNorm; 2]>,
}

impl Projections {
    /// Loads the layers with these names: queries, keys, values, and the norms of queries and keys. `norm_width`: features of a
    /// head; without it there are no norms.
    pub(in crate::models) fn new(
        weights: &Weights,
        width: usize,
        norm_width: Option<usize>,
        [q, k, v, norm_q, norm_k]: [&str; 5],
    ) -> Result<Self> {
        let linear = |name: &str| Linear::new(&weights.pp(name), width, width, true);
        let norm = |name: &str, width| RmsNorm::new(&weights.pp(name), width, EPS);
        Ok(Self {
            q: linear(q)?,
            k: linear(k)?,
            v: linear(v)?,
            norms: match norm_width {
                Some(width) => Some([norm(norm_q, width)?, norm(norm_k, width)?]),
                None => None,
            },
        })
    }

    /// Loads the layers of an image stream, or of a block with one stream.
    pub(in crate::models) fn of_image(weights: &Weights, width: usize, norm_width: Option<usize>) -> Result<Self> {
        Self::new(weights, width, norm_width, ["to_q", "to_k", "to_v", "norm_q", "norm_k"])
    }

    /// Loads the layers of a text stream.
    pub(in crate::models) fn of_text(weights: &Weights, width: usize, norm_width: Option<usize>) -> Result<Self> {
        Self::new(
            weights,
            width,
            norm_width,
            ["add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k"],
        )
    }

    /// Calls `f` with the norms of queries and keys, if there are some, by these names.
    pub(in crate::models) fn visit_norms(&mut self, names: [&str; 2], f: &mut Visitor<'_>) -> Result<()> {
        for (norm, name) in self.norms.iter_mut().flatten().zip(names) {
            norm.visit(name, f)?;
        }
        Ok(())
    }

    /// x [b, n, c] -> queries, keys and values, each [b, n, c].
    pub(in crate::models) fn forward(&self, x: &Tensor) -> candle_core::Result<[Tensor; 3]> {
        let (q, k, v) = (self.q.forward(x)?, self.k.forward(x)?, self.v.forward(x)?);
        Ok(match &self.norms {
            Some([norm_q, norm_k]) => [norm_q.forward(&q)?, norm_k.forward(&k)?, v],
            None => [q, k, v],
        })
    }
}

/// Two linear layers with GELU (tanh) between them.
#[derive(Clone, Debug)]
pub(in crate::models) struct FeedForward {
    pub(in crate::models) first: Linear,
    pub(in crate::models) second: Linear,
}

impl FeedForward {
    pub(in crate::models) fn new(weights: &Weights, width: usize) -> Result<Self> {
        let net = weights.pp("net");
        Ok(Self {
            first: Linear::new(&net.pp("0.proj"), width, 4 * width, true)?,
            second: Linear::new(&net.pp("2"), 4 * width, width, true)?,
        })
    }

    /// x [b, n, c] -> the same shape.
    pub(in crate::models) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.second
            .forward(&Activation::GeluTanh.forward(&self.first.forward(x)?)?)
    }
}
