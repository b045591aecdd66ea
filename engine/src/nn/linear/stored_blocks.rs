//! Blocks of 32 weights of a row in each stored form, as vectors.

use crate::nn::cpu::Simd;
use crate::quant::{Q4_K_BYTES, Q6_K_BYTES, Q8_0_BYTES, f16_to_f32, q4_k_factors, q6_k_scales, q8_0_scale};

/// Weights of a block.
pub(super) const BLOCK: usize = 32;
/// Weights of a group, whose scales are read together.
pub(super) const GROUP: usize = 256;
/// Weights of a row whose products are summed at once: those of all outputs of a tile stay in the L1 cache.
pub(super) const CHUNK: usize = 1024;
/// Outputs of a tile: their products share the loads of the input.
pub(super) const TILE: usize = 4;
/// Blocks of a group.
const BLOCKS: usize = GROUP / BLOCK;
/// The most vectors of a block.
const VECTORS: usize = BLOCK / 4;

/// The weights [outputs, inputs] of a layer in blocks.
pub(super) trait WeightBlocks: Copy {
    /// Whether each block has a scale.
    const HAS_SCALE: bool;
    /// Whether each block has a minimum, which is subtracted.
    const HAS_MIN: bool;

    /// The codes of the block that begins at this input, whose group has these factors. `S` has its vectors in the first `BLOCK / S::LANES`
    /// elements.
    fn load<S: Simd>(self, output: usize, input: usize, factors: &Factors) -> [S::V; VECTORS];
    /// The factors of the first `count` blocks of the group that begins at this input.
    #[inline(always)]
    fn factors(self, _output: usize, _input: usize, _count: usize) -> Factors {
        NO_FACTORS
    }
    /// The scale of a row.
    #[inline(always)]
    fn row_scale(self, _output: usize) -> f32 {
        1.0
    }
    /// A weight after the last whole block, without the row's scale. Rows of blocks with factors have none.
    #[inline(always)]
    fn number(self, _output: usize, _input: usize) -> f32 {
        0.0
    }
}

/// Two numbers for each block of a group: its scale and its minimum; of `q6_k`, the scales of its two halves.
pub(super) type Factors = ([f32; BLOCKS], [f32; BLOCKS]);

/// The factors of formats whose blocks have none.
pub(super) const NO_FACTORS: Factors = ([1.0; BLOCKS], [0.0; BLOCKS]);

/// The vectors of a block: the expression, for `at` the first of the numbers of each. A macro, because a closure would be compiled without the
/// instruction set of its caller.
macro_rules! vectors {
    ($S:ident, $at:ident => $load:expr) => {{
        let mut loaded = [$S::splat(0.0); VECTORS];
        for (index, v) in loaded.iter_mut().take(BLOCK / $S::LANES).enumerate() {
            let $at = index * $S::LANES;
            *v = $load;
        }
        loaded
    }};
}

/// Numbers in bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Bf16Blocks<'a> {
    pub(super) numbers: &'a [[u8; 2]],
    pub(super) inputs: usize,
}

impl WeightBlocks for Bf16Blocks<'_> {
    const HAS_SCALE: bool = false;
    const HAS_MIN: bool = false;

    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(self, output: usize, input: usize, _: &Factors) -> [S::V; VECTORS] {
        let block = &self.numbers[output * self.inputs + input..][..BLOCK];
        // SAFETY: the vectors of a block are inside it.
        vectors!(S, at => unsafe { S::load_bf16(block.as_ptr().add(at)) })
    }
    #[inline(always)]
    fn number(self, output: usize, input: usize) -> f32 {
        let bits = u16::from_le_bytes(self.numbers[output * self.inputs + input]);
        f32::from_bits(u32::from(bits) << 16)
    }
}

/// Numbers in half precision.
#[derive(Clone, Copy)]
pub(super) struct F16Blocks<'a> {
    pub(super) numbers: &'a [[u8; 2]],
    pub(super) inputs: usize,
}

impl WeightBlocks for F16Blocks<'_> {
    const HAS_SCALE: bool = false;
    const HAS_MIN: bool = false;

    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(self, output: usize, input: usize, _: &Factors) -> [S::V; VECTORS] {
        let block = &self.numbers[output * self.inputs + input..][..BLOCK];
        // SAFETY: the vectors of a block are inside it.
        vectors!(S, at => unsafe { S::load_f16(block.as_ptr().add(at)) })
    }
    #[inline(always)]
    fn number(self, output: usize, input: usize) -> f32 {
        let [low, high] = self.numbers[output * self.inputs + input];
        f16_to_f32(low, high)
    }
}

/// Bytes with a scale for each row.
#[derive(Clone, Copy)]
pub(super) struct Int8Blocks<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f32],
    pub(super) inputs: usize,
}

impl WeightBlocks for Int8Blocks<'_> {
    const HAS_SCALE: bool = false;
    const HAS_MIN: bool = false;

    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(self, output: usize, input: usize, _: &Factors) -> [S::V; VECTORS] {
        let block = &self.codes[output * self.inputs + input..][..BLOCK];
        // SAFETY: the vectors of a block are inside it.
        vectors!(S, at => S::sub(unsafe { S::load_u8(block.as_ptr().add(at)) }, S::splat(128.0)))
    }
    #[inline(always)]
    fn row_scale(self, output: usize) -> f32 {
        self.scales[output]
    }
    #[inline(always)]
    fn number(self, output: usize, input: usize) -> f32 {
        f32::from(self.codes[output * self.inputs + input]) - 128.0
    }
}

/// Blocks of `q8_0`.
#[derive(Clone, Copy)]
pub(super) struct Q8Blocks<'a> {
    pub(super) blocks: &'a [[u8; Q8_0_BYTES]],
    /// Blocks of a row.
    pub(super) per_row: usize,
}

impl WeightBlocks for Q8Blocks<'_> {
    const HAS_SCALE: bool = true;
    const HAS_MIN: bool = false;

    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(self, output: usize, input: usize, _: &Factors) -> [S::V; VECTORS] {
        let codes = &self.blocks[output * self.per_row + input / BLOCK][2..];
        // SAFETY: the vectors of a block are inside its 32 codes.
        vectors!(S, at => unsafe { S::load_i8(codes.as_ptr().add(at)) })
    }
    #[inline(always)]
    fn factors(self, output: usize, input: usize, count: usize) -> Factors {
        let blocks = &self.blocks[output * self.per_row + input / BLOCK..][..count];
        let (mut scales, minima) = NO_FACTORS;
        for (scale, block) in scales.iter_mut().zip(blocks) {
            *scale = q8_0_scale(block);
        }
        (scales, minima)
    }
}

/// Blocks of `q4_k`.
#[derive(Clone, Copy)]
pub(super) struct Q4KBlocks<'a> {
    pub(super) blocks: &'a [[u8; Q4_K_BYTES]],
    /// Blocks of 256 weights of a row.
    pub(super) per_row: usize,
}

impl WeightBlocks for Q4KBlocks<'_> {
    const HAS_SCALE: bool = true;
    const HAS_MIN: bool = true;

    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(self, output: usize, input: usize, _: &Factors) -> [S::V; VECTORS] {
        let part = input % GROUP / BLOCK;
        let codes = &self.blocks[output * self.per_row + input / GROUP][16 + part / 2 * BLOCK..][..BLOCK];
        match part % 2 {
            // SAFETY: the vectors of a part are inside its 32 bytes.
            0 => vectors!(S, at => unsafe { S::load_low(codes.as_ptr().add(at)) }),
            // SAFETY: as above.
            _ => vectors!(S, at => unsafe { S::load_high(codes.as_ptr().add(at)) }),
        }
    }
    #[inline(always)]
    fn factors(self, output: usize, input: usize, _: usize) -> Factors {
        let [scales, minima] = q4_k_factors(&self.blocks[output * self.per_row + input / GROUP]);
        (scales, minima)
    }
}

/// Blocks of `q6_k`.
#[derive(Clone, Copy)]
pub(super) struct Q6KBlocks<'a> {
    pub(super) blocks: &'a [[u8; Q6_K_BYTES]],
    /// Blocks of 256 weights of a row.
    pub(super) per_row: usize,
}

impl WeightBlocks for Q6KBlocks<'_> {
    // A scale is for 16 weights, half a block: it is part of the loaded numbers.
    const HAS_SCALE: bool = false;
    const HAS_MIN: bool = false;

    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(self, output: usize, input: usize, (first, second): &Factors) -> [S::V; VECTORS] {
        let block = &self.blocks[output * self.per_row + input / GROUP];
        // Two halves of four parts of 32 weights, as `StoredRows::read` reads them.
        let (which, part) = (input % GROUP / 128, input % 128 / BLOCK);
        let low = &block[64 * which + 32 * (part & 1)..][..BLOCK];
        let high = &block[128 + 32 * which..][..BLOCK];
        let scales = [S::splat(first[4 * which + part]), S::splat(second[4 * which + part])];
        vectors!(S, at => {
            // SAFETY: the vectors of a part are inside its 32 bytes.
            let (low, high) = unsafe {
                let low = low.as_ptr().add(at);
                let low = if part < 2 { S::load_low(low) } else { S::load_high(low) };
                (low, S::load_pairs(high.as_ptr().add(at), 2 * part as u32))
            };
            let code = S::mul_add(high, S::splat(16.0), low);
            S::mul(S::sub(code, S::splat(32.0)), scales[at / 16])
        })
    }
    #[inline(always)]
    fn factors(self, output: usize, input: usize, _: usize) -> Factors {
        let scales = q6_k_scales(&self.blocks[output * self.per_row + input / GROUP]);
        let (mut first, mut second) = NO_FACTORS;
        for (block, [a, b]) in scales.as_chunks().0.iter().enumerate() {
            (first[block], second[block]) = (*a, *b);
        }
        (first, second)
    }
}

/// The codes and factors of a chunk of the rows of a tile: decoded once, and multiplied with many rows of inputs.
pub(super) struct Decoded {
    codes: [[f32; CHUNK]; TILE],
    factors: [[Factors; CHUNK / GROUP]; TILE],
}

impl Decoded {
    pub(super) fn new() -> Self {
        Self {
            codes: [[0.0; CHUNK]; TILE],
            factors: [[NO_FACTORS; CHUNK / GROUP]; TILE],
        }
    }

    /// Decodes whole blocks of an output: `length` weights from an input on.
    #[expect(unsafe_code, reason = "stores of vectors take raw pointers")]
    #[inline(always)]
    pub(super) fn decode<S: Simd, B: WeightBlocks>(
        &mut self,
        blocks: B,
        slot: usize,
        [output, input, length]: [usize; 3],
    ) {
        for group in 0..length.div_ceil(GROUP) {
            let at = group * GROUP;
            let count = BLOCKS.min((length - at) / BLOCK);
            let factors = blocks.factors(output, input + at, count);
            let codes = &mut self.codes[slot][at..at + count * BLOCK];
            for (index, to) in codes.chunks_exact_mut(BLOCK).enumerate() {
                let loaded = blocks.load::<S>(output, input + at + index * BLOCK, &factors);
                for (v, to) in loaded.into_iter().zip(to.chunks_exact_mut(S::LANES)) {
                    // SAFETY: `to` has as many elements as the vector.
                    unsafe { S::store(to.as_mut_ptr(), v) };
                }
            }
            self.factors[slot][group] = factors;
        }
    }

    /// As the blocks of a format, with the number in the tile as output.
    #[inline(always)]
    pub(super) fn view<B: WeightBlocks>(&self) -> DecodedBlocks<'_, B> {
        DecodedBlocks {
            decoded: self,
            format: std::marker::PhantomData,
        }
    }
}

/// Decoded blocks that are multiplied as those of a format.
pub(super) struct DecodedBlocks<'a, B> {
    decoded: &'a Decoded,
    format: std::marker::PhantomData<B>,
}

impl<B> Clone for DecodedBlocks<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for DecodedBlocks<'_, B> {}

impl<B: WeightBlocks> WeightBlocks for DecodedBlocks<'_, B> {
    const HAS_SCALE: bool = B::HAS_SCALE;
    const HAS_MIN: bool = B::HAS_MIN;

    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(self, output: usize, input: usize, _: &Factors) -> [S::V; VECTORS] {
        let block = &self.decoded.codes[output][input..][..BLOCK];
        // SAFETY: the vectors of a block are inside it.
        vectors!(S, at => unsafe { S::load(block.as_ptr().add(at)) })
    }
    #[inline(always)]
    fn factors(self, output: usize, input: usize, _: usize) -> Factors {
        self.decoded.factors[output][input / GROUP]
    }
    #[inline(always)]
    fn number(self, output: usize, input: usize) -> f32 {
        self.decoded.codes[output][input]
    }
}
