//! Weights in bfloat16 that are trained without a copy in float32: an update is computed in float32 and rounded to one of the
//! two nearest bfloat16 numbers at random, to the nearer one with the higher probability, so that updates that are smaller than
//! the distance between two numbers are not lost on average (S. Gupta and others, 2015, "Deep Learning with Limited Numerical
//! Precision"; ai-toolkit's `toolkit/optimizers/optimizer_utils.py`).
//!
//! The random bits depend only on the run's seed, the step, the name of the tensor and the position in it
//! (docs/randomness.md).

use super::optimizer::{OptimError, Param};
use candle_core::{DType, Device, Tensor};
use half::bf16;
use md5::{Digest, Md5};
use rayon::prelude::*;
use std::cell::Cell;

/// Elements per task, a multiple of 4.
const CHUNK_LEN: usize = 1 << 14;
/// The increment of SplitMix64 (G. Steele, D. Lea, C. Flood, 2014).
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

thread_local! {
    static SEED_AND_STEP: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
}

/// Runs an optimizer's step on this thread, with stochastic rounding of weights in bfloat16. Without this they are rounded to
/// the nearest number.
pub fn with_stochastic_rounding<R>(seed: u64, step: u64, f: impl FnOnce() -> R) -> R {
    /// Sets the earlier value again, also after a panic.
    struct Restore(Option<(u64, u64)>);
    impl Drop for Restore {
        fn drop(&mut self) {
            SEED_AND_STEP.set(self.0);
        }
    }
    let _restore = Restore(SEED_AND_STEP.replace(Some((seed, step))));
    f()
}

impl Param {
    /// The value in float32, detached.
    ///
    /// # Errors
    /// When the device fails.
    pub fn value(&self) -> Result<Tensor, OptimError> {
        Ok(self.var.as_tensor().detach().to_dtype(DType::F32)?)
    }

    /// Sets the value from float32. A tensor in bfloat16 is rounded as the current step says, see
    /// [`with_stochastic_rounding`].
    ///
    /// # Errors
    /// When the shape is wrong or the device fails.
    pub fn set(&self, value: &Tensor) -> Result<(), OptimError> {
        let dtype = self.var.dtype();
        match (dtype, SEED_AND_STEP.get()) {
            (DType::BF16, Some((seed, step))) => {
                let text = format!("{seed}/rounding/{step}/{}", self.name);
                let numbers = value.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
                let rounded = Tensor::from_vec(round(&numbers, key(&text)), value.shape(), &Device::Cpu)?;
                self.var.set(&rounded.to_device(self.var.device())?)?;
            }
            _ if dtype == value.dtype() => self.var.set(value)?,
            _ => self.var.set(&value.to_dtype(dtype)?)?,
        }
        Ok(())
    }
}

/// The first eight bytes of the MD5 of a text, little endian.
fn key(text: &str) -> u64 {
    let digest = Md5::digest(text.as_bytes());
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(bytes)
}

/// Number `index` of SplitMix64 with this seed.
fn splitmix(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add(GOLDEN.wrapping_mul(index.wrapping_add(1)));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Rounds numbers with 16 random bits each: element `i` has bits `16 * (i % 4)` and up of number `i / 4`.
fn round(numbers: &[f32], key: u64) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; numbers.len()];
    let chunks = out.par_chunks_mut(CHUNK_LEN).zip(numbers.par_chunks(CHUNK_LEN));
    chunks.enumerate().for_each(|(chunk, (out, numbers))| {
        let first = (chunk * CHUNK_LEN / 4) as u64;
        for (word, (out, numbers)) in (first..).zip(out.chunks_mut(4).zip(numbers.chunks(4))) {
            let bits = splitmix(key, word);
            for (lane, (out, number)) in (0..).zip(out.iter_mut().zip(numbers)) {
                *out = round_one(*number, (bits >> (16 * lane)) as u16);
            }
        }
    });
    out
}

/// Adds random bits below the last bit of bfloat16 and cuts the rest off.
fn round_one(number: f32, random: u16) -> bf16 {
    if !number.is_finite() {
        return bf16::from_f32(number);
    }
    let high = |bits: u32| bf16::from_bits((bits >> 16) as u16);
    let rounded = high(number.to_bits().wrapping_add(u32::from(random)));
    // The largest numbers do not become infinite.
    match rounded.is_finite() {
        true => rounded,
        false => high(number.to_bits()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rng::generator_for;
    use candle_core::Var;

    fn param(numbers: &[f32]) -> Param {
        let tensor = Tensor::new(numbers, &Device::Cpu)
            .unwrap()
            .to_dtype(DType::BF16)
            .unwrap();
        Param {
            name: "transformer.x".into(),
            var: Var::from_tensor(&tensor).unwrap(),
        }
    }

    fn numbers(param: &Param) -> Vec<f32> {
        param.value().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn rounding_is_unbiased() {
        const COUNT: usize = 1 << 16;
        for start in generator_for(3, "rounding", 0, 0).randn(16) {
            let value = start * 10f32.powf(start * 3.0);
            let param = param(&vec![0.0; COUNT]);
            let wanted = Tensor::full(value, COUNT, &Device::Cpu).unwrap();
            with_stochastic_rounding(1, 2, || param.set(&wanted)).unwrap();
            let found = numbers(&param);
            let down = f32::from_bits(value.to_bits() & 0xFFFF_0000);
            let up = f32::from_bits((value.to_bits() & 0xFFFF_0000) + 0x1_0000);
            assert!(found.iter().all(|x| *x == down || *x == up), "{value}");
            let mean = found.iter().map(|x| f64::from(*x)).sum::<f64>() / COUNT as f64;
            // Five standard deviations of the mean of this many choices between two numbers.
            let deviation = f64::from((up - down).abs()) * 0.5 / (COUNT as f64).sqrt();
            assert!((mean - f64::from(value)).abs() < 5.0 * deviation, "{value}: {mean}");
        }
    }

    #[test]
    fn numbers_of_bfloat16_and_those_that_are_not_finite_stay() {
        let exact = [
            0.0,
            -0.0,
            1.0,
            -1.5,
            f32::from_bits(0x7F7F_0000),
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::from_bits(1 << 16),
        ];
        let param = param(&[7.0; 8]);
        for step in 0..50 {
            with_stochastic_rounding(1, step, || param.set(&Tensor::new(&exact, &Device::Cpu).unwrap())).unwrap();
            let bits: Vec<u32> = numbers(&param).iter().map(|x| x.to_bits()).collect();
            assert_eq!(bits, exact.map(|x| bf16::from_f32(x).to_f32().to_bits()));
            assert!(round_one(f32::MAX, step as u16 * 1000).is_finite());
            assert!(round_one(f32::NAN, step as u16).is_nan());
        }
    }

    #[test]
    fn bits_depend_on_seed_step_name_and_position_and_not_on_the_number_of_threads() {
        let count = 3 * CHUNK_LEN + 5;
        let wanted = Tensor::full(1.003f32, count, &Device::Cpu).unwrap();
        let draw = |seed, step, name: &str| {
            let mut param = param(&vec![0.0; count]);
            param.name = name.into();
            with_stochastic_rounding(seed, step, || param.set(&wanted)).unwrap();
            numbers(&param)
        };
        let first = draw(1, 2, "x");
        assert_eq!(first, draw(1, 2, "x"));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(first, pool.install(|| draw(1, 2, "x")));
        for other in [draw(2, 2, "x"), draw(1, 3, "x"), draw(1, 2, "y")] {
            let equal = first.iter().zip(&other).filter(|(a, b)| a == b).count() as f64 / count as f64;
            assert!(equal < 0.75, "{equal}");
        }
        // The numbers of docs/randomness.md.
        let bits = splitmix(key("42/rounding/0/transformer.x"), 0);
        assert_eq!(splitmix(0, 0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(
            round_one(1.003, bits as u16),
            round(&[1.003], key("42/rounding/0/transformer.x"))[0]
        );
        // Without a step: to the nearest.
        let param = param(&[0.0; 2]);
        param
            .set(&Tensor::new(&[1.0038f32, 1.0040], &Device::Cpu).unwrap())
            .unwrap();
        assert_eq!(numbers(&param), [1.0, 1.0078125]);
    }
}
