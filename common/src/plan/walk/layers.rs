//! Layers and operations, as `kernels/src/nn`: what each allocates, and what it keeps for its backward pass.

use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::{TRAINED, Walk};
use super::tensors::{Activation, AttentionOptions, NormActivation};

/// Up to this many rows, a linear layer computes the transposed result first (`FEW_ROWS` in `nn/linear/kernels.rs`).
const FEW_ROWS: f64 = 160.0;
/// Elements of a tile of the gradient of a convolution with a stride (`MAX_TILE_ELEMENTS` in `nn/conv2d/geometry.rs`).
const TILE_ELEMENTS: f64 = 1_048_576.0;

/// The adapter of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::plan) struct Adapter {
    pub(in crate::plan) rank: f64,
    /// Whether training drops something: then layer and adapter are not computed as one operation. Of a LoKr: whether it drops outputs.
    pub(in crate::plan) dropout: bool,
    /// Whether it drops inputs of the down projection.
    pub(in crate::plan) drops_inputs: bool,
    /// Whether it has Tucker's core.
    pub(in crate::plan) core: bool,
    /// Whether a number is trained too that multiplies the change.
    pub(in crate::plan) has_scalar: bool,
    /// The magnitudes of a weight that is decomposed (`dora_wd`); 0: it is not.
    pub(in crate::plan) magnitudes: f64,
    pub(in crate::plan) form: AdapterForm,
}

/// How an adapter changes the weight of its layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::plan) enum AdapterForm {
    /// A low-rank product.
    LowRank,
    /// A Kronecker product (LoKr).
    Kron(KronSizes),
    /// A low-rank product and a magnitude of each row (DoRA).
    Magnitude,
    /// The element-wise product of two low-rank products (LoHa).
    Hadamard,
    /// A difference of its size, and that of the bias.
    Difference,
}

impl Adapter {
    /// The rank of the low-rank product that is computed together with the layer.
    fn low_rank(self) -> f64 {
        match self.form {
            AdapterForm::LowRank => self.rank,
            _ => 0.0,
        }
    }
}

/// The sizes of a LoKr: its first matrix is [a, c], its second [b, d, kernel, kernel], which may be a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::plan) struct KronSizes {
    pub(in crate::plan) a: f64,
    pub(in crate::plan) b: f64,
    pub(in crate::plan) c: f64,
    pub(in crate::plan) d: f64,
    /// The rank of the product that is the second matrix.
    pub(in crate::plan) rank: Option<f64>,
    /// The rank of the product that is the first matrix.
    pub(in crate::plan) first_rank: Option<f64>,
}

impl KronSizes {
    /// The trained numbers of the first matrix.
    pub(super) fn of_first(self) -> f64 {
        match self.first_rank {
            Some(rank) => rank * (self.a + self.c),
            None => self.a * self.c,
        }
    }
}

/// The most rows of a product with a weight in its stored form (`MAX_ROWS` in `nn/linear/few_rows.rs`).
const STORED_ROWS: f64 = 64.0;

/// Elements of a 16-bit weight that a linear layer widens at once (`BLOCK` in `nn/linear/halves.rs`).
const WIDENED_ELEMENTS: f64 = 4_194_304.0;

/// How much of a frozen weight is made in the compute dtype for each use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::plan) enum Unpacking {
    /// Nothing: it is in memory.
    None,
    /// All of it: it is quantised or streamed.
    Whole,
    /// A block at a time: it is in 16-bit floats. A convolution needs all of it.
    Blocks,
    /// Streamed from a file that has it in 16-bit floats: it is read as it is, and widened as [`Self::Blocks`]. A convolution needs all of it
    /// in the compute dtype.
    StreamedHalves,
}

/// A linear layer or a convolution.
#[derive(Clone, Debug)]
pub(in crate::plan) struct Layer {
    pub(in crate::plan) inputs: f64,
    pub(in crate::plan) outputs: f64,
    pub(in crate::plan) kernel: f64,
    pub(in crate::plan) stride: f64,
    pub(in crate::plan) padding: f64,
    /// The position in the model; it names the trained tensors.
    pub(in crate::plan) index: u64,
    /// Whether there is a bias.
    pub(in crate::plan) bias: bool,
    pub(in crate::plan) unpacking: Unpacking,
    /// Bytes per weight that candle's operations need to dequantise it, besides the result; 0 if it is not quantised.
    pub(in crate::plan) unpacking_bytes: f64,
    /// Whether the weight itself is trained.
    pub(in crate::plan) is_trained: bool,
    pub(in crate::plan) adapter: Option<Adapter>,
}

impl Layer {
    /// The number of weights.
    pub(in crate::plan) fn elements(&self) -> f64 {
        self.outputs * self.fan_in()
    }

    pub(in crate::plan) fn fan_in(&self) -> f64 {
        self.inputs * self.kernel * self.kernel
    }

    /// The number of the adapter's weights.
    fn low_rank_elements(&self) -> f64 {
        self.adapter
            .map_or(0.0, |adapter| adapter.rank * (self.fan_in() + self.outputs))
    }

    /// The id of one of its trained tensors.
    pub(super) fn trained_id(&self, which: u64) -> u64 {
        TRAINED + 4 * self.index + which
    }

    /// The part of the weight that is unpacked while the layer runs with this number of rows.
    fn unpacked(&self, walk: &Walk, rows: f64) -> Option<MetaTensor> {
        let [outputs, kernel] = [self.outputs, self.kernel];
        // A few rows are multiplied with the stored form of a weight, row by row.
        let is_stored = self.unpacking == Unpacking::Blocks || self.unpacking_bytes > 0.0;
        if is_stored && kernel == 1.0 && rows <= STORED_ROWS && walk.backend.is_cpu() && self.adapter.is_none() {
            return None;
        }
        let block = outputs.min((WIDENED_ELEMENTS / self.inputs).floor().max(1.0));
        let outputs = match self.unpacking {
            Unpacking::None => return None,
            Unpacking::Whole => outputs,
            Unpacking::Blocks | Unpacking::StreamedHalves if kernel > 1.0 => outputs,
            // The copy that the adapter is merged into is counted by the layer.
            Unpacking::Blocks if self.adapter.is_some() && merges(self, rows) => return None,
            Unpacking::Blocks => block,
            Unpacking::StreamedHalves if rows > STORED_ROWS && rows <= FEW_ROWS => outputs / 2.0 + block,
            Unpacking::StreamedHalves => outputs / 2.0,
        };
        Some(walk.tensor([outputs, self.inputs, kernel, kernel], false))
    }
}

/// Sizes of a layer's product.
#[derive(Clone, Copy)]
pub(super) struct Product {
    /// Tokens, or pixels of the result.
    pub(super) rows: f64,
    pub(super) output: [f64; 4],
    few_rows: bool,
}

impl Walk {
    pub(super) fn sizes_of(layer: &Layer, x: &MetaTensor, is_linear: bool) -> Product {
        let [batch, ..] = x.dims;
        if is_linear {
            let mut output = x.dims;
            output[2] = layer.outputs;
            return Product {
                rows: batch * x.dims[1],
                output,
                few_rows: batch * x.dims[1] <= FEW_ROWS,
            };
        }
        let side = |side: f64| {
            ((side + 2.0 * layer.padding - layer.kernel) / layer.stride)
                .floor()
                .max(0.0)
                + 1.0
        };
        let (height, width) = (side(x.dims[2]), side(x.dims[3]));
        Product {
            rows: batch * height * width,
            output: [batch, layer.outputs, height, width],
            few_rows: false,
        }
    }

    /// A linear layer: x [batch, tokens, inputs].
    pub(super) fn linear(&self, layer: &Layer, x: &MetaTensor) -> MetaTensor {
        self.layer(layer, x, true)
    }

    /// A convolution: x [batch, inputs, height, width].
    pub(super) fn conv(&self, layer: &Layer, x: &MetaTensor) -> MetaTensor {
        self.layer(layer, x, false)
    }

    pub(super) fn layer(&self, layer: &Layer, x: &MetaTensor, is_linear: bool) -> MetaTensor {
        let x = self.contiguous(x.clone());
        if let Some(adapter) = layer.adapter {
            if adapter.core {
                return self.layer_with_core(layer, adapter, &x, is_linear);
            }
            if adapter.magnitudes > 0.0 {
                return self.layer_with_decomposition(layer, adapter, &x, is_linear);
            }
            match adapter.form {
                AdapterForm::LowRank => {}
                AdapterForm::Kron(kron) => return self.layer_with_kron(layer, kron, adapter.dropout, &x, is_linear),
                AdapterForm::Magnitude => return self.layer_with_magnitude(layer, adapter, &x, is_linear),
                AdapterForm::Hadamard => return self.layer_with_hadamard(layer, adapter, &x, is_linear),
                AdapterForm::Difference => return self.layer_with_difference(layer, &x, is_linear),
            }
        }
        let product = Self::sizes_of(layer, &x, is_linear);
        if !self.backend.is_cpu() {
            return self.layer_of_tensors(layer, &x, product, is_linear);
        }
        let recording = self.is_recording();
        let has_adapter = recording && layer.adapter.is_some();
        let tracked = recording && (x.tracked || layer.is_trained || has_adapter);
        let y = self.layer_forward(layer, &product, tracked);
        if !tracked {
            return y;
        }
        match layer.adapter {
            Some(adapter) if adapter.dropout => self.with_dropout(layer, adapter, &x, y, product.rows),
            _ => {
                self.record_layer(layer.clone(), &x, &y, product.rows, is_linear);
                y
            }
        }
    }

    fn layer_forward(&self, layer: &Layer, product: &Product, tracked: bool) -> MetaTensor {
        let rank = layer.adapter.map_or(0.0, Adapter::low_rank);
        self.meter
            .multiply(product.rows * (layer.elements() + layer.low_rank_elements()));
        let weight = layer.unpacked(self, product.rows);
        let merged = (rank > 0.0 && merges(layer, product.rows)).then(|| self.floats(layer.elements()));
        let hidden = (rank > 0.0 && merged.is_none()).then(|| self.floats(product.rows * rank));
        let transposed = product.few_rows.then(|| self.tensor(product.output, false));
        let y = self.tensor(product.output, tracked);
        drop((weight, merged, hidden, transposed));
        y
    }

    fn record_layer(&self, layer: Layer, x: &MetaTensor, y: &MetaTensor, rows: f64, is_linear: bool) {
        let trains_adapter = layer.adapter.is_some();
        let saved = (layer.is_trained || trains_adapter).then(|| x.clone());
        let (x_id, x_dims, needs_dx) = (x.id, x.dims, x.tracked);
        self.record_step(y, move |walk, gradient| {
            let mut gradients = Vec::new();
            let rank = layer.adapter.map_or(0.0, Adapter::low_rank);
            let weights = layer.elements() * (f64::from(needs_dx) + f64::from(layer.is_trained));
            // Both matrices are multiplied with the gradient, and get one; the hidden state is computed again.
            walk.meter
                .multiply(rows * (weights + 2.0 * layer.low_rank_elements() + rank * layer.fan_in()));
            let d_hidden = trains_adapter.then(|| walk.floats(rows * rank));
            let hidden = trains_adapter.then(|| walk.floats(rows * rank));
            let mut adapter =
                trains_adapter.then(|| [walk.floats(rank * layer.fan_in()), walk.floats(layer.outputs * rank)]);
            drop(hidden);
            if needs_dx {
                let weight = layer.unpacked(walk, rows);
                let merged = (trains_adapter && merges(&layer, rows)).then(|| walk.floats(layer.elements()));
                let tile = (!is_linear && layer.stride > 1.0).then(|| {
                    let one_row = layer.fan_in() * x_dims[3] / layer.stride;
                    walk.floats(TILE_ELEMENTS.max(one_row).min(layer.fan_in() * rows))
                });
                let dx = walk.tensor(x_dims, false);
                let change = (trains_adapter && merged.is_none() && !is_linear).then(|| walk.tensor(x_dims, false));
                drop((weight, merged, tile, change));
                gradients.push((x_id, dx));
            }
            drop(d_hidden);
            if let Some([down, up]) = adapter.take() {
                gradients.push((layer.trained_id(0), down));
                gradients.push((layer.trained_id(1), up));
            }
            if layer.is_trained {
                gradients.push((layer.trained_id(2), walk.floats(layer.elements())));
            }
            drop((saved, gradient));
            gradients
        });
    }

    /// The layer, and its adapter as operations of its own.
    fn with_dropout(&self, layer: &Layer, adapter: Adapter, x: &MetaTensor, y: MetaTensor, rows: f64) -> MetaTensor {
        let base = Layer {
            adapter: None,
            ..layer.clone()
        };
        let mut y = y;
        y.tracked = x.tracked;
        if x.tracked {
            self.record_layer(base, x, &y, rows, layer.kernel == 1.0 && x.dims[3] == 1.0);
        }
        // The mask, the product with it, and the change before it is scaled stay in candle's graph.
        let dropped = if adapter.drops_inputs {
            layer.fan_in()
        } else {
            adapter.rank
        };
        let kept = [rows * dropped, rows * dropped, rows * adapter.rank].map(|elements| self.floats(elements));
        let scaled = self.tensor(y.dims, true);
        let change = self.tensor(y.dims, true);
        let sum = self.tensor(y.dims, true);
        let (saved, y_id, y_tracked) = (x.clone(), y.id, y.tracked);
        let (x_id, x_dims) = (x.id, x.dims);
        let (layer, rank) = (layer.clone(), adapter.rank);
        self.record_step(&sum, move |walk, gradient| {
            // candle's backward pass makes zeros, a sum and the result.
            let dy = [0; 3].map(|_| walk.tensor(gradient.dims, false));
            let hidden = [walk.floats(rows * rank), walk.floats(rows * rank)];
            // candle's product has gradients of the inputs and of the mask.
            let inputs = adapter
                .drops_inputs
                .then(|| [0; 5].map(|_| walk.floats(rows * layer.fan_in())));
            let mut gradients = vec![
                (layer.trained_id(0), walk.floats(rank * layer.fan_in())),
                (layer.trained_id(1), walk.floats(layer.outputs * rank)),
            ];
            if saved.tracked {
                gradients.push((x_id, walk.tensor(x_dims, false)));
            }
            if y_tracked {
                gradients.push((y_id, gradient));
            }
            drop((saved, dy, hidden, inputs, kept, scaled, change));
            gradients
        });
        sum
    }

    /// A norm, with an activation that is part of it.
    pub(super) fn norm(&self, x: &MetaTensor, norm: Norm, activation: NormActivation) -> MetaTensor {
        let x = self.contiguous(x.clone());
        if !self.backend.is_cpu() {
            return self.norm_of_tensors(&x, norm, activation);
        }
        let tracked = self.is_recording() && (x.tracked || norm.trained_elements > 0.0);
        let y = self.tensor(x.dims, tracked);
        if tracked {
            let saved = x.clone();
            self.record_step(&y, move |walk, gradient| {
                let dx = walk.tensor(saved.dims, false);
                let mut gradients = vec![];
                if saved.tracked {
                    gradients.push((saved.id, dx));
                }
                if norm.trained_elements > 0.0 {
                    gradients.push((norm.trained_id(), walk.floats(norm.trained_elements)));
                }
                // The whole tensor is captured: it stays in memory until here.
                drop((saved, gradient));
                gradients
            });
        }
        y
    }

    /// A function of each element that needs its input in the backward pass.
    pub(super) fn activation(&self, x: &MetaTensor, activation: Activation) -> MetaTensor {
        if !self.backend.is_cpu() {
            return self.activation_of_tensors(&self.contiguous(x.clone()), activation);
        }
        let mut dims = x.dims;
        dims[2] *= activation.outputs();
        let y = self.tensor(dims, self.is_recording() && x.tracked);
        if y.tracked {
            let saved = x.clone();
            self.record_step(&y, move |walk, gradient| {
                let gradients = vec![(saved.id, walk.tensor(saved.dims, false))];
                drop((saved, gradient));
                gradients
            });
        }
        y
    }

    /// A copy in another order or size whose backward pass needs nothing: a transposition, an upsampling, a padding.
    pub(in crate::plan) fn rearranged(&self, x: &MetaTensor, dims: [f64; 4]) -> MetaTensor {
        let x = self.contiguous(x.clone());
        let y = self.tensor(dims, self.is_recording() && x.tracked);
        if y.tracked {
            let (id, dims) = (x.id, x.dims);
            self.record_step(&y, move |walk, gradient| {
                let dx = walk.tensor(dims, false);
                drop(gradient);
                vec![(id, dx)]
            });
        }
        y
    }

    /// Nearest-neighbour upsampling to [batch, channels, height, width].
    pub(super) fn upsampled(&self, x: &MetaTensor, dims: [f64; 4]) -> MetaTensor {
        if self.backend.is_cpu() || self.backend.width >= 4.0 {
            return self.rearranged(x, dims);
        }
        let x = self.contiguous(x.clone());
        let y = self.tensor(dims, self.is_recording() && x.tracked);
        if y.tracked {
            let (id, dims, elements) = (x.id, x.dims, y.elements());
            self.record_step(&y, move |walk, gradient| {
                // Sums are in float32.
                let wide = walk.floats(elements);
                let sums = walk.floats(dims.iter().product());
                drop(wide);
                let dx = walk.tensor(dims, false);
                drop((sums, gradient));
                vec![(id, dx)]
            });
        }
        y
    }

    /// a + b, of the same shape.
    pub(in crate::plan) fn add(&self, a: &MetaTensor, b: &MetaTensor) -> MetaTensor {
        let y = self.tensor(a.dims, self.is_recording() && (a.tracked || b.tracked));
        if y.tracked {
            let inputs = [a, b].map(|x| x.tracked.then_some(x.id));
            self.record_step(&y, move |_, gradient| {
                let each = inputs.into_iter().flatten();
                each.map(|id| (id, gradient.clone())).collect()
            });
        }
        y
    }

    /// x plus one number for each channel.
    pub(super) fn add_channels(&self, x: &MetaTensor, shift: &MetaTensor) -> MetaTensor {
        let y = self.tensor(x.dims, self.is_recording() && (x.tracked || shift.tracked));
        if y.tracked {
            let (x_id, shift_id) = (x.tracked.then_some(x.id), shift.tracked.then_some(shift.id));
            let shift_dims = shift.dims;
            self.record_step(&y, move |walk, gradient| {
                let mut gradients = Vec::new();
                if let Some(id) = shift_id {
                    let half = !walk.backend.is_cpu() && walk.backend.width < 4.0;
                    let wide = half.then(|| walk.floats(gradient.elements()));
                    gradients.push((id, walk.tensor(shift_dims, false)));
                    drop(wide);
                }
                if let Some(id) = x_id {
                    gradients.push((id, gradient));
                }
                gradients
            });
        }
        y
    }

    /// a and b [batch, channels, height, width], one after the other along the channels.
    pub(super) fn cat(&self, a: &MetaTensor, b: &MetaTensor) -> MetaTensor {
        let mut dims = a.dims;
        dims[1] += b.dims[1];
        let y = self.tensor(dims, self.is_recording() && (a.tracked || b.tracked));
        if y.tracked {
            let parts = [(a.id, a.dims, a.tracked), (b.id, b.dims, b.tracked)];
            self.record_step(&y, move |walk, gradient| {
                let parts = parts.into_iter().filter(|(.., tracked)| *tracked);
                parts
                    .map(|(id, dims, _)| (id, walk.view(&gradient, dims, dims[0] <= 1.0)))
                    .collect()
            });
        }
        y
    }

    /// Attention: q [batch, queries, features], k and v [batch, keys, features].
    pub(super) fn attention(
        &self,
        q: &MetaTensor,
        k: &MetaTensor,
        v: &MetaTensor,
        options: AttentionOptions,
    ) -> MetaTensor {
        if !self.backend.is_cpu() {
            return self.attention_of_tensors(q, k, v, options);
        }
        let tracked = self.is_recording() && (q.tracked || k.tracked || v.tracked);
        let scores = q.elements() * k.dims[1];
        self.meter.multiply(2.0 * scores);
        let scratch = self.packed_keys(k);
        let by_head = self.tensor(q.dims, false);
        let y = self.tensor(q.dims, tracked);
        drop((scratch, by_head));
        if tracked {
            // The result is read in the backward pass, too.
            let saved = [q, k, v, &y].map(Clone::clone);
            self.record_step(&y, move |walk, gradient| {
                let [q, k, v, _] = &saved;
                // The scores are computed again.
                walk.meter.multiply(5.0 * scores);
                let scratch = walk.packed_keys(k);
                // Gradients of keys and values are computed for each head of the queries, and then added.
                let group = q.dims[2] / k.dims[2].max(1.0);
                let by_head = [(q, 1.0), (k, group), (v, group)].map(|(x, heads)| {
                    let [batch, length, features, last] = x.dims;
                    walk.tensor([batch, length, features * heads, last], false)
                });
                let joined = [q, k, v].map(|x| walk.tensor(x.dims, false));
                drop((by_head, scratch));
                let gradients: Vec<_> = [q, k, v]
                    .map(|x| (x.id, walk.tensor(x.dims, false), x.tracked))
                    .into_iter()
                    .filter_map(|(id, dx, tracked)| tracked.then_some((id, dx)))
                    .collect();
                drop((joined, gradient));
                gradients
            });
        }
        y
    }

    /// What attention on a CPU holds besides its inputs and its result: packed keys and values.
    fn packed_keys(&self, k: &MetaTensor) -> [MetaTensor; 2] {
        [self.tensor(k.dims, false), self.tensor(k.dims, false)]
    }
}

/// Whether the adapter is merged into the weight for the product (`should_merge` in `nn/low_rank.rs`).
fn merges(layer: &Layer, rows: f64) -> bool {
    rows * (layer.fan_in() + layer.outputs) >= layer.fan_in() * layer.outputs
}
