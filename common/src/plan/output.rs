//! What a training leaves on the disk: saves, exact states to go on from, samples.

use super::anatomy::Anatomy;
use super::demand::{Figures, Trained, factored, factored_convolutions, state_width};
use super::family::Family;
use crate::job::process::TrainerProcess;
use crate::job::sample::SampleConfig;
use serde::Serialize;

/// Exact states on the disk at the most: the newest, the one before, and one that is being written.
const STATES: u64 = 3;
/// Log, numbers of the steps, config, and the curve of the loss.
const SMALL_FILES: u64 = 64 << 10;
/// Bytes of the names and shapes at the beginning of a file: some 300 layers.
const HEADER: u64 = 48 << 10;

/// What a training writes. Bytes are predictions, for sd1 within a few percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RunOutput {
    /// Step saves, without the final one.
    pub saves: u64,
    /// Those of them that stay.
    pub saves_kept: u64,
    /// Bytes of one save.
    pub save_bytes: Option<u64>,
    /// Bytes of one exact state (weights, optimizer, average).
    pub state_bytes: Option<u64>,
    /// Sample images in all.
    pub samples: u64,
}

impl RunOutput {
    /// Of a training; `anatomy` is its model's, where the model's files were seen.
    #[must_use]
    pub fn of(process: &TrainerProcess, anatomy: Option<Anatomy>) -> Self {
        let steps = process.train.steps;
        // Steps that are due, from `start` to the one before the last.
        let due = |every: Option<u64>, start: u64| match every {
            Some(every) if every > 0 => {
                let last = steps.saturating_sub(1);
                (last / every).saturating_sub(start.max(1).saturating_sub(1).min(last) / every)
            }
            _ => 0,
        };
        let saves = due(process.save.save_every, 0);
        let keep = process.save.max_step_saves_to_keep;
        let bytes = Self::bytes(process, anatomy);
        Self {
            saves,
            saves_kept: if keep == 0 { saves } else { saves.min(keep) },
            save_bytes: bytes.map(|(save, _)| save),
            state_bytes: bytes.map(|(_, state)| state),
            samples: samples(
                process,
                due(process.sample.sample_every, process.sample.sample_start_step),
            ),
        }
    }

    /// Bytes of a save and of an exact state.
    fn bytes(process: &TrainerProcess, anatomy: Option<Anatomy>) -> Option<(u64, u64)> {
        let body = serde_json::to_value(process).ok()?;
        let figures = Figures::of(Family::of(process.model.arch.name.name())?, anatomy);
        let Trained { millions, full } = Trained::of(&body, &figures);
        let optimizer = process.train.optimizer.name();
        let mut state = state_width(optimizer);
        if full[0] && factored(optimizer) {
            state += factored_convolutions(figures.family);
        }
        let averaged = if process.train.ema_config.use_ema { 4.0 } else { 0.0 };
        // A save of a full fine-tune is the whole model.
        let saved = match process.network {
            Some(_) => millions,
            None => figures.denoiser + figures.text + figures.vae,
        };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let bytes = |millions: f64, width: f64| (millions * 1e6 * width) as u64;
        #[allow(clippy::cast_precision_loss)]
        let width = process.save.dtype.bytes() as f64;
        Some((
            HEADER + bytes(saved, width),
            // Weights, and as a rule two numbers of the optimizer for each.
            3 * HEADER + bytes(millions, 4.0 + state + averaged),
        ))
    }

    /// The most that saves and states take at one time.
    #[must_use]
    pub fn disk_bytes(&self) -> Option<u64> {
        // The final save, and one step save more than is kept while the oldest is still there.
        let files = self.saves_kept + u64::from(self.saves > self.saves_kept) + 1;
        let saves = self.save_bytes?.saturating_mul(files);
        let states = self.state_bytes?.saturating_mul(STATES.min(self.saves + 1));
        Some(saves.saturating_add(states).saturating_add(SMALL_FILES))
    }
}

/// Samples before the first step, at each due step, and at the end.
fn samples(process: &TrainerProcess, due: u64) -> u64 {
    if process.train.disable_sampling {
        return 0;
    }
    let count = |section: &SampleConfig| section.samples.len() as u64;
    let each = count(&process.sample);
    let first = match process.train.skip_first_sample && !process.train.force_first_sample {
        true => 0,
        false => process.first_sample.as_ref().map_or(each, count),
    };
    first + (due + 1) * each
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::network::NetworkConfig;

    fn lora(steps: u64, keep: u64) -> TrainerProcess {
        let mut process = TrainerProcess::default();
        process.train.steps = steps;
        process.save.save_every = Some(100);
        process.save.max_step_saves_to_keep = keep;
        process.sample.sample_every = Some(50);
        process.sample.samples = vec![Default::default(), Default::default()];
        process.network = Some(NetworkConfig {
            linear: 16,
            ..NetworkConfig::default()
        });
        process
    }

    #[test]
    fn saves_states_and_samples_are_counted() {
        let output = RunOutput::of(&lora(1000, 4), None);
        assert_eq!((output.saves, output.saves_kept), (9, 4));
        // Before the first step, at 50 … 950, and at the end.
        assert_eq!(output.samples, 2 * (1 + 19 + 1));
        let mut late = lora(1000, 4);
        late.sample.sample_start_step = 100;
        assert_eq!(RunOutput::of(&late, None).samples, 2 * (1 + 18 + 1));
        // A LoRA of rank 16 over Stable Diffusion 1.5 has about 7 million parameters, in float16.
        let save = output.save_bytes.unwrap();
        assert!((12_000_000..16_000_000).contains(&save), "{save}");
        let state = output.state_bytes.unwrap();
        assert!(state > 3 * save, "float32 and the optimizer's moments: {state}");
        assert_eq!(output.disk_bytes(), Some(6 * save + 3 * state + SMALL_FILES));

        let all = RunOutput::of(&lora(1000, 0), None);
        assert_eq!((all.saves, all.saves_kept), (9, 9));
        let short = RunOutput::of(&lora(100, 4), None);
        let mut convolutions = lora(1000, 4);
        if let Some(network) = &mut convolutions.network {
            network.conv = Some(8);
        }
        let more = RunOutput::of(&convolutions, None).save_bytes.unwrap() - save;
        // 547,240 parameters per rank of a convolution, over those of Stable Diffusion 1.5's U-Net with a 3x3 kernel.
        assert_eq!(more, 8 * 547_000 * 2);
        assert_eq!((short.saves, short.disk_bytes()), (0, Some(save + state + SMALL_FILES)));
    }

    #[test]
    fn a_full_fine_tune_saves_the_whole_model() {
        let mut process = lora(10, 0);
        process.network = None;
        process.train.disable_sampling = true;
        let output = RunOutput::of(&process, None);
        assert_eq!(output.samples, 0);
        let save = output.save_bytes.unwrap();
        assert!((2_000_000_000..2_300_000_000).contains(&save), "{save}");
    }
}
