//! Predicts the output of a training run: saved weights, checkpoints, samples.

use super::families;
use super::family::FamilySpeed;
use super::job_memory::{Job, WorkKind};
use super::parameter_counts::ParameterCounts;
use crate::job::process::TrainerProcess;
use crate::job::sample::SampleConfig;
use serde::Serialize;

/// The most checkpoints on the disk at a time: the newest two, and one that is being written.
const MAX_CHECKPOINTS: u64 = 3;
/// Bytes of the log, metrics, config and loss plot.
const SMALL_FILE_BYTES: u64 = 64 << 10;
/// Bytes of a safetensors header with some 300 layers.
const HEADER_BYTES: u64 = 48 << 10;

/// The predicted output of a training run. Sizes for sd1 are accurate to a few percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RunOutput {
    /// Number of step saves, without the final save.
    pub saves: u64,
    /// Number of step saves that retention keeps.
    pub saves_kept: u64,
    /// Size of one save in bytes.
    pub save_bytes: Option<u64>,
    /// Size of one checkpoint in bytes (weights, optimizer state, EMA).
    pub state_bytes: Option<u64>,
    /// Total number of sample images.
    pub samples: u64,
}

impl RunOutput {
    /// Predicts the output of a training run. `counts` is given if the model's files are known.
    #[must_use]
    pub fn of(process: &TrainerProcess, counts: Option<ParameterCounts>) -> Self {
        let steps = process.train.steps;
        // Number of multiples of `every` from `start` to the second-to-last step.
        let due = |every: Option<u64>, start: u64| match every {
            Some(every) if every > 0 => {
                let last = steps.saturating_sub(1);
                (last / every).saturating_sub(start.max(1).saturating_sub(1).min(last) / every)
            }
            _ => 0,
        };
        let saves = due(process.save.save_every, 0);
        let keep = process.save.max_step_saves_to_keep;
        let bytes = Self::bytes(process, counts);
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

    /// Bytes of a save and of a checkpoint.
    fn bytes(process: &TrainerProcess, counts: Option<ParameterCounts>) -> Option<(u64, u64)> {
        let body = serde_json::to_value(process).ok()?;
        let name = process.model.arch.name.name();
        let family = families::of(FamilySpeed::of(name)?.name)?;
        let (trained, state, model) = Job::new(WorkKind::Training, &body, family, counts, &[]).trained();
        let averaged = if process.train.ema_config.use_ema { 4.0 } else { 0.0 };
        let saved = if process.saves_whole_model() { model } else { trained };
        // With a merged network, a checkpoint also has the weights into which it was merged.
        #[allow(clippy::cast_precision_loss)]
        let base = match process.merges_network() {
            true => model * process.train.dtype.bytes() as f64,
            false => 0.0,
        };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let whole = |bytes: f64| bytes as u64;
        #[allow(clippy::cast_precision_loss)]
        let width = process.save.dtype.bytes() as f64;
        Some((
            HEADER_BYTES + whole(saved * width),
            // Weights and optimizer state, usually two moments per weight.
            3 * HEADER_BYTES + whole(trained * (4.0 + averaged) + state + base),
        ))
    }

    /// The peak disk usage of saves and checkpoints in bytes.
    #[must_use]
    pub fn disk_bytes(&self) -> Option<u64> {
        // The final save, and one extra step save: the oldest is removed after the newest is written.
        let files = self.saves_kept + u64::from(self.saves > self.saves_kept) + 1;
        let saves = self.save_bytes?.saturating_mul(files);
        let states = self.state_bytes?.saturating_mul(MAX_CHECKPOINTS.min(self.saves + 1));
        Some(saves.saturating_add(states).saturating_add(SMALL_FILE_BYTES))
    }
}

/// Number of samples before the first step (of `first_sample` too), at each due step, and at the end.
fn samples(process: &TrainerProcess, due: u64) -> u64 {
    if process.train.disable_sampling {
        return 0;
    }
    let count = |section: &SampleConfig| section.samples.len() as u64;
    let each = count(&process.sample);
    let baseline = if process.train.skip_first_sample { 0 } else { each };
    let periodic = due.saturating_add(1).saturating_mul(each);
    let first = process.first_sample.as_ref().map_or(0, count);
    periodic.saturating_add(first).saturating_add(baseline)
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
    fn saves_checkpoints_and_samples_are_counted() {
        let output = RunOutput::of(&lora(1000, 4), None);
        assert_eq!((output.saves, output.saves_kept), (9, 4));
        // Before the first step, at 50 … 950, and at the end.
        assert_eq!(output.samples, 2 * (1 + 19 + 1));
        let mut late = lora(1000, 4);
        late.sample.sample_start_step = 100;
        assert_eq!(RunOutput::of(&late, None).samples, 2 * (1 + 18 + 1));
        // `first_sample` is made beside those of the beginning, and without them.
        late.first_sample = Some(SampleConfig {
            samples: vec![Default::default()],
            ..SampleConfig::default()
        });
        assert_eq!(RunOutput::of(&late, None).samples, 2 * (1 + 18 + 1) + 1);
        late.train.skip_first_sample = true;
        late.train.force_first_sample = true;
        assert_eq!(RunOutput::of(&late, None).samples, 2 * (18 + 1) + 1);
        // A LoRA of rank 16 over Stable Diffusion 1.5 has 16 x 510,976 parameters, in float16.
        let save = output.save_bytes.unwrap();
        assert_eq!(save, HEADER_BYTES + 2 * 16 * 510_976);
        let state = output.state_bytes.unwrap();
        assert!(state > 3 * save, "float32 and the optimizer's moments: {state}");
        assert_eq!(output.disk_bytes(), Some(6 * save + 3 * state + SMALL_FILE_BYTES));

        // Any number of steps is accepted.
        let mut endless = lora(u64::MAX, 4);
        endless.sample.sample_every = Some(1);
        assert_eq!(RunOutput::of(&endless, None).samples, u64::MAX);

        let all = RunOutput::of(&lora(1000, 0), None);
        assert_eq!((all.saves, all.saves_kept), (9, 9));
        let short = RunOutput::of(&lora(100, 4), None);
        let mut convolutions = lora(1000, 4);
        if let Some(network) = &mut convolutions.network {
            network.conv = Some(8);
        }
        let more = RunOutput::of(&convolutions, None).save_bytes.unwrap() - save;
        // Parameters per rank of a convolution, over those of Stable Diffusion 1.5's U-Net with a 3x3 kernel.
        assert_eq!(more, 8 * 547_240 * 2);
        assert_eq!(
            (short.saves, short.disk_bytes()),
            (0, Some(save + state + SMALL_FILE_BYTES))
        );
    }

    #[test]
    fn a_merged_network_is_saved_as_a_whole_model() {
        let mut process = lora(10, 0);
        process.train.dtype = crate::job::dtype::DType::F16;
        let alone = RunOutput::of(&process, None);
        process.train.merge_network_on_save = true;
        let output = RunOutput::of(&process, None);
        let save = output.save_bytes.unwrap();
        assert!((2_000_000_000..2_300_000_000).contains(&save), "{save}");
        let base = output.state_bytes.unwrap() - alone.state_bytes.unwrap();
        assert!(base.abs_diff(save) < 1 << 20, "{base} {save}");
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

    #[test]
    fn the_save_of_a_decorator_has_its_tokens_alone() {
        use crate::job::arch::{Arch, ArchName};
        use crate::job::decorator::DecoratorConfig;
        let mut process = lora(10, 0);
        process.network = None;
        process.model.arch = Arch::from(ArchName::Flux);
        process.decorator = Some(DecoratorConfig::default());
        let output = RunOutput::of(&process, None);
        assert_eq!(output.save_bytes.unwrap(), HEADER_BYTES + 2 * 4 * 4096);
        // Weights and two moments.
        let state = output.state_bytes.unwrap();
        assert!((12 * 4 * 4096..1 << 20).contains(&state), "{state}");
    }

    /// The parameters are those of diffusers' `T2IAdapter` and `ControlNetModel` for the published models.
    #[test]
    fn the_save_of_an_adapter_has_the_parameters_of_diffusers() {
        use crate::job::adapter::{AdapterConfig, AdapterType, T2iNetwork};
        use crate::job::arch::{Arch, ArchName};
        let of = |arch: ArchName, adapter: AdapterConfig| {
            let mut process = lora(10, 0);
            process.network = None;
            process.model.arch = Arch::from(arch);
            process.adapter = Some(adapter);
            RunOutput::of(&process, None)
        };
        let t2i = |network: T2iNetwork, channels: &[u32], resnets: u32, factor: u32| AdapterConfig {
            train: true,
            adapter_type: network,
            channels: channels.to_vec(),
            num_res_blocks: resnets,
            downscale_factor: factor,
            ..AdapterConfig::default()
        };
        let control_net = AdapterConfig {
            kind: AdapterType::ControlNet,
            train: true,
            ..AdapterConfig::default()
        };
        let (full, light) = (T2iNetwork::FullAdapter, T2iNetwork::LightAdapter);
        for (arch, adapter, parameters) in [
            (ArchName::Sd1, t2i(full, &[320, 640, 1280, 1280], 2, 8), 77_369_280),
            (ArchName::Sd1, t2i(light, &[320, 640, 1280], 4, 8), 18_689_200),
            (ArchName::Sdxl, t2i(full, &[320, 640, 1280, 1280], 2, 16), 79_028_160),
            (ArchName::Sd1, control_net.clone(), 361_279_120),
            (ArchName::Sdxl, control_net, 1_251_014_160),
        ] {
            let kind = adapter.kind;
            let output = of(arch, adapter);
            assert_eq!(
                output.save_bytes.unwrap(),
                HEADER_BYTES + 2 * parameters,
                "{kind} of {arch}"
            );
            // Weights and two moments.
            assert!(output.state_bytes.unwrap() > 12 * parameters, "{kind} of {arch}");
        }
    }
}
