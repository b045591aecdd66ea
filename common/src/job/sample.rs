//! `sample`: images generated during the training, to show its progress.

use super::declare::section;
use super::limits::{MAX_FACTOR, MAX_SAMPLE_STEPS, MAX_SAMPLES, MAX_SIDE};
use super::sampler::SamplerName;
use super::schema::{PresentKeys, ReadContext};
use super::values::{Float, TextOrFalse};

section! {
    /// One image. Absent keys take the section's value.
    pub struct SampleItem("samples") {
        /// The prompt; may end in flags such as `--seed 7`.
        prompt: String = String::new(), Works;
        /// Width in pixels.
        width: Option<u32> = None, Works;
        /// Height in pixels.
        height: Option<u32> = None, Works;
        /// Negative prompt.
        neg: Option<TextOrFalse> = None, Works;
        /// Seed.
        seed: Option<i64> = None, Works;
        /// Guidance scale.
        guidance_scale: Option<f64> = None, Works;
        /// Steps.
        sample_steps: Option<u32> = None, Works;
        /// Video frames per second.
        fps: Option<u32> = None, DependsOn("num_frames");
        /// Video frames.
        num_frames: Option<u32> = None, Refused("no video models yet");
        /// LoRA strength.
        network_multiplier: Option<Float> = None, Works;
        /// Control image: with FLUX.1 Kontext the image that the prompt changes, with `adapter` what the image is conditioned on.
        ctrl_img: Option<String> = None, Works, input ControlImages;
        /// Index of the control.
        ctrl_idx: u32 = 0, DependsOn("ctrl_img_1");
        /// First of several control images.
        ctrl_img_1: Option<String> = None, Refused("the models that take several control images (OmniGen2, Qwen-Image-Edit-Plus) are not run here: use `ctrl_img`"), shown "`ctrl_img`", input ControlImages;
        /// Second of several control images.
        ctrl_img_2: Option<String> = None, Refused("the models that take several control images (OmniGen2, Qwen-Image-Edit-Plus) are not run here"), input ControlImages;
        /// Third of several control images.
        ctrl_img_3: Option<String> = None, Refused("the models that take several control images (OmniGen2, Qwen-Image-Edit-Plus) are not run here"), input ControlImages;
        /// No effect, as in ai-toolkit: the section's value is used.
        do_cfg_norm: bool = false, Accepted("never had an effect");
    }
    finish = finish_item;
}

fn finish_item(item: &mut SampleItem, _present: &PresentKeys, cx: &mut ReadContext) {
    for path in [
        &mut item.ctrl_img,
        &mut item.ctrl_img_1,
        &mut item.ctrl_img_2,
        &mut item.ctrl_img_3,
    ] {
        if path.as_deref() == Some("") {
            *path = None;
        }
    }
    if item.num_frames == Some(1) {
        item.num_frames = None;
    }
    for (key, value) in [
        ("width", item.width),
        ("height", item.height),
        ("sample_steps", item.sample_steps),
    ] {
        cx.check_not_zero(key, value.unwrap_or(1));
    }
    let guidance = item.guidance_scale.unwrap_or(1.0);
    cx.check_in_range("guidance_scale", guidance, -MAX_FACTOR..=MAX_FACTOR);
    cx.check_at_most("width", item.width.unwrap_or(0), MAX_SIDE);
    cx.check_at_most("height", item.height.unwrap_or(0), MAX_SIDE);
    cx.check_at_most("sample_steps", item.sample_steps.unwrap_or(0), MAX_SAMPLE_STEPS);
}

section! {
    /// Images generated during the training, to show its progress.
    pub struct SampleConfig("sample") {
        /// Sampler; models of flow matching take `flowmatch`, `heun`, `dpmsolver++` and `unipc`.
        sampler: SamplerName = SamplerName::Ddpm, Works;
        /// Sample when `step % sample_every == 0`, never on the first step that runs; 0 or null: not while training.
        sample_every: Option<u64> = Some(100), Works;
        /// No periodic samples before this step.
        sample_start_step: u64 = 0, Works;
        /// Width in pixels.
        width: u32 = 512, Works;
        /// Height in pixels.
        height: u32 = 512, Works;
        /// Negative prompt; false for none.
        neg: TextOrFalse = TextOrFalse::default(), Works, shown "false";
        /// Seed of the first image; -1 is random.
        seed: i64 = 0, Works;
        /// Image i uses `seed` + i.
        walk_seed: bool = false, Works;
        /// Guidance scale.
        guidance_scale: f64 = 7.0, Works;
        /// Guidance rescale.
        guidance_rescale: f64 = 0.0, Works;
        /// Steps.
        sample_steps: u32 = 20, Works;
        /// LoRA strength.
        network_multiplier: f64 = 1.0, Works;
        /// Suffix of the files: `jpg`, `png`, `webp`; sound models: `wav`, `mp3`, `flac`, `ogg`.
        format: String = "jpg".into(), Works;
        /// Above 1 makes a video.
        num_frames: u32 = 1, Refused("no video models yet");
        /// Video frames per second.
        fps: u32 = 16, DependsOn("num_frames");
        /// Strength of `adapter`.
        adapter_conditioning_scale: f64 = 1.0, DependsOn("adapter");
        /// Where the SDXL refiner takes over.
        refiner_start_at: f64 = 0.5, DependsOn("model.refiner_name_or_path");
        /// CFG norm (Qwen edit).
        do_cfg_norm: bool = false, Accepted("only Qwen-Image uses it");
        /// Older form of `samples`; used only when that is absent.
        prompts: Vec<String> = Vec::new(), Works;
        /// The images.
        samples: Vec<SampleItem> = Vec::new(), Works, shown "from `prompts`";
    }
    rare {
        "extra_values" => DependsOn("adapter");
    }
    finish = finish;
}

fn finish(sample: &mut SampleConfig, present: &PresentKeys, cx: &mut ReadContext) {
    if present.has("samples") {
        if !sample.prompts.is_empty() {
            cx.warn_at("prompts", "`samples` is given, so `prompts` is not used");
        }
    } else {
        sample.samples = sample.samples_of_prompts();
    }
    cx.check_item_count("samples", sample.samples.len(), MAX_SAMPLES);
    sample.format = sample.format.trim_start_matches('.').to_ascii_lowercase();
    if !FORMATS.contains(&sample.format.as_str()) {
        cx.error_at(
            "format",
            format!(
                "`{}` is not a known format. Known: {}",
                sample.format,
                FORMATS.join(", ")
            ),
        );
    }
    if sample.sample_steps == 0 {
        cx.error_at("sample_steps", "expected at least 1");
    }
    cx.check_at_most("sample_steps", sample.sample_steps, MAX_SAMPLE_STEPS);
    cx.check_not_zero("width", sample.width);
    cx.check_not_zero("height", sample.height);
    for (key, value) in [
        ("guidance_scale", sample.guidance_scale),
        ("network_multiplier", sample.network_multiplier),
    ] {
        cx.check_in_range(key, value, -MAX_FACTOR..=MAX_FACTOR);
    }
    cx.check_in_range("guidance_rescale", sample.guidance_rescale, 0.0..=1.0);
    cx.check_at_most("width", sample.width, MAX_SIDE);
    cx.check_at_most("height", sample.height, MAX_SIDE);
}

const FORMATS: &[&str] = &["jpg", "jpeg", "png", "webp", "wav", "mp3", "flac", "ogg", "mp4"];

impl SampleConfig {
    /// The samples made from `prompts`, for configs without `samples`.
    pub(super) fn samples_of_prompts(&self) -> Vec<SampleItem> {
        let items = self.prompts.iter().map(|prompt| SampleItem {
            prompt: prompt.clone(),
            ..SampleItem::default()
        });
        items.collect()
    }

    /// Whether periodic samples are due at `step`.
    #[must_use]
    pub fn is_due(&self, step: u64) -> bool {
        step >= self.sample_start_step
            && self
                .sample_every
                .is_some_and(|every| every > 0 && step.is_multiple_of(every))
    }
}
