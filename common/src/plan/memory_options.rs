//! The memory-saving options that each memory profile enables.

use super::profile::MemoryProfile;

/// Memory-saving options of a task. They do not change the results, except that a tiled VAE differs where its tiles are
/// blended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryOptions {
    /// Fraction of the denoiser's layers, 0 to 1, whose weights are streamed: read from their file whenever the layer runs.
    pub denoiser_streamed: f64,
    /// Fraction of the text encoders' layers that are streamed.
    pub text_streamed: f64,
    /// Fraction of the VAE's layers that are streamed.
    pub vae_streamed: f64,
    /// Classifier-free guidance runs its two denoiser passes one after another instead of in one batch.
    pub sequential_cfg: bool,
    /// The VAE uses tiling for images larger than its training resolution.
    pub vae_tiled: bool,
    /// Training uses gradient checkpointing even if the config disables it.
    pub gradient_checkpointing: bool,
    /// A full fine-tune updates each parameter as soon as its gradient is complete, so that at most one block's gradients
    /// are in memory. With gradient clipping, a step then runs the model twice.
    pub fused_backward: bool,
    /// Freed memory is returned to the operating system immediately. Otherwise it is reused for the next step, which is much
    /// faster on a CPU.
    pub returns_freed_memory: bool,
}

impl MemoryOptions {
    /// The options of a memory profile.
    #[must_use]
    pub fn of(profile: MemoryProfile) -> Self {
        let all = Self::default();
        let stream_idle_components = Self {
            text_streamed: 1.0,
            vae_streamed: 1.0,
            ..all
        };
        let small_pieces = Self {
            sequential_cfg: true,
            vae_tiled: true,
            gradient_checkpointing: true,
            fused_backward: true,
            returns_freed_memory: true,
            ..stream_idle_components
        };
        match profile {
            MemoryProfile::FullGpu | MemoryProfile::CpuOnly => all,
            MemoryProfile::Balanced => stream_idle_components,
            MemoryProfile::GpuPoor => Self {
                denoiser_streamed: 0.5,
                ..small_pieces
            },
            MemoryProfile::Extreme => Self {
                denoiser_streamed: 1.0,
                ..small_pieces
            },
        }
    }

    /// The options of a config's own keys: `low_vram`, and the fractions of the denoiser's and text encoders' layers that
    /// `layer_offloading` streams.
    #[must_use]
    pub fn from_config(low_vram: bool, offloaded: Option<[f64; 2]>) -> Self {
        let mut options = Self::default();
        if low_vram {
            options = Self {
                sequential_cfg: true,
                vae_tiled: true,
                returns_freed_memory: true,
                ..Self::of(MemoryProfile::Balanced)
            };
        }
        if let Some([denoiser, text]) = offloaded {
            options.denoiser_streamed = denoiser;
            options.text_streamed = options.text_streamed.max(text);
        }
        options
    }

    /// Combines two sets of options: for each option, the one that saves more memory.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        Self {
            denoiser_streamed: self.denoiser_streamed.max(other.denoiser_streamed),
            text_streamed: self.text_streamed.max(other.text_streamed),
            vae_streamed: self.vae_streamed.max(other.vae_streamed),
            sequential_cfg: self.sequential_cfg || other.sequential_cfg,
            vae_tiled: self.vae_tiled || other.vae_tiled,
            gradient_checkpointing: self.gradient_checkpointing || other.gradient_checkpointing,
            fused_backward: self.fused_backward || other.fused_backward,
            returns_freed_memory: self.returns_freed_memory || other.returns_freed_memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_profile_includes_the_options_of_the_previous_one() {
        for pair in MemoryProfile::ALL[..4].windows(2) {
            let (one, next) = (MemoryOptions::of(pair[0]), MemoryOptions::of(pair[1]));
            assert_ne!(one, next);
            assert_eq!(one.merge(next), next);
        }
        assert_eq!(MemoryOptions::of(MemoryProfile::CpuOnly), MemoryOptions::default());
    }
}
