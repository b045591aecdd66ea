//! Helpers for the tests of several modules, of this crate and of the engine (which includes this file).

use crate::autograd::gradients;
use crate::rng::TorchGenerator;
use candle_core::{DType, Device, Result, Tensor, Var};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Once;

/// Runs tests of this module again in portable mode, as tests of the same names in a module `in_portable_mode`.
macro_rules! in_portable_mode {
    ($($test:ident),* $(,)?) => {
        mod in_portable_mode {
            $(
                #[test]
                fn $test() {
                    crate::device::portable::portable(super::$test);
                }
            )*
        }
    };
}
pub(crate) use in_portable_mode;

/// Runs tests of this module again with emulated kernels for CUDA, as tests of the same names in a module `with_emulated_kernels`.
macro_rules! with_emulated_kernels {
    ($($test:ident),* $(,)?) => {
        mod with_emulated_kernels {
            $(
                #[test]
                fn $test() {
                    crate::device::portable::emulated_kernels(super::$test);
                }
            )*
        }
    };
}
pub(crate) use with_emulated_kernels;

/// The cases that a test compares: every eighth; with `AITK_CASES=half`, which `.ci/run` sets, half of them; with `AITK_CASES=all` all. In
/// portable mode, which is slow, half of those. The first is always among them, and halves are drawn with a fixed seed, because neighbours
/// often differ in one setting.
pub(crate) fn sampled_cases<T>(cases: Vec<T>) -> Vec<T> {
    let every = match CaseShare::of_environment() {
        CaseShare::All => 1,
        CaseShare::Half => 2,
        CaseShare::Eighth => 8,
    };
    let every = if crate::device::portable::is_portable() {
        2 * every
    } else {
        every
    };
    if every >= 8 {
        return cases.into_iter().step_by(every).collect();
    }
    let mut generator = TorchGenerator::manual_seed(11);
    let mut is_drawn = |index: usize| generator.next_u64().is_multiple_of(every as u64) || index == 0;
    let cases = cases.into_iter().enumerate();
    cases
        .filter_map(|(index, case)| is_drawn(index).then_some(case))
        .collect()
}

/// The share of the cases that tests compare.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CaseShare {
    Eighth,
    Half,
    All,
}

impl CaseShare {
    pub(crate) fn of_environment() -> Self {
        match std::env::var("AITK_CASES").as_deref() {
            Ok("all") => Self::All,
            Ok("half") => Self::Half,
            Ok(other) => panic!("AITK_CASES: expected `all` or `half`, found `{other}`"),
            Err(_) => Self::Eighth,
        }
    }
}

/// Lets this thread compute alone from now on. Tests run side by side on all cores, and what they compute is small: with
/// threads of their own they would wait for each other most of the time.
pub(crate) fn compute_on_this_thread() {
    static CANDLE: Once = Once::new();
    // candle's own threads wait in a loop that takes a whole core, and without this variable each of its matrix products
    // reads /proc/cpuinfo.
    // SAFETY: Rust's functions for the environment exclude each other, and no C code of these tests reads it.
    #[expect(unsafe_code, reason = "the only way to tell candle")]
    CANDLE.call_once(|| unsafe { std::env::set_var("RAYON_NUM_THREADS", "1") });
    if rayon::current_thread_index().is_none() {
        // It stays until the process ends: this thread belongs to it.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread();
        std::mem::forget(pool.build().unwrap());
    }
}

/// The folder of fixtures, most of which Python scripts made.
pub(crate) fn fixtures() -> PathBuf {
    compute_on_this_thread();
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// The largest absolute value.
pub(crate) fn largest(t: &Tensor) -> f32 {
    let flat = t.abs().unwrap().flatten_all().unwrap();
    flat.max(0).unwrap().to_scalar().unwrap()
}

/// The largest absolute difference between elements of `a` and `b`.
pub(crate) fn gap(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    largest(&(a - b).unwrap())
}

/// FNV-1a of a name.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The output of splitmix64 for this state.
fn mix(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Numbers from -scale to scale that depend on the name and their index: the same as `formula` of `tests/reference/formula_weights.py`.
pub(crate) fn formula(name: &str, count: usize, scale: f32) -> Vec<f32> {
    let seed = hash(name);
    (1..=count as u64)
        .map(|index| {
            let bits = mix(seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15))) >> 40;
            (bits as f32 / (1u32 << 23) as f32 - 1.0) * scale
        })
        .collect()
}

/// The inputs, results and gradients that PyTorch computed for single operations (`tests/reference/make_ops.py`).
pub(crate) struct Reference(HashMap<String, Tensor>);

impl Reference {
    pub(crate) fn open() -> Self {
        Self(candle_core::safetensors::load(fixtures().join("models/ops.safetensors"), &Device::Cpu).unwrap())
    }

    pub(crate) fn get(&self, case: &str, name: &str, dtype: DType) -> Tensor {
        let tensor = self.0.get(&format!("{case}/{name}"));
        tensor
            .unwrap_or_else(|| panic!("no {case}/{name}"))
            .to_dtype(dtype)
            .unwrap()
    }

    /// Compares the result of `f` and the gradients of its inputs, in f32 and f64.
    pub(crate) fn check(&self, case: &str, inputs: &[&str], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
        for dtype in [DType::F32, DType::F64] {
            let vars = inputs.iter().map(|name| self.get(case, name, dtype));
            let vars: Vec<Var> = vars.map(|x| Var::from_tensor(&x).unwrap()).collect();
            let tracked: Vec<_> = vars.iter().map(|var| var.as_tensor().clone()).collect();
            close(&f(&tracked).unwrap(), &self.get(case, "y", dtype), case);
            let probe = self.get(case, "probe", dtype);
            let (_, found) = gradients(|| (f(&tracked)? * &probe)?.sum_all()).unwrap();
            for (name, var) in inputs.iter().zip(&vars) {
                let gradient = found
                    .get(var)
                    .unwrap_or_else(|| panic!("{case}: no gradient of {name}"));
                let expected = self.get(case, &format!("d.{name}"), dtype);
                close(gradient, &expected, &format!("{case}: gradient of {name} in {dtype:?}"));
            }
        }
    }
}

/// Whether two tensors are equal within 2e-5 of the largest number.
pub(crate) fn close(ours: &Tensor, expected: &Tensor, what: &str) {
    let [ours, expected] = [ours, expected].map(|t| t.to_dtype(DType::F32).unwrap());
    let error = gap(&ours, &expected) / largest(&expected).max(1e-3);
    assert!(error < 2e-5, "{what}: relative error {error}");
}
