//! Names of noise schedulers (training) and samplers (image generation).

use super::declare::choices;

choices! {
    /// A noise scheduler (training) or sampler (images). A `k_` name means Karras sigmas.
    pub enum SamplerName("sampler") {
        /// Ancestral sampling of the original paper.
        Ddpm = "ddpm", Works;
        /// Deterministic.
        Ddim = "ddim", Works;
        /// Pseudo numerical methods.
        Pndm = "pndm", Works;
        /// Linear multi-step.
        Lms = "lms", Works;
        /// Linear multi-step with Karras sigmas.
        KLms = "k_lms", Works;
        /// Euler.
        Euler = "euler", Works;
        /// Euler with Karras sigmas.
        KEuler = "k_euler", Works;
        /// Euler with ancestral noise.
        EulerA = "euler_a", Works;
        /// DPM-Solver, second order.
        DpmSolver = "dpmsolver", Works;
        /// DPM-Solver++ 2M.
        DpmSolverPp = "dpmsolver++" | "dpm++_2m" | "dpmpp_2m", Works;
        /// DPM-Solver with Karras sigmas.
        KDpmSolver = "k_dpmsolver", Works;
        /// DPM-Solver++ 2M with Karras sigmas.
        KDpmSolverPp = "k_dpmsolver++" | "k_dpm++_2m" | "k_dpmpp_2m", Works;
        /// DPM-Solver++, single step.
        DpmSingle = "dpmsingle", Works;
        /// Heun.
        Heun = "heun" | "flow_match_heun", Works;
        /// UniPC.
        UniPc = "unipc" | "uni_pc", Works;
        /// KDPM2, two evaluations of the model per step.
        Dpm2 = "dpm_2", Works;
        /// KDPM2 with ancestral noise.
        Dpm2A = "dpm_2_a", Works;
        /// Latent consistency.
        Lcm = "lcm", Works;
        /// ai-toolkit's variant of `lcm`.
        CustomLcm = "custom_lcm", Refused("use `lcm`");
        /// Mean flow.
        MeanFlow = "mean_flow", Refused("use `flowmatch`");
        /// Flow matching.
        FlowMatch = "flowmatch", Works;
    }
}

impl SamplerName {
    /// Whether it uses Karras sigmas.
    #[must_use]
    pub fn is_karras(self) -> bool {
        self.name().starts_with("k_")
    }

    /// How often it evaluates the model in this many steps.
    #[must_use]
    pub fn evaluations(self, steps: u32) -> u32 {
        match self {
            Self::Heun | Self::Dpm2 | Self::Dpm2A => steps.saturating_mul(2).saturating_sub(1),
            // It corrects its first step, if there is a second.
            Self::Pndm if steps > 1 => steps + 1,
            _ => steps,
        }
    }
}
