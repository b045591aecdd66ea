//! What a memory profile means: which parts of a model stay in memory, and what works in smaller pieces.

use super::profile::MemoryProfile;

/// How a task is laid out in memory. Whatever is chosen, the results are the same; only a tiled VAE differs, within the
/// blending of its tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Choices {
    /// Share of the denoiser's layers whose weights are not kept: they are read from their file whenever the layer
    /// runs. 0 to 1.
    pub denoiser_streamed: f64,
    /// The same of the text encoders.
    pub text_streamed: f64,
    /// The same of the VAE.
    pub vae_streamed: f64,
    /// Guidance asks the denoiser for the two predictions one after another, not in one batch.
    pub sequential_cfg: bool,
    /// The VAE works in tiles where an image is larger than it was made for.
    pub vae_tiled: bool,
    /// Training keeps what goes into a block only, and runs it again in the backward pass, whatever the config says.
    pub recomputed: bool,
    /// Where the denoiser itself is trained, each of its parameters is updated as soon as its gradient is there, so that
    /// the gradients of one block exist at a time. Where gradients are clipped a step goes through the model twice.
    pub fused_backward: bool,
    /// Memory that is free goes back to the operating system at once. Otherwise it is kept for the next step, which is a
    /// good deal faster on a CPU.
    pub pages_returned: bool,
}

impl Choices {
    /// What a profile chooses.
    #[must_use]
    pub fn of(profile: MemoryProfile) -> Self {
        let all = Self::default();
        let idle_parts_leave = Self {
            text_streamed: 1.0,
            vae_streamed: 1.0,
            ..all
        };
        let small_pieces = Self {
            sequential_cfg: true,
            vae_tiled: true,
            recomputed: true,
            fused_backward: true,
            pages_returned: true,
            ..idle_parts_leave
        };
        match profile {
            MemoryProfile::FullGpu | MemoryProfile::CpuOnly => all,
            MemoryProfile::Balanced => idle_parts_leave,
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

    /// What a config's own keys ask for: `low_vram`, and the shares of denoiser and text encoders that
    /// `layer_offloading` leaves in their files.
    #[must_use]
    pub fn asked(low_vram: bool, offloaded: Option<[f64; 2]>) -> Self {
        let mut choices = Self::default();
        if low_vram {
            choices = Self {
                sequential_cfg: true,
                vae_tiled: true,
                pages_returned: true,
                ..Self::of(MemoryProfile::Balanced)
            };
        }
        if let Some([denoiser, text]) = offloaded {
            choices.denoiser_streamed = denoiser;
            choices.text_streamed = choices.text_streamed.max(text);
        }
        choices
    }

    /// Whichever of the two saves more, choice by choice.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            denoiser_streamed: self.denoiser_streamed.max(other.denoiser_streamed),
            text_streamed: self.text_streamed.max(other.text_streamed),
            vae_streamed: self.vae_streamed.max(other.vae_streamed),
            sequential_cfg: self.sequential_cfg || other.sequential_cfg,
            vae_tiled: self.vae_tiled || other.vae_tiled,
            recomputed: self.recomputed || other.recomputed,
            fused_backward: self.fused_backward || other.fused_backward,
            pages_returned: self.pages_returned || other.pages_returned,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_saves_what_the_one_before_it_does() {
        for pair in MemoryProfile::ALL[..4].windows(2) {
            let (one, next) = (Choices::of(pair[0]), Choices::of(pair[1]));
            assert_ne!(one, next);
            assert_eq!(one.and(next), next);
        }
        assert_eq!(Choices::of(MemoryProfile::CpuOnly), Choices::default());
    }
}
