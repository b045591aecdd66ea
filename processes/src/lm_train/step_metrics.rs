//! What was measured of a step.

use super::super::step_recorder::StepMeasurements;
use crate::training::StepReport;
use std::collections::BTreeMap;

/// What was measured of a step.
pub(super) struct StepMetrics {
    pub(super) report: StepReport,
    pub(super) measured: StepMeasurements,
}

impl StepMetrics {
    /// The values that are shown while the training runs. JSON has only finite numbers.
    pub(super) fn values(&self, steps: u64, seconds_per_step: Option<f64>) -> BTreeMap<String, f64> {
        let (report, measured) = (&self.report, self.measured);
        let mut values = BTreeMap::from([("learning_rate".to_owned(), report.lr)]);
        values.insert("loss/loss".into(), report.loss);
        values.extend(report.grad_norm.map(|norm| ("grad_norm".to_owned(), norm)));
        values.extend(measured.values());
        values.extend(seconds_per_step.map(|seconds| ("seconds_per_step".to_owned(), seconds)));
        #[allow(clippy::cast_precision_loss)]
        values.insert("steps".into(), steps as f64);
        values.retain(|_, value| value.is_finite());
        values
    }
}
