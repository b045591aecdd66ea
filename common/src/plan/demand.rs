//! Predicts a job's memory need under each profile and its amount of work.
//!
//! The predictions are conservative; `cluster.memory_budget` in a config overrides them. The job's JSON is read key by key, so
//! that jobs of a newer version with unknown keys get a prediction, too.

use super::families;
use super::family::{ActivationCosts, FamilyCosts};
use super::image_batches::{ImageBatch, MAX_IMAGE_BATCHES};
use super::job_memory::{Job, Task};
use super::json::{config_options, dtype_bytes, flag, largest, number, text};
use super::layout::{self, Activations, ComponentWeights, GIB, Layout};
use super::need::MemoryNeed;
use super::optimizers::{OptimizerFacts, facts};
use super::parameter_counts::{CompactWeights, ParameterCounts};
use super::qtype::QType;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Denoiser passes that a training step costs: the forward pass, and a backward pass of twice the cost.
const TRAINING_PASSES: f64 = 3.0;
/// The same with gradient checkpointing: one more forward pass.
const CHECKPOINTED_PASSES: f64 = 4.0;
/// Bytes of row and column means per trained parameter.
const MEAN_BYTES: f64 = 0.1;
/// GiB of activations of the VAE that do not depend on the image size.
const VAE_FIXED_GIB: f64 = 0.039;

/// The version of what a unit of work is ([`Demand::units`]), for measured speeds that are stored. 0 counted passes; since 1 it
/// is FLOPs where the planner knows them.
pub const WORK_UNIT: u32 = 1;

/// The resources that a job needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Demand {
    /// The model's family. Measured speeds are stored per family.
    pub family: String,
    /// Thousandths of a unit of work. A unit is one pass of the family's published denoiser over one 512 x 512 image: of families
    /// that the planner walks its FLOPs, with which those of the job are compared; of others the job's passes are counted.
    #[serde(rename = "milliunits")]
    pub millipasses: u64,
    /// Peak device memory under each profile. None: unknown.
    pub memory: Option<MemoryNeed>,
}

impl Demand {
    /// Predicts the needs of a job (`JobSpec` as JSON). `counts` is given if the model's files are known, `batches` have the
    /// processes whose data sets are known. `None` if no process of the job has a model.
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
        self.millipasses = to_thousandths(self.units() / image_count(body) * images as f64);
        self
    }

    /// The amount of work in units.
    #[must_use]
    pub fn units(&self) -> f64 {
        self.millipasses as f64 / 1000.0
    }
}

fn to_thousandths(units: f64) -> u64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let thousandths = (units * 1000.0).round().clamp(1.0, 1e15) as u64;
    thousandths
}

/// Bytes of optimizer state per trained parameter, for families whose tensors the planner does not know.
pub(super) fn state_bytes_per_parameter(optimizer: &OptimizerFacts) -> f64 {
    optimizer.state + if optimizer.is_factored { MEAN_BYTES } else { 0.0 }
}

/// Bytes of a factored optimizer's means for convolution kernels, per parameter of the model: six numbers per nine weights.
pub(super) fn factored_convolution_bytes(family: &FamilyCosts) -> f64 {
    4.0 * family.convolutions * 6.0 / 9.0
}

fn of_process(process: &Value, counts: Option<ParameterCounts>, batches: &[ImageBatch]) -> Option<Demand> {
    let kinds = process.get("kind")?.as_object()?;
    let (kind, body) = kinds.iter().next()?;
    let arch = text(body, "/model/arch")?;
    let family = FamilyCosts::of(arch);
    let name = family.map_or_else(
        || arch.split(':').next().unwrap_or(arch).to_owned(),
        |f| f.name.to_owned(),
    );
    let figures = family.map(|family| ModelFigures::of(family, counts));
    let task = match kind.as_str() {
        "train" => Task::Training,
        "generate" | "img2_img" => Task::Generation,
        _ => return None,
    };
    if let Some(family) = families::of(&name) {
        let job = Job::new(task, body, family, counts, batches);
        let times = match task {
            Task::Training => number(body, "/train/steps").unwrap_or(1000.0) * accumulated(body),
            Task::Generation => image_count(body),
        };
        return Some(Demand {
            family: name,
            millipasses: to_thousandths(times * job.passes()),
            memory: Some(job.memory_need()),
        });
    }
    Some(match task {
        Task::Training => training(name, body, figures),
        Task::Generation => generation(name, body, figures),
    })
}

/// The micro-batches of a step.
fn accumulated(body: &Value) -> f64 {
    number(body, "/train/gradient_accumulation").unwrap_or(1.0).max(1.0)
}

/// A family's figures, scaled to the actual model. Parameters in millions.
pub(super) struct ModelFigures {
    pub(super) family: &'static FamilyCosts,
    pub(super) denoiser: f64,
    pub(super) text: f64,
    pub(super) vae: f64,
    /// Factor on activations, relative to the family. Activations grow with the width of the layers, parameters with its square.
    scale: f64,
    /// The compactly stored parameters of denoiser, text encoders and VAE.
    stored: [CompactWeights; 3],
}

impl ModelFigures {
    pub(super) fn of(family: &'static FamilyCosts, counts: Option<ParameterCounts>) -> Self {
        match counts {
            None => Self {
                family,
                denoiser: family.denoiser,
                text: family.text,
                vae: family.vae,
                scale: 1.0,
                stored: Default::default(),
            },
            Some(counts) => {
                let millions = |n: u64| n as f64 / 1e6;
                let denoiser = millions(counts.denoiser);
                // A component that was not found is stored elsewhere and has the family's usual size, scaled down for tiny models.
                let scale = (denoiser / family.denoiser).sqrt().clamp(0.01, 4.0);
                let component = |found: u64, usual: f64| match found {
                    0 => usual * scale.powi(2).min(1.0),
                    found => millions(found),
                };
                Self {
                    family,
                    denoiser,
                    text: component(counts.text, family.text),
                    vae: component(counts.vae, family.vae),
                    scale,
                    stored: [counts.denoiser_stored, counts.text_stored, counts.vae_stored],
                }
            }
        }
    }
}

impl ModelFigures {
    /// Factor on the VAE's activations, relative to the family.
    fn vae_scale(&self) -> f64 {
        (self.vae / self.family.vae).sqrt().clamp(0.01, 4.0)
    }

    /// Millions of text encoder parameters that are never quantised. Smaller encoders have shorter embedding vectors, but the
    /// same vocabulary.
    fn text_tables(&self) -> f64 {
        let smaller = (self.text / self.family.text).sqrt();
        (self.family.text_tables * smaller).min(self.text)
    }

    /// The memory of the weights alone, without activations and training state. `full` says whether the denoiser and the text
    /// encoders themselves are trained.
    fn layout(&self, body: &Value, target: ComputeTarget, full: [bool; 2]) -> Layout {
        let [denoiser, text, vae] = self.stored;
        let tables = self.text_tables();
        Layout {
            denoiser: match full[0] {
                // Trained weights are converted to the compute dtype.
                true => component_weights(self.denoiser, 0.0, CompactWeights::default(), None, target),
                false => {
                    let quantised = quantised_width(body, Quantisable::Denoiser, target.width);
                    component_weights(self.denoiser, 0.0, denoiser, quantised, target)
                }
            },
            denoiser_trained: full[0],
            text: match full[1] {
                true => component_weights(self.text, 0.0, CompactWeights::default(), None, target),
                false => {
                    let quantised = quantised_width(body, Quantisable::TextEncoder, target.width);
                    component_weights(self.text, tables, text, quantised, target)
                }
            },
            text_trained: full[1],
            vae: component_weights(self.vae, 0.0, vae, None, target),
            trained: 0.0,
            gradients: 0.0,
            separable: false,
            saving: 0.0,
            activations: Activations::default(),
            config_options: config_options(body),
        }
    }
}

/// The kind of device, and the bytes per number of its compute dtype.
#[derive(Clone, Copy)]
struct ComputeTarget {
    width: f64,
    cpu: bool,
}

impl ComputeTarget {
    fn gpu(width: f64) -> Self {
        Self { width, cpu: false }
    }

    /// A CPU computes in float32.
    fn cpu() -> Self {
        Self { width: 4.0, cpu: true }
    }
}

/// The memory of a component with `all` million parameters. `stored` are those that the file stores compactly; `tables` million
/// of the others are never quantised; `quantised` is the bytes per weight if the rest is quantised at load time.
fn component_weights(
    all: f64,
    tables: f64,
    stored: CompactWeights,
    quantised: Option<f64>,
    target: ComputeTarget,
) -> ComponentWeights {
    let gib = |millions: f64, width: f64| millions * 1e6 * width / GIB;
    let in_file = (stored.quantised as f64 / 1e6).min(all);
    let others = all - in_file;
    let halves = match target.cpu && quantised.is_none() {
        true => (stored.halves as f64 / 1e6).min(others),
        false => 0.0,
    };
    let (packed, plain) = match quantised {
        Some(width) => {
            let tables = tables.min(others);
            (gib(others - tables, width), tables)
        }
        None => (0.0, others - halves),
    };
    let wide = gib(plain, target.width);
    ComponentWeights {
        streamable: wide + gib(halves, 2.0),
        quantised: packed,
        stored: stored.bytes as f64 / GIB,
        in_compute_dtype: wide,
        dequantised: gib(all, target.width) - wide,
    }
}

fn training(family: String, body: &Value, figures: Option<ModelFigures>) -> Demand {
    let batch = number(body, "/train/batch_size").unwrap_or(1.0).max(1.0);
    let datasets = body.get("datasets").and_then(Value::as_array);
    let side = datasets
        .into_iter()
        .flatten()
        .filter_map(|set| largest(set.get("resolution")))
        .fold(None, |most: Option<f64>, n| Some(most.map_or(n, |most| most.max(n))))
        .unwrap_or(512.0);
    let checkpointed = body
        .pointer("/train/gradient_checkpointing")
        .and_then(Value::as_bool)
        .unwrap_or(true);
    let steps = number(body, "/train/steps").unwrap_or(1000.0);
    let accumulated = accumulated(body);
    // A negative value means one update per epoch.
    let updates_every_step = body
        .pointer("/train/gradient_accumulation_steps")
        .is_none_or(|steps| steps == 1);
    let passes = if checkpointed {
        CHECKPOINTED_PASSES
    } else {
        TRAINING_PASSES
    };
    let units = steps * batch * accumulated * passes * (side / 512.0).powi(2);
    let memory = figures.map(|figures| {
        let optimizer = facts(text(body, "/train/optimizer").unwrap_or("adamw"));
        let network = body.get("network").filter(|network| !network.is_null());
        let TrainedParameters {
            millions: trained,
            full,
        } = TrainedParameters::of(body, &figures);
        // A full fine-tune keeps and computes its weights in f32.
        let width = match network {
            Some(_) => dtype_bytes(text(body, "/train/dtype")),
            None => 4.0,
        };
        let trained = trained * 1e6 / GIB;
        let mut state = state_bytes_per_parameter(&optimizer);
        if full[0] && optimizer.is_factored {
            state += factored_convolution_bytes(figures.family);
        }
        // The gradient of the token embeddings exists twice: the backward pass of the lookup makes another one.
        let tables = f64::from(full[1]) * figures.text_tables() * 1e6 * 4.0 / GIB;
        let averaged = flag(body, "/train/ema_config/use_ema");
        let one = (side / 1024.0).powi(2);
        let layout = |target: ComputeTarget, costs: ActivationCosts| {
            let per_image = |activations: f64| one * batch * activations * figures.scale;
            // A full fine-tune's weights are counted with their component, updated in place and saved one by one; the EMA
            // is swapped with them to be saved. An adapter needs one more number per parameter during an optimizer step,
            // which is noticeable on a CPU.
            let (extra, saving) = match network {
                Some(_) => (
                    4.0 + costs.step * state,
                    costs.saving.weights * 4.0 + costs.saving.state * state,
                ),
                None if averaged => (8.0, 0.0),
                None => (0.0, 0.0),
            };
            Layout {
                trained: trained * (extra + state),
                gradients: trained * 4.0 + tables,
                separable: optimizer.is_separable && accumulated == 1.0 && updates_every_step,
                saving: trained * saving,
                activations: Activations {
                    work: if checkpointed {
                        per_image(costs.train_checkpointed)
                    } else {
                        per_image(costs.train_plain)
                    },
                    memory_saving_work: per_image(costs.train_memory_saving),
                    // Images are encoded one at a time.
                    vae: (one * costs.encode + VAE_FIXED_GIB) * figures.vae_scale(),
                    vae_megapixels: one,
                },
                ..figures.layout(body, target, full)
            }
        };
        let family = figures.family;
        layout::memory_need(
            &layout(ComputeTarget::gpu(width), family.on_gpu(width)),
            &layout(ComputeTarget::cpu(), family.on_cpu()),
        )
    });
    Demand {
        family,
        millipasses: to_thousandths(units),
        memory,
    }
}

/// The parameters that a training run trains.
pub(super) struct TrainedParameters {
    /// Millions of trained parameters.
    pub(super) millions: f64,
    /// Whether denoiser and text encoders themselves are trained.
    pub(super) full: [bool; 2],
}

impl TrainedParameters {
    pub(super) fn of(body: &Value, figures: &ModelFigures) -> Self {
        let network = body.get("network").filter(|network| !network.is_null());
        let components = [
            body.pointer("/train/train_unet")
                .and_then(Value::as_bool)
                .unwrap_or(true),
            flag(body, "/train/train_text_encoder"),
        ];
        let full = components.map(|trained| trained && network.is_none());
        let millions = match network {
            Some(network) => {
                let rank = number(network, "/rank")
                    .or_else(|| number(network, "/linear"))
                    .unwrap_or(4.0);
                let of_text = match components[1] {
                    true => figures.family.text_lora_per_rank,
                    false => 0.0,
                };
                let of_convolutions = number(network, "/conv").unwrap_or(0.0) * figures.family.conv_lora_per_rank;
                (rank * (figures.family.lora_per_rank + of_text) + of_convolutions) * figures.scale
            }
            None => f64::from(full[0]) * figures.denoiser + f64::from(full[1]) * figures.text,
        };
        Self { millions, full }
    }
}

fn generation(family: String, body: &Value, figures: Option<ModelFigures>) -> Demand {
    let width_px = number(body, "/generate/width").unwrap_or(512.0);
    let height_px = number(body, "/generate/height").unwrap_or(512.0);
    let steps = number(body, "/generate/sample_steps").unwrap_or(20.0);
    let guided = number(body, "/generate/guidance_scale").unwrap_or(7.0) > 1.0;
    let images = image_count(body);
    let area = width_px * height_px;
    let passes = if guided { 2.0 } else { 1.0 };
    let units = images * steps * passes * area / (512.0 * 512.0);
    let memory = figures.map(|figures| {
        let megapixels = area / (1024.0 * 1024.0);
        let layout = |target: ComputeTarget, costs: ActivationCosts| {
            let one = megapixels * costs.denoise * figures.scale;
            Layout {
                activations: Activations {
                    work: passes * one,
                    memory_saving_work: one,
                    vae: (megapixels * costs.decode + VAE_FIXED_GIB) * figures.vae_scale(),
                    vae_megapixels: megapixels,
                },
                ..figures.layout(body, target, [false; 2])
            }
        };
        let (family, width) = (figures.family, dtype_bytes(text(body, "/model/dtype")));
        layout::memory_need(
            &layout(ComputeTarget::gpu(width), family.on_gpu(width)),
            &layout(ComputeTarget::cpu(), family.on_cpu()),
        )
    });
    Demand {
        family,
        millipasses: to_thousandths(units),
        memory,
    }
}

/// A component that can be quantised.
#[derive(Clone, Copy)]
enum Quantisable {
    Denoiser,
    TextEncoder,
}

/// Bytes per weight of this component if the config quantises it.
fn quantised_width(body: &Value, part: Quantisable, width: f64) -> Option<f64> {
    let quantize = flag(body, "/model/quantize");
    let (on, key) = match part {
        Quantisable::Denoiser => (quantize, "/model/qtype"),
        Quantisable::TextEncoder => {
            let own = body.pointer("/model/quantize_te").and_then(Value::as_bool);
            (own.unwrap_or(quantize), "/model/qtype_te")
        }
    };
    let kind = text(body, key).and_then(QType::from_name);
    on.then(|| kind.unwrap_or(QType::Float8).bytes().min(width))
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
    let most = number(body, "/generate/max_images").unwrap_or(f64::INFINITY);
    (prompts as f64 * repeats).min(most).max(1.0)
}

#[cfg(test)]
mod tests;
