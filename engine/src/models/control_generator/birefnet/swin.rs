//! Swin transformers (Z. Liu and others, arXiv:2103.14030): attention within windows of an image, which every second layer shifts.
//!
//! The layers and the names of their tensors are those of the authors of BiRefNet (`models/backbones/swin_v1.py`).

use crate::error::Result;
use crate::models::feature_extractor::{channels_of, weights_error};
use crate::nn::{Activation, Attention, Conv2d, LayerNorm, Linear, add, to_image, to_tokens};
use crate::weights::{Index, Weights};
use candle_core::{D, Device, Tensor};

/// The stages, each of half the height and width and twice the features of the one before it.
pub(super) const STAGES: usize = 4;
/// The side of a patch.
const PATCH: usize = 4;
/// The largest side of a window: the published ones have 7 and 12. The table of a block's biases grows with its fourth power.
const MAX_WINDOW: usize = 32;
const EPSILON: f64 = 1e-5;

/// A layer: attention within windows and an MLP.
#[derive(Clone, Debug)]
struct Block {
    heads: usize,
    window: usize,
    /// By how many pixels the windows are shifted.
    shift: usize,
    /// Biases of pairs of places in a window, [1, heads, places, places].
    bias: Tensor,
    norms: [LayerNorm; 2],
    qkv: Linear,
    projection: Linear,
    mlp: [Linear; 2],
}

impl Block {
    fn new((index, prefix): (&Index, &str), weights: &Weights, width: usize, is_shifted: bool) -> Result<Self> {
        let name = format!("{prefix}.attn.relative_position_bias_table");
        let (places, heads) = match index.shape(&name) {
            None => return Err(index.missing_error(&name)),
            Some([places, heads]) => (*places, *heads),
            Some(_) => (0, 0),
        };
        // A window of n x n has 2 n - 1 distances along each axis.
        let window = (1..=MAX_WINDOW).find(|side| (2 * side - 1).pow(2) == places);
        let (Some(window), true) = (window, heads > 0 && width.is_multiple_of(heads.max(1))) else {
            return Err(weights_error(
                index,
                format!(
                    "tensor `{name}` has shape {:?}: expected the squared number of distances in a window of at most {MAX_WINDOW}, and heads \
                     whose number divides {width}",
                    index.shape(&name).unwrap_or_default()
                ),
            ));
        };
        let hidden = format!("{prefix}.mlp.fc1.weight");
        let hidden = match index.shape(&hidden) {
            Some([hidden, _]) => *hidden,
            Some(_) | None => return Err(index.missing_error(&hidden)),
        };
        let attention = weights.pp("attn");
        let table = attention
            .get((places, heads), "relative_position_bias_table")?
            .contiguous()?;
        let pairs = pairs(window);
        let count = window * window;
        let pairs = Tensor::from_vec(pairs, count * count, table.device())?;
        let bias = table.index_select(&pairs, 0)?.t()?.contiguous()?;
        let norm = |name: &str| LayerNorm::new(&weights.pp(name), width, EPSILON);
        let linear = |name: &str, inputs, outputs| Linear::new(&weights.pp(name), inputs, outputs, true);
        Ok(Self {
            heads,
            window,
            shift: if is_shifted { window / 2 } else { 0 },
            bias: bias.reshape((1, heads, count, count))?,
            norms: [norm("norm1")?, norm("norm2")?],
            qkv: linear("attn.qkv", width, 3 * width)?,
            projection: linear("attn.proj", width, width)?,
            mlp: [linear("mlp.fc1", width, hidden)?, linear("mlp.fc2", hidden, width)?],
        })
    }

    /// x [b, height * width, features] -> the same shape.
    fn forward(&self, x: &Tensor, size: (usize, usize)) -> candle_core::Result<Tensor> {
        let attended = self.attend(&self.norms[0].forward(x)?, size)?;
        let x = add(&attended, x)?;
        let [up, down] = &self.mlp;
        let inner = Activation::Gelu.forward(&up.forward(&self.norms[1].forward(&x)?)?)?;
        add(&down.forward(&inner)?, &x)
    }

    fn attend(&self, x: &Tensor, (height, width): (usize, usize)) -> candle_core::Result<Tensor> {
        let (batch, _, features) = x.dims3()?;
        let window = self.window;
        let (rows, columns) = (height.div_ceil(window), width.div_ceil(window));
        let (full_height, full_width) = (rows * window, columns * window);
        // Zeros beyond the image are attended to as well.
        let x = x
            .reshape((batch, height, width, features))?
            .pad_with_zeros(1, 0, full_height - height)?
            .pad_with_zeros(2, 0, full_width - width)?;
        let x = rolled(&rolled(&x, 1, self.shift)?, 2, self.shift)?;
        let windows = x
            .reshape(vec![batch, rows, window, columns, window, features])?
            .permute(vec![0, 1, 3, 2, 4, 5])?
            .contiguous()?
            .reshape((batch * rows * columns, window * window, features))?;
        let qkv = self.qkv.forward(&windows)?;
        let part = |i: usize| qkv.narrow(D::Minus1, i * features, features)?.contiguous();
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let found = match self.shift {
            0 => self.attention(&self.bias).forward(&q, &k, &v)?,
            _ => self.attend_in_rows([&q, &k, &v], (rows, columns))?,
        };
        let found = self
            .projection
            .forward(&found)?
            .reshape(vec![batch, rows, columns, window, window, features])?
            .permute(vec![0, 1, 3, 2, 4, 5])?
            .contiguous()?
            .reshape((batch, full_height, full_width, features))?;
        let back = |x: &Tensor, axis: usize, side: usize| rolled(x, axis, (side - self.shift) % side.max(1));
        back(&back(&found, 1, full_height)?, 2, full_width)?
            .narrow(1, 0, height)?
            .narrow(2, 0, width)?
            .contiguous()?
            .reshape((batch, height * width, features))
    }

    /// Attention within shifted windows: the last ones of each row and column have pixels of both ends of the image, which do not attend to each
    /// other. One row of windows after the other, because a bias for every window would be larger than everything else.
    fn attend_in_rows(&self, [q, k, v]: [&Tensor; 3], (rows, columns): (usize, usize)) -> candle_core::Result<Tensor> {
        let bias = |is_last: bool| {
            let mask = mask(self.window, self.shift, columns, is_last, q.device())?;
            self.bias.broadcast_add(&mask)
        };
        let (inner, last) = (bias(false)?, bias(true)?);
        let count = q.dim(0)? / columns.max(1);
        let row = |i: usize| {
            let of_row = |x: &Tensor| x.narrow(0, i * columns, columns);
            let bias = if i % rows + 1 == rows { &last } else { &inner };
            self.attention(bias).forward(&of_row(q)?, &of_row(k)?, &of_row(v)?)
        };
        let rows: Vec<Tensor> = (0..count).map(row).collect::<candle_core::Result<_>>()?;
        Tensor::cat(&rows, 0)
    }

    fn attention<'a>(&self, bias: &'a Tensor) -> Attention<'a> {
        Attention {
            bias: Some(bias),
            ..Attention::new(self.heads)
        }
    }
}

/// For each pair of places in a window, the row of the table of biases that belongs to their distance.
fn pairs(window: usize) -> Vec<u32> {
    let count = window * window;
    let row = move |from: usize, to: usize| {
        let distance = |a: usize, b: usize| a + window - 1 - b;
        let rows = distance(from / window, to / window);
        (rows * (2 * window - 1) + distance(from % window, to % window)) as u32
    };
    (0..count)
        .flat_map(|from| (0..count).map(move |to| row(from, to)))
        .collect()
}

/// The biases [columns, 1, places, places] of a row of shifted windows: minus infinity where a pixel does not attend to another. `is_last`: of
/// the last row.
fn mask(window: usize, shift: usize, columns: usize, is_last: bool, device: &Device) -> candle_core::Result<Tensor> {
    let count = window * window;
    let first_end = window - shift;
    let mut values = vec![0f32; columns * count * count];
    for (column, values) in values.chunks_mut(count * count).enumerate() {
        let end = |place: usize| {
            let below = is_last && place / window >= first_end;
            let right = column + 1 == columns && place % window >= first_end;
            (below, right)
        };
        for (pair, value) in values.iter_mut().enumerate() {
            if end(pair / count) != end(pair % count) {
                *value = f32::NEG_INFINITY;
            }
        }
    }
    Tensor::from_vec(values, (columns, 1, count, count), device)
}

/// x with the first `count` values along an axis moved to its end.
fn rolled(x: &Tensor, axis: usize, count: usize) -> candle_core::Result<Tensor> {
    match count {
        0 => Ok(x.clone()),
        _ => {
            let rest = x.dim(axis)? - count;
            Tensor::cat(&[x.narrow(axis, count, rest)?, x.narrow(axis, 0, count)?], axis)
        }
    }
}

/// Makes one pixel of each square of four, with twice the features.
#[derive(Clone, Debug)]
struct Merging {
    norm: LayerNorm,
    reduction: Linear,
}

impl Merging {
    fn new(weights: &Weights, width: usize) -> Result<Self> {
        Ok(Self {
            norm: LayerNorm::new(&weights.pp("norm"), 4 * width, EPSILON)?,
            reduction: Linear::new(&weights.pp("reduction"), 4 * width, 2 * width, false)?,
        })
    }

    /// x [b, height * width, features] with even sides -> [b, height / 2 * width / 2, 2 * features].
    fn forward(&self, x: &Tensor, (height, width): (usize, usize)) -> candle_core::Result<Tensor> {
        let (batch, _, features) = x.dims3()?;
        let squares = x
            .reshape(vec![batch, height / 2, 2, width / 2, 2, features])?
            .permute(vec![0, 1, 3, 4, 2, 5])?
            .contiguous()?
            .reshape((batch, height / 2 * (width / 2), 4 * features))?;
        self.reduction.forward(&self.norm.forward(&squares)?)
    }
}

/// Layers of one size.
#[derive(Clone, Debug)]
struct Stage {
    blocks: Vec<Block>,
    /// Of what the stage gives to the decoder.
    norm: LayerNorm,
    /// To the next stage.
    merging: Option<Merging>,
}

/// The transformer.
#[derive(Clone, Debug)]
pub(super) struct Swin {
    patches: Conv2d,
    norm: LayerNorm,
    stages: Vec<Stage>,
    width: usize,
}

impl Swin {
    /// Reads the transformer, whose tensors begin with `bb.`. Its sizes are those of its tensors: Swin-L has 192 features in the first stage and
    /// 2, 2, 18 and 2 layers.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub(super) fn new(index: &Index, weights: &Weights) -> Result<Self> {
        let (_, width) = channels_of(index, "bb.patch_embed.proj.weight")?;
        let weights = weights.pp("bb");
        let stage = |number: usize| -> Result<Stage> {
            let width = width << number;
            let layers = weights.pp("layers").pp(number);
            let prefix = |block: usize| format!("bb.layers.{number}.blocks.{block}");
            let depth = (0..)
                .take_while(|block| index.contains(&format!("{}.norm1.weight", prefix(*block))))
                .count();
            let block = |block: usize| {
                let prefix = prefix(block);
                Block::new((index, &prefix), &layers.pp("blocks").pp(block), width, block % 2 == 1)
            };
            Ok(Stage {
                blocks: (0..depth).map(block).collect::<Result<_>>()?,
                norm: LayerNorm::new(&weights.pp(format!("norm{number}")), width, EPSILON)?,
                merging: match number + 1 < STAGES {
                    true => Some(Merging::new(&layers.pp("downsample"), width)?),
                    false => None,
                },
            })
        };
        Ok(Self {
            patches: Conv2d::new(&weights.pp("patch_embed.proj"), 3, width, PATCH, PATCH, 0)?,
            norm: LayerNorm::new(&weights.pp("patch_embed.norm"), width, EPSILON)?,
            stages: (0..STAGES).map(stage).collect::<Result<_>>()?,
            width,
        })
    }

    /// The features of the stages.
    pub(super) fn widths(&self) -> [usize; STAGES] {
        std::array::from_fn(|stage| self.width << stage)
    }

    /// The features of images [b, 3, height, width], whose sides are multiples of 32, after each stage: [b, features, height / 4, width / 4], then
    /// twice as many features in half the height and width, and so on.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(&self, images: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        let patches = self.patches.forward(images)?;
        let (batch, _, mut height, mut width) = patches.dims4()?;
        let mut x = self.norm.forward(&to_tokens(&patches)?)?;
        let mut results = Vec::with_capacity(self.stages.len());
        for stage in &self.stages {
            for block in &stage.blocks {
                x = block.forward(&x, (height, width))?;
            }
            let features = x.dim(D::Minus1)?;
            results.push(to_image(&stage.norm.forward(&x)?, &[batch, features, height, width])?);
            if let Some(merging) = &stage.merging {
                x = merging.forward(&x, (height, width))?;
                (height, width) = (height / 2, width / 2);
            }
        }
        Ok(results)
    }
}
