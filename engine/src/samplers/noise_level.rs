//! Signal, noise and the logarithm of their ratio at one noise level, which multistep solvers compute with.

/// One noise level: a noisy sample is `alpha * original + sigma * noise`. In f32, as in diffusers.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoiseLevel {
    pub(super) alpha: f32,
    pub(super) sigma: f32,
    /// `ln(alpha / sigma)`.
    pub(super) lambda: f32,
}

impl NoiseLevel {
    /// From the ratio of noise to signal, of diffusion models.
    pub(super) fn from_sigma(level: f32) -> Self {
        let alpha = 1.0 / (level * level + 1.0).sqrt();
        Self::new(alpha, level * alpha)
    }

    /// From the share of noise, of models that were trained by flow matching.
    pub(super) fn from_flow_sigma(sigma: f32) -> Self {
        Self::new(1.0 - sigma, sigma)
    }

    fn new(alpha: f32, sigma: f32) -> Self {
        Self {
            alpha,
            sigma,
            lambda: alpha.ln() - sigma.ln(),
        }
    }
}
