//! The plot of the loss in the run folder.

use super::super::context::Context;
use super::run::Run;
use aitk_common::fsutil;
use aitk_common::step_metrics::PLOT_FILE;
use std::io::Write;

impl Run<'_> {
    /// Writes the plot of the loss and emits it. An error is only logged.
    pub(super) fn write_loss_plot(&self, cx: &mut Context<'_>, step: u64) {
        let Some(png) = self.metrics.png(&format!("{}   {step} steps", cx.job.name)) else {
            return;
        };
        let path = self.folder.path.join(PLOT_FILE);
        match fsutil::write_atomic(&path, |out| out.write_all(&png)) {
            Ok(()) => cx.artifact("plot", &self.folder.root, &path, Some(step), None),
            Err(error) => cx.log("warn", format!("cannot write the plot of the loss: {error}")),
        }
    }
}
