//! From parameters and activations to bytes under each memory profile.

use super::choices::Choices;
use super::need::MemoryNeed;
use super::profile::MemoryProfile;

pub(super) const GIB: f64 = 1_073_741_824.0;
/// Needs on a GPU are rounded up to this, so that jobs which differ by a few bytes are alike.
const ROUND: u64 = 64 << 20;
/// Where gradients of one block are held at a time: GiB of these, or of the largest tensors as they are written to a file, and
/// the share of all gradients that comes on top. Measured on a CPU (docs/memory.md).
const ONE_BLOCK: (f64, f64) = (0.2, 0.04);
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

/// A CPU, measured (docs/memory.md).
const CPU_LAYOUT: Machine = Machine {
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

/// The weights of a part of a model. GiB, as they lie in memory.
#[derive(Clone, Copy, Default)]
pub(super) struct Part {
    /// What may stay in its file.
    pub(super) plain: f64,
    /// What is quantised as it is read. It stays in memory.
    pub(super) quantised: f64,
    /// What is quantised in its file already. It stays in memory.
    pub(super) stored: f64,
    /// As `plain`, of what is there as it is computed with: all but what has 16 bits.
    pub(super) wide: f64,
    /// GiB that everything else would be as it is computed with: each layer is unpacked when it runs.
    pub(super) unpacked: f64,
}

impl Part {
    /// What stays, where this share of `plain` does not: as it was read, and quantised on the way.
    fn stays(&self, streamed: f64) -> [f64; 2] {
        [self.plain * (1.0 - streamed) + self.stored, self.quantised]
    }
}

/// What a job keeps on one kind of device.
pub(super) struct Layout {
    pub(super) denoiser: Part,
    /// The denoiser is trained: it stays in memory.
    pub(super) denoiser_trained: bool,
    pub(super) text: Part,
    /// The same of the text encoders.
    pub(super) text_trained: bool,
    pub(super) vae: Part,
    /// Adapters, optimizer state. GiB.
    pub(super) trained: f64,
    /// Gradients. GiB.
    pub(super) gradients: f64,
    /// Parameters may be updated one by one, each when its gradient is there.
    pub(super) separable: bool,
    /// What is trained and its state, as they are and on their way to a file. GiB; none where that is elsewhere.
    pub(super) saving: f64,
    pub(super) activations: Activations,
    /// What the config's own keys ask for.
    pub(super) asked: Choices,
}

/// The peaks on both kinds of device.
pub(super) fn need(gpu: &Layout, cpu: &Layout) -> MemoryNeed {
    MemoryNeed::new(
        MemoryProfile::on(false).map(|profile| gpu.peak(profile, &GPU).div_ceil(ROUND) * ROUND),
        MemoryProfile::on(true).map(|profile| cpu.peak(profile, &CPU_LAYOUT)),
    )
}

impl Layout {
    fn peak(&self, profile: MemoryProfile, machine: &Machine) -> u64 {
        let choices = Choices::of(profile).and(self.asked);
        let unless = |trained: bool, streamed: f64| if trained { 0.0 } else { streamed };
        let streamed = unless(self.denoiser_trained, choices.denoiser_streamed);
        let text_streamed = unless(self.text_trained, choices.text_streamed);
        // A layer of the denoiser is there while it runs, not while the VAE does.
        let layer = (self.denoiser.wide * streamed + self.denoiser.unpacked) * machine.unpacked;
        let parts = [
            self.denoiser.stays(streamed),
            self.text.stays(text_streamed),
            self.vae.stays(choices.vae_streamed),
        ];
        let stays: f64 = parts
            .iter()
            .map(|[kept, quantised]| kept * machine.weights + quantised * machine.quantised)
            .sum();
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
        let lean = choices.sequential_cfg || choices.recomputed;
        let work = if lean { lean_work } else { work };
        let whole_parts = self.denoiser_trained || self.text_trained;
        let gradients = match whole_parts {
            true if choices.fused_backward && self.separable => {
                self.gradients.min(ONE_BLOCK.0 + ONE_BLOCK.1 * self.gradients)
            }
            true => self.gradients * machine.weights,
            false => self.gradients,
        };
        let running = self.trained + gradients + (work + layer).max(vae);
        let whole = stays + running.max(self.saving) + free_pages + machine.base;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let bytes = (whole * machine.margin * GIB).clamp(0.0, 1e18) as u64;
        bytes
    }
}
