//! The `batch_img2img` process (docs/images.md): image-to-image on data sets, with captions as
//! prompts.

use super::context::{Context, artifact_name};
use super::events::{OutputRequests, StopSignal};
use super::image_generator::{FinishedImages, ImageGenerator, artifact_index_base, image_name, png_parameters};
use super::log_file::LogFile;
use super::rate::Progress;
use crate::data::{CaptionRules, Dataset, DatasetOptions, DatasetScan, build_caption};
use crate::error::{EngineError, Result};
use crate::image_io::{self, Filter};
use crate::pipelines::{Pipeline, random_seed, to_generate_request};
use crate::rng::generator_for;
use crate::samplers::{self, NoiseSource};
use aitk_common::attempt::{AttemptSpec, Outcome};
use aitk_common::fsutil;
use aitk_common::job::dataset::DatasetConfig;
use aitk_common::job::process::Img2ImgProcess;
use aitk_common::job::prompt::{ImageRequest, PromptFlags};
use aitk_common::job::{JobSpec, ProcessKind};
use aitk_common::plan::image_batches::{ImageBatch, largest_batches};
use image::RgbImage;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Sides of images are multiples of this number of pixels.
const DIVISIBILITY: u32 = 8;

/// One image-to-image task.
struct Task {
    /// The input image.
    path: PathBuf,
    /// How it is flipped, scaled and cropped, as in training.
    plan: SourcePlan,
    prompt: String,
}

/// How an input image is flipped, scaled and cropped.
struct SourcePlan {
    scale_to: (u32, u32),
    bucket: (u32, u32),
    crop: (u32, u32),
    flip: (bool, bool),
}

impl Task {
    /// Reads the input image, flipped, scaled and cropped.
    fn open(&self) -> Result<RgbImage> {
        let mut image = image_io::open_rgb(&self.path)?;
        if self.plan.flip.0 {
            image::imageops::flip_horizontal_in_place(&mut image);
        }
        if self.plan.flip.1 {
            image::imageops::flip_vertical_in_place(&mut image);
        }
        let (width, height) = self.plan.scale_to;
        let scaled = image_io::resize(&image, width, height, Filter::Bicubic);
        let ((x, y), (width, height)) = (self.plan.crop, self.plan.bucket);
        Ok(image::imageops::crop_imm(&scaled, x, y, width, height).to_image())
    }
}

/// Runs image-to-image on every image of the process.
///
/// # Errors
/// When the model, a data set or the folder cannot be used.
pub(super) fn run(process: &Img2ImgProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    let config = &process.generate;
    let sampler = config.sampler.name();
    samplers::check_name(sampler)?;
    let tasks = tasks(process, cx)?;
    let folder = cx.output_root(Some(&process.output_folder));
    fsutil::create_dir_all(&folder).map_err(image_io::from_fs_error)?;
    let copies = process.copy_inputs_to.as_ref().map(|path| match &cx.spec.output_root {
        Some(root) => root.join("inputs"),
        None => super::expand_home(path),
    });
    if let Some(copies) = &copies {
        fsutil::create_dir_all(copies).map_err(image_io::from_fs_error)?;
    }
    let mut finished = FinishedImages::open(&folder, cx, process)?;
    let index_base = artifact_index_base(
        cx.job,
        |kind| matches!(kind, ProcessKind::Img2Img(own) if std::ptr::eq(&raw const **own, process)),
    );
    let generator = ImageGenerator::load(&process.model, cx)?;
    let pipeline = Pipeline::new(&*generator.model, generator.v_prediction)?;

    cx.phase("generating");
    let total = tasks.len() as u64;
    let generated: BTreeSet<u64> = cx.spec.generated.iter().copied().collect();
    let mut done = 0;
    let mut progress = Progress::new();
    for (index, task) in (0u64..).zip(&tasks) {
        if let Some(name) = finished.get(index) {
            let path = folder.join(name);
            cx.artifact("image", &folder, &path, None, Some(index_base + index));
            done += 1;
            continue;
        }
        if generated.contains(&(index_base + index)) {
            done += 1;
            continue;
        }
        progress.report(cx, done, total);
        let source = task.open()?;
        let request = request(process, &task.prompt, index, &source, cx.spec.seed);
        let seed = request.seed.unwrap_or_default() as u64;
        if let Some(lora) = &generator.lora {
            lora.multiplier.set(request.network_multiplier);
        }
        let mut generate_request = to_generate_request(&request, sampler, generator.model.size_multiple());
        generate_request.bypass_guidance_embedding = process.model.uses_true_cfg();
        let stop = cx.stop.clone();
        let images = pipeline.image_to_image(
            &generate_request,
            std::slice::from_ref(&source),
            config.denoise_strength,
            &mut NoiseSource::from_seeds(&[seed]),
            &mut |_, _| {
                progress.keep_alive(cx, done, total);
                !stop.is_set()
            },
        )?;
        let Some(result) = images.and_then(|images| images.into_iter().next()) else {
            return Ok(Outcome::stopped());
        };
        let name = image_name(&folder, index, &config.ext);
        let path = folder.join(&name);
        finished.add(index, name.clone())?;
        if let Some(copies) = &copies {
            image_io::save(&source, &copies.join(&name), &[])?;
        }
        image_io::save(
            &result,
            &path,
            &[("parameters", &png_parameters(&request, sampler, seed))],
        )?;
        cx.log(
            "info",
            format!(
                "{}: from {}, seed {seed}",
                artifact_name(&folder, &path),
                task.path.display()
            ),
        );
        cx.artifact("image", &folder, &path, None, Some(index_base + index));
        done += 1;
        progress.step(cx, done, total);
    }
    finished.clear();
    Ok(Outcome::Completed)
}

/// The settings of one image: the flags of its caption override those of the `generate` section.
fn request(process: &Img2ImgProcess, prompt: &str, index: u64, source: &RgbImage, job_seed: u64) -> ImageRequest {
    let config = &process.generate;
    let flags = PromptFlags::parse(prompt);
    let default_seed = match config.seed {
        -1 => random_seed(job_seed, index) as i64,
        seed if config.walk_seed => seed.wrapping_add(index as i64),
        seed => seed,
    };
    ImageRequest {
        prompt: flags.prompt,
        prompt_2: flags.prompt_2,
        negative_prompt: flags.negative_prompt.unwrap_or_else(|| config.neg.clone()),
        negative_prompt_2: flags.negative_prompt_2,
        width: source.width(),
        height: source.height(),
        seed: Some(flags.seed.unwrap_or(default_seed)),
        guidance_scale: flags.guidance_scale.unwrap_or(config.guidance_scale),
        guidance_rescale: flags.guidance_rescale.unwrap_or(config.guidance_rescale),
        steps: flags.steps.unwrap_or(config.sample_steps).max(1),
        network_multiplier: flags.network_multiplier.unwrap_or(1.0),
        adapter_conditioning_scale: 1.0,
        refiner_start_at: 0.5,
        extra_values: Vec::new(),
        num_frames: 1,
        fps: 16,
        ctrl_img: None,
        ctrl_img_1: None,
        ctrl_img_2: None,
        ctrl_img_3: None,
        ctrl_idx: 0,
        do_cfg_norm: false,
    }
}

/// The largest images of each process of an attempt that changes images, in the size in which they are changed, for the prediction of its
/// memory. Headers are read, and nothing is written. A process whose data cannot be read has none.
pub(super) fn image_batches(spec: &AttemptSpec) -> Vec<ImageBatch> {
    let Ok(job) = serde_json::from_value::<JobSpec>(spec.job.clone()) else {
        return Vec::new();
    };
    let mut events = Vec::new();
    let cx = Context {
        spec,
        job: &job,
        events: &mut events,
        stop: &StopSignal::new(),
        requests: &OutputRequests::new(),
        log_file: LogFile::default(),
    };
    let mut batches = Vec::new();
    for (index, process) in job.process.iter().enumerate() {
        let ProcessKind::Img2Img(process) = &process.kind else {
            continue;
        };
        let Ok(sizes) = image_sizes(process, &cx) else {
            continue;
        };
        let of_size = |(width, height): (u32, u32)| ImageBatch {
            process: u32::try_from(index).unwrap_or(u32::MAX),
            width,
            height,
            images: 1,
        };
        batches.extend(largest_batches(sizes.into_iter().map(of_size)));
    }
    batches
}

/// Width and height of the images of all data sets, as they are changed.
fn image_sizes(process: &Img2ImgProcess, cx: &Context<'_>) -> Result<BTreeSet<(u32, u32)>> {
    let mut sizes = BTreeSet::new();
    for config in &process.datasets {
        for resolution in config.resolution.iter() {
            let options = options(config, *resolution, process.generate.trigger_word.as_deref(), cx)?;
            let scan = DatasetScan::read(&options, false)?;
            sizes.extend(scan.bucket_sizes(&options, DIVISIBILITY));
        }
    }
    Ok(sizes)
}

/// The tasks of all data sets, in order.
fn tasks(process: &Img2ImgProcess, cx: &mut Context<'_>) -> Result<Vec<Task>> {
    let mut out = Vec::new();
    for config in &process.datasets {
        for resolution in config.resolution.iter() {
            let options = options(config, *resolution, process.generate.trigger_word.as_deref(), cx)?;
            let (dataset, warnings) = Dataset::open(options, DIVISIBILITY, cx.spec.seed)?;
            for warning in warnings {
                cx.log("warn", warning);
            }
            for item in &dataset.items {
                let index = out.len() as u64;
                let mut generator = generator_for(cx.spec.seed, "img2img/caption", index, 0);
                let prompt = build_caption(&item.caption, &dataset.options.captions, &mut generator);
                out.push(Task {
                    path: item.path.clone(),
                    plan: SourcePlan {
                        scale_to: item.plan.scale_to,
                        bucket: item.plan.bucket,
                        crop: item.plan.crop,
                        flip: (item.flip_x, item.flip_y),
                    },
                    prompt,
                });
            }
        }
    }
    if out.is_empty() {
        return Err(EngineError::bad_input("`datasets`: the data sets have no image"));
    }
    Ok(out)
}

/// Converts a `datasets` entry at one resolution.
fn options(config: &DatasetConfig, resolution: u32, trigger: Option<&str>, cx: &Context<'_>) -> Result<DatasetOptions> {
    let path = config
        .path()
        .ok_or_else(|| EngineError::bad_input("datasets: an entry has no `folder_path`"))?;
    let trigger = config.trigger_word.clone().or_else(|| trigger.map(str::to_owned));
    Ok(DatasetOptions {
        path: cx.local_path(path)?,
        stay_in_folder: cx.has_staged_inputs(),
        resolution,
        repeats: config.num_repeats.max(1) as usize,
        caption_ext: config.caption_ext.clone(),
        default_caption: config.default_caption.clone(),
        short_captions: config.use_short_captions,
        captions: CaptionRules {
            trigger: trigger.clone(),
            process_trigger: trigger,
            ..CaptionRules::default()
        },
        buckets: config.buckets,
        square_crop: config.square_crop,
        random_crop: config.random_crop,
        scale: config.scale,
        flip_x: config.flip_x,
        flip_y: config.flip_y,
        ..DatasetOptions::default()
    })
}
