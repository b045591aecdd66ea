//! Training gives the same result under every memory layout.

use super::tests::{logs, losses, run_spec, saved_lora, spec, trainer};
use crate::testing::runs_all_cases;
use aitk_common::attempt::Outcome;
use aitk_common::job::process::TrainerProcess;
use aitk_common::plan::profile::MemoryProfile;
use candle_core::{Device, safetensors};
use proptest::prelude::*;
use std::path::Path;
use std::sync::LazyLock;

const STEPS: u64 = 4;

#[derive(Clone, Debug)]
struct Layout {
    profile: MemoryProfile,
    low_vram: bool,
    offloaded: Option<(f64, f64)>,
    checkpointed: bool,
    trains_text_encoder: bool,
}

fn layout() -> impl Strategy<Value = Layout> {
    let shares = (0.0..=1.0f64, 0.0..=1.0f64);
    let profile = proptest::sample::select(MemoryProfile::ALL.to_vec());
    let switches = (any::<bool>(), any::<bool>(), any::<bool>());
    (profile, proptest::option::of(shares), switches).prop_map(|(profile, offloaded, switches)| Layout {
        profile,
        low_vram: switches.0,
        offloaded,
        checkpointed: switches.1,
        trains_text_encoder: switches.2,
    })
}

fn process(root: &Path, trains_text_encoder: bool) -> TrainerProcess {
    let mut process = trainer(root, STEPS);
    process.train.train_text_encoder = trains_text_encoder;
    process
}

/// Trains and returns the losses and the weights of the LoRA.
fn train(process: TrainerProcess, root: &Path, profile: MemoryProfile) -> (Vec<f64>, Vec<(String, Vec<f32>)>) {
    let mut spec = spec(process);
    spec.profile = profile;
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let tensors = safetensors::load_buffer(&saved_lora(root), &Device::Cpu).unwrap();
    let numbers = |tensor: &candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1().unwrap();
    let mut numbers: Vec<_> = tensors.iter().map(|(name, t)| (name.clone(), numbers(t))).collect();
    numbers.sort_by(|a, b| a.0.cmp(&b.0));
    (losses(&events), numbers)
}

type Trained = (Vec<f64>, Vec<(String, Vec<f32>)>);

/// The results with everything in memory and no gradient checkpointing: without and with training of the text encoder.
static EXPECTED: LazyLock<[Trained; 2]> = LazyLock::new(|| {
    [false, true].map(|trains_text_encoder| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = process(dir.path(), trains_text_encoder);
        process.train.gradient_checkpointing = false;
        train(process, dir.path(), MemoryProfile::FullGpu)
    })
});

proptest! {
    #![proptest_config(ProptestConfig { cases: if runs_all_cases() { 16 } else { 4 }, max_shrink_iters: 8, ..ProptestConfig::default() })]

    #[test]
    fn every_memory_layout_gives_the_same_losses_and_weights(layout in layout()) {
        let dir = tempfile::tempdir().unwrap();
        let mut process = process(dir.path(), layout.trains_text_encoder);
        process.train.gradient_checkpointing = layout.checkpointed;
        process.model.low_vram = layout.low_vram;
        if let Some((denoiser, text)) = layout.offloaded {
            process.model.layer_offloading = Some(true);
            process.model.layer_offloading_transformer_percent = denoiser;
            process.model.layer_offloading_text_encoder_percent = text;
        }
        let found = train(process, dir.path(), layout.profile);
        let expected = &EXPECTED[usize::from(layout.trains_text_encoder)];
        for (found, expected) in found.0.iter().zip(&expected.0) {
            prop_assert!((found / expected - 1.0).abs() < 1e-4, "a loss of {found}, not {expected}");
        }
        prop_assert_eq!(found.1.len(), expected.1.len());
        for ((name, found), (_, expected)) in found.1.iter().zip(&expected.1) {
            let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|n| n * n).sum::<f32>().sqrt();
            let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
            let total = norm(&mut expected.iter().copied());
            prop_assert!(difference <= 1e-4 * total, "{name}: {difference} of {total}");
        }
    }
}
