//! The objective of a run: diffusion or flow matching, by the family of the model.

use super::options;
use crate::error::{EngineError, Result};
use crate::families::Model;
use crate::samplers::{NoiseSchedule, PredictionType, SamplerParams};
use crate::training::{Ddpm, FlowMatch, FlowShift, FlowTimesteps, FlowWeighting, Objective};
use aitk_common::job::dataset::DatasetConfig;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::train::{LossTarget, TimestepType};

/// The objective that the config and the model's scheduler ask for.
///
/// # Errors
/// When `scheduler_config.json` is wrong, or the config asks for what is not supported.
pub(super) fn objective(process: &TrainerProcess, model: &dyn Model) -> Result<Box<dyn Objective>> {
    let params = SamplerParams::from_json(model.scheduler_config())?;
    if process.model.arch.name.is_flow() {
        let length = params.num_train_timesteps.unwrap_or(1000);
        return Ok(Box::new(FlowMatch {
            timesteps: flow_timesteps(process, params)?,
            weighting: flow_weighting(process),
            noise: options::noise_options(process, length),
        }));
    }
    let mut schedule = NoiseSchedule::new(&params)?;
    if process.model.is_v_pred {
        schedule.prediction_type = PredictionType::VPrediction;
    }
    if schedule.prediction_type == PredictionType::VPrediction {
        check_v_prediction(process)?;
    }
    Ok(Box::new(Ddpm {
        noise: options::noise_options(process, schedule.len()),
        weighting: options::snr_weighting(process),
        schedule,
    }))
}

/// Refuses what only models can train that predict the noise.
fn check_v_prediction(process: &TrainerProcess) -> Result<()> {
    let train = &process.train;
    if train.correct_pred_norm {
        return Err(EngineError::bad_input(
            "train.correct_pred_norm: this model predicts the velocity (`prediction_type: v_prediction`), and this option corrects a \
             prediction of the noise; in ai-toolkit it would train such a model to predict the noise. Remove the key",
        ));
    }
    if matches!(train.loss_target, LossTarget::Source | LossTarget::Unaugmented) {
        return Err(EngineError::bad_input(format!(
            "train.loss_target: `{}` needs a model that predicts the noise or is trained by flow matching, and this one predicts the \
             velocity (`prediction_type: v_prediction`); use `noise`",
            train.loss_target
        )));
    }
    let guidance = process.datasets.iter().find_map(DatasetConfig::paired_guidance);
    if let Some(guidance) = guidance.filter(|_| !process.kind.is_slider()) {
        return Err(EngineError::bad_input(format!(
            "datasets: guidance_type: `{guidance}` compares predictions with the noise, and this model predicts the velocity \
             (`prediction_type: v_prediction`): ai-toolkit would train it to predict the noise. Remove `unconditional_path`"
        )));
    }
    Ok(())
}

/// The timesteps of `train.timestep_type`.
fn flow_timesteps(process: &TrainerProcess, params: SamplerParams) -> Result<FlowTimesteps> {
    let train = &process.train;
    let timesteps = match train.timestep_type {
        // These entries are of the even table.
        TimestepType::OneStep => FlowTimesteps::FewSteps(1),
        TimestepType::TwoStep => FlowTimesteps::FewSteps(2),
        TimestepType::FourStep => FlowTimesteps::FewSteps(4),
        TimestepType::EightStep => FlowTimesteps::FewSteps(8),
        _ if train.linear_timesteps || train.linear_timesteps2 => FlowTimesteps::Linear,
        TimestepType::Sigmoid => FlowTimesteps::Sigmoid(train.timestep_sigmoid_scale),
        TimestepType::Linear | TimestepType::Weighted => FlowTimesteps::Linear,
        TimestepType::Shift => FlowTimesteps::Shift(Box::new(params)),
        TimestepType::LognormBlend => FlowTimesteps::LognormBlend,
        TimestepType::NextSample => FlowTimesteps::NextSample(Box::new(params), train.next_sample_timesteps),
    };
    let shift = match train.timestep_shift_by_size {
        true => FlowShift::BySize,
        false if train.timestep_shift == 1.0 => return Ok(timesteps),
        false => FlowShift::Constant(train.timestep_shift),
    };
    Ok(FlowTimesteps::Shifted(Box::new(timesteps), shift))
}

/// The weighting that goes with them. `weighted` has precedence, as in ai-toolkit.
fn flow_weighting(process: &TrainerProcess) -> FlowWeighting {
    let train = &process.train;
    match train.timestep_type {
        TimestepType::Weighted => FlowWeighting::Measured,
        _ if train.linear_timesteps2 => FlowWeighting::HalfBell,
        _ if train.linear_timesteps => FlowWeighting::Bell,
        _ => FlowWeighting::Even,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::training::{DrawInputs, batch_generator, draw};
    use candle_core::{DType, Device, Tensor};

    /// The timesteps of a sampler with as many steps (`timestep_spacing: leading`), as in ai-toolkit.
    #[test]
    fn a_shorter_table_of_timesteps_spans_all_noise_levels() {
        let mut process = TrainerProcess::default();
        let mut drawn = |entries: u32, index: u32| {
            let train = &mut process.train;
            train.num_train_timesteps = entries;
            (train.min_denoising_steps, train.max_denoising_steps) = (index, index);
            let latents = [Tensor::zeros((1, 4, 2, 2), DType::F32, &Device::Cpu).unwrap()];
            let (noise, inputs) = (options::noise_options(&process, 1000), DrawInputs::new(&latents));
            draw(&noise, &mut batch_generator(1, 2, 3), &inputs).unwrap().timesteps[0]
        };
        for (entries, first) in [(1000, 999.0), (700, 699.0), (500, 998.0), (300, 897.0), (1, 0.0)] {
            assert_eq!(drawn(entries, 0), first, "{entries} entries");
            assert_eq!(drawn(entries, entries - 1), 0.0, "{entries} entries");
        }
        assert_eq!(drawn(500, 1), 996.0);
    }

    /// As in ai-toolkit, the bell weighs the loss of the entries that are trained.
    #[test]
    fn few_timesteps_are_weighed_by_the_bell() {
        let mut process = TrainerProcess::default();
        process.train.linear_timesteps = true;
        for (kind, steps) in [
            (TimestepType::OneStep, 1),
            (TimestepType::TwoStep, 2),
            (TimestepType::FourStep, 4),
            (TimestepType::EightStep, 8),
        ] {
            process.train.timestep_type = kind;
            let timesteps = flow_timesteps(&process, SamplerParams::default()).unwrap();
            assert_eq!(timesteps, FlowTimesteps::FewSteps(steps), "{kind:?}");
            assert_eq!(flow_weighting(&process), FlowWeighting::Bell);
        }
        process.train.timestep_type = TimestepType::Shift;
        let timesteps = flow_timesteps(&process, SamplerParams::default()).unwrap();
        assert_eq!(timesteps, FlowTimesteps::Linear);
    }
}
