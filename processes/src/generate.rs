//! The `to_folder` process (docs/images.md): generates images from prompts.
//!
//! Unlike in ai-toolkit, the flags of a prompt are honoured, and Stable Diffusion works. The job's
//! seed decides everything random (seeds, sizes of `size_list`, random prompts, the shuffled order), so that another
//! attempt generates the same images.

use super::context::{COMPILE_NOTE, Context, artifact_name};
use super::image_generator::{
    FinishedImages, ImageGenerator, artifact_index_base, image_name, png_parameters, prompt_with_flags,
};
use super::rate::Progress;
use crate::error::{EngineError, Result};
use crate::families::{Model, SizeLimit};
use crate::image_io;
use crate::pipelines::{SampleSettings, generate_images, random_seed};
use crate::rng::generator_for;
use crate::samplers;
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::fsutil::{self, regular};
use aitk_common::job::ProcessKind;
use aitk_common::job::generate::{GenerateConfig, prompt_lines};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::process::GenerateProcess;
use aitk_common::job::prompt::{ImageRequest, PromptFileReport, PromptFlags};
use aitk_common::job::spec::JobSpec;
use aitk_common::job::values::TextSource;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;

/// The most images that one process may generate.
const MAX_IMAGES: usize = 1_000_000;

/// The most warnings about flags in a file of prompts.
const MAX_FLAG_WARNINGS: usize = 20;

/// Generates every image of the process.
///
/// # Errors
/// When the model, the prompts or the folder cannot be used.
pub(super) fn run(process: &GenerateProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    let config = &process.generate;
    let sampler = config.sampler.name();
    samplers::check_name(sampler)?;
    let requests = requests(config, cx)?;
    let range = image_range(cx.job, requests.len())?;
    let first = range.start as u64;
    // Each image has the same index and seed as in the whole job.
    let requests = requests.get(range).unwrap_or_default();
    let folder = cx.output_root(Some(&process.output_folder));
    fsutil::create_dir_all(&folder).map_err(image_io::from_fs_error)?;
    let mut finished = FinishedImages::open(&folder, cx, process)?;
    let index_base = artifact_index_base(
        cx.job,
        |kind| matches!(kind, ProcessKind::Generate(own) if std::ptr::eq(&raw const **own, process)),
    );
    let generated: BTreeSet<u64> = cx.spec.generated.iter().copied().collect();
    for index in first..first + requests.len() as u64 {
        if let Some(name) = finished.get(index) {
            let path = folder.join(name);
            cx.artifact("image", &folder, &path, None, Some(index_base + index));
        }
    }
    let (indices, remaining): (Vec<u64>, Vec<ImageRequest>) = requests
        .iter()
        .zip(first..)
        .filter(|(_, i)| finished.get(*i).is_none() && !generated.contains(&(index_base + *i)))
        .map(|(r, i)| (i, r.clone()))
        .unzip();
    let total = requests.len() as u64;
    if remaining.len() < requests.len() {
        cx.log(
            "info",
            format!(
                "{} of {total} images are already finished",
                total - remaining.len() as u64
            ),
        );
    }
    if remaining.is_empty() {
        finished.clear();
        return Ok(Outcome::Completed);
    }

    check_control(process, &remaining)?;
    let control_images = cx.control_images(&remaining)?;
    let generator = ImageGenerator::load(&process.model, cx)?;
    check_sizes(&*generator.model, &remaining)?;
    if config.compile && !process.model.compile && !process.model.block_compile {
        cx.log("info", COMPILE_NOTE);
    }
    cx.phase("generating");
    let done = total - remaining.len() as u64;
    cx.events.emit(ChildEvent::Progress {
        done,
        total,
        seconds_per_step: None,
    });
    let settings = SampleSettings {
        refuse_non_finite: true,
        sampler,
        v_prediction: generator.v_prediction,
        bypass_guidance_embedding: process.model.uses_true_cfg(),
        multiplier: generator.lora.as_ref().map(|lora| &lora.multiplier),
        control_images: &control_images,
        job_seed: cx.spec.seed,
    };
    let stop = cx.stop.clone();
    // Both callbacks report progress.
    let state = RefCell::new((cx, Progress::new(), done));
    let complete = generate_images(
        &*generator.model,
        &settings,
        &remaining,
        &mut |_, _| {
            let (cx, progress, done) = &mut *state.borrow_mut();
            progress.keep_alive(cx, *done, total);
            !stop.is_set()
        },
        &mut |i, request, seed, image| {
            let (cx, progress, done) = &mut *state.borrow_mut();
            let index = indices[i];
            let name = image_name(&folder, index, &config.ext);
            let path = folder.join(&name);
            finished.add(index, name)?;
            if config.prompt_file {
                let prompt_file = path.with_extension("txt");
                image_io::write(&prompt_file, prompt_with_flags(request, seed).as_bytes())?;
                cx.artifact("prompt", &folder, &prompt_file, None, Some(index_base + index));
            }
            image_io::save(
                &image,
                &path,
                &[("parameters", &png_parameters(request, sampler, seed))],
            )?;
            cx.log(
                "info",
                format!(
                    "{}: {}",
                    artifact_name(&folder, &path),
                    prompt_with_flags(request, seed)
                ),
            );
            cx.artifact("image", &folder, &path, None, Some(index_base + index));
            *done += 1;
            progress.step(cx, *done, total);
            Ok(())
        },
    )?;
    if !complete {
        return Ok(Outcome::stopped());
    }
    finished.clear();
    Ok(Outcome::Completed)
}

/// Checks that every image has the control image that the model needs: prompts of a file are not known earlier.
fn check_control(process: &GenerateProcess, requests: &[ImageRequest]) -> Result<()> {
    let arch = process.model.arch.name;
    let has_control = |request: &ImageRequest| request.ctrl_img.as_deref().is_some_and(|path| !path.is_empty());
    match requests
        .iter()
        .find(|request| has_control(request) != arch.takes_control_image())
    {
        Some(request) if arch.takes_control_image() => Err(EngineError::bad_input(format!(
            "`arch: {arch}` changes an image, and the prompt \"{}\" has none: add `--ctrl_img PATH` to it",
            request.prompt
        ))),
        Some(request) => Err(EngineError::bad_input(format!(
            "`arch: {arch}` takes no control image: remove `--ctrl_img` from the prompt \"{}\", or use FLUX.1 Kontext (`arch: flux_kontext`)",
            request.prompt
        ))),
        None => Ok(()),
    }
}

/// Checks that the model can make images of these sizes, before it makes the first.
fn check_sizes(model: &dyn Model, requests: &[ImageRequest]) -> Result<()> {
    let Some(limit) = SizeLimit::of(model) else {
        return Ok(());
    };
    for request in requests {
        limit.check(request.width, request.height).map_err(|problem| {
            EngineError::bad_input(format!("generate: the prompt \"{}\": {problem}", request.prompt))
        })?;
    }
    Ok(())
}

/// The range of images that this job generates: all, or its part of a larger job.
fn image_range(job: &JobSpec, images: usize) -> Result<Range<usize>> {
    let Some(part) = job.part else { return Ok(0..images) };
    let bound = |number: u64| usize::try_from(number).ok().filter(|number| *number <= images);
    match (bound(part.from), bound(part.to)) {
        (Some(from), Some(to)) if from < to && job.process.len() == 1 => Ok(from..to),
        _ => Err(EngineError::bad_input(format!(
            "this part of the job has images {} to {}, but the job generates {images}; if its prompts have changed, submit the \
             job again",
            part.from, part.to
        ))),
    }
}

/// All images to generate, in order, each with its seed.
fn requests(config: &GenerateConfig, cx: &mut Context<'_>) -> Result<Vec<ImageRequest>> {
    let lines = prompts(&config.prompts, cx)?;
    let seed = cx.spec.seed;
    if config.random_prompts && config.max_images as usize > MAX_IMAGES {
        return Err(EngineError::bad_input(format!(
            "`generate.max_images` must be at most {MAX_IMAGES}"
        )));
    }
    let mut list = if config.random_prompts {
        random_prompts(config, &lines, seed)
    } else {
        lines
    };
    let repeats = config.num_repeats.max(1) as usize;
    if list.len().saturating_mul(repeats) > MAX_IMAGES {
        return Err(EngineError::bad_input(format!(
            "generate: {} prompts times {repeats} repeats are more than {MAX_IMAGES} images: split them into several jobs",
            list.len()
        )));
    }
    list = std::iter::repeat_n(list, repeats).flatten().collect();
    if config.shuffle {
        let order = generator_for(seed, "generate/shuffle", 0, 0).randperm(list.len());
        list = order
            .into_iter()
            .filter_map(|i| list.get(i as usize).cloned())
            .collect();
    }
    let mut out = Vec::with_capacity(list.len());
    for (index, prompt) in (0u64..).zip(&list) {
        let size = config
            .size_list
            .as_ref()
            .filter(|sizes| !sizes.is_empty())
            .map(|sizes| {
                let chosen = generator_for(seed, "generate/size", index, 0).randint(0, sizes.len() as i64, 1)[0];
                let pair = sizes[chosen as usize];
                (pair.0, pair.1)
            });
        for problem in PromptFlags::parse(prompt).problems {
            cx.log("warn", format!("prompt {}: {problem}", index + 1));
        }
        let mut request = config.request(prompt, size);
        let image_seed = request.seed.unwrap_or_else(|| random_seed(seed, index) as i64);
        request.seed = Some(image_seed);
        out.push(request);
    }
    Ok(out)
}

/// Reads the list of prompts from the config or a file.
fn prompts(source: &TextSource, cx: &mut Context<'_>) -> Result<Vec<String>> {
    let lines = match source {
        TextSource::List(list) => list.clone(),
        TextSource::File(file) => {
            let path = cx.local_path(file)?;
            let bytes = regular::read(&path, MAX_TEXT_FILE_BYTES).map_err(|e| EngineError::io(&path, e))?;
            let text = String::from_utf8(bytes)
                .map_err(|_| EngineError::bad_input(format!("{}: the prompts are not UTF-8", path.display())))?;
            check_flags(file, &text, cx)?;
            prompt_lines(&text).into_iter().map(str::to_owned).collect()
        }
    };
    if lines.is_empty() {
        return Err(EngineError::bad_input("`generate.prompts`: there is no prompt"));
    }
    Ok(lines)
}

/// Checks the flags of the prompts in a file, as those of a config are checked when it is read.
fn check_flags(file: &str, text: &str, cx: &mut Context<'_>) -> Result<()> {
    let PromptFileReport { errors, warnings } = PromptFileReport::of(text);
    if let Some(first) = errors.first() {
        return Err(EngineError::bad_input(format!("`generate.prompts`: {file}:{first}")));
    }
    for warning in warnings.iter().take(MAX_FLAG_WARNINGS) {
        cx.log("warn", format!("{file}:{warning}"));
    }
    if let Some(more @ 1..) = warnings.len().checked_sub(MAX_FLAG_WARNINGS) {
        cx.log("warn", format!("{file}: {more} more flags have no effect"));
    }
    Ok(())
}

/// Makes `max_images` prompts, each of 1 to `max_random_per_prompt` random lines joined by ", ".
fn random_prompts(config: &GenerateConfig, lines: &[String], seed: u64) -> Vec<String> {
    let max_lines = i64::from(config.max_random_per_prompt.max(1));
    (0..u64::from(config.max_images))
        .map(|index| {
            let mut generator = generator_for(seed, "generate/prompt", index, 0);
            let count = generator.randint(1, max_lines + 1, 1)[0] as usize;
            let indices = generator.randint(0, lines.len() as i64, count);
            indices
                .into_iter()
                .map(|i| lines[i as usize].as_str())
                .collect::<Vec<_>>()
                .join(", ")
        })
        .collect()
}
