//! What a job needs on a kind of device, from its live tensors.

const GIB: f64 = 1_073_741_824.0;

/// Bytes that the driver takes of an NVIDIA card for a process, with the kernels and cuBLAS: its context.
pub const CUDA_CONTEXT: u64 = 713_000_000;

/// What a kind of device needs besides live tensors. The allocator takes memory in large pages, and rounds up.
pub(super) struct DeviceFactors {
    /// Bytes before any tensor exists: the program itself.
    base: f64,
    /// Memory per byte of resident weights.
    weights: f64,
    /// The same for weights that are quantised when they are loaded: the dense weights leave gaps.
    quantised: f64,
    /// The same for small tensors of an adapter, of its optimizer's state and of its average. Large ones are like weights.
    small_tensors: f64,
    /// The same for tensors that live for a part of a step.
    transient: f64,
    /// Whether a profile can have freed memory returned at once.
    returns_pages: bool,
    /// Free memory that the allocator keeps unless it is returned at once: bytes, and a fraction of those that come and go.
    retained: (f64, f64),
    /// Bytes that stay when memory is returned at once, from the second image on: large pages were split.
    split: f64,
    /// Safety factor on the total.
    margin: f64,
}

/// Fitted to measurements (docs/memory-measurements.md).
pub(super) const CPU: DeviceFactors = DeviceFactors {
    base: 0.063 * GIB,
    weights: 1.065,
    quantised: 1.18,
    small_tensors: 1.34,
    transient: 1.07,
    returns_pages: true,
    retained: (0.035 * GIB, 0.6),
    split: 0.008 * GIB,
    margin: 1.025,
};

/// The same for a language model: all of its blocks have tensors of the same sizes, so that more of what one block frees is used again by the next
/// one. What comes and goes is given as what stays of it: [`retained_of_blocks`]. The other figures were fitted to language models alone.
pub(super) const CPU_LANGUAGE: DeviceFactors = DeviceFactors {
    base: 0.056 * GIB,
    weights: 1.08,
    quantised: 1.2,
    small_tensors: 1.26,
    transient: 1.08,
    retained: (0.0, 1.0),
    ..CPU
};

/// What the allocator keeps of the bytes that come and go in a block of a language model, with those of its logits: at most all of it.
pub(super) fn retained_of_blocks(transient: f64) -> f64 {
    transient.min(0.04 * GIB + 0.25 * transient)
}

/// An NVIDIA card. The pool of the driver takes memory in pages of 32 MiB, and keeps what tensors have freed until a phase ends: tensors
/// that come and go leave gaps. Fitted to what jobs took on an H100 (docs/memory-measurements.md).
pub(super) const CUDA: DeviceFactors = DeviceFactors {
    base: CUDA_CONTEXT as f64,
    weights: 1.02,
    quantised: 1.02,
    small_tensors: 1.05,
    transient: 1.0,
    returns_pages: false,
    retained: (0.03 * GIB, 0.3),
    split: 0.0,
    margin: 1.0,
};

/// The GPU of a Mac: not measured.
pub(super) const METAL: DeviceFactors = DeviceFactors {
    base: 0.66 * GIB,
    weights: 1.02,
    quantised: 1.02,
    small_tensors: 1.15,
    transient: 1.15,
    returns_pages: false,
    retained: (0.0, 0.0),
    split: 0.0,
    margin: 1.0,
};
/// GPU predictions are rounded up to a multiple of this, so that jobs that differ by a few bytes have equal needs.
pub(super) const GPU_GRANULARITY: u64 = 64 << 20;

/// What a job needs in one of its phases, besides its weights.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Phase {
    /// What the job does in it.
    pub(super) name: &'static str,
    /// Tensors that live for the whole phase or longer: optimizer state, averages, gradients.
    pub(super) held: f64,
    /// Tensors that come and go: activations.
    pub(super) transient: f64,
}

/// What a job needs of memory.
#[derive(Clone, Debug)]
pub(super) struct Need {
    /// Weights that stay in memory.
    pub(super) weights: f64,
    /// Weights that were quantised when they were loaded.
    pub(super) quantised: f64,
    pub(super) phases: Vec<Phase>,
    /// The largest number of bytes that come and go, in any phase or forward pass.
    pub(super) recycled: f64,
    /// The fraction of the bytes of the held tensors that is in small tensors of an adapter.
    pub(super) small_fraction: f64,
    /// Whether freed memory is returned at once.
    pub(super) returns_freed_memory: bool,
    /// Whether several images are generated.
    pub(super) has_several_images: bool,
}

impl Need {
    /// The bytes of the largest phase.
    pub(super) fn bytes(&self, factors: &DeviceFactors) -> f64 {
        let held = factors.weights + (factors.small_tensors - factors.weights) * self.small_fraction;
        let (retained, fraction) = match (
            self.returns_freed_memory && factors.returns_pages,
            self.has_several_images,
        ) {
            (false, _) => factors.retained,
            (true, true) => (factors.split, 0.0),
            (true, false) => (0.0, 0.0),
        };
        let phases = self.phases.iter();
        let largest = phases
            .map(|phase| phase.held * held + phase.transient * factors.transient)
            .fold(0.0, f64::max);
        let weights = self.weights * factors.weights + self.quantised * factors.quantised;
        let retained = retained + fraction * self.recycled;
        (factors.base + weights + largest + retained) * factors.margin
    }
}
