//! A table of vectors with a LoRA, as `engine/src/adapters/lora/embedding.rs`: the columns of `down` of some ids, times `up`, are added to the
//! rows of the table.

use super::meter::MetaTensor;
use super::tape::Walk;

/// The LoRA of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableAdapter {
    pub(super) rank: f64,
    /// The rows of the table.
    pub(super) rows: f64,
    /// The ids of `down` and of `up`.
    pub(super) ids: [u64; 2],
}

impl Walk {
    /// The rows `x` of a table [.., width] with what the LoRA of the table adds to them.
    pub(super) fn add_table_adapter(&self, adapter: TableAdapter, x: MetaTensor, width: f64) -> MetaTensor {
        let TableAdapter { rank, rows, ids } = adapter;
        let elements = x.elements();
        let hidden_elements = rank * elements / width.max(1.0);
        let (columns, hidden) = (self.floats(hidden_elements), self.floats(hidden_elements));
        let product = self.floats(elements);
        self.meter.multiply(hidden_elements * width);
        let scaled = self.floats(elements);
        let narrow = self.backend.is_half().then(|| self.numbers(elements));
        let recording = self.is_recording();
        let y = self.tensor(x.dims, recording);
        drop((x, narrow, scaled));
        if recording {
            // candle's graph holds what its operations made.
            let saved = (columns, hidden, product);
            self.record_step(&y, move |walk, gradient| {
                let wide = walk.widened(elements);
                let scaled = walk.floats(elements);
                drop((wide, gradient));
                walk.meter.multiply(2.0 * hidden_elements * width);
                let up = walk.floats(width * rank);
                let (of_hidden, transposed) = (walk.floats(hidden_elements), walk.floats(hidden_elements));
                drop((scaled, of_hidden, saved));
                // candle adds the gradients of the columns to a matrix of zeros.
                let zeros = walk.floats(rank * rows);
                let down = walk.floats(rank * rows);
                drop((zeros, transposed));
                let [down_id, up_id] = ids;
                vec![(down_id, down), (up_id, up)]
            });
        }
        y
    }
}
