//! Encodes the prompts of a run before its model is loaded, so that the text encoders are not in memory while it trains.

use super::super::context::Context;
use super::super::rate::Progress;
use super::data::TrainingData;
use super::fingerprints::text_fingerprint;
use super::options::caches_captions;
use super::preservation::Preservation;
use super::sliders::slider::Slider;
use super::validation;
use crate::adapters::load_text_lora;
use crate::data::{TextCache, TextKey, dropped_caption};
use crate::device::Compute;
use crate::device::precision::MatmulPrecision;
use crate::error::Result;
use crate::families::{Prompt, PromptReading};
use crate::training::CachedTextEmbeddings;
use aitk_common::job::model::ModelConfig;
use aitk_common::job::process::TrainerProcess;
use std::path::Path;

/// The arithmetic in which prompts are encoded, for the key of their cache.
fn arithmetic(compute: &Compute) -> &'static str {
    match MatmulPrecision::current() {
        MatmulPrecision::F32 => compute.dtype.as_str(),
        MatmulPrecision::Bf16 => "f32, products in bf16",
    }
}

/// Whether the text encoders leave the memory before the training.
pub(super) fn frees_text_encoders(process: &TrainerProcess) -> bool {
    !process.train.train_text_encoder && (process.train.unload_text_encoder || caches_captions(process))
}

/// Encodes every prompt that the run uses: captions, the empty prompt and the trigger word, which replace dropped captions, those of a
/// slider and of the guidance loss, and prompts of samples. Those that an earlier run encoded are read; the text encoders are loaded only if one is missing. `None`:
/// the run should stop.
///
/// # Errors
/// When the text encoders cannot be loaded or a prompt cannot be encoded, or the disk is full.
pub(super) fn encode(
    process: &TrainerProcess,
    seed: u64,
    data: &TrainingData,
    compute: &Compute,
    cx: &mut Context<'_>,
) -> Result<Option<CachedTextEmbeddings>> {
    cx.phase("caching text embeddings");
    let model = &process.model;
    let path = cx.local_path(&model.name_or_path)?;
    let lora = model.lora_path.as_ref().map(|lora| cx.local_path(lora)).transpose()?;
    let quantization = model.text_encoder_quantization().map(|qtype| {
        let exclude = model.quantize_exclude().unwrap_or_default().join(" ");
        format!("{qtype} {exclude}")
    });
    let changes: Vec<_> = lora.iter().cloned().chain(cx.embedding_files(model)?).collect();
    let cache = TextCache::new(TextKey {
        space: text_space(model),
        encoders: text_fingerprint(&path, &cx.part_paths(model)?, &changes)?,
        dtype: arithmetic(compute).to_owned(),
        quantization: quantization.unwrap_or_default(),
    });
    let mut embeddings = CachedTextEmbeddings::new(cache);
    add_prompts(process, seed, data, &mut embeddings);

    let missing = embeddings.missing();
    if missing.is_empty() {
        cx.log("info", format!("{} prompts are encoded already", embeddings.count()));
        return Ok(Some(embeddings));
    }
    let mut encoders = cx.load_text_encoders(model, compute)?;
    if let Some(lora) = &lora {
        load_text_lora(&mut encoders.parts(), lora)?;
    }
    let (mut progress, total) = (Progress::new(), missing.len() as u64);
    for (done, prompt) in (1..).zip(&missing) {
        if cx.stop.is_set() {
            return Ok(None);
        }
        let conditioning = encoders.encode_prompts(std::slice::from_ref(prompt))?;
        embeddings.insert(prompt, &conditioning.detached_as(compute.dtype)?)?;
        progress.step(cx, done, total);
    }
    cx.log(
        "info",
        format!("{total} of {} prompts were encoded", embeddings.count()),
    );
    Ok(Some(embeddings))
}

/// What the encoded prompts are for: the family and how it reads prompts.
fn text_space(model: &ModelConfig) -> String {
    let (name, reading) = (model.arch.name, PromptReading::of(model));
    match reading == PromptReading::default() {
        true => name.to_string(),
        false => format!(
            "{name}, {} layers skipped, {} blocks of tokens, {}{}{}",
            reading.clip_skip,
            reading.chunks,
            if reading.masks_padding {
                "padding masked"
            } else {
                "with padding"
            },
            if reading.masks_attention {
                ", no attention to padding"
            } else {
                ""
            },
            if reading.masks_clip_attention {
                ", none to that of CLIP"
            } else {
                ""
            }
        ),
    }
}

/// Adds every prompt of the run.
fn add_prompts(process: &TrainerProcess, seed: u64, data: &TrainingData, embeddings: &mut CachedTextEmbeddings) {
    // Prompts that belong to no image have their files next to the first one.
    let first = data.datasets.iter().find_map(|dataset| dataset.items.first());
    let (image, derived) = first.map_or((Path::new("prompt"), None), |item| {
        (&*item.path, item.derived.as_deref())
    });
    let common = image.with_file_name("prompt");
    let mut add = |text: &str, text_2: Option<&String>| {
        let prompt = Prompt {
            text: text.to_owned(),
            text_2: text_2.cloned(),
        };
        embeddings.add(prompt, &common, derived);
    };
    add("", None);
    if let Some(trigger) = &process.trigger_word {
        add(trigger, None);
    }
    if !process.train.disable_sampling {
        for section in [Some(&process.sample), process.first_sample.as_ref()]
            .into_iter()
            .flatten()
        {
            for request in process.sample_requests(section) {
                add(&request.prompt, request.prompt_2.as_ref());
                add(&request.negative_prompt, request.negative_prompt_2.as_ref());
            }
        }
    }
    for prompt in Slider::of(process, seed).iter().flat_map(|slider| slider.prompts()) {
        add(&prompt, None);
    }
    if process.train.do_guidance_loss {
        add(&process.train.unconditional_prompt, None);
    }
    for prompt in validation::prompts(process) {
        add(&prompt, None);
    }
    let preservation = Preservation::of(process);
    // Beside captions that are dropped.
    for dataset in &data.datasets {
        if let Some(preservation) = &preservation {
            let rules = &dataset.options.captions;
            add(
                &preservation.prompt(&dropped_caption(rules), rules.trigger_word()),
                None,
            );
        }
    }
    if caches_captions(process) {
        for (number, dataset) in data.datasets.iter().enumerate() {
            for (index, item) in dataset.items.iter().enumerate() {
                let caption = data.frozen_caption(number, index);
                let kept = preservation.as_ref();
                let kept = kept.map(|kept| kept.prompt(&caption, dataset.options.captions.trigger_word()));
                for prompt in [Some(caption), kept].into_iter().flatten() {
                    embeddings.add(Prompt::new(prompt), &item.path, item.derived.as_deref());
                }
            }
        }
    }
}
