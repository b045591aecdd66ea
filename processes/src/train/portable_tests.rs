//! Whole training runs with the device `cpu:portable`.

use super::tests::{logs, losses, run_spec, spec, trainer};
use crate::device::precision::has_bf16_products;
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::job::dtype::DType;
use aitk_common::job::optimizer::OptimizerName;

/// The losses of four steps and the log.
fn train(device: Option<DeviceRef>, dtype: DType) -> (Vec<f64>, String) {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 4);
    process.train.dtype = dtype;
    process.train.optimizer = OptimizerName::AdamW8Bit;
    let mut spec = spec(process);
    spec.device = device.unwrap_or(spec.device);
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    (losses(&events), logs(&events))
}

#[test]
fn a_portable_training_computes_in_its_dtype_and_has_the_same_losses() {
    let (expected, log) = train(None, DType::F32);
    assert!(!log.contains("computing in"), "{log}");
    // The CPU: layers multiply numbers of bfloat16 where it can, else it computes in f32 and says so.
    let (found, log) = train(None, DType::BF16);
    assert_eq!(
        log.contains("computing in f32 on the CPU"),
        !has_bf16_products(),
        "{log}"
    );
    for (found, expected) in found.iter().zip(&expected) {
        let error = (found / expected - 1.0).abs();
        assert!(error < 0.03, "a loss of {found}, not {expected}");
    }
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F16, 0.005), (DType::BF16, 0.03)] {
        let (found, log) = train(Some(DeviceRef::PORTABLE_CPU), dtype);
        assert!(!log.contains("computing in f32"), "{log}");
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            let error = (found / expected - 1.0).abs();
            assert!(error < tolerance, "{dtype:?}: a loss of {found}, not {expected}");
        }
    }
}
