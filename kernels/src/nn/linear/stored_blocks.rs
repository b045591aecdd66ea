//! Blocks of 32 weights of a row in each stored form, as vectors.

use crate::nn::cpu::Simd;
use crate::quant::{Q4_K_BYTES, Q6_K_BYTES, Q8_0_BYTES, f16_to_f32, q4_k_codes, q6_k_codes};

/// Weights of a block.
pub(super) const BLOCK: usize = 32;
/// Weights of a group, whose scales are read together.
pub(super) const GROUP: usize = 256;
/// Weights of a row whose products are summed at once: those of all outputs of a tile stay in the L1 cache.
pub(super) const CHUNK: usize = 1024;
/// Outputs of a tile: their products share the loads of the input.
pub(super) const TILE: usize = 4;
/// Blocks of a group.
pub(super) const BLOCKS: usize = GROUP / BLOCK;
/// The most vectors of a block.
const VECTORS: usize = BLOCK / 4;

/// The weights [outputs, inputs] of a layer in blocks.
pub(super) trait WeightBlocks: Copy {
    /// Whether each block has a scale.
    const HAS_SCALE: bool;
    /// Whether each block has a minimum, which is subtracted. Groups of such blocks are whole.
    const HAS_MIN: bool;
    /// Whether each group has a scale.
    const HAS_GROUP_SCALE: bool;
    /// Up to `BLOCKS` stored blocks of a row.
    type Group: Copy;
    /// What is computed once for a group.
    type Factors: Copy + Default;

    /// `count` blocks of a row from this input on, which is a multiple of `GROUP`.
    fn group(self, output: usize, input: usize, count: usize) -> Self::Group;
    /// Prefetches the group at the same place in the next tile. Rows are so short that the CPU's own prefetching starts again for each.
    #[inline(always)]
    fn prefetch<S: Simd>(self, _group: Self::Group) {}
    /// The factors of a group.
    fn factors<S: Simd>(group: Self::Group) -> Self::Factors;
    /// The scale of a group, in every lane.
    #[inline(always)]
    fn group_scale<S: Simd>(_group: Self::Group) -> S::V {
        S::splat(1.0)
    }
    /// The codes of a block of a group. `S` has its vectors in the first `BLOCK / S::LANES` elements.
    fn load<S: Simd>(group: Self::Group, factors: &Self::Factors, block: usize) -> [S::V; VECTORS];
    /// The scale of a block of a group, in every lane.
    #[inline(always)]
    fn scale<S: Simd>(_group: Self::Group, _factors: &Self::Factors, _block: usize) -> S::V {
        S::splat(1.0)
    }
    /// The minima of the blocks of a group.
    #[inline(always)]
    fn minima(_group: Self::Group, _factors: &Self::Factors) -> [f32; BLOCKS] {
        [0.0; BLOCKS]
    }
    /// Whether groups are whole, and `S` multiplies their codes in the order of the 32-bit words in which they are stored ([`order_of_words`]):
    /// fewer instructions than in the order of the inputs.
    #[inline(always)]
    fn has_words<S: Simd>() -> bool {
        false
    }
    /// For [`Self::has_words`]: codes of 64 bytes of a group, a vector for each byte of the words, from their low or their high four bits.
    #[inline(always)]
    fn load_words<S: Simd, const HIGH: bool>(_group: Self::Group, _unit: usize) -> [S::V; 4] {
        [S::splat(0.0); 4]
    }
    /// The scales of the codes of [`Self::load_words`].
    #[inline(always)]
    fn word_scales<S: Simd, const HIGH: bool>(_group: Self::Group, _factors: &Self::Factors, _unit: usize) -> S::V {
        S::splat(1.0)
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

/// Lanes for which [`order_of_words`] is made.
const WORD_LANES: usize = 16;
/// Inputs of the codes of 64 bytes.
pub(super) const UNIT: usize = 4 * BLOCK;

/// Which input is at a place of the order of [`WeightBlocks::has_words`], from the first input of 128 on. Their codes are in 64 bytes, which are loaded
/// as 16 words: those of two blocks in the low four bits, and after 32 bytes of two more.
pub(super) const fn order_of_words() -> [usize; UNIT] {
    let mut order = [0; UNIT];
    let mut place = 0;
    while place < UNIT {
        let (high, byte, lane) = (place / 64, place / WORD_LANES % 4, place % WORD_LANES);
        order[place] = 64 * (lane / 8) + BLOCK * high + 4 * (lane % 8) + byte;
        place += 1;
    }
    order
}

/// The two blocks, of a group, whose codes are in the lanes of [`WeightBlocks::load_words`].
#[inline(always)]
const fn blocks_of_words(unit: usize, high: bool) -> [usize; 2] {
    let first = 4 * unit + high as usize;
    [first, first + 2]
}

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

/// Prefetches `length` bytes, `distance` bytes after this one. They may lie behind the end of the weight.
#[inline(always)]
fn prefetch<S: Simd>(from: *const u8, distance: usize, length: usize) {
    for line in (0..length).step_by(64) {
        S::prefetch(from.wrapping_add(distance + line).cast());
    }
}

/// Bytes as floats.
#[expect(unsafe_code, reason = "loads and stores of vectors take raw pointers")]
#[inline(always)]
fn floats<S: Simd>(bytes: &[u8; 2 * BLOCKS], is_signed: bool) -> [f32; 2 * BLOCKS] {
    let mut floats = [0f32; 2 * BLOCKS];
    for at in (0..2 * BLOCKS).step_by(S::LANES) {
        // SAFETY: no vector has more lanes than there are numbers, which are a multiple of them.
        unsafe {
            let from = bytes.as_ptr().add(at);
            let v = if is_signed { S::load_i8(from) } else { S::load_u8(from) };
            S::store(floats.as_mut_ptr().add(at), v);
        }
    }
    floats
}

/// Numbers in bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Bf16Blocks<'a> {
    pub(super) numbers: &'a [[u8; 2]],
    pub(super) inputs: usize,
}

impl<'a> WeightBlocks for Bf16Blocks<'a> {
    const HAS_SCALE: bool = false;
    const HAS_MIN: bool = false;
    const HAS_GROUP_SCALE: bool = false;
    type Group = &'a [[[u8; 2]; BLOCK]];
    type Factors = ();

    #[inline(always)]
    fn group(self, output: usize, input: usize, count: usize) -> Self::Group {
        &self.numbers[output * self.inputs + input..].as_chunks().0[..count]
    }
    #[inline(always)]
    fn prefetch<S: Simd>(self, group: Self::Group) {
        prefetch::<S>(group.as_ptr().cast(), TILE * self.inputs * 2, GROUP * 2);
    }
    #[inline(always)]
    fn factors<S: Simd>(_: Self::Group) {}
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(group: Self::Group, (): &(), block: usize) -> [S::V; VECTORS] {
        let numbers = &group[block];
        // SAFETY: the vectors of a block are inside it.
        vectors!(S, at => unsafe { S::load_bf16(numbers.as_ptr().add(at)) })
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

impl<'a> WeightBlocks for F16Blocks<'a> {
    const HAS_SCALE: bool = false;
    const HAS_MIN: bool = false;
    const HAS_GROUP_SCALE: bool = false;
    type Group = &'a [[[u8; 2]; BLOCK]];
    type Factors = ();

    #[inline(always)]
    fn group(self, output: usize, input: usize, count: usize) -> Self::Group {
        &self.numbers[output * self.inputs + input..].as_chunks().0[..count]
    }
    #[inline(always)]
    fn prefetch<S: Simd>(self, group: Self::Group) {
        prefetch::<S>(group.as_ptr().cast(), TILE * self.inputs * 2, GROUP * 2);
    }
    #[inline(always)]
    fn factors<S: Simd>(_: Self::Group) {}
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(group: Self::Group, (): &(), block: usize) -> [S::V; VECTORS] {
        let numbers = &group[block];
        // SAFETY: the vectors of a block are inside it.
        vectors!(S, at => unsafe { S::load_f16(numbers.as_ptr().add(at)) })
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

impl<'a> WeightBlocks for Int8Blocks<'a> {
    const HAS_SCALE: bool = false;
    const HAS_MIN: bool = false;
    const HAS_GROUP_SCALE: bool = false;
    type Group = &'a [[u8; BLOCK]];
    type Factors = ();

    #[inline(always)]
    fn group(self, output: usize, input: usize, count: usize) -> Self::Group {
        &self.codes[output * self.inputs + input..].as_chunks().0[..count]
    }
    #[inline(always)]
    fn prefetch<S: Simd>(self, group: Self::Group) {
        prefetch::<S>(group.as_ptr().cast(), TILE * self.inputs, GROUP);
    }
    #[inline(always)]
    fn factors<S: Simd>(_: Self::Group) {}
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(group: Self::Group, (): &(), block: usize) -> [S::V; VECTORS] {
        let codes = &group[block];
        // SAFETY: the vectors of a block are inside it.
        vectors!(S, at => S::sub(unsafe { S::load_u8(codes.as_ptr().add(at)) }, S::splat(128.0)))
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

impl<'a> WeightBlocks for Q8Blocks<'a> {
    const HAS_SCALE: bool = true;
    const HAS_MIN: bool = false;
    const HAS_GROUP_SCALE: bool = false;
    type Group = &'a [[u8; Q8_0_BYTES]];
    type Factors = ();

    #[inline(always)]
    fn group(self, output: usize, input: usize, count: usize) -> Self::Group {
        &self.blocks[output * self.per_row + input / BLOCK..][..count]
    }
    #[inline(always)]
    fn prefetch<S: Simd>(self, group: Self::Group) {
        prefetch::<S>(
            group.as_ptr().cast(),
            TILE * self.per_row * Q8_0_BYTES,
            BLOCKS * Q8_0_BYTES,
        );
    }
    #[inline(always)]
    fn factors<S: Simd>(_: Self::Group) {}
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(group: Self::Group, (): &(), block: usize) -> [S::V; VECTORS] {
        let codes = &group[block][2..];
        // SAFETY: the vectors of a block are inside its 32 codes.
        vectors!(S, at => unsafe { S::load_i8(codes.as_ptr().add(at)) })
    }
    #[inline(always)]
    fn scale<S: Simd>(group: Self::Group, (): &(), block: usize) -> S::V {
        S::splat_f16([group[block][0], group[block][1]])
    }
}

/// Blocks of `q4_k`.
#[derive(Clone, Copy)]
pub(super) struct Q4KBlocks<'a> {
    pub(super) blocks: &'a [[u8; Q4_K_BYTES]],
    /// Blocks of 256 weights of a row.
    pub(super) per_row: usize,
}

impl<'a> WeightBlocks for Q4KBlocks<'a> {
    const HAS_SCALE: bool = true;
    const HAS_MIN: bool = true;
    const HAS_GROUP_SCALE: bool = true;
    type Group = &'a [u8; Q4_K_BYTES];
    /// The codes of the scales of the blocks, and those of their minima.
    type Factors = [f32; 2 * BLOCKS];

    #[inline(always)]
    fn group(self, output: usize, input: usize, _: usize) -> Self::Group {
        &self.blocks[output * self.per_row + input / GROUP]
    }
    #[inline(always)]
    fn prefetch<S: Simd>(self, group: Self::Group) {
        prefetch::<S>(group.as_ptr(), TILE * self.per_row * Q4_K_BYTES, Q4_K_BYTES);
    }
    #[inline(always)]
    fn factors<S: Simd>(group: Self::Group) -> Self::Factors {
        floats::<S>(&q4_k_codes(group), false)
    }
    #[inline(always)]
    fn group_scale<S: Simd>(group: Self::Group) -> S::V {
        S::splat_f16([group[0], group[1]])
    }
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(group: Self::Group, _: &Self::Factors, block: usize) -> [S::V; VECTORS] {
        let codes = &group[16 + block / 2 * BLOCK..][..BLOCK];
        match block % 2 {
            // SAFETY: the vectors of a block are inside its 32 bytes.
            0 => vectors!(S, at => unsafe { S::load_low(codes.as_ptr().add(at)) }),
            // SAFETY: as above.
            _ => vectors!(S, at => unsafe { S::load_high(codes.as_ptr().add(at)) }),
        }
    }
    #[inline(always)]
    fn scale<S: Simd>(_: Self::Group, codes: &Self::Factors, block: usize) -> S::V {
        S::splat(codes[block])
    }
    #[inline(always)]
    fn has_words<S: Simd>() -> bool {
        S::LANES == WORD_LANES
    }
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load_words<S: Simd, const HIGH: bool>(group: Self::Group, unit: usize) -> [S::V; 4] {
        let codes = group[16 + 64 * unit..][..64].as_ptr();
        // SAFETY: the 16 words are inside the 64 bytes.
        unsafe {
            match HIGH {
                false => [
                    S::load_four::<0>(codes),
                    S::load_four::<8>(codes),
                    S::load_four::<16>(codes),
                    S::load_four::<24>(codes),
                ],
                true => [
                    S::load_four::<4>(codes),
                    S::load_four::<12>(codes),
                    S::load_four::<20>(codes),
                    S::load_four::<28>(codes),
                ],
            }
        }
    }
    #[inline(always)]
    fn word_scales<S: Simd, const HIGH: bool>(_: Self::Group, codes: &Self::Factors, unit: usize) -> S::V {
        let [first, second] = blocks_of_words(unit, HIGH);
        S::halves(codes[first], codes[second])
    }
    #[inline(always)]
    fn minima(group: Self::Group, codes: &Self::Factors) -> [f32; BLOCKS] {
        let scale = f16_to_f32(group[2], group[3]);
        let mut minima = [0f32; BLOCKS];
        for block in 0..BLOCKS {
            minima[block] = scale * codes[BLOCKS + block];
        }
        minima
    }
}

/// Blocks of `q6_k`.
#[derive(Clone, Copy)]
pub(super) struct Q6KBlocks<'a> {
    pub(super) blocks: &'a [[u8; Q6_K_BYTES]],
    /// Blocks of 256 weights of a row.
    pub(super) per_row: usize,
}

impl<'a> WeightBlocks for Q6KBlocks<'a> {
    // A scale is for 16 weights, half a block: it is part of the loaded numbers.
    const HAS_SCALE: bool = false;
    const HAS_MIN: bool = false;
    const HAS_GROUP_SCALE: bool = true;
    type Group = &'a [u8; Q6_K_BYTES];
    /// The codes of the scales of every 16 weights.
    type Factors = [f32; 2 * BLOCKS];

    #[inline(always)]
    fn group(self, output: usize, input: usize, _: usize) -> Self::Group {
        &self.blocks[output * self.per_row + input / GROUP]
    }
    #[inline(always)]
    fn prefetch<S: Simd>(self, group: Self::Group) {
        prefetch::<S>(group.as_ptr(), TILE * self.per_row * Q6_K_BYTES, Q6_K_BYTES);
    }
    #[inline(always)]
    fn factors<S: Simd>(group: Self::Group) -> Self::Factors {
        floats::<S>(q6_k_codes(group), true)
    }
    #[inline(always)]
    fn group_scale<S: Simd>(group: Self::Group) -> S::V {
        S::splat_f16([group[208], group[209]])
    }
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>(group: Self::Group, scales: &Self::Factors, block: usize) -> [S::V; VECTORS] {
        // Two halves of four parts of 32 weights, as `StoredRows::read` reads them.
        let (which, part) = (block / 4, block % 4);
        let low = &group[64 * which + 32 * (part & 1)..][..BLOCK];
        let high = &group[128 + 32 * which..][..BLOCK];
        // SAFETY: both have 32 bytes.
        let mut codes = unsafe { S::load_six(low.as_ptr(), 4 * (part as i32 / 2), high.as_ptr(), 2 * part as i32) };
        for (index, code) in codes.iter_mut().take(BLOCK / S::LANES).enumerate() {
            *code = S::mul(*code, S::splat(scales[2 * block + index * S::LANES / 16]));
        }
        codes
    }
}

/// The codes and factors of a chunk of the rows of a tile: decoded once, and multiplied with many rows of inputs.
// The codes begin at a cache line, so that no vector of them spans two.
#[repr(C, align(64))]
pub(super) struct Decoded {
    codes: [[[f32; BLOCK]; CHUNK / BLOCK]; TILE],
    scales: [[f32; CHUNK / BLOCK]; TILE],
    minima: [[[f32; BLOCKS]; CHUNK / GROUP]; TILE],
    group_scales: [[f32; CHUNK / GROUP]; TILE],
}

impl Decoded {
    pub(super) fn new() -> Self {
        Self {
            codes: [[[0.0; BLOCK]; CHUNK / BLOCK]; TILE],
            scales: [[1.0; CHUNK / BLOCK]; TILE],
            minima: [[[0.0; BLOCKS]; CHUNK / GROUP]; TILE],
            group_scales: [[1.0; CHUNK / GROUP]; TILE],
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
        for first in (0..length / BLOCK).step_by(BLOCKS) {
            let count = BLOCKS.min(length / BLOCK - first);
            let group = blocks.group(output, input + first * BLOCK, count);
            let factors = B::factors::<S>(group);
            if B::has_words::<S>() {
                for unit in 0..2 {
                    self.store_words::<S>(slot, first + 4 * unit, B::load_words::<S, false>(group, unit));
                    self.store_words::<S>(slot, first + 4 * unit + 2, B::load_words::<S, true>(group, unit));
                }
            }
            for block in 0..count {
                if B::HAS_SCALE {
                    let scale = B::scale::<S>(group, &factors, block);
                    // SAFETY: one element is written.
                    unsafe { S::store_first(&raw mut self.scales[slot][first + block], scale, 1) };
                }
                if B::has_words::<S>() {
                    continue;
                }
                let loaded = B::load::<S>(group, &factors, block);
                let to = &mut self.codes[slot][first + block];
                for (v, to) in loaded.into_iter().zip(to.chunks_exact_mut(S::LANES)) {
                    // SAFETY: `to` has as many elements as the vector.
                    unsafe { S::store(to.as_mut_ptr(), v) };
                }
            }
            if B::HAS_GROUP_SCALE {
                // SAFETY: one element is written.
                unsafe {
                    S::store_first(
                        &raw mut self.group_scales[slot][first / BLOCKS],
                        B::group_scale::<S>(group),
                        1,
                    )
                };
            }
            if B::HAS_MIN {
                self.minima[slot][first / BLOCKS] = B::minima(group, &factors);
            }
        }
    }

    /// Stores four vectors, one for each byte of words, in two blocks from this one on.
    #[expect(unsafe_code, reason = "stores of vectors take raw pointers")]
    #[inline(always)]
    fn store_words<S: Simd>(&mut self, slot: usize, block: usize, vectors: [S::V; 4]) {
        let to = self.codes[slot][block..block + 2].as_flattened_mut();
        for (v, to) in vectors.into_iter().zip(to.chunks_exact_mut(S::LANES)) {
            // SAFETY: `to` has as many elements as the vector.
            unsafe { S::store(to.as_mut_ptr(), v) };
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

impl<'a, B: WeightBlocks> WeightBlocks for DecodedBlocks<'a, B> {
    const HAS_SCALE: bool = B::HAS_SCALE;
    const HAS_MIN: bool = B::HAS_MIN;
    const HAS_GROUP_SCALE: bool = B::HAS_GROUP_SCALE;
    /// Codes, scales, minima, and the scale of the group.
    type Group = (&'a [[f32; BLOCK]], &'a [f32], &'a [f32; BLOCKS], f32);
    type Factors = ();

    #[inline(always)]
    fn group(self, output: usize, input: usize, count: usize) -> Self::Group {
        let first = input / BLOCK;
        let codes = &self.decoded.codes[output][first..][..count];
        let scales = &self.decoded.scales[output][first..][..count];
        let group = input / GROUP;
        (
            codes,
            scales,
            &self.decoded.minima[output][group],
            self.decoded.group_scales[output][group],
        )
    }
    #[inline(always)]
    fn factors<S: Simd>(_: Self::Group) {}
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load<S: Simd>((codes, ..): Self::Group, (): &(), block: usize) -> [S::V; VECTORS] {
        let codes = &codes[block];
        // SAFETY: the vectors of a block are inside it.
        vectors!(S, at => unsafe { S::load(codes.as_ptr().add(at)) })
    }
    #[inline(always)]
    fn scale<S: Simd>((_, scales, ..): Self::Group, (): &(), block: usize) -> S::V {
        S::splat(scales[block])
    }
    #[inline(always)]
    fn has_words<S: Simd>() -> bool {
        B::has_words::<S>()
    }
    #[expect(unsafe_code, reason = "loads of vectors take raw pointers")]
    #[inline(always)]
    fn load_words<S: Simd, const HIGH: bool>((codes, ..): Self::Group, unit: usize) -> [S::V; 4] {
        let first = 4 * unit + 2 * usize::from(HIGH);
        let codes = codes[first..first + 2].as_flattened();
        let mut vectors = [S::splat(0.0); 4];
        for (v, codes) in vectors.iter_mut().zip(codes.chunks_exact(S::LANES)) {
            // SAFETY: `codes` has as many elements as the vector.
            *v = unsafe { S::load(codes.as_ptr()) };
        }
        vectors
    }
    #[inline(always)]
    fn word_scales<S: Simd, const HIGH: bool>((_, scales, ..): Self::Group, (): &(), unit: usize) -> S::V {
        let [first, second] = blocks_of_words(unit, HIGH);
        S::halves(scales[first], scales[second])
    }
    #[inline(always)]
    fn group_scale<S: Simd>((.., scale): Self::Group) -> S::V {
        S::splat(scale)
    }
    #[inline(always)]
    fn minima((_, _, minima, _): Self::Group, (): &()) -> [f32; BLOCKS] {
        *minima
    }
    #[inline(always)]
    fn number(self, output: usize, input: usize) -> f32 {
        self.decoded.codes[output][input / BLOCK][input % BLOCK]
    }
}
