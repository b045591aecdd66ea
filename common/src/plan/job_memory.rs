//! Predicts the memory of a job's process by walking its phases: loading, caching latents, training steps, samples, saving,
//! generation. The total is that of the largest phase.

mod conditions;
mod controls;
mod decorator;
mod features;
mod image_adapter;
mod layer_ranks;
mod phases;
mod training;
mod work;

use super::device_factors::{CPU, CUDA, GPU_GRANULARITY, METAL, Need, Phase};
use super::families::Family;
use super::image_batches::{ImageBatch, largest_batches};
use super::json::{dtype_bytes, flag, number, strings, text};
use super::memory_options::MemoryOptions;
use super::names::NameFilter;
use super::need::MemoryNeed;
use super::optimizers::{OptimizerFacts, facts_of};
use super::parameter_counts::{CompactWeights, ParameterCounts};
use super::profile::MemoryProfile;
use super::qtype::QType;
use super::requests::{ImageSize, image_sizes_with_files, sample_sizes};
use super::shapes::ModelShapes;
use super::walk::build::{
    AdapterKind, AdapterOptions, Builder, ComponentOptions, LoraLayers, MagnitudeSide, StoredFractions, WeightTotals,
};
use super::walk::{Backend, Denoiser, Form, ImageAdapter, LanguageEncoder, MetaTensor, TextEncoder, Vae, Walk};
use crate::job::lokr::LokrSplits;
use crate::job::lora_containers::target_classes;
use crate::job::network::LOKR_FULL_RANK;
use layer_ranks::layer_ranks;
use serde_json::Value;

pub(super) use training::preserves;

/// The largest side of an image that a prediction considers.
const MAX_SIDE: f64 = 65_536.0;
const MAX_BATCH: f64 = 1e6;
/// Bytes below which a tensor shares the allocator's pages with others.
const SMALL_TENSOR: f64 = 262_144.0;

/// The rank of a LoRA whose file the planner does not see.
const ASSUMED_RANK: f64 = 32.0;
/// The keys of LoRA files that stay in memory beside the model, and whether a generation loads them too.
const LORA_FILES: [(&str, bool); 4] = [
    ("/model/lora_path", true),
    ("/model/inference_lora_path", true),
    ("/model/assistant_lora_path", false),
    ("/model/accuracy_recovery_adapter", true),
];

/// Characters of a prompt for each token, and the tokens of the chat around it.
const CHARACTERS_PER_TOKEN: f64 = 4.0;
const CHAT_TOKENS: f64 = 10.0;
/// Tokens of a caption for families whose passes depend on it.
const CAPTION_TOKENS: f64 = 96.0;

/// The kind of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkKind {
    Training,
    Generation,
}

/// A process and its model.
pub(super) struct Job<'a> {
    kind: WorkKind,
    body: &'a Value,
    family: &'a Family,
    shapes: ModelShapes,
    counts: ParameterCounts,
    is_full: bool,
    optimizer: OptimizerFacts,
    /// The largest batches of its data sets, if these were seen.
    batches: Vec<ImageBatch>,
}

/// The components of a model as a job loads them.
struct Model {
    text: Vec<TextEncoder>,
    language: Option<LanguageEncoder>,
    denoiser: Denoiser,
    /// A network beside the denoiser that is trained; its trained tensors are among those of the denoiser.
    image_adapter: Option<ImageAdapter>,
    vae: Vae,
    /// Those of the text encoders, the denoiser and the autoencoder.
    weights: [WeightTotals; 3],
}

impl<'a> Job<'a> {
    pub(super) fn new(
        kind: WorkKind,
        body: &'a Value,
        family: &'a Family,
        counts: Option<ParameterCounts>,
        batches: &[ImageBatch],
    ) -> Self {
        let counts = counts.unwrap_or_default();
        let published = family.shapes;
        let shapes = counts.shapes.and_then(ModelShapes::checked).unwrap_or_else(|| {
            let fraction = |found: u64, usual: f64| match found {
                0 => 1.0,
                found => (found as f64 / usual).clamp(1e-4, 16.0),
            };
            let [text, unet, vae] = parameters(family, published);
            let denoiser = fraction(counts.denoiser, unet);
            // A component that was not found is stored elsewhere and has the family's usual size, scaled down for tiny models.
            let other = |found: u64, usual: f64| match found {
                0 => denoiser.min(1.0),
                found => fraction(found, usual),
            };
            published.scaled([denoiser, other(counts.text, text), other(counts.vae, vae)])
        });
        Self {
            kind,
            body,
            family,
            shapes,
            counts,
            is_full: kind == WorkKind::Training
                && ["network", "embedding", "adapter", "decorator"]
                    .iter()
                    .all(|key| body.get(*key).is_none_or(Value::is_null)),
            optimizer: facts_of(body),
            batches: largest_batches(batches.iter().copied()),
        }
    }

    /// Predicts the memory on GPUs and on a CPU under each profile.
    pub(super) fn memory_need(&self) -> MemoryNeed {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let whole = |bytes: f64| bytes.clamp(0.0, 1e18) as u64;
        let on_gpu = |(form, factors)| {
            MemoryProfile::on(false).map(|profile| {
                let bytes = whole(self.need(profile, self.backend(form)).bytes(factors));
                bytes.div_ceil(GPU_GRANULARITY) * GPU_GRANULARITY
            })
        };
        let on_cpu = |profile| whole(self.need(profile, Backend::CPU).bytes(&CPU));
        MemoryNeed::new(
            [(Form::Cuda, &CUDA), (Form::Metal, &METAL)].map(on_gpu),
            MemoryProfile::on(true).map(on_cpu),
        )
    }

    /// The trained parameters, the bytes of their optimizer's state, and the parameters of a whole model as it is saved.
    pub(super) fn trained(&self) -> (f64, f64, f64) {
        let model = self.model(&MemoryOptions::default(), Backend::CPU);
        let trained = model.weights.iter().flat_map(|weights| &weights.trained);
        let (elements, state) = trained.fold((0.0, 0.0), |(elements, state), tensor| {
            let more = self.optimizer.state_bytes(tensor.elements, tensor.factored);
            (elements + tensor.elements, state + more)
        });
        let saved = match self.shapes.has_transformer() {
            // Only the transformer is saved.
            true => model.weights[1].parameters,
            false => model.weights.iter().map(|weights| weights.parameters).sum(),
        };
        (elements, state, saved)
    }

    /// The dtype in which the job computes on a device of this form.
    pub(super) fn backend(&self, form: Form) -> Backend {
        let width = match self.kind {
            // A full fine-tune keeps and computes its weights in float32, or in bfloat16 with stochastic rounding.
            WorkKind::Training if self.is_full && !matches!(self.dtype(), Some("bf16" | "bfloat16")) => 4.0,
            _ => dtype_bytes(self.dtype()),
        };
        Backend { width, form }
    }

    /// The name of the configured dtype.
    fn dtype(&self) -> Option<&str> {
        match self.kind {
            WorkKind::Training => text(self.body, "/train/dtype"),
            WorkKind::Generation => text(self.body, "/model/dtype"),
        }
    }

    /// Whether a GPU computes in float16.
    fn is_f16(&self) -> bool {
        matches!(self.dtype(), Some("fp16" | "float16" | "f16"))
    }

    /// The dtype of the autoencoder.
    fn vae_backend(&self, backend: Backend) -> Backend {
        let width = match self.is_f16() && self.family.vae_overflows_in_f16 {
            true => 4.0,
            false => backend.width,
        };
        Backend { width, ..backend }
    }

    /// Whether the U-Net and the text encoders are trained: themselves, or by an adapter.
    fn trains(&self) -> [bool; 2] {
        let key = |key: &str, usual: bool| self.body.pointer(key).and_then(Value::as_bool).unwrap_or(usual);
        match self.kind {
            WorkKind::Training if self.learned_vectors() > 0.0 => [false, true],
            WorkKind::Training if self.trains_image_adapter() || self.decorator_tokens() > 0.0 => [false; 2],
            WorkKind::Training => [key("/train/train_unet", true), key("/train/train_text_encoder", false)],
            WorkKind::Generation => [false; 2],
        }
    }

    /// The vectors of a textual inversion, for each text encoder.
    fn learned_vectors(&self) -> f64 {
        let embedding = self.body.get("embedding").filter(|embedding| !embedding.is_null());
        embedding.map_or(0.0, |embedding| {
            number(embedding, "/tokens").unwrap_or(4.0).clamp(1.0, 1e5)
        })
    }

    /// The parameters of the text encoders' embedding tables, which are dense in memory whatever their files have.
    fn text_tables(&self) -> f64 {
        let clip = self.shapes.text_encoders().take(self.family.text_prefixes.len());
        let clip = clip.map(|text| (f64::from(text.vocabulary) + f64::from(text.positions)) * f64::from(text.width));
        let language = &self.shapes.language;
        clip.sum::<f64>() + f64::from(language.vocabulary) * f64::from(language.width)
    }

    /// Whether each save merges the network into the model.
    fn merges_network(&self) -> bool {
        self.kind == WorkKind::Training && !self.is_full && flag(self.body, "/train/merge_network_on_save")
    }

    fn adapter(&self) -> Option<AdapterOptions> {
        let network = self.body.get("network").filter(|network| !network.is_null())?;
        let positive = |key: &str| number(network, key).filter(|rank| *rank > 0.0);
        let kind = match text(network, "/type") {
            Some("locon" | "lycoris") => AdapterKind::Locon,
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            Some("lokr") => AdapterKind::Lokr {
                factor: positive("/lokr_factor").map(|factor| factor.min(1e9) as usize),
                splits: LokrSplits {
                    smaller_first: flag(network, "/network_kwargs/smaller_factor_first"),
                    unbalanced: flag(network, "/network_kwargs/unbalanced_factorization"),
                    decompose_both: flag(network, "/network_kwargs/decompose_both"),
                },
            },
            Some("dora") => AdapterKind::Dora,
            Some("loha") => AdapterKind::Loha,
            Some("fullrank") => AdapterKind::Difference,
            _ => AdapterKind::Lora,
        };
        let dropped: &[&str] = match kind {
            // Whole changes are dropped without further tensors, and outputs of other types in their matrices.
            AdapterKind::Lokr { .. } => &["/network_kwargs/rank_dropout"],
            _ => &[
                "/dropout",
                "/network_kwargs/rank_dropout",
                "/network_kwargs/module_dropout",
            ],
        };
        let full_rank = network.get("lokr_full_rank").and_then(Value::as_bool).unwrap_or(true);
        let is_full = full_rank && matches!(kind, AdapterKind::Lokr { .. });
        let rank = positive("/rank").or_else(|| positive("/linear")).unwrap_or(4.0);
        let conv_rank = positive("/conv");
        Some(AdapterOptions {
            kind,
            rank: if is_full { LOKR_FULL_RANK as f64 } else { rank.min(1e5) },
            conv_rank: if is_full {
                Some(LOKR_FULL_RANK as f64)
            } else {
                conv_rank.map(|rank| rank.min(1e5))
            },
            layer_ranks: layer_ranks(network, rank, conv_rank.unwrap_or(0.0)),
            // A training of images drops other numbers.
            drops_inputs: false,
            dropout: dropped.iter().any(|key| {
                network
                    .pointer(key)
                    .and_then(Value::as_f64)
                    .is_some_and(|chance| chance > 0.0)
            }),
            full_if_contains: strings(network.pointer("/network_kwargs/full_if_contains")),
            containers: target_classes(
                &strings(network.pointer("/network_kwargs/target_lin_modules")),
                &strings(network.pointer("/network_kwargs/target_conv_modules")),
                is_full || conv_rank.is_some(),
            ),
            tucker: flag(network, "/network_kwargs/use_cp"),
            scalar: flag(network, "/network_kwargs/use_scalar"),
            magnitudes: flag(network, "/network_kwargs/dora_wd").then(|| {
                match network.pointer("/network_kwargs/wd_on_out").and_then(Value::as_bool) {
                    Some(false) => MagnitudeSide::Inputs,
                    _ => MagnitudeSide::Outputs,
                }
            }),
            norms: flag(network, "/all_layers") || flag(network, "/network_kwargs/train_norm"),
            whole_in_out: flag(network, "/network_kwargs/full_train_in_out"),
            parameter_threshold: network
                .pointer("/network_kwargs/parameter_threshold")
                .and_then(Value::as_f64)
                .unwrap_or(0.0),
            filter: NameFilter {
                only_if_contains: strings(network.pointer("/network_kwargs/only_if_contains")),
                ignore_if_contains: strings(network.pointer("/network_kwargs/ignore_if_contains")),
            },
        })
    }

    fn model(&self, options: &MemoryOptions, backend: Backend) -> Model {
        let body = self.body;
        let [trains_unet, trains_text] = self.trains();
        let trained_names = NameFilter {
            only_if_contains: strings(body.pointer("/model/only_if_contains")),
            ignore_if_contains: strings(body.pointer("/model/ignore_if_contains")),
        };
        let exclude = strings(body.pointer("/model/quantize_kwargs/exclude"));
        let quantize = flag(body, "/model/quantize");
        let quantize_te = body
            .pointer("/model/quantize_te")
            .and_then(Value::as_bool)
            .unwrap_or(quantize);
        let qtype = |on: bool, key: &str| {
            let named = text(body, key).and_then(QType::from_name);
            on.then(|| named.unwrap_or(QType::Float8))
        };
        let component = |trains: bool, streamed: f64, qtype: Option<QType>, stored: StoredFractions, lora| {
            let is_own = trains && self.is_full;
            // A network is merged into weights in memory.
            let is_changed = is_own || (trains && self.merges_network());
            let (lora_prefix, lora_layers) = lora;
            ComponentOptions {
                // A trained component is neither quantised nor streamed.
                streamed: if is_changed { 0.0 } else { streamed },
                qtype: qtype.filter(|_| !is_changed),
                exclude: exclude.clone(),
                trained: is_own.then(|| trained_names.clone()),
                learned_vectors: if trains { self.learned_vectors() } else { 0.0 },
                adapter: self.adapter().filter(|_| trains),
                lora_prefix,
                lora_layers,
                width: backend.width,
                cpu: backend.is_cpu(),
                stored: if is_changed { StoredFractions::default() } else { stored },
            }
        };
        let counts = &self.counts;
        let mut index = 0;
        let (mut text, mut text_weights) = (Vec::new(), WeightTotals::default());
        let text_qtype = qtype(quantize_te, "/model/qtype_te");
        let stored = fractions(counts.text_stored, counts.text as f64 - self.text_tables());
        for (shapes, prefix) in self.shapes.text_encoders().zip(self.family.text_prefixes) {
            let lora = (*prefix, LoraLayers::AttentionAndMlp);
            let mut builder = Builder::new(
                component(trains_text, options.text_streamed, text_qtype, stored, lora),
                index,
            );
            text.push(TextEncoder::new(&mut builder, shapes));
            index = builder.last_index();
            text_weights.add(builder.weights);
        }
        // A language model is never trained.
        let language = self.shapes.language.exists().then(|| {
            let lora = ("", LoraLayers::All);
            let mut builder = Builder::new(component(false, options.text_streamed, text_qtype, stored, lora), index);
            let is_f16 = self.is_f16() && !backend.is_cpu();
            let encoder = LanguageEncoder::new(&mut builder, &self.shapes.language, is_f16);
            index = builder.last_index();
            text_weights.add(builder.weights);
            encoder
        });
        let stored = fractions(counts.denoiser_stored, counts.denoiser as f64);
        let lora_layers = match body.pointer("/network/transformer_only").and_then(Value::as_bool) {
            Some(false) => LoraLayers::All,
            _ => self.family.lora_layers,
        };
        let mut denoiser_options = component(
            trains_unet,
            options.denoiser_streamed,
            qtype(quantize, "/model/qtype"),
            stored,
            (self.family.denoiser_prefix, lora_layers),
        );
        let never_quantised = self.family.never_quantised.iter();
        denoiser_options
            .exclude
            .extend(never_quantised.map(|&name| name.to_owned()));
        let mut builder = Builder::new(denoiser_options, index);
        let denoiser = Denoiser::new(&mut builder, &self.shapes);
        let mut denoiser_weights = std::mem::take(&mut builder.weights);
        denoiser_weights.trained.extend(self.decorator());
        let stored = fractions(counts.vae_stored, counts.vae as f64);
        let mut vae_options = component(false, options.vae_streamed, None, stored, ("", LoraLayers::All));
        vae_options.width = self.vae_backend(backend).width;
        let mut builder = Builder::new(vae_options, builder.last_index());
        let vae = Vae::new(&mut builder, &self.shapes.vae);
        let at = (builder.last_index(), vae.scale());
        let image_adapter = self.image_adapter(&mut denoiser_weights, at, backend);
        Model {
            text,
            language,
            denoiser,
            image_adapter,
            vae,
            weights: [text_weights, denoiser_weights, builder.weights],
        }
    }

    /// The bytes of the LoRA files that the config names: float32, whatever the model computes in.
    fn lora_files(&self, backend: Backend) -> f64 {
        let is_loaded = |(key, in_generation): &&(&str, bool)| {
            text(self.body, key).is_some_and(|path| !path.is_empty())
                && (self.kind == WorkKind::Training || *in_generation)
        };
        let files = LORA_FILES.iter().filter(is_loaded).count();
        if files == 0 {
            return 0.0;
        }
        let options = ComponentOptions {
            adapter: Some(AdapterOptions {
                rank: ASSUMED_RANK,
                ..AdapterOptions::default()
            }),
            lora_prefix: self.family.denoiser_prefix,
            lora_layers: self.family.lora_layers,
            width: backend.width,
            cpu: backend.is_cpu(),
            ..ComponentOptions::default()
        };
        let mut builder = Builder::new(options, 0);
        let _denoiser = Denoiser::new(&mut builder, &self.shapes);
        let numbers: f64 = builder.weights.trained.iter().map(|tensor| tensor.elements).sum();
        4.0 * numbers * files as f64
    }

    /// What the job needs under a profile.
    pub(super) fn need(&self, profile: MemoryProfile, backend: Backend) -> Need {
        let options = MemoryOptions::of(profile).merge(super::json::config_options(self.body));
        let mut model = self.model(&options, backend);
        let text_phase = self
            .frees_text_encoders()
            .then(|| self.free_text_encoders(&mut model, backend));
        let sum = |of: fn(&WeightTotals) -> f64| model.weights.iter().map(of).sum::<f64>();
        let (weights, quantised) = (sum(|weights| weights.resident), sum(|weights| weights.quantised));
        let weights = weights + self.lora_files(backend) + self.feature_extractor_weights(backend);
        let (mut phases, recycled) = match self.kind {
            WorkKind::Generation => {
                let transient = self.images(&model, &options, backend, &self.generated_sizes());
                let images = Phase {
                    name: "images",
                    held: 0.0,
                    transient,
                };
                (vec![images], transient)
            }
            WorkKind::Training => self.training(&model, &options, backend),
        };
        let small_fraction = if self.is_full { 0.0 } else { small_fraction(&model) };
        phases.extend(text_phase);
        if self.kind == WorkKind::Training {
            phases.push(self.caching_latents(&model, &options, backend));
        }
        phases.extend(self.making_controls(&model));
        phases.extend(self.loading(&model));
        Need {
            weights,
            quantised,
            phases,
            recycled,
            small_fraction,
            returns_freed_memory: options.returns_freed_memory,
            has_several_images: match self.kind {
                // A data set usually has several.
                WorkKind::Generation => self.changes_images() || self.generated_sizes().len() > 1,
                // Samples are made at the end, and usually before it.
                WorkKind::Training => !sample_sizes(self.body, self.multiple()).is_empty(),
            },
        }
    }

    /// Loading: a dense weight and a copy of it beside what was loaded before. The other weights are counted in every phase.
    fn loading(&self, model: &Model) -> Vec<Phase> {
        let [text, denoiser, vae] = &model.weights;
        let phase = |largest: f64, missing: f64| Phase {
            name: "loading",
            held: 0.0,
            transient: 2.0 * largest - missing,
        };
        let all = |weights: &WeightTotals| weights.resident + weights.quantised;
        if self.shapes.has_transformer() {
            // The largest layers are not the last ones of the transformer; those of a language model are equally large.
            return vec![
                phase(
                    denoiser.largest_quantised,
                    all(text) + all(vae) + 0.2 * denoiser.quantised,
                ),
                phase(text.largest_quantised, 0.0),
            ];
        }
        // The autoencoder is loaded after all others, and the largest layers are not the last ones of the U-Net.
        let largest = text.largest_quantised.max(denoiser.largest_quantised);
        let quantised = text.quantised + denoiser.quantised;
        vec![phase(largest, vae.resident + 0.2 * quantised)]
    }

    /// Whether the process changes the images of data sets (`batch_img2img`).
    fn changes_images(&self) -> bool {
        self.kind == WorkKind::Generation && self.body.get("datasets").is_some_and(Value::is_array)
    }

    /// The sizes of the images that a generation makes: those of the images that it changes, or else those of its section.
    fn generated_sizes(&self) -> Vec<ImageSize> {
        let multiple = self.multiple();
        if !self.changes_images() {
            return image_sizes_with_files(self.body, multiple, &self.batches);
        }
        let guidance_scale = self.body.pointer("/generate/guidance_scale").and_then(Value::as_f64);
        let floor = |side: f64| ((side / multiple).floor() * multiple).max(multiple);
        let size = |[height, width]: [f64; 2]| ImageSize {
            width: floor(width),
            height: floor(height),
            guidance_scale: guidance_scale.unwrap_or(7.0),
            // Its prompts are captions.
            characters: (CAPTION_TOKENS - CHAT_TOKENS) * CHARACTERS_PER_TOKEN,
            negative_characters: 0.0,
        };
        self.data().into_iter().map(|batch| size(batch.size)).collect()
    }

    /// Sides of images are multiples of this number of pixels.
    fn multiple(&self) -> f64 {
        if self.shapes.has_transformer() { 16.0 } else { 8.0 }
    }

    /// Whether an image is generated with classifier-free guidance.
    fn is_guided(&self, size: &ImageSize) -> bool {
        let guided_above = match flag(self.body, "/model/use_flux_cfg") {
            true => 1.0,
            false => self.family.guided_above,
        };
        size.guidance_scale > guided_above
    }

    /// Whether every prompt is encoded before the model is loaded, without its text encoders.
    fn frees_text_encoders(&self) -> bool {
        let datasets = self.body.get("datasets").and_then(Value::as_array);
        let caches = |set: &Value| flag(set, "/cache_text_embeddings");
        self.kind == WorkKind::Training
            && !self.trains()[1]
            && (flag(self.body, "/train/unload_text_encoder")
                || flag(self.body, "/train/cache_text_embeddings")
                || datasets.into_iter().flatten().any(caches))
    }

    /// Removes the text encoders from a model, and returns the phase in which they are alone in memory.
    fn free_text_encoders(&self, model: &mut Model, backend: Backend) -> Phase {
        let pass = self.text_pass(model, backend, CAPTION_TOKENS);
        let [text, others @ ..] = &mut model.weights;
        let bytes = text.resident + text.quantised;
        (text.resident, text.quantised) = (0.0, 0.0);
        model.text.clear();
        model.language = None;
        let others = others
            .iter()
            .map(|weights| weights.resident + weights.quantised)
            .sum::<f64>();
        Phase {
            name: "caching text embeddings",
            held: 0.0,
            // The other weights are counted in every phase, and are not loaded in this one.
            transient: bytes + pass - others,
        }
    }

    /// Generates images of these sizes, one after the other.
    fn images(&self, model: &Model, options: &MemoryOptions, backend: Backend, sizes: &[ImageSize]) -> f64 {
        let mut peak = self.text_pass(model, backend, prompt_tokens(sizes));
        for guided in [false, true] {
            let largest = sizes
                .iter()
                .filter(|size| self.is_guided(size) == guided)
                .max_by(|a, b| a.area().total_cmp(&b.area()));
            let Some(size) = largest else { continue };
            let side = [size.height, size.width].map(|side| side.min(MAX_SIDE));
            let batch = if guided && !options.sequential_cfg { 2.0 } else { 1.0 };
            let prompt = prompt_tokens(sizes);
            peak = peak.max(self.denoising(model, backend, side, batch, guided, prompt).peak());
            peak = peak.max(self.decoding(model, options, backend, side).peak());
            if self.has_control() || self.changes_images() {
                peak = peak.max(self.encoding(model, options, backend, side));
            }
        }
        peak
    }

    /// A pass of the denoiser over `batch` latents of images of this height and width.
    fn denoising(
        &self,
        model: &Model,
        backend: Backend,
        side: [f64; 2],
        batch: f64,
        guided: bool,
        prompt_tokens: f64,
    ) -> Walk {
        let walk = Walk::new(backend);
        let latents = self.latents(&walk, model, side, batch);
        let conditions = self.conditions(&walk, if guided { 2.0 } else { 1.0 }, &latents, prompt_tokens);
        let passed = conditions.of_items(&walk, batch);
        let passed = self.with_decorator(&walk, passed);
        let passed = self.with_image_adapter(&walk, model, &latents, passed, false);
        model.denoiser.forward(&walk, &latents, &passed, false);
        drop((latents, conditions, passed));
        walk
    }

    /// Decodes an image of this height and width.
    fn decoding(&self, model: &Model, options: &MemoryOptions, backend: Backend, side: [f64; 2]) -> Walk {
        let walk = Walk::new(self.vae_backend(backend));
        model.vae.decode(&walk, side, options.vae_tiled);
        walk
    }

    /// Encodes an image of this height and width.
    fn encoding(&self, model: &Model, options: &MemoryOptions, backend: Backend, side: [f64; 2]) -> f64 {
        let walk = Walk::new(self.vae_backend(backend));
        model.vae.encode(&walk, side, options.vae_tiled);
        walk.peak()
    }

    fn latents(&self, walk: &Walk, model: &Model, [height, width]: [f64; 2], batch: f64) -> MetaTensor {
        let scale = model.vae.scale();
        let channels = f64::from(self.shapes.vae.latent_channels);
        walk.tensor(
            [batch, channels, (height / scale).floor(), (width / scale).floor()],
            false,
        )
    }
}

impl WeightTotals {
    fn add(&mut self, other: Self) {
        self.resident += other.resident;
        self.quantised += other.quantised;
        self.largest_quantised = self.largest_quantised.max(other.largest_quantised);
        self.largest_frozen = self.largest_frozen.max(other.largest_frozen);
        self.parameters += other.parameters;
        self.trained.extend(other.trained);
    }
}

/// The fraction of the trained elements that is in tensors which share the allocator's pages with others.
fn small_fraction(model: &Model) -> f64 {
    let trained = || model.weights.iter().flat_map(|weights| &weights.trained);
    let all: f64 = trained().map(|tensor| tensor.elements).sum();
    let small = trained().filter(|tensor| 4.0 * tensor.elements < SMALL_TENSOR);
    small.map(|tensor| tensor.elements).sum::<f64>() / all.max(1.0)
}

/// The fractions of the weights of layers that are stored in fewer bits. `layers`: the parameters without the tables.
fn fractions(stored: CompactWeights, layers: f64) -> StoredFractions {
    let layers = layers.max(1.0);
    StoredFractions {
        quantised: (stored.quantised as f64 / layers).min(1.0),
        bytes: stored.bytes as f64 / stored.quantised.max(1) as f64,
        halves: (stored.halves as f64 / layers).min(1.0),
    }
}

/// Tokens of the longest prompt with those of the chat around it, for a language model whose prompts are not all equally long.
fn prompt_tokens(sizes: &[ImageSize]) -> f64 {
    let longest = sizes.iter().map(ImageSize::longest_text).fold(0.0, f64::max);
    longest / CHARACTERS_PER_TOKEN + CHAT_TOKENS
}

/// The parameters of text encoders, denoiser and autoencoder.
pub(super) fn parameters(family: &Family, shapes: ModelShapes) -> [f64; 3] {
    let options = || ComponentOptions {
        width: 4.0,
        ..ComponentOptions::default()
    };
    let mut text = Builder::new(options(), 0);
    for shapes in shapes.text_encoders().take(family.text_prefixes.len()) {
        TextEncoder::new(&mut text, shapes);
    }
    if shapes.language.exists() {
        LanguageEncoder::new(&mut text, &shapes.language, false);
    }
    let mut denoiser = Builder::new(options(), 0);
    Denoiser::new(&mut denoiser, &shapes);
    let mut vae = Builder::new(options(), 0);
    Vae::new(&mut vae, &shapes.vae);
    [text, denoiser, vae].map(|builder| builder.weights.parameters)
}
