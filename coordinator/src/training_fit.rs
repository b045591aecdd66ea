//! What a training of a code model leaves to its device (`auto`), for `aitk fit`: the run chooses by the same rules.

use aitk_common::control_plane::{DeviceForecast, Forecast, Submission};
use aitk_common::plan::training_fit::{AutoKeys, TrainingFit};
use aitk_common::plan::training_memory::TrainingMemory;
use serde_json::Value;

/// Devices for which the choice is computed, the best first.
const MAX_DEVICES: usize = 8;

/// Whether a job leaves something to its device, which it then fills.
pub(crate) fn fills_device(job: &Value) -> bool {
    trainings(job).any(|body| AutoKeys::of(body).any())
}

/// The trainings of code models of a job.
fn trainings(job: &Value) -> impl Iterator<Item = &Value> {
    let processes = job.get("process").and_then(Value::as_array).into_iter().flatten();
    processes.filter_map(|process| process.pointer("/kind/lm_train"))
}

/// Adds to the description of each fitting device what the job would choose there.
pub(crate) fn describe_choices(submission: &Submission, forecast: &mut Forecast) {
    // Most jobs leave nothing to the machine.
    if !submission.job_json.contains("\"auto\"") {
        return;
    }
    let Ok(job) = serde_json::from_str::<Value>(&submission.job_json) else {
        return;
    };
    let budget = job.pointer("/cluster/memory_budget").and_then(Value::as_u64);
    let fitting = forecast.devices.iter_mut().filter(|device| device.fits);
    for (index, device) in fitting.take(MAX_DEVICES).enumerate() {
        let limit = device.budget.min(budget.unwrap_or(u64::MAX));
        let choices: Vec<String> = trainings(&job)
            .filter_map(|body| choice(body, submission, device, limit))
            .collect();
        if choices.is_empty() {
            continue;
        }
        let described = format!("; fitted to it: {}", choices.join("; "));
        // The summary ends with the description of the first device that fits.
        if index == 0 {
            forecast.summary.push_str(&described);
        }
        device.description.push_str(&described);
    }
}

fn choice(body: &Value, submission: &Submission, device: &DeviceForecast, limit: u64) -> Option<String> {
    let keys = AutoKeys::of(body);
    if !keys.any() {
        return None;
    }
    let memory = TrainingMemory::new(body, submission.parameter_counts?)?;
    let planner = TrainingFit::new(keys, memory, device.profile?, device.device.kind);
    let choice = planner.choose(planner.context(limit), limit);
    Some(planner.reason(&choice, limit))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use aitk_common::capability::{DeviceKind, DeviceRef};
    use aitk_common::id::WorkerId;
    use aitk_common::plan::parameter_counts::ParameterCounts;
    use aitk_common::plan::profile::MemoryProfile;
    use aitk_common::plan::shapes::{LanguageKind, LanguageShapes};
    use serde_json::json;

    fn device(budget: u64, fits: bool) -> DeviceForecast {
        DeviceForecast {
            worker: WorkerId::new("w1"),
            worker_name: "box".into(),
            device: DeviceRef {
                kind: DeviceKind::Cpu,
                index: 0,
            },
            device_name: "CPU".into(),
            budget,
            fits,
            can_start_now: fits,
            profile: fits.then_some(MemoryProfile::CpuOnly),
            memory: None,
            seconds: None,
            is_speed_measured: false,
            description: format!("box with {budget}"),
        }
    }

    #[test]
    fn fit_shows_what_a_job_would_choose_on_each_device() {
        let body = json!({
            "context": 256, "network": {"linear": 8}, "model": {"dtype": "bfloat16"},
            "train": {"batch_size": "auto", "gradient_accumulation": 32, "gradient_checkpointing": true},
        });
        let job = |body: &Value, cluster: Value| json!({"process": [{"kind": {"lm_train": body}}], "cluster": cluster});
        let counts = ParameterCounts {
            denoiser: 40_000_000,
            decoder: Some(LanguageShapes {
                kind: LanguageKind::Decoder,
                width: 512,
                heads: 8,
                kv_heads: 8,
                head_width: 64,
                intermediate: 2048,
                layers: 8,
                vocabulary: 16_384,
                positions: 2048,
                ..LanguageShapes::default()
            }),
            ..ParameterCounts::default()
        };
        let described = |body: &Value, cluster: Value| {
            let submission = Submission {
                config_text: String::new(),
                config_format: "yaml".into(),
                job_json: job(body, cluster).to_string(),
                inputs: Default::default(),
                local: false,
                idempotency_key: None,
                owner: None,
                parameter_counts: Some(counts),
                image_batches: Vec::new(),
                longest_prompt: None,
                images: None,
            };
            let devices = vec![device(2 << 30, true), device(1 << 30, true), device(1, false)];
            let mut forecast = Forecast {
                summary: format!("would start now on {}", devices[0].description),
                devices,
            };
            describe_choices(&submission, &mut forecast);
            let lines: Vec<String> = forecast.devices.into_iter().map(|device| device.description).collect();
            (forecast.summary, lines)
        };
        assert!(fills_device(&job(&body, json!({}))));
        let (summary, lines) = described(&body, json!({}));
        assert_eq!(summary, format!("would start now on {}", lines[0]));
        // What the run itself would choose with such a budget.
        let keys = AutoKeys::of(&body);
        let memory = TrainingMemory::new(&body, counts).unwrap();
        let planner = TrainingFit::new(keys, memory, MemoryProfile::CpuOnly, DeviceKind::Cpu);
        let expected = |limit: u64| planner.reason(&planner.choose(256, limit), limit);
        for (line, budget) in lines.iter().zip([2u64 << 30, 1 << 30]) {
            assert_eq!(*line, format!("box with {budget}; fitted to it: {}", expected(budget)));
        }
        assert_ne!(expected(2 << 30), expected(1 << 30));
        assert_eq!(lines[2], "box with 1");
        // The job's own limit counts.
        let (_, limited) = described(&body, json!({"memory_budget": 1 << 30}));
        assert!(limited[0].ends_with(&expected(1 << 30)), "{}", limited[0]);
        // A job that has all values is described as before, and may share its device.
        let mut fixed = body;
        fixed["train"]["batch_size"] = json!(4);
        assert_eq!(described(&fixed, json!({})).1[0], format!("box with {}", 2u64 << 30));
        assert!(!fills_device(&job(&fixed, json!({}))));
    }
}
