//! Names of losses and timestep distributions in `train`.

use super::declare::choices;

choices! {
    /// How prediction and target are compared.
    pub enum LossType("loss type") {
        /// Mean of squares.
        Mse = "mse", Works;
        /// Mean of absolute values.
        Mae = "mae", Works;
        /// Over the bands of a Haar wavelet, of flow models: the same as `mse`, as this transform keeps sums of squares.
        Wavelet = "wavelet", Works;
        /// Flow models: mean of squares of the images to which a step of the sampler leads, of 50 entries of the table of timesteps.
        Stepped = "stepped", Works;
        /// Smooth absolute value.
        PseudoHuber = "pseudo_huber", Works;
        /// Mean flow.
        MeanFlow = "mean_flow", Refused("needs ai-toolkit's `mean_flow` adapter, which is not supported: use `mse` or `mae`");
    }
}

choices! {
    /// What the prediction is compared with.
    pub enum LossTarget("loss target") {
        /// The noise (or velocity) that was added.
        Noise = "noise", Works;
        /// The image: the latents to which the prediction leads are compared with it. The squares count as much as those of `noise`.
        Source = "source", Works;
        /// The same with the image before its `augmentations`.
        Unaugmented = "unaugmented", Works;
        /// The image before its `augmentations` is trained, with half of what they change in the latents added to the noise.
        DifferentialNoise = "differential_noise", Works;
    }
}

choices! {
    /// How flow models draw timesteps.
    pub enum TimestepType("timestep type") {
        /// Sigmoid of a normal number.
        Sigmoid = "sigmoid", Works;
        /// Even.
        Linear = "linear", Works;
        /// Even, with a table of loss weights.
        Weighted = "weighted", Works;
        /// Shifted by resolution, as at inference.
        Shift = "shift" | "flux_shift" | "lumina2_shift", Works;
        /// Three quarters log-normal, a quarter even.
        LognormBlend = "lognorm_blend", Works;
        /// After one denoising step.
        NextSample = "next_sample", Works;
        /// Only the first step of a 1-step sampler.
        OneStep = "one_step", Works;
        /// Only the steps of a 2-step sampler.
        TwoStep = "two_step", Works;
        /// Only the steps of a 4-step sampler.
        FourStep = "four_step", Works;
        /// Only the steps of an 8-step sampler.
        EightStep = "eight_step", Works;
    }
}

choices! {
    /// Which noise levels are trained most.
    pub enum ContentOrStyle("noise level preference") {
        /// All noise levels equally.
        Balanced = "balanced", Works;
        /// High noise.
        Content = "content", Works;
        /// Low noise.
        Style = "style", Works;
    }
}

choices! {
    /// How the scale of the guidance loss changes with the noise level.
    pub enum GuidanceLossSchedule("guidance loss schedule") {
        /// It stays the same.
        Constant = "constant", Works;
        /// It falls to 1 with the noise level.
        Sigma = "sigma", Works;
    }
}
