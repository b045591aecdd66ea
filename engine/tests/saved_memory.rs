//! The memory that a forward pass in portable mode keeps for the backward pass, and the peak of both, counted by the
//! allocator. A program of its own, because the allocator counts for the whole process.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints what it measured"
)]

mod allocator;

use aitk_engine::autograd::record;
use aitk_engine::device::portable::portable;
use aitk_engine::nn::{Attention, Conv2d, GroupNorm, Linear, geglu, silu, to_tokens};
use aitk_engine::weights::Weights;
use allocator::{IN_USE, PEAK};
use candle_core::{DType, Device, Result, Tensor, Var};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const MIB: f64 = (1 << 20) as f64;

/// Bytes beyond those in use before the forward pass, in MiB.
#[derive(Debug)]
struct Memory {
    /// After the forward pass: its result, and what the backward pass needs.
    saved: f64,
    /// The peak of both passes.
    peak: f64,
}

/// Runs both passes of `forward` on `x` with the tape, or with candle's graph.
fn measure(x: &Var, on_tape: bool, forward: impl Fn(&Tensor) -> Result<Tensor>) -> Memory {
    // Buffers that threads keep for later products are not counted.
    drop(forward(&x.detach()).unwrap());
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let since = |bytes: &AtomicUsize| bytes.load(Relaxed).saturating_sub(before) as f64 / MIB;
    let saved;
    if on_tape {
        let (y, tape) = record(|| forward(x)).unwrap();
        saved = since(&IN_USE);
        assert!(tape.backward(&y).unwrap().get(x).is_some());
    } else {
        let y = forward(x).unwrap();
        saved = since(&IN_USE);
        assert!(y.backward().unwrap().get(x).is_some());
    }
    let peak = since(&PEAK);
    Memory { saved, peak }
}

fn variable(shape: &[usize], dtype: DType) -> Var {
    let count: usize = shape.iter().product();
    let elements: Vec<f32> = (0..count).map(|i| (i * 7919 % 2003) as f32 / 1001.5 - 1.0).collect();
    let x = Tensor::from_vec(elements, shape, &Device::Cpu).unwrap();
    Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap()
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn the_tape_keeps_little_of_a_forward_pass() {
    portable(|| {
        // candle's products in bfloat16 are slow on a CPU: fewer tokens, unless all cases are wanted.
        let are_all_wanted = std::env::var("AITK_CASES").is_ok_and(|cases| cases == "all");
        attention_keeps_its_operands(if are_all_wanted { 2048 } else { 1024 });
        frozen_layers_keep_the_inputs_of_functions();
    });
}

/// Self-attention of SD 1.5 with 8 heads of 40 features, in bf16.
fn attention_keeps_its_operands(tokens: usize) {
    let x = variable(&[1, tokens, 320], DType::BF16);
    let attend = |x: &Tensor| Attention::new(8).forward(x, x, x);
    let (ours, candles) = (measure(&x, true, attend), measure(&x, false, attend));
    println!("attention of {tokens} tokens: {ours:.1?}; with candle's graph {candles:.1?}");
    let result = (tokens * 320 * 2) as f64 / MIB;
    assert!(ours.saved < 1.1 * result, "only the result is new: {ours:?}");
    // A chunk of scores has at most 64 MiB.
    assert!(ours.peak < 6.0 * 64.0, "{ours:?}");
    assert!(candles.saved > 8.0 * (tokens * tokens * 10) as f64 / MIB, "{candles:?}");
}

/// A frozen convolution, norm, two linear layers and their activations, on 64 x 64 pixels.
fn frozen_layers_keep_the_inputs_of_functions() {
    let weights = Weights::init(1, &Device::Cpu).frozen();
    let conv = Conv2d::new(&weights.pp("conv"), 64, 64, 3, 1, 1).unwrap();
    let norm = GroupNorm::new(&weights.pp("norm"), 8, 64, 1e-5).unwrap();
    let wide = Linear::new(&weights.pp("wide"), 64, 512, true).unwrap();
    let narrow = Linear::new(&weights.pp("narrow"), 256, 64, true).unwrap();
    let x = variable(&[1, 64, 64, 64], DType::F32);
    let forward = |x: &Tensor| {
        let tokens = to_tokens(&norm.forward(&conv.forward(x)?)?)?;
        silu(&narrow.forward(&geglu(&wide.forward(&tokens)?)?)?)
    };
    let (ours, candles) = (measure(&x, true, forward), measure(&x, false, forward));
    println!("frozen layers: {ours:.1?}; with candle's graph {candles:.1?}");
    // In units of x, 1 MiB: the input of the norm 1, of the gated activation 8, of the last activation 1, the result 1.
    assert!(ours.saved < 11.1, "{ours:?}");
    assert!(candles.saved > 20.0, "{candles:?}");
}
