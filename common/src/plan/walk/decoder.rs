//! The steps of a language model that generates texts, as `engine/src/models/causal_lm`, and of the loss of its training
//! (`kernels/src/nn/token_loss.rs`).

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::embedding::TableAdapter;
use super::layers::{Layer, Unpacking};
use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::{TRAINED, Walk};
use super::tensors::{Activation, AttentionOptions, NormActivation};
use super::tokens::Rotary;
use crate::plan::shapes::LanguageShapes;
use std::cell::RefCell;
use std::rc::Rc;

/// Numbers of the logits that exist at a time (`CHUNK_NUMBERS` of the engine's loss).
const CHUNK_NUMBERS: f64 = 16_777_216.0;
/// Tokens of a chunk of the logits, at least and at most.
const CHUNK_TOKENS: [f64; 2] = [16.0, 1024.0];
/// Ids of the trained tables, above those of layers and norms.
const TABLES: u64 = TRAINED + (1 << 40);
/// Ids of the matrices of their LoRAs.
const TABLE_ADAPTERS: u64 = TABLES + 16;

/// The projections to queries, keys and values.
#[expect(clippy::large_enum_variant, reason = "a plan has one for each block of a model")]
enum Projections {
    /// One layer; the features of queries and of keys.
    Fused(Layer, [f64; 2]),
    Separate([Layer; 3]),
}

/// A feed-forward network.
enum FeedForward {
    Plain([Layer; 2]),
    /// gate, up, down.
    Gated([Layer; 3]),
}

struct DecoderBlock {
    norms: [Norm; 2],
    projections: Projections,
    output: Layer,
    feed_forward: FeedForward,
    heads: f64,
}

/// A table of vectors.
struct Table {
    elements: f64,
    /// Whether it is read from its file at each use.
    is_streamed: bool,
    is_trained: bool,
    id: u64,
    adapter: Option<TableAdapter>,
}

/// A language model that generates texts.
pub(in crate::plan) struct Decoder {
    tokens: Table,
    positions: Option<Table>,
    blocks: Vec<Rc<DecoderBlock>>,
    final_norm: Norm,
    /// `None`: the table of tokens.
    output: Option<Layer>,
    shapes: LanguageShapes,
}

/// The rows of a pass.
#[derive(Clone, Copy, Debug)]
pub(in crate::plan) struct DecoderRows {
    pub(in crate::plan) rows: f64,
    /// Tokens of a row.
    pub(in crate::plan) tokens: f64,
    /// Whether rows may have several documents, which do not see one another.
    pub(in crate::plan) is_packed: bool,
}

/// The gradient of a table that is the output layer too: that of the loss waits for that of the lookup.
type SharedGradient = Rc<RefCell<Option<MetaTensor>>>;

impl Decoder {
    /// `stored_table`: bytes of a number of the tables if they stay as they are stored. `None`: they are in the dtype of the arithmetic.
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &LanguageShapes, stored_table: Option<f64>) -> Self {
        let width = f64::from(shapes.width);
        // The engine requests the tables first.
        let [tokens, blocks, norm] = match shapes.learned_positions {
            true => ["wte", "h", "ln_f"],
            false => ["embed_tokens", "layers", "norm"],
        };
        let table = |b: &mut Builder, name: &str, rows: u32, index: u64| {
            b.with_width_of(stored_table, |b| Table::new(b, name, f64::from(rows), width, index))
        };
        let tokens = table(b, tokens, shapes.vocabulary, 0);
        let positions = shapes.learned_positions.then(|| table(b, "wpe", shapes.positions, 1));
        let blocks = (0..shapes.layers).map(|i| Rc::new(DecoderBlock::new(b, &format!("{blocks}.{i}"), shapes)));
        let blocks = blocks.collect();
        let final_norm = norm_of(b, norm, shapes);
        let output = shapes.untied.then(|| {
            let sizes = LayerSizes::linear(width, f64::from(shapes.vocabulary), false);
            b.layer(OUTPUT, sizes)
        });
        Self {
            tokens,
            positions,
            blocks,
            final_norm,
            output,
            shapes: *shapes,
        }
    }

    /// A forward and a backward pass with the loss of every token. `drops_gradients`: as [`Walk::forward_backward`]. `None`: a step of the walk
    /// is missing.
    pub(in crate::plan) fn train(
        &self,
        walk: &Walk,
        rows: DecoderRows,
        checkpointed: bool,
        drops_gradients: bool,
    ) -> Option<()> {
        let shared = SharedGradient::default();
        // The tape holds it until the backward pass of the first block.
        let layout = Rc::new(self.layout(walk, rows));
        let mut ran = None;
        let gradients = walk.forward_backward(drops_gradients, || {
            let loss = self
                .hidden(walk, rows, &layout, checkpointed, &shared)
                .map(|hidden| self.loss(walk, &hidden, &shared));
            ran = loss.as_ref().map(|_| ());
            loss.unwrap_or_else(|| walk.floats(1.0))
        });
        drop((gradients, layout));
        ran
    }

    /// The states of all tokens after the final norm, without a backward pass.
    pub(in crate::plan) fn forward(&self, walk: &Walk, rows: DecoderRows) -> Option<MetaTensor> {
        let layout = Rc::new(self.layout(walk, rows));
        self.hidden(walk, rows, &layout, false, &SharedGradient::default())
    }

    /// The logits of this many tokens, of which a generation has two copies.
    pub(in crate::plan) fn logits(&self, walk: &Walk, tokens: f64) -> [MetaTensor; 2] {
        let (vocabulary, width) = (f64::from(self.shapes.vocabulary), f64::from(self.shapes.width));
        let hidden = walk.tensor([tokens, 1.0, width, 1.0], false);
        let logits = match &self.output {
            Some(output) => walk.linear(output, &hidden),
            None => {
                let table = self.tokens.is_streamed.then(|| walk.numbers(vocabulary * width));
                let logits = walk.tensor([tokens, 1.0, vocabulary, 1.0], false);
                drop(table);
                logits
            }
        };
        [logits, walk.floats(tokens * vocabulary)]
    }

    fn hidden(
        &self,
        walk: &Walk,
        rows: DecoderRows,
        layout: &Rc<Layout>,
        checkpointed: bool,
        shared: &SharedGradient,
    ) -> Option<MetaTensor> {
        let DecoderRows {
            rows: batch,
            tokens,
            is_packed,
        } = rows;
        let x = self.embed(walk, [batch, tokens], shared);
        let is_by_row = is_packed && batch > 1.0;
        let mut sequence = BlockSequence::default();
        let mut at = sequence.input(x);
        for block in &self.blocks {
            let (block, layout) = (Rc::clone(block), Rc::clone(layout));
            at = sequence.add(&[at], move |walk, inputs| {
                block.forward(walk, &inputs[0], &layout, is_by_row)
            });
        }
        let x = sequence.run(walk, checkpointed, at)?;
        Some(walk.norm(&x, self.final_norm, NormActivation::None))
    }

    /// The masks and the rotary embedding of a pass.
    fn layout(&self, walk: &Walk, rows: DecoderRows) -> Layout {
        let DecoderRows {
            rows: batch,
            tokens,
            is_packed,
        } = rows;
        let window = f64::from(self.shapes.window);
        let is_windowed = window > 0.0 && window < tokens;
        let mask_rows = if is_packed { batch } else { 1.0 };
        // Some layers of Qwen2 have a window, and others have none.
        let masks = match (is_packed, is_windowed) {
            (false, false) => 0.0,
            (true, true) if self.shapes.gated => 2.0,
            _ => 1.0,
        };
        let bias = (masks > 0.0).then(|| walk.floats(masks * mask_rows * tokens * tokens));
        let positions = if is_packed { batch * tokens } else { tokens };
        let rotary =
            (!self.shapes.learned_positions).then(|| walk.rotary(positions, f64::from(self.shapes.head_width)));
        Layout { rotary, bias }
    }

    /// The vectors of tokens [batch, tokens], with those of their positions.
    fn embed(&self, walk: &Walk, [batch, tokens]: [f64; 2], shared: &SharedGradient) -> MetaTensor {
        let width = f64::from(self.shapes.width);
        let dims = [batch, tokens, width, 1.0];
        let lookup = |table: &Table, shared: Option<SharedGradient>| {
            let x = walk.tensor(dims, table.is_trained && walk.is_recording());
            if x.tracked {
                let (id, elements) = (table.id, table.elements);
                // candle's backward pass of the lookup adds the gradients to a table of zeros.
                walk.record_step(&x, move |walk, gradient| {
                    let zeros = walk.numbers(elements);
                    let own = walk.numbers(elements);
                    drop((zeros, gradient));
                    let before = shared.and_then(|shared| shared.borrow_mut().take());
                    let whole = match before {
                        None => own,
                        Some(before) => {
                            let sum = walk.numbers(elements);
                            drop((before, own));
                            sum
                        }
                    };
                    vec![(id, whole)]
                });
            }
            match table.adapter {
                Some(adapter) => walk.add_table_adapter(adapter, x, width),
                None => x,
            }
        };
        let x = lookup(&self.tokens, self.output.is_none().then(|| Rc::clone(shared)));
        match &self.positions {
            None => x,
            Some(table) => {
                let positions = lookup(table, None);
                walk.sum_in_candle(&x, &positions)
            }
        }
    }

    /// The loss of the next token of every token.
    fn loss(&self, walk: &Walk, hidden: &MetaTensor, shared: &SharedGradient) -> MetaTensor {
        let (vocabulary, width) = (f64::from(self.shapes.vocabulary), f64::from(self.shapes.width));
        let elements = vocabulary * width;
        let rows = hidden.elements() / width.max(1.0);
        let [min, max] = CHUNK_TOKENS;
        let chunk = (CHUNK_NUMBERS / vocabulary.max(1.0)).floor().clamp(min, max).min(rows);
        let is_dense = match &self.output {
            None => !self.tokens.is_streamed,
            Some(output) => output.unpacking == Unpacking::None,
        };
        let dense = (!is_dense).then(|| walk.numbers(elements));
        walk.meter.multiply(rows * elements);
        drop(walk.logits(chunk, vocabulary, width, false));
        let (is_trained, id) = match &self.output {
            None => (self.tokens.is_trained, None),
            Some(output) => (output.is_trained, Some(output.trained_id(2))),
        };
        let loss = MetaTensor {
            tracked: walk.is_recording() && (hidden.tracked || is_trained),
            ..walk.floats(1.0)
        };
        if !loss.tracked {
            return loss;
        }
        let (saved, shared) = (hidden.clone(), Rc::clone(shared));
        walk.record_step(&loss, move |walk, gradient| {
            // The logits again, the gradient of the states, and that of the weight.
            let products = 1.0 + f64::from(saved.tracked) + f64::from(is_trained);
            walk.meter.multiply(products * rows * elements);
            let mut gradients = Vec::new();
            let states = saved.tracked.then(|| {
                let sum = walk.floats(saved.elements());
                // Outside of CPUs each sum is a new tensor.
                let before = (!walk.backend.is_cpu()).then(|| walk.floats(saved.elements()));
                drop(before);
                sum
            });
            let weight = is_trained.then(|| walk.numbers(elements));
            let before = (is_trained && !walk.backend.is_cpu()).then(|| walk.numbers(elements));
            drop((walk.logits(chunk, vocabulary, width, true), before));
            gradients.extend(states.map(|states| (saved.id, states)));
            match (id, weight) {
                (Some(id), Some(weight)) => gradients.push((id, weight)),
                (None, Some(weight)) => _ = shared.borrow_mut().replace(weight),
                _ => {}
            }
            drop((saved, dense, gradient));
            gradients
        });
        loss
    }
}

/// The output layer, which is not quantised and gets no adapter.
const OUTPUT: &str = "lm_head";

/// What all blocks of a pass share.
struct Layout {
    rotary: Option<Rotary>,
    /// The bias of the scores.
    bias: Option<MetaTensor>,
}

impl Table {
    fn new(b: &mut Builder, name: &str, rows: f64, width: f64, index: u64) -> Self {
        let before = b.weights.resident;
        let is_trained = b.table(&format!("{name}.weight"), rows, width, true).is_some();
        Self {
            elements: rows * width,
            is_streamed: rows * width > 0.0 && b.weights.resident <= before,
            is_trained,
            id: TABLES + index,
            adapter: b.table_adapter(name, rows, width).map(|rank| TableAdapter {
                rank,
                rows,
                ids: [0, 1].map(|which| TABLE_ADAPTERS + 2 * index + which),
            }),
        }
    }
}

fn norm_of(b: &mut Builder, name: &str, shapes: &LanguageShapes) -> Norm {
    match shapes.gated {
        true => b.rms_norm(name, f64::from(shapes.width)),
        false => b.norm(name, f64::from(shapes.width)),
    }
}

impl DecoderBlock {
    fn new(b: &mut Builder, name: &str, shapes: &LanguageShapes) -> Self {
        let n = f64::from;
        let (width, inner) = (n(shapes.width), n(shapes.intermediate));
        let [queries, keys] = [shapes.heads, shapes.kv_heads].map(|heads| n(heads) * n(shapes.head_width));
        // Qwen2 has biases for queries, keys and values, Llama has none: they are small.
        let bias = !shapes.gated;
        let layer = |b: &mut Builder, part: &str, inputs: f64, outputs: f64| {
            b.layer(&format!("{name}.{part}"), LayerSizes::linear(inputs, outputs, bias))
        };
        let projections = match shapes.learned_positions {
            true => Projections::Fused(layer(b, "attn.c_attn", width, queries + 2.0 * keys), [queries, keys]),
            false => Projections::Separate([
                layer(b, "self_attn.q_proj", width, queries),
                layer(b, "self_attn.k_proj", width, keys),
                layer(b, "self_attn.v_proj", width, keys),
            ]),
        };
        let feed_forward = match shapes.gated {
            true => FeedForward::Gated([
                layer(b, "mlp.gate_proj", width, inner),
                layer(b, "mlp.up_proj", width, inner),
                layer(b, "mlp.down_proj", inner, width),
            ]),
            false => FeedForward::Plain([layer(b, "mlp.c_fc", width, inner), layer(b, "mlp.c_proj", inner, width)]),
        };
        let names = match shapes.learned_positions {
            true => ["ln_1", "ln_2", "attn.c_proj"],
            false => ["input_layernorm", "post_attention_layernorm", "self_attn.o_proj"],
        };
        let norms = [0, 1].map(|i| norm_of(b, &format!("{name}.{}", names[i]), shapes));
        Self {
            norms,
            projections,
            output: layer(b, names[2], queries, width),
            feed_forward,
            heads: n(shapes.heads),
        }
    }

    /// `is_by_row`: each row has positions of its own.
    fn forward(&self, walk: &Walk, x: &MetaTensor, layout: &Layout, is_by_row: bool) -> MetaTensor {
        let norm = |norm: Norm, x: &MetaTensor| walk.norm(x, norm, NormActivation::None);
        let [norm1, norm2] = self.norms;
        let normed = norm(norm1, x);
        let [q, k, v] = match &self.projections {
            Projections::Separate(layers) => {
                let [q, k, v] = layers;
                [
                    walk.linear(q, &normed),
                    walk.linear(k, &normed),
                    walk.linear(v, &normed),
                ]
            }
            Projections::Fused(layer, [queries, keys]) => {
                let fused = walk.linear(layer, &normed);
                [*queries, *keys, *keys].map(|features| walk.narrow(&fused, 2, features))
            }
        };
        drop(normed);
        let rotate = |x: &MetaTensor| match &layout.rotary {
            None => x.clone(),
            Some(rotary) if is_by_row => {
                // The rows of a batch as one row, and back.
                let flat = walk.reshaped_in_candle(x);
                walk.reshaped_in_candle(&walk.rotate(&flat, rotary))
            }
            Some(rotary) => walk.rotate(x, rotary),
        };
        let (rotated_q, rotated_k) = (rotate(&q), rotate(&k));
        let options = AttentionOptions {
            heads: self.heads,
            causal: true,
            has_bias: layout.bias.is_some(),
            ..AttentionOptions::default()
        };
        let attended = walk.attention(&rotated_q, &rotated_k, &v, options);
        let y = walk.linear(&self.output, &attended);
        drop(attended);
        let x = walk.add(x, &y);
        drop(y);
        let h = norm(norm2, &x);
        let change = match &self.feed_forward {
            FeedForward::Plain([up, down]) => {
                let wide = walk.linear(up, &h);
                let active = walk.activation(&wide, Activation::GeluTanh);
                walk.linear(down, &active)
            }
            FeedForward::Gated([gate, up, down]) => {
                let inactive = walk.linear(gate, &h);
                let gate = walk.activation(&inactive, Activation::Silu);
                let up = walk.linear(up, &h);
                let product = walk.product(&gate, &up);
                walk.linear(down, &product)
            }
        };
        walk.add(&x, &change)
    }
}

impl Walk {
    /// What a chunk of the logits needs: its states and its logits, and in the backward pass products of their gradients.
    fn logits(&self, tokens: f64, vocabulary: f64, width: f64, is_backward: bool) -> Vec<MetaTensor> {
        let (states, logits) = (tokens * width, tokens * vocabulary);
        if self.backend.is_cpu() {
            let mut buffers = vec![self.floats(states), self.floats(logits)];
            buffers.extend(is_backward.then(|| self.floats(states)));
            return buffers;
        }
        let mut buffers = vec![self.numbers(states)];
        // The product, in float32 too; its sum of exponentials, whose operations make two tensors of its size.
        let narrow = self.backend.is_half().then(|| self.numbers(logits));
        buffers.push(self.floats(logits));
        drop(narrow);
        let sums = [self.floats(logits), self.floats(logits)];
        if is_backward {
            drop(sums);
            // Differences, exponentials, with the targets subtracted, scaled, in the dtype of the arithmetic.
            let difference = self.floats(logits);
            buffers.push(self.floats(logits));
            drop(difference);
            buffers.push(self.floats(logits));
            let scaled = self.floats(logits);
            buffers.extend(self.backend.is_half().then(|| self.numbers(logits)));
            if !self.backend.is_half() {
                buffers.push(scaled);
            }
            buffers.push(self.floats(states));
        }
        buffers
    }
}
