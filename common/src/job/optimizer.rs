//! Names of optimizers and learning rate schedulers.

use super::declare::choices;

choices! {
    /// An optimizer.
    pub enum OptimizerName("optimizer") {
        /// Adam.
        Adam = "adam", Works;
        /// Adam with decoupled weight decay.
        AdamW = "adamw", Works;
        /// ai-toolkit's own Adam with 8-bit state; its decay is decoupled too.
        Adam8 = "adam8", Works;
        /// ai-toolkit's own AdamW with 8-bit state.
        AdamW8 = "adamw8", Works;
        /// bitsandbytes Adam.
        Adam8Bit = "adam8bit", Works;
        /// bitsandbytes AdamW.
        AdamW8Bit = "adamw8bit", Works;
        /// bitsandbytes AdEMAMix.
        AdemaMix8Bit = "ademamix8bit", Works;
        /// bitsandbytes Lion.
        Lion8Bit = "lion8bit", Works;
        /// Lion.
        Lion = "lion", Works;
        /// Adagrad.
        Adagrad = "adagrad", Works;
        /// Adafactor.
        Adafactor = "adafactor", Works;
        /// Prodigy; any name that begins with `prodigy`.
        Prodigy = "prodigy", Works;
        /// Prodigy with 8-bit state; any name that begins with `prodigy8bit`.
        Prodigy8Bit = "prodigy8bit", Works;
        /// D-Adaptation.
        DAdaptation = "dadaptation", Works;
        /// D-Adapted Adam.
        DAdaptationAdam = "dadaptationadam", Works;
        /// D-Adapted Lion.
        DAdaptationLion = "dadaptationlion", Works;
        /// Learning rate per element.
        Automagic = "automagic", Works;
        /// Learning rate per parameter.
        Automagic2 = "automagic2", Works;
        /// One learning rate, adapted by a vote.
        Automagic3 = "automagic3", Works;
        /// Experimental.
        AutomagicExperiment = "automagicexperiment", Refused("an experiment of ai-toolkit; use `automagic3`");
    }
    normalise = normalise_prodigy;
}

fn normalise_prodigy(name: &str) -> &str {
    if name.starts_with("prodigy8bit") {
        "prodigy8bit"
    } else if name.starts_with("prodigy") {
        "prodigy"
    } else {
        name
    }
}

impl OptimizerName {
    /// Whether it finds one learning rate for all tensors while it trains, from `lr` or near 1 on.
    #[must_use]
    pub fn finds_learning_rate(self) -> bool {
        use OptimizerName::{
            Automagic, Automagic2, Automagic3, AutomagicExperiment, DAdaptation, DAdaptationAdam, DAdaptationLion,
            Prodigy, Prodigy8Bit,
        };
        matches!(
            self,
            Prodigy
                | Prodigy8Bit
                | DAdaptation
                | DAdaptationAdam
                | DAdaptationLion
                | Automagic
                | Automagic2
                | Automagic3
                | AutomagicExperiment
        )
    }
}

choices! {
    /// How the learning rate changes over the steps.
    pub enum LrSchedulerName("learning rate scheduler") {
        /// Constant.
        Constant = "constant", Works;
        /// A linear start (`num_warmup_steps`, 1000 by default), then constant.
        ConstantWithWarmup = "constant_with_warmup", Works;
        /// torch's LinearLR: from a third up to the full rate over `total_iters`.
        Linear = "linear", Works;
        /// Down to `eta_min` along half a cosine.
        Cosine = "cosine", Works;
        /// Half a cosine, restarted every `T_0` steps.
        CosineWithRestarts = "cosine_with_restarts", Works;
        /// Down to `lr_end` along a power.
        Polynomial = "polynomial", Works;
        /// Multiplied by `gamma` every `step_size` steps.
        Step = "step", Works;
        /// Constant values between steps that rules give.
        PiecewiseConstant = "piecewise_constant", Refused("ai-toolkit fails with it, as it passes `total_iters`, which diffusers' schedule does not take: use `constant`, `step` or `cosine`");
    }
}
