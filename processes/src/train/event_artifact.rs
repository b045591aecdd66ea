//! The metrics of a job's attempt for TensorBoard, as an artifact.

use super::super::context::Context;
use super::super::tensorboard::write_file;
use super::run::Run;
use crate::error::Result;
use aitk_common::fsutil;
use aitk_common::tensorboard::EVENT_FILE;

/// The folder of the event file of a job, in the run folder.
const JOB_FOLDER: &str = "tensorboard";

impl Run<'_> {
    /// Writes the event file of a job's attempt: the whole of its metrics, into the run folder, because an attempt writes nowhere
    /// else. It is uploaded as an artifact. An error is only logged.
    pub(super) fn write_event_file(&self, cx: &mut Context<'_>, step: u64) {
        if self.process.log_dir.is_none() || !cx.has_staged_inputs() {
            return;
        }
        let folder = self.folder.path.join(JOB_FOLDER);
        let path = folder.join(EVENT_FILE);
        let write = || -> Result<()> {
            let steps = self.metrics.on_disk()?;
            fsutil::create_dir_all(&folder)?;
            fsutil::write_atomic(&path, |out| write_file(out, &steps))?;
            Ok(())
        };
        match write() {
            Ok(()) => cx.artifact("tensorboard", &self.folder.root, &path, Some(step), None),
            Err(error) => cx.log("warn", format!("cannot write the metrics for TensorBoard: {error}")),
        }
    }
}
