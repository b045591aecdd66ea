//! Random numbers that are bit-identical to PyTorch's.
//!
//! [`TorchGenerator`] reproduces `torch.Generator("cpu")` of torch 2.15 bit for bit: the same seed gives the same
//! `randn`, `rand`, `randint` and `randperm`. All random numbers that depend on a seed are drawn here, on the CPU, so
//! that an image does not depend on the device that generates it.
//!
//! torch has several code paths with different results. These are reproduced:
//! - `randn` of fewer than 16 numbers: Box-Muller in f64, one pair at a time. The second number of a pair is stored for
//!   the next call. `sin`, `cos` and `log1p` come from the system's math library, as in torch.
//! - `randn` of 16 or more in f32: torch's AVX2 kernel (also chosen on AVX-512 machines), whose logarithm and sine are
//!   the Cephes polynomials evaluated with fused multiply-adds. Reproduced operation by operation, so it gives the
//!   same bits on every machine. (A torch built for ARM uses its math library here and differs in the last bits.)
//! - f16 and bf16: the f32 kernel, rounded, but with fewer draws than f32 if the length is not a multiple of 16.

mod keyed;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use keyed::{generator_for, generator_from_text};

use half::{bf16, f16};

/// The words of the state of a Mersenne Twister (MT19937).
const N: usize = 624;
/// The offset of the word that is mixed into a new one (`m` of MT19937).
const M: usize = 397;
/// The bytes of a state of `torch.Generator("cpu")`, all little-endian: seed u64, `left` i32, 1 (seeded) i32, `next` u64, 624 words as u64,
/// three f64 of which the second is `next_normal`, whether there is one as i32, and zeros.
const STATE_BYTES: usize = 5056;

/// The error of [`TorchGenerator::from_state`]: the bytes are not a generator state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a torch CPU generator state: {0}")]
pub struct BadState(String);

/// A float type for [`TorchGenerator::randn_as`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormalKind {
    /// `torch.float32`
    F32,
    /// `torch.float16`
    F16,
    /// `torch.bfloat16`
    BF16,
}

/// A Mersenne Twister with the distributions of PyTorch's CPU generator.
#[derive(Clone)]
pub struct TorchGenerator {
    seed: u64,
    state: Box<[u32; N]>,
    /// The number of unused words in `state`, plus one, as in torch.
    left: usize,
    /// The index of the next unused word in `state`.
    next: usize,
    /// The second half of the last Box-Muller pair in f64.
    next_normal: Option<f64>,
}

impl std::fmt::Debug for TorchGenerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TorchGenerator")
            .field("seed", &self.seed)
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}

impl TorchGenerator {
    /// The same generator as `torch.Generator("cpu").manual_seed(seed)`. As in torch, only the low 32 bits matter.
    /// A negative Python seed is its two's complement: `-1` is `u64::MAX`, see [`TorchGenerator::manual_seed_signed`].
    #[must_use]
    pub fn manual_seed(seed: u64) -> Self {
        let mut state = Box::new([0u32; N]);
        state[0] = (seed & 0xffff_ffff) as u32;
        for i in 1..N {
            let previous = state[i - 1];
            state[i] = 1_812_433_253u32
                .wrapping_mul(previous ^ (previous >> 30))
                .wrapping_add(i as u32);
        }
        Self {
            seed,
            state,
            left: 1,
            next: 0,
            next_normal: None,
        }
    }

    /// As [`TorchGenerator::manual_seed`], for a Python integer that may be negative.
    #[must_use]
    pub fn manual_seed_signed(seed: i64) -> Self {
        Self::manual_seed(seed as u64)
    }

    /// The seed that the generator was created with.
    #[must_use]
    pub fn initial_seed(&self) -> u64 {
        self.seed
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        self.left -= 1;
        if self.left == 0 {
            self.twist();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// The next 64 random bits: two draws; the first is the upper half.
    pub fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        (high << 32) | u64::from(self.next_u32())
    }

    fn twist(&mut self) {
        let mix = |u: u32, v: u32| {
            let joined = (u & 0x8000_0000) | (v & 0x7fff_ffff);
            (joined >> 1) ^ if v & 1 == 1 { 0x9908_b0df } else { 0 }
        };
        for i in 0..N {
            let twisted = mix(self.state[i], self.state[(i + 1) % N]);
            self.state[i] = self.state[(i + M) % N] ^ twisted;
        }
        self.left = N;
        self.next = 0;
    }

    fn uniform_f32(&mut self) -> f32 {
        (self.next_u32() & 0x00ff_ffff) as f32 * (1.0 / 16_777_216.0)
    }

    fn uniform_f64(&mut self) -> f64 {
        (self.next_u64() & ((1 << 53) - 1)) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// `torch.rand(n)`: f32 in `[0, 1)`, 24 random bits each.
    pub fn rand(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.uniform_f32()).collect()
    }

    /// `torch.rand(n, dtype=torch.float64)`: 53 random bits each.
    pub fn rand_f64(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.uniform_f64()).collect()
    }

    /// `torch.empty(n).uniform_(from, to)` in f32.
    pub fn uniform(&mut self, n: usize, from: f32, to: f32) -> Vec<f32> {
        (0..n)
            .map(|_| {
                // torch's compiler fuses the multiply and the add.
                let value = self.uniform_f32().mul_add(to - from, from);
                if value == to { from } else { value }
            })
            .collect()
    }

    /// `torch.randn(n)` in f32. torch's algorithm depends on the length, so one call here must correspond to one call
    /// in torch.
    pub fn randn(&mut self, n: usize) -> Vec<f32> {
        if n < 16 {
            return (0..n).map(|_| self.normal_f64() as f32).collect();
        }
        let mut data = self.rand(n);
        for block in data.chunks_exact_mut(16) {
            box_muller_16(block);
        }
        if !n.is_multiple_of(16) {
            let tail = &mut data[n - 16..];
            for value in tail.iter_mut() {
                *value = self.uniform_f32();
            }
            box_muller_16(tail);
        }
        data
    }

    /// `torch.randn(n, dtype=…)` for any of the float types that models compute in, as f32 values of that precision.
    pub fn randn_as(&mut self, n: usize, kind: NormalKind) -> Vec<f32> {
        // torch also converts from f64 to the 16-bit types through f32.
        let round = |x: f32| match kind {
            NormalKind::F32 => x,
            NormalKind::F16 => f16::from_f32(x).to_f32(),
            NormalKind::BF16 => bf16::from_f32(x).to_f32(),
        };
        if kind == NormalKind::F32 {
            return self.randn(n);
        }
        if n < 16 {
            return (0..n).map(|_| round(self.normal_f64() as f32)).collect();
        }
        let mut data = vec![0f32; n];
        let aligned_len = n - n % 16;
        for start in (0..aligned_len)
            .step_by(16)
            .chain((!n.is_multiple_of(16)).then(|| n - 16))
        {
            let block = &mut data[start..start + 16];
            for value in block.iter_mut() {
                *value = self.uniform_f32();
            }
            box_muller_16(block);
            for value in block.iter_mut() {
                *value = round(*value);
            }
        }
        data
    }

    /// `torch.randn(n, dtype=torch.float64)`.
    pub fn randn_f64(&mut self, n: usize) -> Vec<f64> {
        if n < 16 {
            return (0..n).map(|_| self.normal_f64()).collect();
        }
        let mut data = self.rand_f64(n);
        for block in data.chunks_exact_mut(16) {
            box_muller_16_f64(block);
        }
        if !n.is_multiple_of(16) {
            let tail = &mut data[n - 16..];
            for value in tail.iter_mut() {
                *value = self.uniform_f64();
            }
            box_muller_16_f64(tail);
        }
        data
    }

    fn normal_f64(&mut self) -> f64 {
        if let Some(normal) = self.next_normal.take() {
            return normal;
        }
        let u1 = self.uniform_f64();
        let u2 = self.uniform_f64();
        let r = (-2.0 * (-u2).ln_1p()).sqrt();
        let theta = 2.0 * std::f64::consts::PI * u1;
        self.next_normal = Some(r * theta.sin());
        r * theta.cos()
    }

    /// `torch.randint(low, high, (n,))`: integers in `[low, high)`. An empty range gives `low` (torch raises).
    pub fn randint(&mut self, low: i64, high: i64, n: usize) -> Vec<i64> {
        let range = (high.wrapping_sub(low) as u64).max(1);
        (0..n)
            .map(|_| {
                let bits = if range >= 1 << 28 {
                    self.next_u64()
                } else {
                    u64::from(self.next_u32())
                };
                ((bits % range) as i64).wrapping_add(low)
            })
            .collect()
    }

    /// `torch.randperm(n)`: the numbers 0 … n-1 in random order.
    pub fn randperm(&mut self, n: usize) -> Vec<i64> {
        let mut order: Vec<i64> = (0..n as i64).collect();
        let use_u64 = n as u64 >= u64::from(u32::MAX) / 20;
        for i in 0..n.saturating_sub(1) {
            let bits = if use_u64 {
                self.next_u64()
            } else {
                u64::from(self.next_u32())
            };
            order.swap(i, i + (bits % (n - i) as u64) as usize);
        }
        order
    }

    /// The state in the exact format of `torch.Generator.get_state()` (5,056 bytes).
    #[must_use]
    pub fn state(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(STATE_BYTES);
        out.extend_from_slice(&self.seed.to_le_bytes());
        out.extend_from_slice(&(self.left as i32).to_le_bytes());
        out.extend_from_slice(&1i32.to_le_bytes());
        out.extend_from_slice(&(self.next as u64).to_le_bytes());
        for word in self.state.iter() {
            out.extend_from_slice(&u64::from(*word).to_le_bytes());
        }
        out.extend_from_slice(&0f64.to_le_bytes());
        out.extend_from_slice(&self.next_normal.unwrap_or(0.0).to_le_bytes());
        out.extend_from_slice(&0f64.to_le_bytes());
        out.extend_from_slice(&i32::from(self.next_normal.is_some()).to_le_bytes());
        out.resize(STATE_BYTES, 0);
        out
    }

    /// Restores a generator from [`TorchGenerator::state`] or from `torch.Generator.get_state()`.
    ///
    /// # Errors
    /// When the length is wrong, or the bytes contain an impossible position or word.
    pub fn from_state(bytes: &[u8]) -> Result<Self, BadState> {
        if bytes.len() != STATE_BYTES {
            return Err(BadState(format!("expected {STATE_BYTES} bytes, found {}", bytes.len())));
        }
        let word64 = |at: usize| {
            let mut raw = [0u8; 8];
            raw.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(raw)
        };
        let left = (word64(8) & 0xffff_ffff) as usize;
        let next = word64(16).min(N as u64 + 1) as usize;
        // A new generator has left = 1 and next = 0. Every draw decrements `left` and increments `next`.
        if !(1..=N).contains(&left) || (left + next != N + 1 && (left, next) != (1, 0)) {
            return Err(BadState(format!("impossible position: left {left}, next {next}")));
        }
        let mut state = Box::new([0u32; N]);
        for (i, word) in state.iter_mut().enumerate() {
            *word =
                u32::try_from(word64(24 + 8 * i)).map_err(|_| BadState(format!("word {i} is wider than 32 bits")))?;
        }
        let normals_at = 24 + 8 * N;
        let has_normal = word64(normals_at + 24) & 0xffff_ffff != 0;
        let next_normal = has_normal.then(|| f64::from_bits(word64(normals_at + 8)));
        Ok(Self {
            seed: word64(0),
            state,
            left,
            next,
            next_normal,
        })
    }
}

/// Box-Muller on 8 pairs of uniforms: `data[j]` and `data[j + 8]` make one pair.
fn box_muller_16(data: &mut [f32]) {
    const TWO_PI: f32 = std::f32::consts::TAU;
    for j in 0..8 {
        let radius = (-2.0 * log(1.0 - data[j])).sqrt();
        let (sin, cos) = sin_cos(TWO_PI * data[j + 8]);
        // `+ 0.0` is the mean. torch adds it too; it turns -0 into 0.
        data[j] = radius * cos + 0.0;
        data[j + 8] = radius * sin + 0.0;
    }
}

fn box_muller_16_f64(data: &mut [f64]) {
    for j in 0..8 {
        let radius = (-2.0 * (1.0 - data[j]).ln()).sqrt();
        let theta = 2.0 * std::f64::consts::PI * data[j + 8];
        data[j] = radius * theta.cos() + 0.0;
        data[j + 8] = radius * theta.sin() + 0.0;
    }
}

/// The Cephes single-precision logarithm for x in (0, 1], with the fused multiply-adds of torch's build.
#[allow(clippy::excessive_precision)]
fn log(x: f32) -> f32 {
    let x = x.max(f32::MIN_POSITIVE);
    let bits = x.to_bits();
    let mut e = ((bits >> 23) as i32 - 0x7f) as f32 + 1.0;
    let mut x = f32::from_bits((bits & !0x7f80_0000) | 0.5f32.to_bits());
    if x < std::f32::consts::FRAC_1_SQRT_2 {
        let mantissa = x;
        e -= 1.0;
        x = (x - 1.0) + mantissa;
    } else {
        x -= 1.0;
    }
    let z = x * x;
    let mut y = 7.037_683_629_2e-2_f32;
    for p in [
        -1.151_461_031_0e-1_f32,
        1.167_699_874_0e-1,
        -1.242_014_084_6e-1,
        1.424_932_278_7e-1,
        -1.666_805_766_5e-1,
        2.000_071_476_5e-1,
        -2.499_999_399_3e-1,
        3.333_333_117_4e-1,
    ] {
        y = y.mul_add(x, p);
    }
    y *= x;
    y = y.mul_add(z, e * -2.121_944_40e-4);
    y = (-z).mul_add(0.5, y);
    e.mul_add(0.693_359_375, x + y)
}

/// The Cephes single-precision sine and cosine for x in [0, 2 pi), with the fused multiply-adds of torch's build.
#[allow(clippy::excessive_precision)]
fn sin_cos(x: f32) -> (f32, f32) {
    let octant = ((x * 1.273_239_544_735_16) as i32 + 1) & !1;
    let y = octant as f32;
    let x = y.mul_add(-0.785_156_25, x);
    let x = y.mul_add(-2.418_756_484_985_351_562_5e-4, x);
    let x = y.mul_add(-3.774_894_977_445_941_08e-8, x);
    let z = x * x;

    let mut c = 2.443_315_711_809_948e-5_f32;
    c = c.mul_add(z, -1.388_731_625_493_765e-3);
    c = c.mul_add(z, 4.166_664_568_298_827e-2);
    c = (c * z).mul_add(z, -(z * 0.5)) + 1.0;

    let mut s = -1.951_529_589_1e-4_f32;
    s = s.mul_add(z, 8.332_160_873_6e-3);
    s = s.mul_add(z, -1.666_665_461_1e-1);
    s = (s * z).mul_add(x, x);

    let (sin, cos) = if octant & 2 == 0 { (s, c) } else { (c, s) };
    let negative_sin = octant & 4 != 0;
    let negative_cos = (octant - 2) & 4 == 0;
    (
        if negative_sin { -sin } else { sin },
        if negative_cos { -cos } else { cos },
    )
}
