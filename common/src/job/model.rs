//! `model`: the base model, its source, and how it is held in memory.

use super::arch::{Arch, ArchName};
use super::declare::section;
use super::dtype::DType;
use super::limits::MAX_EMBEDDINGS;
use super::schema::{PresentKeys, ReadContext, SupportReport, join};
use super::values::{FreeMap, OneOrMany};
use crate::plan::memory_options::MemoryOptions;
use crate::plan::qtype::QType;

section! {
    /// The base model, its source, and how it is held in memory.
    pub struct ModelConfig("model") {
        /// Local folder or file, or the id of a Hugging Face repository.
        name_or_path [required]: String = String::new(), Works, input Model;
        /// Family of the model. Text after `:` is dropped.
        arch: Arch = Arch::from(ArchName::Sd1), Works, shown "from the `is_…` keys, else `sd1`";
        /// Legacy: Stable Diffusion 2.x.
        is_v2: bool = false, Works;
        /// Legacy: Stable Diffusion 3.
        is_v3: bool = false, Works;
        /// Legacy: SDXL.
        is_xl: bool = false, Works;
        /// Legacy: PixArt.
        is_pixart: bool = false, Works;
        /// Legacy: PixArt-Sigma.
        is_pixart_sigma: bool = false, Works;
        /// Legacy: AuraFlow.
        is_auraflow: bool = false, Works;
        /// Legacy: FLUX.1.
        is_flux: bool = false, Works;
        /// Legacy: Lumina Image 2.
        is_lumina2: bool = false, Works;
        /// Legacy: SSD-1B.
        is_ssd: bool = false, Works;
        /// Legacy: Vega.
        is_vega: bool = false, Works;
        /// The model predicts velocity.
        is_v_pred: bool = false, Works;
        /// Number format of the arithmetic; trainers use `train.dtype` instead.
        dtype: DType = DType::F16, Works;
        /// Replacement VAE: the folder `vae` of a diffusers model, or a model that has one; for FLUX.1, Stable Diffusion 3.5, Chroma and
        /// Z-Image also one file (`ae.safetensors`).
        vae_path: Option<String> = None, Works, input Vae;
        /// Number format of the VAE.
        vae_dtype: Option<DType> = None, Ignored("all components compute in `dtype`"), shown "`dtype`";
        /// Number format of the text encoders.
        te_dtype: Option<DType> = None, Ignored("all components compute in `dtype`"), shown "`dtype`";
        /// No effect, as in ai-toolkit.
        vae_device: Option<String> = None, Accepted("never had an effect");
        /// No effect, as in ai-toolkit.
        te_device: Option<String> = None, Accepted("never had an effect");
        /// Text encoders, as a file (`t5xxl_fp16.safetensors`, `qwen_3_4b.safetensors`, GGUF) or a folder: for FLUX.1 and Chroma T5, for
        /// Stable Diffusion 3.5 one or all of CLIP-L, CLIP-G and T5, for Z-Image Qwen3.
        te_name_or_path: Option<String> = None, Works, input Model;
        /// FLUX.1, Stable Diffusion 3.5, Chroma, Z-Image: where the parts come from that the model's own file or folder does not have: text
        /// encoders, tokenizers, VAE and scheduler. A diffusers folder or repository, or a folder with their files.
        extras_name_or_path: Option<String> = None, Works, shown "`name_or_path`", input Model;
        /// Overrides the tag of the latent cache.
        latent_space_version: Option<String> = None, Works;
        /// SDXL: use the first text encoder.
        use_text_encoder_1: bool = true, Accepted("only SDXL has two, and uses both: `false` is refused there");
        /// SDXL: use the second text encoder.
        use_text_encoder_2: bool = true, Accepted("only SDXL has two, and uses both: `false` is refused there");
        /// FLUX.1 (`arch: flux`) with classifier-free guidance in place of its guidance embedding: in samples `guidance_scale` is the scale
        /// between the negative and the positive prompt, which takes twice the time, and trainings have
        /// `train.bypass_guidance_embedding`.
        use_flux_cfg: bool = false, Works;
        /// FLUX.1: what T5 makes of the padding of prompts becomes zero.
        attn_masking: bool = false, Works;
        /// FLUX.1 and Stable Diffusion 3.5 (ours): the padding of prompts is masked in the attention of T5, and with FLUX.1 in that of the
        /// transformer too, as by sd-scripts' option of this name.
        apply_t5_attn_mask: bool = false, Works;
        /// Stable Diffusion 3.5 (ours): the padding of prompts is masked in the attention of both CLIPs, as by sd-scripts' option of this
        /// name.
        apply_lg_attn_mask: bool = false, Works;
        /// Options of one family.
        model_kwargs: FreeMap = FreeMap::new(), Accepted("the families of this release have none");
        /// No effect, as in ai-toolkit.
        model_paths: FreeMap = FreeMap::new(), Accepted("never had an effect");
        /// No effect, as in ai-toolkit.
        in_context: bool = false, Accepted("never had an effect");

        /// LoRA that is applied to the base model, frozen.
        lora_path: Option<String> = None, Works, input Lora;
        /// Training adapter: active while training, removed while sampling.
        assistant_lora_path: Option<String> = None, Works, input Lora;
        /// LoRA that is active only while sampling.
        inference_lora_path: Option<String> = None, Works, input Lora;
        /// Files of textual inversions (ours), one or a list: prompts and captions can use their words. A word is the `name` in the file's
        /// metadata, or else the file's name. Stable Diffusion 1.x, 2.x and SDXL.
        embedding_paths: OneOrMany<String> = OneOrMany(Vec::new()), Works, input Embedding;
        /// Stable Diffusion 1.x and 2.x (ours): the layer of the text encoder whose output is used, counted from the last one. 1 is the last
        /// one; 2 leaves one out, as AUTOMATIC1111 and sd-scripts count.
        clip_skip: u32 = 1, Works;
        /// Stable Diffusion 1.x, 2.x and SDXL (ours): how many tokens of a prompt are read: 75, 150 or 225, in blocks of 75 as in
        /// sd-scripts.
        max_token_length: u32 = 75, Works;
        /// LoRA that is active only on the unconditional pass.
        unconditional_lora_path: Option<String> = None, Accepted("as in ai-toolkit, only Ideogram 4 has it");
        /// With `quantize`: a LoRA that makes up for quantisation. It stays active in training and samples and is not saved. `qtype` is for its
        /// layers; the others are quantised in 8 bits (`int8`). Also as `qtype: TYPE|PATH`.
        accuracy_recovery_adapter: Option<String> = None, Works, input Lora;

        /// Quantise the U-Net or transformer: its linear layers and convolutions, except the first, the last and those of the
        /// time embedding.
        quantize: bool = false, Works;
        /// Quantise the text encoder.
        quantize_te: Option<bool> = None, Works, shown "`quantize`";
        /// How the U-Net or transformer is quantised: `qfloat8`, `float8`, `qint8`, `int8`, `nf4`, `q8_0`, `q4_k`.
        qtype: String = "qfloat8".into(), Works;
        /// How the text encoder is quantised.
        qtype_te: String = "qfloat8".into(), Works;
        /// `exclude`: a list of names of layers that are not quantised; `*` matches anything.
        quantize_kwargs: FreeMap = FreeMap::new(), Works;
        /// 16, 8 or 4 bits for the text encoder.
        text_encoder_bits: u32 = 16, Accepted("as in ai-toolkit, only PixArt and AuraFlow have it; use `quantize_te` and `qtype_te`");
        /// At least the savings of the memory profile `balanced`, plus CFG in two passes and the VAE in tiles.
        low_vram: bool = false, Works;
        /// Stream the layers: each is read from its file when it runs and does not stay in memory.
        layer_offloading: Option<bool> = None, Works, shown "`auto_memory`";
        /// Older name of `layer_offloading`.
        auto_memory: bool = false, Works;
        /// Share of the U-Net or transformer that is streamed, 0 to 1.
        layer_offloading_transformer_percent: f64 = 1.0, Works;
        /// Share of the text encoders that is streamed, 0 to 1.
        layer_offloading_text_encoder_percent: f64 = 1.0, Works;
        /// FLUX.1 over several GPUs.
        split_model_over_gpus: bool = false, Accepted("only FLUX.1 uses it");
        /// Hint for `split_model_over_gpus`.
        split_model_other_module_param_count_scale: f64 = 0.3, DependsOn("split_model_over_gpus");
        /// Full fine-tune: do not train parameters whose name contains one of these. Wins over `only_if_contains`.
        ignore_if_contains: Option<OneOrMany<String>> = None, Works;
        /// Full fine-tune: train only parameters whose name contains one of these.
        only_if_contains: Option<OneOrMany<String>> = None, Works;
        /// torch.compile.
        compile: bool = false, Accepted("an optimisation; the result is the same");
        /// torch.compile, block by block.
        block_compile: bool = false, Accepted("an optimisation; the result is the same");
        /// Mode of torch.compile.
        compile_mode: String = "default".into(), Accepted("an optimisation; the result is the same");
        /// Flag of torch.compile.
        compile_fullgraph: bool = false, Accepted("an optimisation; the result is the same");
        /// Flag of torch.compile.
        compile_dynamic: bool = true, Accepted("an optimisation; the result is the same");
        /// Cache limit of torch.compile.
        cache_size_limit: Option<u64> = None, Accepted("an optimisation; the result is the same");
    }
    rare {
        "unet_path" => Accepted("as in ai-toolkit, only PixArt and AuraFlow have it");
        "unet_sample_size" => Accepted("as in ai-toolkit, only PixArt has it");
        "refiner_name_or_path" => Refused("no refiner");
        "refiner_start_at" => DependsOn("refiner_name_or_path");
        "experimental_xl" => Refused("it never had an effect on SDXL as published");
    }
    finish = finish;
    check = check;
}

/// Checks `clip_skip` and `max_token_length`.
fn check_prompt_reading(model: &ModelConfig, cx: &mut ReadContext) {
    let arch = model.arch.name;
    let is_diffusion = matches!(arch, ArchName::Sd1 | ArchName::Sd2);
    if model.clip_skip != 1 && !is_diffusion {
        let message = format!(
            "is for Stable Diffusion 1.x and 2.x, and this is `arch: {}`",
            model.arch
        );
        cx.error_at("clip_skip", message);
    } else if !(1..=MAX_CLIP_SKIP).contains(&model.clip_skip) {
        let message = format!("expected a number from 1 to {MAX_CLIP_SKIP}, found {}", model.clip_skip);
        cx.error_at("clip_skip", message);
    }
    if model.max_token_length != TOKENS_OF_BLOCK && !is_diffusion && arch != ArchName::Sdxl {
        let message = format!(
            "is for Stable Diffusion 1.x, 2.x and SDXL, and this is `arch: {}`",
            model.arch
        );
        cx.error_at("max_token_length", message);
    } else if ![1, 2, 3].contains(&model.token_blocks()) || !model.max_token_length.is_multiple_of(TOKENS_OF_BLOCK) {
        let message = format!("expected 75, 150 or 225, found {}", model.max_token_length);
        cx.error_at("max_token_length", message);
    }
    if model.apply_t5_attn_mask && !arch.is_flux() && arch != ArchName::Sd3 {
        let message = format!(
            "is for FLUX.1 and Stable Diffusion 3.5, whose prompts T5 reads, and this is `arch: {}`: remove it",
            model.arch
        );
        cx.error_at("apply_t5_attn_mask", message);
    }
    if model.apply_lg_attn_mask && arch != ArchName::Sd3 {
        let message = format!(
            "is for Stable Diffusion 3.5, and this is `arch: {}`: remove it",
            model.arch
        );
        cx.error_at("apply_lg_attn_mask", message);
    }
}

/// The tokens that CLIP reads at once.
const TOKENS_OF_BLOCK: u32 = 75;
/// The text encoder of Stable Diffusion 1.x has 12 layers; of 2.x, 23.
const MAX_CLIP_SKIP: u32 = 12;

impl ModelConfig {
    /// How many of the last layers of the text encoder `clip_skip` leaves out.
    #[must_use]
    pub fn skipped_text_layers(&self) -> u32 {
        self.clip_skip.saturating_sub(1)
    }

    /// How many blocks of 75 tokens a prompt has (`max_token_length`).
    #[must_use]
    pub fn token_blocks(&self) -> u32 {
        self.max_token_length / TOKENS_OF_BLOCK
    }
}

fn finish(model: &mut ModelConfig, present: &PresentKeys, cx: &mut ReadContext) {
    match model.legacy_arch() {
        Some((arch, _)) if !present.has("arch") => model.arch = Arch::from(arch),
        Some((arch, key)) if arch != model.arch.name => {
            cx.warn_at(key, format!("`arch: {}` wins over `{key}`", model.arch));
        }
        _ => {}
    }
    if model.extras_name_or_path.as_ref() == Some(&model.name_or_path) {
        model.extras_name_or_path = None;
    }
    if model.assistant_lora_path.is_some() && model.inference_lora_path.is_some() {
        cx.error_at(
            "inference_lora_path",
            "cannot be used together with `assistant_lora_path`",
        );
    }
    model.embedding_paths.0.retain(|path| !path.is_empty());
    cx.check_item_count("embedding_paths", model.embedding_paths.len(), MAX_EMBEDDINGS);
    let takes_embeddings = matches!(model.arch.name, ArchName::Sd1 | ArchName::Sd2 | ArchName::Sdxl);
    if !model.embedding_paths.is_empty() && !takes_embeddings {
        cx.error_at(
            "embedding_paths",
            format!(
                "textual inversions are for the CLIP text encoders of Stable Diffusion and SDXL, and this is `arch: {}`",
                model.arch
            ),
        );
    }
    check_prompt_reading(model, cx);
    if let Some((qtype, adapter)) = model.qtype.split_once('|') {
        let (qtype, adapter) = (qtype.trim().to_owned(), adapter.trim().to_owned());
        if present.has("accuracy_recovery_adapter") {
            cx.warn_at(
                "accuracy_recovery_adapter",
                format!("`qtype` names an adapter too, which wins: `{adapter}`"),
            );
        }
        if adapter.is_empty() {
            cx.error_at("qtype", "expected the file of an accuracy recovery adapter after `|`");
        }
        (model.qtype, model.accuracy_recovery_adapter) = (qtype, Some(adapter));
    }
    let of_qtype = !present.has("accuracy_recovery_adapter");
    if model.accuracy_recovery_adapter.is_some() && !model.quantize {
        cx.warn_at(
            if of_qtype { "qtype" } else { "accuracy_recovery_adapter" },
            "has no effect: it makes up for quantisation, and `quantize` is off",
        );
        model.accuracy_recovery_adapter = None;
    }
    if model.accuracy_recovery_adapter.is_some() && model.assistant_lora_path.is_some() {
        cx.error_at(
            "assistant_lora_path",
            "cannot be used together with an accuracy recovery adapter",
        );
    }
    for (on, key) in [
        (model.attn_masking, "attn_masking"),
        (model.split_model_over_gpus, "split_model_over_gpus"),
    ] {
        if on && !model.arch.name.is_flux() {
            cx.error_at(
                key,
                format!("only works with FLUX.1 (`arch: flux`), this model is `{}`", model.arch),
            );
        }
    }
    if model.use_flux_cfg && !model.uses_true_cfg() {
        cx.error_at(
            "use_flux_cfg",
            format!(
                "only works with FLUX.1 (`arch: flux`), this model is `{}`; remove the key",
                model.arch
            ),
        );
    }
    if present.has("name_or_path") && model.name_or_path.trim().is_empty() {
        cx.missing_at(
            "name_or_path",
            "needs the path of a model, or the name of a repository (ORG/NAME)",
        );
    }
    if ![4, 8, 16].contains(&model.text_encoder_bits) {
        cx.error_at("text_encoder_bits", "expected 16, 8 or 4");
    }
}

fn check(model: &ModelConfig, path: &str, report: &mut SupportReport) {
    let kinds = [
        (model.quantize, "qtype", &model.qtype),
        (model.quantizes_text_encoder(), "qtype_te", &model.qtype_te),
    ];
    for (_, key, name) in kinds.into_iter().filter(|(on, ..)| *on) {
        if name.contains('|') {
            let message = "an accuracy recovery adapter (after `|`) is for `qtype`; give the type alone";
            report.error(join(path, key), message);
        } else if QType::from_name(name).is_none() {
            let message = format!("`{name}` does not work yet; expected one of {}", QType::names());
            report.error(join(path, key), message);
        }
    }
    if let Some(key) = model.quantize_kwargs.keys().find(|key| *key != "exclude") {
        let key = format!("quantize_kwargs.{key}");
        report.error(
            join(path, &key),
            "is not a known option: remove it; only `exclude` (a list of layer names) is known",
        );
    } else if model.quantize_kwargs.contains_key("exclude") && model.quantize_exclude().is_none() {
        let message = "expected a list of names of layers, such as `- \"down_blocks.0.*\"`";
        report.error(join(path, "quantize_kwargs.exclude"), message);
    }
    let text_encoders = [
        ("use_text_encoder_1", model.use_text_encoder_1),
        ("use_text_encoder_2", model.use_text_encoder_2),
    ];
    for (key, _) in text_encoders.into_iter().filter(|(_, is_used)| !is_used) {
        if model.arch.name == ArchName::Sdxl {
            report.error(
                join(path, key),
                "SDXL without one of its text encoders is not supported yet; remove the key",
            );
        }
    }
    let shares = [
        (
            "layer_offloading_transformer_percent",
            model.layer_offloading_transformer_percent,
        ),
        (
            "layer_offloading_text_encoder_percent",
            model.layer_offloading_text_encoder_percent,
        ),
    ];
    for (key, _) in shares.into_iter().filter(|(_, share)| !(0.0..=1.0).contains(share)) {
        report.error(join(path, key), "expected a share from 0 (nothing) to 1 (everything)");
    }
    for (key, value) in [
        ("te_name_or_path", &model.te_name_or_path),
        ("extras_name_or_path", &model.extras_name_or_path),
    ] {
        if value.is_some() && !model.arch.name.takes_parts() {
            let message = format!(
                "only FLUX.1, Chroma, Stable Diffusion 3.5 and Z-Image take parts from elsewhere; of `arch: {}`, text encoders and tokenizers are the model's own: remove the key",
                model.arch
            );
            report.error(join(path, key), message);
        }
    }
    if model.name_or_path.contains("civitai.com/") {
        let message = "download the model from civitai.com first and give the path of the file";
        report.error(join(path, "name_or_path"), message);
    }
}

impl ModelConfig {
    /// Whether a model with a guidance embedding is used without it, and samples have classifier-free guidance.
    #[must_use]
    pub fn uses_true_cfg(&self) -> bool {
        self.use_flux_cfg && self.arch.name == ArchName::Flux
    }

    /// The architecture of the first `is_…` key that is true, and that key.
    pub(super) fn legacy_arch(&self) -> Option<(ArchName, &'static str)> {
        let flags = [
            (self.is_v2, ArchName::Sd2, "is_v2"),
            (self.is_v3, ArchName::Sd3, "is_v3"),
            (self.is_xl, ArchName::Sdxl, "is_xl"),
            (self.is_pixart, ArchName::Pixart, "is_pixart"),
            (self.is_pixart_sigma, ArchName::PixartSigma, "is_pixart_sigma"),
            (self.is_auraflow, ArchName::Auraflow, "is_auraflow"),
            (self.is_flux, ArchName::Flux, "is_flux"),
            (self.is_lumina2, ArchName::Lumina2, "is_lumina2"),
            (self.is_vega, ArchName::Vega, "is_vega"),
            (self.is_ssd, ArchName::Ssd, "is_ssd"),
        ];
        let first = flags.into_iter().find(|(on, ..)| *on);
        first.map(|(_, arch, key)| (arch, key))
    }

    /// Whether the text encoder is quantised.
    #[must_use]
    pub fn quantizes_text_encoder(&self) -> bool {
        self.quantize_te.unwrap_or(self.quantize)
    }

    /// How the U-Net or transformer is quantised, if it is.
    #[must_use]
    pub fn quantization(&self) -> Option<QType> {
        QType::from_name(&self.qtype).filter(|_| self.quantize)
    }

    /// How the text encoder is quantised, if it is.
    #[must_use]
    pub fn text_encoder_quantization(&self) -> Option<QType> {
        QType::from_name(&self.qtype_te).filter(|_| self.quantizes_text_encoder())
    }

    /// The names of layers that are not quantised; `None` if `exclude` is not a list of names.
    #[must_use]
    pub fn quantize_exclude(&self) -> Option<Vec<String>> {
        match self.quantize_kwargs.get("exclude") {
            None => Some(Vec::new()),
            Some(serde_json::Value::String(name)) => Some(vec![name.clone()]),
            Some(list) => {
                let names = list.as_array()?.iter().map(|name| name.as_str().map(str::to_owned));
                names.collect()
            }
        }
    }

    /// Whether layers are streamed instead of staying in memory.
    #[must_use]
    pub fn offloads_layers(&self) -> bool {
        self.layer_offloading.unwrap_or(self.auto_memory)
    }

    /// The memory options that the keys of this section request in addition to the memory profile.
    #[must_use]
    pub fn memory_options(&self) -> MemoryOptions {
        let shares = [
            self.layer_offloading_transformer_percent,
            self.layer_offloading_text_encoder_percent,
        ];
        MemoryOptions::from_config(self.low_vram, self.offloads_layers().then_some(shares))
    }

    /// Number format of the VAE.
    #[must_use]
    pub fn vae_dtype(&self) -> DType {
        self.vae_dtype.unwrap_or(self.dtype)
    }

    /// Number format of the text encoders.
    #[must_use]
    pub fn te_dtype(&self) -> DType {
        self.te_dtype.unwrap_or(self.dtype)
    }

    /// Tag of the latent cache.
    #[must_use]
    pub fn latent_space_version(&self) -> &str {
        self.latent_space_version
            .as_deref()
            .unwrap_or_else(|| self.arch.name.latent_space_version())
    }
}
