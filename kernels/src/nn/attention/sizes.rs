//! The shapes of attention's operands, and its heads as matrices.

use super::kernel::Bias;
use crate::nn::cpu::Mat;
use candle_core::Shape;

/// The sizes of the operands.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) width: usize,
}

impl Sizes {
    /// Checks the shapes. `heads` and `kv_heads` are those of [`Attention`](super::Attention).
    pub(super) fn new([heads, kv_heads]: [usize; 2], q: &Shape, k: &Shape, v: &Shape) -> candle_core::Result<Self> {
        let ((batch, queries, features), (k_batch, keys, k_features)) = (q.dims3()?, k.dims3()?);
        let grouped = kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads);
        let fits = k.dims() == v.dims() && k_batch == batch && keys > 0;
        if !grouped || !fits || features % heads != 0 || features / heads * kv_heads != k_features {
            candle_core::bail!(
                "attention with {heads} heads and {kv_heads} key-value heads: the shapes q {:?}, k {:?} and v {:?} do not match",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        Ok(Self {
            batch,
            queries,
            keys,
            heads,
            kv_heads,
            width: features / heads,
        })
    }

    pub(super) fn check_bias(&self, bias: &[usize]) -> candle_core::Result<()> {
        let scores = [self.batch, self.heads, self.queries, self.keys];
        let fits = bias.len() == 4 && bias[3] == self.keys;
        if !fits
            || bias
                .iter()
                .zip(scores)
                .any(|(size, score)| *size != 1 && *size != score)
        {
            candle_core::bail!("attention: a bias of shape {bias:?} does not match scores of shape {scores:?}");
        }
        Ok(())
    }

    pub(super) fn features(&self) -> usize {
        self.heads * self.width
    }

    /// The key-value head, counted over the batch, of query head `head`, also counted over the batch.
    pub(super) fn kv_head(&self, head: usize) -> usize {
        let (b, h) = (head / self.heads, head % self.heads);
        b * self.kv_heads + h / (self.heads / self.kv_heads)
    }

    /// Query head `head`, counted over the batch, as a matrix [queries, width].
    pub(super) fn query_head_matrix<'a>(&self, data: &'a [f32], head: usize) -> Mat<'a> {
        head_of(data, head, [self.queries, self.heads, self.width])
    }

    /// Head `head` of keys or values, counted over the batch, as a matrix [keys, width].
    pub(super) fn kv_head_matrix<'a>(&self, data: &'a [f32], head: usize) -> Mat<'a> {
        head_of(data, head, [self.keys, self.kv_heads, self.width])
    }

    /// The bias of the scores of a head. `dims` is the shape of `bias`.
    pub(super) fn bias_of<'a>(&self, bias: &'a [f32], dims: &[usize], head: usize) -> Bias<'a> {
        let size = |axis: usize| dims.get(axis).copied().unwrap_or(1);
        let at = |i: usize, axis: usize| if size(axis) == 1 { 0 } else { i };
        let table = size(2) * size(3);
        let start = (at(head / self.heads, 0) * size(1) + at(head % self.heads, 1)) * table;
        Bias {
            data: &bias[start..start + table],
            per_query: size(2) != 1,
        }
    }
}

/// A head, counted over the batch, of a tensor [b, length, heads * width], as a matrix [length, width].
fn head_of(data: &[f32], head: usize, [length, heads, width]: [usize; 3]) -> Mat<'_> {
    let (b, h) = (head / heads, head % heads);
    let offset = b * length * heads * width + h * width;
    Mat {
        data: data.get(offset..).unwrap_or(&[]),
        rows: length,
        cols: width,
        row_stride: heads * width,
        col_stride: 1,
    }
}
