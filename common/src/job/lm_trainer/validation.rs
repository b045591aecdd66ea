//! `validation` of a training of a code model.

use crate::job::declare::section;
use crate::job::limits::MAX_VALIDATION_ROWS;
use crate::job::schema::{PresentKeys, ReadContext};

section! {
    /// Held-out documents. Their loss is the metric `val/loss`, its exponential `val/perplexity`.
    pub struct LmValidationConfig("validation") {
        /// A file or folder of documents, read as a data set of `kind: auto` with the names of columns of the first of `datasets`. For a data set
        /// of Hugging Face, its validation split, or else its test split.
        path: Option<String> = None, Works, input Dataset;
        /// Share of the documents of `datasets` that are held out, chosen by the seed.
        share: Option<f64> = None, Works;
        /// Steps between measurements; it is measured after the first and the last step too. 0: only then.
        every: u64 = 100, Works;
        /// Rows of `context` tokens that are measured at most.
        max_rows: u32 = 256, Works;
    }
    finish = finish;
}

fn finish(validation: &mut LmValidationConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    match (&validation.path, validation.share) {
        (Some(_), Some(_)) => cx.error_at("share", "cannot be used together with `path`: remove one of them"),
        (None, None) => cx.error("needs a `path` of held-out documents, or a `share` of the data sets such as 0.05"),
        (Some(path), None) if path.trim().is_empty() => cx.missing_at("path", "needs the path of a file or a folder"),
        (None, Some(share)) if !(share > 0.0 && share < 1.0) => {
            cx.error_at("share", format!("expected a number above 0 and below 1, found {share}"));
        }
        _ => {}
    }
    cx.check_not_zero("max_rows", validation.max_rows);
    cx.check_at_most("max_rows", validation.max_rows, MAX_VALIDATION_ROWS);
}

impl LmValidationConfig {
    /// Whether it is measured after `step` of `steps` steps.
    #[must_use]
    pub fn is_due(&self, step: u64, steps: u64) -> bool {
        step == 1 || step == steps || (self.every > 0 && step.is_multiple_of(self.every))
    }
}
