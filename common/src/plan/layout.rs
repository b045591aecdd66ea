//! Predicts peak memory under each memory profile from parameters and activations.

use super::memory_options::MemoryOptions;
use super::need::MemoryNeed;
use super::profile::MemoryProfile;

pub(super) const GIB: f64 = 1_073_741_824.0;
/// GPU predictions are rounded up to a multiple of this, so that jobs that differ by a few bytes have equal needs.
const GPU_GRANULARITY: u64 = 64 << 20;
/// With a fused backward pass: GiB of one block's gradients (or of the largest tensors while they are saved), and the fraction
/// of all gradients that is added. Measured on a CPU (docs/memory.md).
const FUSED_GRADIENTS: (f64, f64) = (0.2, 0.04);
/// Area of a VAE tile in megapixels of 1024 x 1024.
const TILE_MEGAPIXELS: f64 = 0.25;

/// Memory constants of a kind of device.
pub(super) struct DeviceFactors {
    /// GiB used before any tensor exists: the driver's context, or the program itself.
    base: f64,
    /// Memory per GiB of resident weights: rounding and fragmentation.
    weights: f64,
    /// The same for weights quantised at load time: the original weights cause more fragmentation.
    quantised: f64,
    /// GiB of free pages that the allocator retains, unless they are returned immediately.
    free_pages: f64,
    /// Safety factor on the total.
    margin: f64,
    /// Fraction of a streamed or quantised denoiser that is in memory in the compute dtype: tensors outside of layers, and the
    /// running layer.
    dequantised_fraction: f64,
}

/// A GPU: conservative values based on published figures of trainers.
const GPU: DeviceFactors = DeviceFactors {
    base: 0.6,
    weights: 1.0,
    quantised: 1.0,
    free_pages: 0.0,
    margin: 1.1,
    dequantised_fraction: 0.05,
};

/// A CPU, measured (docs/memory.md).
const CPU: DeviceFactors = DeviceFactors {
    base: 0.02,
    weights: 1.091,
    quantised: 1.327,
    free_pages: 0.121,
    margin: 1.02,
    dequantised_fraction: 0.043,
};

/// Activation memory of a job in GiB.
#[derive(Clone, Copy, Default)]
pub(super) struct Activations {
    /// While denoising or training with the config's options.
    pub(super) work: f64,
    /// The same with the profile's memory-saving options: sequential guidance, gradient checkpointing.
    pub(super) memory_saving_work: f64,
    /// While the VAE runs.
    pub(super) vae: f64,
    /// Megapixels that the VAE processes at once.
    pub(super) vae_megapixels: f64,
}

/// The weights of a component of a model, in GiB of memory.
#[derive(Clone, Copy, Default)]
pub(super) struct ComponentWeights {
    /// Weights that can be streamed.
    pub(super) streamable: f64,
    /// Weights quantised at load time, which stay in memory.
    pub(super) quantised: f64,
    /// Weights quantised in their file, which stay in memory.
    pub(super) stored: f64,
    /// The part of `streamable` that is stored in the compute dtype: all but 16-bit weights.
    pub(super) in_compute_dtype: f64,
    /// The size that all other weights have when dequantised. Each layer is dequantised when it runs.
    pub(super) dequantised: f64,
}

impl ComponentWeights {
    /// The resident weights if this fraction of `streamable` is streamed: as stored, and quantised at load time.
    fn resident(&self, streamed: f64) -> [f64; 2] {
        [self.streamable * (1.0 - streamed) + self.stored, self.quantised]
    }
}

/// The memory of a job on one kind of device.
pub(super) struct Layout {
    pub(super) denoiser: ComponentWeights,
    /// Whether the denoiser itself is trained, so that it stays in memory.
    pub(super) denoiser_trained: bool,
    pub(super) text: ComponentWeights,
    /// Whether the text encoders themselves are trained.
    pub(super) text_trained: bool,
    pub(super) vae: ComponentWeights,
    /// Adapters and optimizer state in GiB.
    pub(super) trained: f64,
    /// Gradients in GiB.
    pub(super) gradients: f64,
    /// Whether each parameter can be updated as soon as its gradient is complete.
    pub(super) separable: bool,
    /// Trained weights and optimizer state in GiB, with their copies while they are saved. 0 if these are not on this device.
    pub(super) saving: f64,
    pub(super) activations: Activations,
    /// The options of the config's own keys.
    pub(super) config_options: MemoryOptions,
}

/// Predicts the peak memory on both kinds of device.
pub(super) fn memory_need(gpu: &Layout, cpu: &Layout) -> MemoryNeed {
    MemoryNeed::new(
        MemoryProfile::on(false).map(|profile| gpu.peak(profile, &GPU).div_ceil(GPU_GRANULARITY) * GPU_GRANULARITY),
        MemoryProfile::on(true).map(|profile| cpu.peak(profile, &CPU)),
    )
}

impl Layout {
    fn peak(&self, profile: MemoryProfile, factors: &DeviceFactors) -> u64 {
        let options = MemoryOptions::of(profile).merge(self.config_options);
        let unless_trained = |trained: bool, streamed: f64| if trained { 0.0 } else { streamed };
        let streamed = unless_trained(self.denoiser_trained, options.denoiser_streamed);
        let text_streamed = unless_trained(self.text_trained, options.text_streamed);
        // A dequantised layer exists only while the denoiser runs, not while the VAE runs.
        let layer =
            (self.denoiser.in_compute_dtype * streamed + self.denoiser.dequantised) * factors.dequantised_fraction;
        let components = [
            self.denoiser.resident(streamed),
            self.text.resident(text_streamed),
            self.vae.resident(options.vae_streamed),
        ];
        let resident: f64 = components
            .iter()
            .map(|[plain, quantised]| plain * factors.weights + quantised * factors.quantised)
            .sum();
        let Activations {
            work,
            memory_saving_work,
            mut vae,
            vae_megapixels,
        } = self.activations;
        let free_pages = if options.pages_returned {
            0.0
        } else {
            factors.free_pages
        };
        if options.vae_tiled && vae_megapixels > TILE_MEGAPIXELS {
            vae *= TILE_MEGAPIXELS / vae_megapixels;
        }
        let memory_saving = options.sequential_cfg || options.gradient_checkpointing;
        let work = if memory_saving { memory_saving_work } else { work };
        let full_training = self.denoiser_trained || self.text_trained;
        let gradients = match full_training {
            true if options.fused_backward && self.separable => self
                .gradients
                .min(FUSED_GRADIENTS.0 + FUSED_GRADIENTS.1 * self.gradients),
            true => self.gradients * factors.weights,
            false => self.gradients,
        };
        let running = self.trained + gradients + (work + layer).max(vae);
        let total = resident + running.max(self.saving) + free_pages + factors.base;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let bytes = (total * factors.margin * GIB).clamp(0.0, 1e18) as u64;
        bytes
    }
}
