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
    /// On top of everything.
    margin: f64,
    /// Share of a streamed denoiser that is in memory at a time: what is not in a layer, and the layer that runs.
    streamed: f64,
}

/// A GPU: the figures that trainers publish, on the careful side.
const GPU: Machine = Machine {
    base: 0.6,
    weights: 1.0,
    margin: 1.1,
    streamed: 0.05,
};

/// A processor, measured (docs/memory.md).
const PROCESSOR: Machine = Machine {
    base: 0.09,
    weights: 1.055,
    margin: 1.02,
    streamed: 0.036,
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

/// What a job keeps on one kind of device.
pub(super) struct Layout {
    /// GiB of the denoiser's weights.
    pub(super) denoiser: f64,
    /// Whether they may stay in their files: those that are quantised or trained may not.
    pub(super) streams: bool,
    /// GiB of the text encoders' weights.
    pub(super) text: f64,
    /// GiB of the VAE's.
    pub(super) vae: f64,
    /// Adapters, gradients, optimizer state. GiB.
    pub(super) trained: f64,
    /// What is trained and its state, twice: as it is, and on its way to a file. GiB; none where that is elsewhere.
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
        let streamed = if self.streams { choices.denoiser_streamed } else { 0.0 };
        let kept = self.denoiser * (1.0 - streamed)
            + self.text * (1.0 - choices.text_streamed)
            + self.vae * (1.0 - choices.vae_streamed);
        // A layer of the denoiser is there while it runs, not while the VAE does.
        let layer = self.denoiser * machine.streamed * streamed;
        let Activations {
            work,
            lean_work,
            mut vae,
            vae_megapixels,
        } = self.activations;
        if choices.vae_tiled && vae_megapixels > TILE {
            vae *= TILE / vae_megapixels;
        }
        let lean = choices.guidance_in_turn || choices.recomputed;
        let work = if lean { lean_work } else { work };
        let running = self.trained + (work + layer).max(vae);
        // Half of what the last step took is still held.
        let saving = self.saving + (work + layer) / 2.0;
        let whole = kept * machine.weights + running.max(saving) + machine.base;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let bytes = (whole * machine.margin * GIB).clamp(0.0, 1e18) as u64;
        bytes
    }
}
