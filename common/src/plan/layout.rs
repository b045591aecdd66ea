//! From parameters and activations to bytes under each memory profile.

use super::demand::MemoryNeed;

pub(super) const GIB: f64 = 1_073_741_824.0;
/// What the driver's context, the allocator's rounding and small buffers take.
const CONTEXT: f64 = 0.6;
/// On top of everything, for fragmentation.
const MARGIN: f64 = 1.1;
/// Share of the denoiser that stays on the device while its blocks are streamed: what is not in a block, and two
/// blocks (the ring of two slots; FLUX.1 has 57 blocks of which two are 3.6 %, the UNets have fewer and larger ones).
const STREAMED_SHARE: f64 = 0.15;
/// Needs are rounded up to this, so that jobs which differ by a few bytes are alike.
const ROUND: u64 = 64 << 20;

/// Bytes per parameter of each component, and GiB of activations.
pub(super) struct Layout {
    pub(super) denoiser: f64,
    pub(super) text: f64,
    pub(super) vae: f64,
    /// Bytes per parameter as the config wants them kept.
    pub(super) width: f64,
    /// The same for the denoiser, which may be quantised by the config.
    pub(super) denoiser_width: f64,
    /// What is trained beside the denoiser's own weights: adapters, gradients, optimizer state. GiB.
    pub(super) trained: f64,
    /// The denoiser's weights do not change: they may be quantised and streamed.
    pub(super) frozen: bool,
    /// Activations while denoising or training, GiB.
    pub(super) activations: f64,
    /// Activations of the VAE, GiB.
    pub(super) vae_activations: f64,
}

impl Layout {
    /// The peak under each profile.
    pub(super) fn need(&self) -> MemoryNeed {
        let gib = |millions: f64, width: f64| millions * 1e6 * width / GIB;
        let denoiser = gib(self.denoiser, self.denoiser_width);
        let (text, vae) = (gib(self.text, self.width), gib(self.vae, self.width));
        // Weights below one byte are not for us yet, and weights that are trained keep their width.
        let small = match self.frozen {
            true => gib(self.denoiser, self.denoiser_width.min(1.0)),
            false => denoiser,
        };
        let streamed = if self.frozen { small * STREAMED_SHARE } else { small };
        let (small_text, vae_work) = (gib(self.text, self.width.min(1.0)), vae + self.vae_activations);
        let work = self.trained + self.activations;
        let full = denoiser + text + vae + self.trained + self.activations.max(self.vae_activations);
        // Encoders leave when idle: the peak is the largest stage, not the sum.
        let balanced = (denoiser + work).max(text + 0.1).max(vae_work);
        let poor = (small + work).max(small_text + 0.1).max(vae_work);
        // The VAE works in tiles, text encoders are streamed as well.
        let extreme = (streamed + work).max(small_text * STREAMED_SHARE).max(vae_work / 2.0);
        // Everything stays in memory, in f32.
        let cpu =
            gib(self.denoiser + self.text + self.vae, 4.0) + self.trained + self.activations.max(self.vae_activations);
        let bytes = |gib: f64| round_up((gib + CONTEXT) * MARGIN * GIB);
        MemoryNeed([bytes(full), bytes(balanced), bytes(poor), bytes(extreme), bytes(cpu)])
    }
}

fn round_up(bytes: f64) -> u64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let bytes = bytes.clamp(0.0, 1e18) as u64;
    bytes.div_ceil(ROUND) * ROUND
}
