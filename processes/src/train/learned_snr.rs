//! The learned weights of the loss of a run (`train.learnable_snr_gos`), and their file in the run folder.

use super::super::context::Context;
use super::run::Run;
use crate::error::{EngineError, Result};
use crate::training::{LEARNED_SNR_FILE, LearnedSnr, LearnedWeights, NoiseDraw};
use aitk_common::fsutil::{self, regular};
use std::io::Write as _;

/// The largest file that is read: it has four numbers.
const MAX_BYTES: u64 = 1 << 16;

impl Run<'_> {
    /// Reads the numbers that an earlier run, also one of ai-toolkit, left in the run folder, and makes them part of the trainer's
    /// state. A checkpoint has precedence.
    ///
    /// # Errors
    /// When the file is there and is not one of these.
    pub(super) fn start_learned_snr(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let Some(learned) = &self.learned_snr else {
            return Ok(());
        };
        let path = self.folder.path.join(LEARNED_SNR_FILE);
        if path.exists() {
            let wrong = |problem: String| {
                EngineError::bad_input(format!(
                    "{}: {problem}. It is the file of `train.learnable_snr_gos`: remove it to start anew",
                    path.display()
                ))
            };
            let text = regular::read_text(&path, MAX_BYTES).map_err(|error| wrong(error.to_string()))?;
            let file = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
            learned.set(LearnedSnr::from_json(&file).map_err(wrong)?);
            cx.log(
                "info",
                format!("learnable_snr_gos: starting from the numbers of {}", path.display()),
            );
        }
        self.trainer = self.new_trainer()?;
        Ok(())
    }

    /// The learned weights of a micro-batch.
    pub(super) fn learned_weights(&self, noise_draw: &NoiseDraw) -> Result<Option<LearnedWeights>> {
        let of = |learned: &crate::training::SharedLearnedSnr| {
            let snr = noise_draw.timesteps.iter().map(|t| self.objective.snr(*t));
            Ok(learned.of_batch(snr.collect::<Result<_>>()?))
        };
        self.learned_snr.as_ref().map(of).transpose()
    }

    /// Writes the learned numbers into the run folder and emits the file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn write_learned_snr(&self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        let Some(learned) = &self.learned_snr else {
            return Ok(());
        };
        let path = self.folder.path.join(LEARNED_SNR_FILE);
        let text = format!("{:#}\n", learned.get().to_json());
        fsutil::write_atomic(&path, |out| out.write_all(text.as_bytes()))?;
        cx.artifact("learnable_snr", &self.folder.root, &path, Some(step), None);
        Ok(())
    }
}
