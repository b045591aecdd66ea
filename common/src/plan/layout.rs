//! From parameters and activations to bytes under each memory profile.

use super::choices::Choices;
use super::need::MemoryNeed;
use super::profile::MemoryProfile;

pub(super) const GIB: f64 = 1_073_741_824.0;
/// Needs on a GPU are rounded up to this, so that jobs which differ by a few bytes are alike.
const ROUND: u64 = 64 << 20;
/// Side of a VAE's tile, squared, in megapixels of 1024 x 1024.
const TILE: f64 = 0.25;

/// What is the same for every job on a kind of device.
pub(super) struct Machine {
    /// GiB that are there before anything is: the driver's context, or the program itself.
    base: f64,
    /// For each GiB that stays; rounding and fragments.
    weights: f64,
    /// The same where it is quantised: what it was before lay between.
    quantised: f64,
    /// GiB of free pages that stay with the program, where they are not given back at once.
    free_pages: f64,
    /// On top of everything.
    margin: f64,
    /// Share of a streamed or quantised denoiser that is there as it is computed with: what is not in a layer, and the
    /// layer that runs.
    unpacked: f64,
}

/// A GPU: the figures that trainers publish, on the careful side.
const GPU: Machine = Machine {
    base: 0.6,
    weights: 1.0,
    quantised: 1.0,
    free_pages: 0.0,
    margin: 1.1,
    unpacked: 0.05,
};

/// A processor, measured (docs/memory.md).
const PROCESSOR: Machine = Machine {
    base: 0.02,
    weights: 1.091,
    quantised: 1.327,
    free_pages: 0.121,
    margin: 1.02,
    unpacked: 0.043,
};

/// GiB of activations of a job.
#[derive(Clone, Copy, Default)]
pub(super) struct Activations {
    /// While denoising or training, as the config wants it.
    pub(super) work: f64,
    /// The same where the profile wants it in smaller pieces: guidance in turn, blocks recomputed.
    pub(super) lean_work: f64,
    /// While the VAE works.
    pub(super) vae: f64,
    /// Megapixels that the VAE works on at once.
    pub(super) vae_megapixels: f64,
}

/// A denoiser's weights. GiB, of numbers as they are computed with unless said otherwise.
pub(super) enum Denoiser {
    /// They may stay in their files.
    Streams(f64),
    /// Quantised to so many GiB: these stay in memory, and each layer is unpacked when it runs.
    Quantised { unpacked: f64, kept: f64 },
    /// They are trained: these stay in memory.
    Trained(f64),
}

/// What a job keeps on one kind of device.
pub(super) struct Layout {
    /// What the denoiser's weights are.
    pub(super) denoiser: Denoiser,
    /// GiB of the text encoders' weights that may stay in their files.
    pub(super) text: f64,
    /// GiB of those that are quantised: they stay in memory under every profile.
    pub(super) text_quantised: f64,
    /// GiB of the VAE's.
    pub(super) vae: f64,
    /// Adapters, gradients, optimizer state. GiB.
    pub(super) trained: f64,
    /// What is trained and its state, as they are and on their way to a file. GiB; none where that is elsewhere.
    pub(super) saving: f64,
    pub(super) activations: Activations,
    /// What the config's own keys ask for.
    pub(super) asked: Choices,
}

/// The peaks on both kinds of device.
pub(super) fn need(gpu: &Layout, processor: &Layout) -> MemoryNeed {
    MemoryNeed::new(
        MemoryProfile::on(false).map(|profile| gpu.peak(profile, &GPU).div_ceil(ROUND) * ROUND),
        MemoryProfile::on(true).map(|profile| processor.peak(profile, &PROCESSOR)),
    )
}

impl Layout {
    fn peak(&self, profile: MemoryProfile, machine: &Machine) -> u64 {
        let choices = Choices::of(profile).and(self.asked);
        // A layer of the denoiser is there while it runs, not while the VAE does.
        let (denoiser, quantised, layer) = match self.denoiser {
            Denoiser::Streams(all) => {
                let streamed = choices.denoiser_streamed;
                (all * (1.0 - streamed), 0.0, all * streamed * machine.unpacked)
            }
            Denoiser::Quantised { unpacked, kept } => (0.0, kept, unpacked * machine.unpacked),
            Denoiser::Trained(all) => (all, 0.0, 0.0),
        };
        let kept = denoiser + self.text * (1.0 - choices.text_streamed) + self.vae * (1.0 - choices.vae_streamed);
        let quantised = quantised + self.text_quantised;
        let stays = kept * machine.weights + quantised * machine.quantised;
        let Activations {
            work,
            lean_work,
            mut vae,
            vae_megapixels,
        } = self.activations;
        let free_pages = if choices.pages_returned {
            0.0
        } else {
            machine.free_pages
        };
        if choices.vae_tiled && vae_megapixels > TILE {
            vae *= TILE / vae_megapixels;
        }
        let lean = choices.guidance_in_turn || choices.recomputed;
        let work = if lean { lean_work } else { work };
        let running = self.trained + (work + layer).max(vae);
        let whole = stays + running.max(self.saving) + free_pages + machine.base;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let bytes = (whole * machine.margin * GIB).clamp(0.0, 1e18) as u64;
        bytes
    }
}
