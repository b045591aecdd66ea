//! Predicts a job's memory need under each profile and its amount of work.
//!
//! The predictions are conservative; `cluster.memory_budget` in a config overrides them. The job's JSON is read key by key, so
//! that jobs of a newer version with unknown keys get a prediction, too.

use super::families;
use super::family::FamilySpeed;
use super::image_batches::{ImageBatch, MAX_IMAGE_BATCHES};
use super::job_memory::{Job, WorkKind, preserves};
use super::json::{flag, largest, number, text};
use super::language_model;
use super::lm_export;
use super::need::MemoryNeed;
use super::paired_images::compared_work;
use super::parameter_counts::ParameterCounts;
use super::slider::SliderKind;
use super::text_generation;
use crate::job::controls::ControlType;
use crate::job::sampler::SamplerName;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Denoiser passes that a training step costs: the forward pass, and a backward pass of twice the cost.
const TRAINING_PASSES: f64 = 3.0;
/// The same with gradient checkpointing: one more forward pass.
const CHECKPOINTED_PASSES: f64 = 4.0;

/// The version of what a pass is ([`Demand::passes`]), for measured speeds that are stored. 0 counted passes; in 1 it was
/// FLOPs of families with a U-Net; since 2 it is FLOPs of every family that the planner walks.
pub const WORK_UNIT: u32 = 2;

/// The resources that a job needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Demand {
    /// The model's family. Measured speeds are stored per family.
    pub family: String,
    /// The amount of work, in thousandths of a pass. That is one run of the family's published denoiser over one 512 x 512 image: of families
    /// that the planner walks its FLOPs, with which those of the job are compared; of others the job's passes are counted.
    #[serde(rename = "milliunits")]
    pub millipasses: u64,
    /// Peak device memory under each profile. None: unknown.
    pub memory: Option<MemoryNeed>,
}

impl Demand {
    /// Predicts the needs of a job (`JobSpec` as JSON). `counts` is given if the model's files are known, `batches` have the
    /// processes whose data sets are known. `None` if no process of the job has a model or converts one.
    #[must_use]
    pub fn of_job(job: &Value, counts: Option<ParameterCounts>, batches: &[ImageBatch]) -> Option<Self> {
        let mut whole: Option<Self> = None;
        for (index, process) in job.get("process")?.as_array()?.iter().enumerate() {
            let own = batches.iter().filter(|batch| batch.process as usize == index);
            let own: Vec<ImageBatch> = own.take(MAX_IMAGE_BATCHES).copied().collect();
            let Some(one) = of_process(process, counts, &own) else {
                continue;
            };
            whole = Some(match whole {
                None => one,
                Some(before) => Self {
                    family: before.family,
                    millipasses: before.millipasses.saturating_add(one.millipasses),
                    // Processes run one after another. If one is unknown, the whole is unknown.
                    memory: before.memory.zip(one.memory).map(|(a, b)| a.max(b)),
                },
            });
        }
        whole
    }

    /// Scales the work to `images`, for jobs whose prompts are in a file, so that the job itself does not give their number.
    #[must_use]
    pub fn with_images(mut self, job: &Value, images: u64) -> Self {
        let Some(body) = job.pointer("/process/0/kind/generate") else {
            return self;
        };
        self.millipasses = to_thousandths(self.passes() / image_count(body) * images as f64);
        self
    }

    /// The amount of work in passes, see [`Self::millipasses`].
    #[must_use]
    pub fn passes(&self) -> f64 {
        self.millipasses as f64 / 1000.0
    }
}

fn to_thousandths(units: f64) -> u64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let thousandths = (units * 1000.0).round().clamp(1.0, 1e15) as u64;
    thousandths
}

fn of_process(process: &Value, counts: Option<ParameterCounts>, batches: &[ImageBatch]) -> Option<Demand> {
    let kinds = process.get("kind")?.as_object()?;
    let (kind, body) = kinds.iter().next()?;
    if let Some(demand) = of_conversion(kind) {
        let exported = lm_export::memory(body, counts).filter(|_| kind == "lm_export");
        return Some(Demand {
            memory: exported.or(demand.memory),
            ..demand
        });
    }
    if kind == "lm_train" {
        let estimate = language_model::estimate(body, counts);
        return Some(Demand {
            family: language_model::FAMILY.to_owned(),
            millipasses: to_thousandths(estimate.passes),
            memory: estimate.memory,
        });
    }
    if kind == "lm_generate" {
        let estimate = text_generation::estimate(body, counts);
        return Some(Demand {
            family: language_model::FAMILY.to_owned(),
            millipasses: to_thousandths(estimate.passes),
            memory: estimate.memory,
        });
    }
    let arch = text(body, "/model/arch")?;
    let name = FamilySpeed::of(arch).map_or_else(
        || arch.split(':').next().unwrap_or(arch).to_owned(),
        |family| family.name.to_owned(),
    );
    let task = match kind.as_str() {
        "train" => WorkKind::Training,
        "generate" | "img2_img" => WorkKind::Generation,
        _ => return None,
    };
    if let Some(family) = families::of(&name) {
        let job = Job::new(task, body, family, counts, batches);
        let times = match task {
            WorkKind::Training => number(body, "/train/steps").unwrap_or(1000.0) * accumulated(body),
            WorkKind::Generation => image_count(body),
        };
        return Some(Demand {
            family: name,
            millipasses: to_thousandths(times * job.passes()),
            memory: Some(job.memory_need()),
        });
    }
    let passes = match task {
        WorkKind::Training => training_passes(body),
        WorkKind::Generation => generation_passes(body),
    };
    Some(Demand {
        family: name,
        millipasses: to_thousandths(passes),
        memory: None,
    })
}

/// The needs of a process that converts model files. It computes on the CPU, whatever its device is, and reads one layer at a time.
///
/// The largest layers of published models have 47 million numbers: both weights, their difference and the factors take 1 GiB in
/// float32, the decomposition of 3072 x 3072 numbers 0.5 GiB. The result of 0.7 GB that a LoCon of rank 64 of Stable Diffusion XL has
/// is in memory meanwhile, and twice while it is written.
fn of_conversion(kind: &str) -> Option<Demand> {
    let (units, cpu) = match kind {
        "extract" => (5.0, 3 << 30),
        "rescale_lora" => (0.1, 2 << 30),
        // One tensor at a time: the largest is a table of embeddings.
        "lm_export" => (0.5, 4 << 30),
        _ => return None,
    };
    Some(Demand {
        family: kind.to_owned(),
        millipasses: to_thousandths(units),
        memory: Some(MemoryNeed::new([[0; 4]; 2], [cpu; 4])),
    })
}

/// The work of a step, in micro-batches of one forward and one backward pass. A preservation loss adds a micro-batch and a forward pass
/// without the adapter (a third). Each prediction with which the loss compares adds a forward pass, and so does one from which the noisy
/// latents are made. A slider has several passes.
fn accumulated(body: &Value) -> f64 {
    let preserved = if preserves(body) { 1.0 + 1.0 / 3.0 } else { 0.0 };
    // The noisy latents of a flow model may be those after a step of a sampler.
    let samples = text(body, "/train/timestep_type") == Some("next_sample");
    let passes = [uses_base(body), flag(body, "/train/do_guidance_loss"), samples];
    let compared = passes.map(f64::from).into_iter().sum::<f64>() / 3.0;
    let compared = compared + compared_work(body);
    let work = SliderKind::of(body).map_or(1.0 + preserved + compared, |slider| slider.work(body));
    number(body, "/train/gradient_accumulation").unwrap_or(1.0).max(1.0) * work
}

/// Whether the loss of a training needs what the model predicts without the adapter.
fn uses_base(body: &Value) -> bool {
    let sets = || body.get("datasets").and_then(Value::as_array).into_iter().flatten();
    let has_masks = |set: &Value| {
        let names = set.get("controls").and_then(Value::as_array).into_iter().flatten();
        let mut types = names.filter_map(|name| ControlType::from_name(name.as_str()?));
        text(set, "/mask_path").is_some() || flag(set, "/alpha_mask") || types.any(ControlType::is_mask)
    };
    let preserves = preserves(body);
    let compares = flag(body, "/train/do_prior_divergence")
        || flag(body, "/train/correct_pred_norm")
        || sets().any(|set| flag(set, "/prior_reg"));
    (compares && !preserves) || (flag(body, "/train/inverted_mask_prior") && sets().any(has_masks))
}

/// The work of a training of a family that the planner does not know, in passes over 512 x 512 pixels.
fn training_passes(body: &Value) -> f64 {
    let batch = number(body, "/train/batch_size").unwrap_or(1.0).max(1.0);
    let datasets = body.get("datasets").and_then(Value::as_array);
    let sides = datasets
        .into_iter()
        .flatten()
        .filter_map(|set| largest(set.get("resolution")));
    let side = sides.reduce(f64::max).unwrap_or(512.0);
    let checkpointed = body.pointer("/train/gradient_checkpointing").and_then(Value::as_bool);
    let passes = match checkpointed.unwrap_or(true) {
        true => CHECKPOINTED_PASSES,
        false => TRAINING_PASSES,
    };
    let steps = number(body, "/train/steps").unwrap_or(1000.0);
    steps * batch * accumulated(body) * passes * (side / 512.0).powi(2)
}

/// As [`training_passes`], for a generation.
fn generation_passes(body: &Value) -> f64 {
    let side = |key: &str| number(body, key).unwrap_or(512.0);
    let area = side("/generate/width") * side("/generate/height");
    let guided = number(body, "/generate/guidance_scale").unwrap_or(7.0) > 1.0;
    let passes = if guided { 2.0 } else { 1.0 };
    image_count(body) * evaluations(body) * passes * area / (512.0 * 512.0)
}

/// How often a generation evaluates the model for one image.
pub(super) fn evaluations(body: &Value) -> f64 {
    let steps = number(body, "/generate/sample_steps").unwrap_or(20.0).min(1e6);
    // `batch_img2img` makes a share of the steps, and has this key always.
    let share = number(body, "/generate/denoise_strength").unwrap_or(1.0).min(1.0);
    let steps = (steps * share - 1e-6).ceil();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let evaluations = |sampler: SamplerName| f64::from(sampler.evaluations(steps as u32));
    text(body, "/generate/sampler")
        .and_then(SamplerName::from_name)
        .map_or(steps, evaluations)
}

/// The number of images, as far as the job itself gives it.
fn image_count(body: &Value) -> f64 {
    let prompts = body
        .pointer("/generate/prompts")
        .and_then(|prompts| {
            prompts
                .as_array()
                .or_else(|| prompts.as_object()?.values().find_map(Value::as_array))
        })
        .map_or(1, |list| list.len().max(1));
    let repeats = number(body, "/generate/num_repeats").unwrap_or(1.0).max(1.0);
    let max = number(body, "/generate/max_images").unwrap_or(f64::INFINITY);
    (prompts as f64 * repeats).min(max).max(1.0)
}

#[cfg(test)]
mod measured_tests;
#[cfg(test)]
mod option_tests;
#[cfg(test)]
mod published_tests;
#[cfg(test)]
mod test_helpers;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod work_tests;
