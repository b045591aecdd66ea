//! `config.process`: the processes that a job runs, in order.

use super::adapter::AdapterConfig;
use super::arch::ArchName;
use super::caption::CaptionProcess;
use super::dataset::DatasetConfig;
use super::declare::section;
use super::decorator::DecoratorConfig;
use super::dtype::DType;
use super::embedding::EmbeddingConfig;
use super::extension::{EXTENSION_PREFIX, ExtensionProcess, ExtensionType};
use super::extract::{ExtractProcess, RescaleLoraProcess};
use super::generate::{GenerateConfig, Img2ImgConfig};
use super::lm_export::LmExportProcess;
use super::lm_generate::LmGenerateProcess;
use super::lm_trainer::LmTrainerProcess;
use super::logging::LoggingConfig;
use super::model::ModelConfig;
use super::network::{NetworkConfig, NetworkType};
use super::node::{Node, Value, shorten};
use super::sample::{SampleConfig, SampleItem};
use super::sampler::SamplerName;
use super::save::SaveConfig;
use super::schema::{
    FieldValue, Input, PresentKeys, ReadContext, SectionInfo, SupportLevel, SupportReport, join, nearest,
};
use super::slider::{ReferenceDataset, Replacement, SliderConfig};
use super::train::{TimestepType, TrainConfig};
use super::values::FreeMap;
use serde::{Deserialize, Serialize};

pub use super::process_type::{JobKind, ProcessType};

section! {
    /// A process that trains.
    pub struct TrainerProcess("process") {
        /// Type of trainer.
        kind as "type": ProcessType = ProcessType::SdTrainer, Works, shown "required";
        /// Name of the run folder. Unlike in ai-toolkit, a name that differs from the job's does not break resume.
        name: Option<String> = None, Works, shown "`config.name`";
        /// The run folder is `training_folder/name`.
        training_folder: Option<String> = None, Works, shown "the job's";
        /// Device to use; ignored, as in ai-toolkit.
        device: Option<String> = None, Accepted("the scheduler assigns the device; `cluster.device` requests a kind");
        /// Trigger word of all data sets without their own, and of sample prompts.
        trigger_word: Option<String> = None, Works;
        /// Seed of everything random in the training. Absent: chosen once per job.
        training_seed: Option<i64> = None, Works;
        /// Folder for TensorBoard: `aitk run` writes the metrics of each step into `log_dir/name_YYYYmmdd-HHMMSS`. A job of `aitk submit`
        /// has them as an artifact.
        log_dir: Option<String> = None, Works, shown "the job's";
        /// Print step timings every N steps.
        performance_log_every: u64 = 0, Accepted("timings are always reported");
        /// Database of ai-toolkit's web UI.
        sqlite_db_path: String = "./aitk_db.db".into(), Accepted("the web UI of ai-toolkit is not used");
        /// The adapter to train. Absent: the full model is trained, or the word of `embedding`, or the network
        /// of `adapter`, or the tokens of `decorator`.
        network: Option<NetworkConfig> = None, Works;
        /// The training loop.
        train: TrainConfig = TrainConfig::default(), Works;
        /// The base model.
        model [required]: ModelConfig = ModelConfig::default(), Works;
        /// When and how to save.
        save: SaveConfig = SaveConfig::default(), Works;
        /// Sample images during the training.
        sample: SampleConfig = SampleConfig::default(), Works;
        /// A second `sample` section: images that are made once, before those of `sample` at step 0, even with `skip_first_sample`.
        first_sample: Option<SampleConfig> = None, Works;
        /// Logging.
        logging: LoggingConfig = LoggingConfig::default(), Works;
        /// Training data, as written: a list of resolutions is one entry here, see `split_datasets`.
        datasets: Vec<DatasetConfig> = Vec::new(), Works;
        /// Textual inversion: train a new word instead of the model. Stable Diffusion 1.x, 2.x and SDXL.
        embedding: Option<EmbeddingConfig> = None, Works;
        /// Train a network beside the U-Net that conditions it on control images: a T2I-Adapter or a ControlNet. Stable Diffusion 1.x,
        /// 2.x and SDXL.
        adapter: Option<AdapterConfig> = None, Works;
        /// Train tokens that the transformer reads after those of every prompt. FLUX.1.
        decorator: Option<DecoratorConfig> = None, Works;
        /// What a slider changes: `type: concept_slider`, `slider`, `image_reference_slider_trainer`, `ultimate_slider_trainer`.
        slider: Option<SliderConfig> = None, Works;
        /// `concept_replacer` only.
        replacements: Vec<Replacement> = Vec::new(), DependsOn("type: concept_replacer");
        /// No effect, as in ai-toolkit.
        guidance: Option<FreeMap> = None, Accepted("never had an effect");
        /// No effect, as in ai-toolkit.
        do_lorm: bool = false, Accepted("never had an effect");
        /// No effect, as in ai-toolkit.
        lorm_extract_mode: String = "ratio".into(), Accepted("never had an effect");
        /// No effect, as in ai-toolkit.
        lorm_extract_mode_param: f64 = 0.25, Accepted("never had an effect");
    }
    rare {
        "torch_profiler" => Ignored("no torch profiler");
        "rescale" => DependsOn("type: rescale_sd");
    }
    finish = finish_trainer;
    check = check_trainer;
}

impl TrainerProcess {
    /// Calls `f` with each sample: its key, the key of its prompt, and the sample. `path` is the key of the process.
    pub(super) fn for_each_sample(&self, path: &str, f: &mut dyn FnMut(String, String, &SampleItem)) {
        for_each_sample_in(&self.sample, &join(path, "sample"), f);
        if let Some(first) = &self.first_sample {
            for_each_sample_in(first, &join(path, "first_sample"), f);
        }
    }
}

fn for_each_sample_in(sample: &SampleConfig, path: &str, f: &mut dyn FnMut(String, String, &SampleItem)) {
    let from_prompts = !sample.prompts.is_empty() && sample.prompts.len() == sample.samples.len();
    for (index, item) in sample.samples.iter().enumerate() {
        if from_prompts && sample.prompts.get(index) == Some(&item.prompt) {
            let key = format!("{path}.prompts[{index}]");
            f(key.clone(), key, item);
        } else {
            let key = format!("{path}.samples[{index}]");
            let prompt_key = format!("{key}.prompt");
            f(key, prompt_key, item);
        }
    }
}

fn check_trainer(process: &TrainerProcess, path: &str, report: &mut SupportReport) {
    let arch = process.model.arch.name;
    let sampler = process.sample.sampler;
    check_sampler(arch, sampler, path, "sample.sampler", report);
    check_noise_scheduler(arch, process.train.noise_scheduler, path, report);
    let has_negatives = process
        .train
        .negative_prompt
        .as_ref()
        .is_some_and(|text| !text.is_empty());
    if let Some(why) = process.ignores_negative_prompts().filter(|_| has_negatives) {
        report.warn(join(path, "train.negative_prompt"), why);
    }
    if arch.is_flow() {
        check_flow(process, path, report);
    } else if let Some(key) = process.train.shifts_timesteps() {
        let message = format!("is only for flow models, and `arch: {arch}` is a diffusion model: it has no effect");
        report.warn(join(path, &format!("train.{key}")), message);
    }
    if process.train.validation_config.is_some() && process.takes_control_images() {
        let who = match process.adapter.is_some() {
            true => "an `adapter`".to_owned(),
            false => format!("`arch: {arch}`"),
        };
        let message = format!("has no control images, which {who} needs: remove it");
        report.error(join(path, "train.validation_config"), message);
    }
    if let Some(network) = &process.network
        && matches!(network.kind, NetworkType::Locon | NetworkType::Lycoris)
        && arch.is_flow()
    {
        let message = format!(
            "`{}` is for U-Nets alone, as in ai-toolkit, and `arch: {arch}` has a transformer: use `lora` or `lokr`",
            network.kind
        );
        report.error(join(path, "network.type"), message);
    }
    if let Some(network) = &process.network
        && network.network_kwargs.full_train_in_out
        && arch.is_flow()
    {
        let message = format!(
            "only U-Nets have the two layers (`conv_in`, `conv_out`) that are trained, in ai-toolkit too, and `arch: {arch}` has a \
             transformer: remove the key"
        );
        report.error(join(path, "network.network_kwargs.full_train_in_out"), message);
    }
    if let Some(network) = &process.network
        && network.network_kwargs.dora_wd
        && matches!(network.kind, NetworkType::Lora | NetworkType::Lierla)
        && arch.is_flow()
    {
        let message = format!(
            "`arch: {arch}` has a transformer, beside whose LoRAs few programs read LyCORIS' magnitudes: use `type: dora`, or `dora_wd` with \
             `type: lokr` or `loha`"
        );
        report.error(join(path, "network.network_kwargs.dora_wd"), message);
    }
    if let Some(network) = &process.network
        && network.network_kwargs.rs_lora
        && !(network.kind == NetworkType::Lokr && network.old_lokr_format)
        && arch.is_flow()
    {
        let message = format!(
            "`arch: {arch}` has a transformer, whose adapters have the scale 1 and no alpha in their files: remove the key"
        );
        report.error(join(path, "network.network_kwargs.rs_lora"), message);
    }
    if let Some(network) = &process.network
        && arch.is_flow()
    {
        let kwargs = &network.network_kwargs;
        for (key, classes) in [
            ("target_lin_modules", &kwargs.target_lin_modules),
            ("target_conv_modules", &kwargs.target_conv_modules),
        ] {
            if !classes.is_empty() {
                let message = format!("has no effect on `arch: {arch}`, as in ai-toolkit: use `only_if_contains`");
                report.warn(join(path, &format!("network.network_kwargs.{key}")), message);
            }
        }
    }
    let untrained_text = match arch {
        ArchName::Chroma => Some("Chroma (T5)"),
        ArchName::Zimage => Some("Z-Image (Qwen3)"),
        _ => None,
    };
    if let Some(model) = untrained_text.filter(|_| process.train.train_text_encoder) {
        let message = format!("the text encoder of {model} is not trained: set it to false");
        report.error(join(path, "train.train_text_encoder"), message);
    }
}

/// Checks the settings of a training by flow matching.
fn check_flow(process: &TrainerProcess, path: &str, report: &mut SupportReport) {
    let train = &process.train;
    if train.timestep_type == TimestepType::NextSample && train.next_sample_timesteps < 3 {
        let message = "expected at least 3: a step leads from one timestep to another, and the last one is not trained";
        report.error(join(path, "train.next_sample_timesteps"), message.to_owned());
    }
    for (on, key) in [
        (train.linear_timesteps, "linear_timesteps"),
        (train.linear_timesteps2, "linear_timesteps2"),
    ] {
        if on && train.timestep_type == TimestepType::NextSample {
            let message =
                "contradicts `timestep_type: next_sample`, whose timesteps are those of a sampler: remove one of them";
            report.error(join(path, &format!("train.{key}")), message.to_owned());
        }
    }
    let shiftable = matches!(train.timestep_type, TimestepType::Sigmoid | TimestepType::Linear);
    if let Some(key) = train.shifts_timesteps().filter(|_| !shiftable) {
        let message =
            "only changes the timesteps of `timestep_type: sigmoid` and `linear`: set one of them, or remove the key";
        report.error(join(path, &format!("train.{key}")), message.to_owned());
    }
    if train.timestep_shift_by_size && train.timestep_shift != 1.0 {
        let message = "contradicts `timestep_shift_by_size`: remove one of them";
        report.error(join(path, "train.timestep_shift"), message.to_owned());
    }
    if train.timestep_sigmoid_scale != 1.0 && train.timestep_type == TimestepType::Linear {
        let message = "has no effect on `timestep_type: linear`";
        report.warn(join(path, "train.timestep_sigmoid_scale"), message.to_owned());
    }
    if train.debiased_estimation_loss {
        let message =
            "weighs the noise levels of diffusion models: remove the key; flow models have `timestep_type: weighted`";
        report.error(join(path, "train.debiased_estimation_loss"), message.to_owned());
    }
    // Sliders do not use the second one: a warning says so.
    let uncapped = train.snr_gamma.filter(|_| !process.kind.is_slider());
    for (key, gamma) in [("min_snr_gamma", train.min_snr_gamma), ("snr_gamma", uncapped)] {
        if gamma.is_some_and(|gamma| gamma > 0.0) {
            let message = "weighs the noise levels of diffusion models: remove the key; flow models have `timestep_type: weighted`";
            report.error(join(path, &format!("train.{key}")), message.to_owned());
        }
    }
}

fn check_generate(process: &GenerateProcess, path: &str, report: &mut SupportReport) {
    let (arch, sampler) = (process.model.arch.name, process.generate.sampler);
    check_sampler(arch, sampler, path, "generate.sampler", report);
    check_assistant_lora(&process.model, path, report);
}

fn check_img2img(process: &Img2ImgProcess, path: &str, report: &mut SupportReport) {
    let (arch, sampler) = (process.model.arch.name, process.generate.sampler);
    check_sampler(arch, sampler, path, "generate.sampler", report);
    check_assistant_lora(&process.model, path, report);
}

/// Warns about a training adapter in a process that does not train: ai-toolkit removes it too while it generates images.
fn check_assistant_lora(model: &ModelConfig, path: &str, report: &mut SupportReport) {
    if model.assistant_lora_path.is_some() {
        report.warn(
            join(path, "model.assistant_lora_path"),
            "has no effect here: a training adapter is active only while training. To generate images with a LoRA, set `lora_path`",
        );
    }
}

/// Checks that a sampler is one for this kind of model. `ddpm` is what a config without a sampler has.
fn check_sampler(arch: ArchName, sampler: SamplerName, path: &str, key: &str, report: &mut SupportReport) {
    use SamplerName::{Ddpm, DpmSolverPp, Euler, FlowMatch, Heun, UniPc};
    let (known, advice) = match arch.is_flow() {
        true => (
            matches!(sampler, FlowMatch | Euler | Ddpm | Heun | DpmSolverPp | UniPc),
            "it was trained by flow matching: use `flowmatch`, `heun`, `dpmsolver++` or `unipc`",
        ),
        false => (
            !matches!(sampler, FlowMatch | Heun | UniPc),
            "it is a diffusion model: use `ddpm`, `euler` or another sampler",
        ),
    };
    report_sampler(known, arch, sampler, (&join(path, key), advice), report);
}

/// Checks that the noise of a training is that of this kind of model.
fn check_noise_scheduler(arch: ArchName, noise: SamplerName, path: &str, report: &mut SupportReport) {
    let key = join(path, "train.noise_scheduler");
    match (arch.is_flow(), noise) {
        (true, SamplerName::Heun | SamplerName::DpmSolverPp | SamplerName::UniPc) => {
            let advice = "it is trained by flow matching: use `flowmatch`";
            report_sampler(false, arch, noise, (&key, advice), report);
        }
        _ => check_sampler(arch, noise, path, "train.noise_scheduler", report),
    }
}

/// Reports a sampler that is not `known` for the model, at a key, with advice what to do.
fn report_sampler(
    known: bool,
    arch: ArchName,
    sampler: SamplerName,
    (key, advice): (&str, &str),
    report: &mut SupportReport,
) {
    if !known && matches!(arch.status(), SupportLevel::Works) {
        let message = format!("`{sampler}` is not a sampler for `arch: {arch}`; {advice}");
        report.error(key.to_owned(), message);
    }
}

fn finish_trainer(process: &mut TrainerProcess, _present: &PresentKeys, cx: &mut ReadContext) {
    process.model.dtype = process.train.dtype;
    if process.trigger_word.as_deref() == Some("") {
        process.trigger_word = None;
    }
    for dataset in &mut process.datasets {
        if dataset.trigger_word.as_deref() == Some("") {
            dataset.trigger_word = None;
        }
    }
    process.finish_slider(cx);
    process.check_embedding(cx);
    process.check_adapter(cx);
    process.check_decorator(cx);
    process.check_combinations(cx);
}

impl TrainerProcess {
    /// Returns the data sets as they are trained: one for each entry and resolution, each with exactly one resolution. An entry
    /// without trigger word or batch size gets the process's. The image pairs of a slider are data sets whose images are the
    /// positive ones, and whose control images are the negative ones.
    #[must_use]
    pub fn split_datasets(&self) -> Vec<DatasetConfig> {
        let mut split = Vec::new();
        let pairs = self.slider.iter().filter(|_| self.kind.uses_image_pairs());
        let pairs: Vec<DatasetConfig> = pairs
            .flat_map(|slider| &slider.datasets)
            .map(ReferenceDataset::as_dataset)
            .collect();
        let own = self.datasets.iter().map(|dataset| (dataset, false));
        for (dataset, is_pair) in own.chain(pairs.iter().map(|dataset| (dataset, true))) {
            for &resolution in dataset.resolution.iter() {
                let mut one = dataset.clone();
                one.resolution.0 = vec![resolution];
                // As in ai-toolkit, the captions of image pairs have no trigger word.
                let trigger = self.trigger_word.as_ref().filter(|_| !is_pair);
                one.trigger_word = one.trigger_word.or_else(|| trigger.cloned());
                one.batch_size = one.batch_size.or(Some(self.train.batch_size));
                one.cache_text_embeddings |= self.train.cache_text_embeddings;
                split.push(one);
            }
        }
        split
    }
}

section! {
    /// A process that generates images from prompts (`to_folder`).
    pub struct GenerateProcess("process") {
        /// `to_folder`.
        kind as "type": ProcessType = ProcessType::ToFolder, Works, shown "required";
        /// Name of the process.
        name: Option<String> = None, Accepted("images go into `output_folder`");
        /// Folder for the images.
        output_folder [required]: String = String::new(), Works;
        /// Device to use; ignored.
        device: Option<String> = None, Accepted("the scheduler assigns the device; `cluster.device` requests a kind");
        /// Number format of the arithmetic.
        dtype: DType = DType::F16, Works, shown "`model.dtype`";
        /// The model.
        model [required]: ModelConfig = ModelConfig::default(), Works;
        /// The images to generate.
        generate [required]: GenerateConfig = GenerateConfig::default(), Works;
    }
    finish = finish_generate;
    check = check_generate;
}

fn finish_generate(process: &mut GenerateProcess, present: &PresentKeys, _cx: &mut ReadContext) {
    if present.has("dtype") {
        process.model.dtype = process.dtype;
    } else {
        process.dtype = process.model.dtype;
    }
}

section! {
    /// A process that runs image to image over data sets (`batch_img2img`).
    pub struct Img2ImgProcess("process") {
        /// `batch_img2img`.
        kind as "type": ProcessType = ProcessType::BatchImg2Img, Works, shown "required";
        /// Name of the process.
        name: Option<String> = None, Accepted("images go into `output_folder`");
        /// Folder for the images, each with its source's name and its caption in a `.txt`.
        output_folder [required]: String = String::new(), Works;
        /// Folder into which the source images are copied as they are used, with their captions.
        copy_inputs_to: Option<String> = None, Works;
        /// Device to use; ignored.
        device: Option<String> = None, Accepted("the scheduler assigns the device; `cluster.device` requests a kind");
        /// Number format of the arithmetic.
        dtype: DType = DType::F16, Works, shown "`model.dtype`";
        /// The model.
        model [required]: ModelConfig = ModelConfig::default(), Works;
        /// The images, with captions as prompts.
        datasets [required]: Vec<DatasetConfig> = Vec::new(), Works;
        /// How the images are changed.
        generate: Img2ImgConfig = Img2ImgConfig::default(), Works;
    }
    finish = finish_img2img;
    check = check_img2img;
}

fn finish_img2img(process: &mut Img2ImgProcess, present: &PresentKeys, cx: &mut ReadContext) {
    process.check_dataset_paths(cx);
    if process.datasets.is_empty() && present.has("datasets") {
        cx.missing_at("datasets", "needs at least one data set (`- folder_path: …`)");
    }
    if present.has("dtype") {
        process.model.dtype = process.dtype;
    } else {
        process.dtype = process.model.dtype;
    }
}

/// A process that is known by name only. Its keys are stored unchanged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RareProcess {
    /// Its type.
    pub kind: ProcessType,
    /// Its keys.
    pub keys: FreeMap,
}

/// The kind of a process, with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessKind {
    /// Any training.
    Train(Box<TrainerProcess>),
    /// `lm_trainer`.
    LmTrain(Box<LmTrainerProcess>),
    /// `to_folder`.
    Generate(Box<GenerateProcess>),
    /// `batch_img2img`.
    Img2Img(Box<Img2ImgProcess>),
    /// `lm_generate`.
    LmGenerate(Box<LmGenerateProcess>),
    /// `lm_export`.
    LmExport(Box<LmExportProcess>),
    /// A captioner.
    Caption(Box<CaptionProcess>),
    /// `locon` or `lora`.
    Extract(Box<ExtractProcess>),
    /// `rescale_lora`.
    RescaleLora(Box<RescaleLoraProcess>),
    /// `extension:NAME`.
    Extension(Box<ExtensionProcess>),
    /// Rarely used processes without typed keys.
    Rare(Box<RareProcess>),
}

/// One entry of `config.process`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Its type as written.
    #[serde(rename = "type")]
    pub process_type: ProcessType,
    /// Its kind, with its settings.
    pub kind: ProcessKind,
}

macro_rules! match_process {
    ($kind:expr, $process:ident => $body:expr, $rare:ident => $else:expr) => {
        match $kind {
            ProcessKind::Train($process) => $body,
            ProcessKind::LmTrain($process) => $body,
            ProcessKind::Generate($process) => $body,
            ProcessKind::Img2Img($process) => $body,
            ProcessKind::LmGenerate($process) => $body,
            ProcessKind::LmExport($process) => $body,
            ProcessKind::Caption($process) => $body,
            ProcessKind::Extract($process) => $body,
            ProcessKind::RescaleLora($process) => $body,
            ProcessKind::Extension($process) => $body,
            ProcessKind::Rare($rare) => $else,
        }
    };
}

impl Process {
    /// Its own name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match_process!(&self.kind, process => process.name.as_deref(), rare => rare.keys.get("name").and_then(|name| name.as_str()))
    }

    /// The base model, for a process that runs one.
    #[must_use]
    pub fn model(&self) -> Option<&ModelConfig> {
        match &self.kind {
            ProcessKind::Train(process) => Some(&process.model),
            ProcessKind::Generate(process) => Some(&process.model),
            ProcessKind::Img2Img(process) => Some(&process.model),
            _ => None,
        }
    }

    /// The settings of the training of a code model, if this is one.
    #[must_use]
    pub fn lm_trainer(&self) -> Option<&LmTrainerProcess> {
        match &self.kind {
            ProcessKind::LmTrain(process) => Some(process),
            _ => None,
        }
    }

    /// The settings of the training of an image model, if this is one.
    #[must_use]
    pub fn trainer(&self) -> Option<&TrainerProcess> {
        match &self.kind {
            ProcessKind::Train(process) => Some(process),
            _ => None,
        }
    }

    /// As [`Self::trainer`], to change them.
    #[must_use]
    pub fn trainer_mut(&mut self) -> Option<&mut TrainerProcess> {
        match &mut self.kind {
            ProcessKind::Train(process) => Some(process),
            _ => None,
        }
    }
}

/// Reads the type of a process: one of the known names, or `extension:NAME`.
fn read_type(node: &Node, cx: &mut ReadContext) -> Option<ProcessType> {
    match &node.value {
        Value::Text(text) if text.starts_with(EXTENSION_PREFIX) => {
            ExtensionType::read(node, cx).map(|_| ProcessType::Extension)
        }
        _ => ProcessType::read(node, cx),
    }
}

impl FieldValue for Process {
    const HAS_CHECKS: bool = true;
    const HAS_INPUTS: bool = true;

    fn kind() -> String {
        "map with a `type`".into()
    }

    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let entries = cx.read_map(node, "process")?;
        let Some(entry) = entries.iter().find(|entry| entry.key == "type") else {
            match entries
                .iter()
                .find(|entry| nearest(&entry.key, std::iter::once("type")).is_some())
            {
                Some(entry) => cx.descend(&entry.key, entry.mark, |cx| {
                    let key = shorten(&entry.key);
                    cx.error(format!("`process` has no key `{key}`; did you mean `type`?"));
                }),
                None => {
                    let names = ProcessType::usable_names().join(", ");
                    cx.error(format!("a process needs the key `type`. Known: {names}"));
                }
            }
            return None;
        };
        let process_type = cx.descend("type", entry.mark, |cx| read_type(&entry.node, cx))?;
        let kind = match process_type {
            ProcessType::SdTrainer
            | ProcessType::DiffusionTrainer
            | ProcessType::UiTrainer
            | ProcessType::TextualInversionTrainer
            | ProcessType::ConceptSlider
            | ProcessType::UltimateSlider
            | ProcessType::ImageReferenceSlider
            | ProcessType::ConceptReplacer
            | ProcessType::Slider
            | ProcessType::SliderOld
            | ProcessType::RescaleSd => ProcessKind::Train(FieldValue::read(node, cx)?),
            ProcessType::LmTrainer => ProcessKind::LmTrain(FieldValue::read(node, cx)?),
            ProcessType::ToFolder => ProcessKind::Generate(FieldValue::read(node, cx)?),
            ProcessType::BatchImg2Img => ProcessKind::Img2Img(FieldValue::read(node, cx)?),
            ProcessType::LmGenerate => ProcessKind::LmGenerate(FieldValue::read(node, cx)?),
            ProcessType::LmExport => ProcessKind::LmExport(FieldValue::read(node, cx)?),
            ProcessType::Qwen3VlCaptioner
            | ProcessType::Qwen3OmniCaptioner
            | ProcessType::Ideogram4Captioner
            | ProcessType::AceStepCaptioner => ProcessKind::Caption(FieldValue::read(node, cx)?),
            ProcessType::ExtractLocon | ProcessType::ExtractLora => ProcessKind::Extract(FieldValue::read(node, cx)?),
            ProcessType::RescaleLora => ProcessKind::RescaleLora(FieldValue::read(node, cx)?),
            ProcessType::Extension => ProcessKind::Extension(FieldValue::read(node, cx)?),
            ProcessType::ReferenceGenerator
            | ProcessType::PureLoraGenerator
            | ProcessType::SuperTagger
            | ProcessType::SyncFromCollection
            | ProcessType::DatasetTools
            | ProcessType::ExampleMergeExtension
            | ProcessType::Vae
            | ProcessType::Esrgan => {
                let keys = FreeMap::read(node, cx)?;
                ProcessKind::Rare(Box::new(RareProcess {
                    kind: process_type,
                    keys,
                }))
            }
        };
        Some(Self { process_type, kind })
    }

    fn show(&self) -> String {
        self.process_type.name().into()
    }

    fn is_falsy(&self) -> bool {
        false
    }

    fn check_support(&self, path: &str, report: &mut SupportReport) {
        if let SupportLevel::Refused(_) = self.process_type.status() {
            // One error is enough; the keys inside do not matter.
            self.process_type.check_support(&join(path, "type"), report);
        } else {
            match_process!(&self.kind, process => process.check_support(path, report), _rare => {});
        }
    }

    fn collect_inputs(&self, path: &str, out: &mut Vec<Input>) {
        match_process!(&self.kind, process => process.collect_inputs(path, out), _rare => {});
    }

    fn section() -> Option<SectionInfo> {
        None
    }

    fn values() -> Vec<(&'static str, SupportLevel)> {
        ProcessType::values()
    }
}
