//! Tensors without data: they count the bytes that are live, and the peak; and the arithmetic.

use std::cell::Cell;
use std::rc::Rc;

/// The bytes of all live buffers and their peak, and the FLOPs.
#[derive(Debug, Default)]
pub(in crate::plan) struct Meter {
    live: Cell<f64>,
    peak: Cell<f64>,
    flops: Cell<f64>,
    next_id: Cell<u64>,
}

impl Meter {
    /// The largest number of bytes that were live at the same time.
    pub(in crate::plan) fn peak(&self) -> f64 {
        self.peak.get()
    }

    /// The FLOPs so far.
    pub(in crate::plan) fn flops(&self) -> f64 {
        self.flops.get()
    }

    /// Counts the FLOPs of this many multiplications, each with an addition.
    pub(super) fn multiply(&self, multiplications: f64) {
        self.flops.set(self.flops.get() + 2.0 * multiplications);
    }

    /// The bytes that are live now.
    #[cfg(test)]
    pub(super) fn live(&self) -> f64 {
        self.live.get()
    }

    /// Allocates a buffer. It is live until it is dropped.
    pub(super) fn buffer(self: &Rc<Self>, bytes: f64) -> Buffer {
        self.live.set(self.live.get() + bytes);
        self.peak.set(self.peak.get().max(self.live.get()));
        Buffer {
            bytes,
            meter: Rc::clone(self),
        }
    }

    /// A new tensor id.
    pub(super) fn id(&self) -> u64 {
        self.next_id.set(self.next_id.get() + 1);
        self.next_id.get()
    }
}

/// Live bytes.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: f64,
    meter: Rc<Meter>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.meter.live.set(self.meter.live.get() - self.bytes);
    }
}

/// The shape of a tensor. Clones share the buffer.
#[derive(Clone, Debug)]
pub(in crate::plan) struct MetaTensor {
    /// [batch, channels, height, width], or [batch, tokens, features, 1].
    pub(super) dims: [f64; 4],
    pub(super) id: u64,
    /// Whether it depends on a trained tensor.
    pub(super) tracked: bool,
    /// Whether its elements are adjacent in memory.
    pub(super) contiguous: bool,
    /// Held, so that the bytes are live as long as this tensor is. `None`: bytes that are counted elsewhere.
    #[expect(dead_code, reason = "only its drop matters")]
    pub(super) buffer: Option<Rc<Buffer>>,
}

impl MetaTensor {
    /// The length of each axis.
    pub(in crate::plan) fn dims(&self) -> [f64; 4] {
        self.dims
    }

    /// The number of elements.
    pub(super) fn elements(&self) -> f64 {
        self.dims.iter().product()
    }
}
