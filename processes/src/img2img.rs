//! The `batch_img2img` process (docs/images.md): image-to-image on data sets, with captions as
//! prompts, each to a file of its image's name.

use super::caption_rules::caption_rules;
use super::context::{Context, artifact_name};
use super::events::{OutputRequests, StopSignal};
use super::image_generator::{FinishedImages, ImageGenerator, artifact_index_base, image_ext, png_parameters};
use super::log_file::LogFile;
use super::preview_spec::preview_spec;
use super::rate::Progress;
use crate::data::{Dataset, DatasetOptions, DatasetScan, build_caption};
use crate::error::{EngineError, Result};
use crate::image_io::{self, Filter};
use crate::pipelines::{Pipeline, random_seed, to_generate_request};
use crate::rng::generator_for;
use crate::samplers::{self, NoiseSource};
use aitk_common::attempt::{AttemptSpec, Outcome};
use aitk_common::fsutil;
use aitk_common::job::dataset::DatasetConfig;
use aitk_common::job::process::Img2ImgProcess;
use aitk_common::job::prompt::ImageRequest;
use aitk_common::job::values::ImageSize;
use aitk_common::job::{JobSpec, ProcessKind};
use aitk_common::plan::image_batches::{ImageBatch, largest_batches};
use image::RgbImage;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

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
    let root = cx.output_root(Some(&process.output_folder));
    // On a worker copies are beside the results.
    let copies_root = process
        .copy_inputs_to
        .as_deref()
        .filter(|_| cx.spec.output_root.is_none());
    let copies_root = copies_root.map(super::expand_home);
    let results: Vec<&Path> = std::iter::once(&root)
        .chain(&copies_root)
        .map(PathBuf::as_path)
        .collect();
    let tasks = tasks(process, &results, cx)?;
    let folder = own_folder(process, &root, cx, |other| other.output_folder == process.output_folder);
    fsutil::create_dir_all(&folder).map_err(image_io::from_fs_error)?;
    let copies = process.copy_inputs_to.as_ref().map(|path| match cx.spec.output_root {
        Some(_) => folder.join("inputs"),
        None => {
            let shares_folder = |other: &Img2ImgProcess| other.copy_inputs_to.as_ref() == Some(path);
            own_folder(process, &super::expand_home(path), cx, shares_folder)
        }
    });
    if let Some(copies) = &copies {
        fsutil::create_dir_all(copies).map_err(image_io::from_fs_error)?;
    }
    let written: Vec<&Path> = std::iter::once(&folder).chain(&copies).map(PathBuf::as_path).collect();
    let stems = result_stems(&tasks, &written);
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
    for ((index, task), stem) in (0u64..).zip(&tasks).zip(&stems) {
        if let Some(name) = finished.get(index) {
            let path = folder.join(name);
            let caption = path.with_extension("txt");
            if caption.is_file() {
                cx.artifact("prompt", &root, &caption, None, Some(index_base + index));
            }
            cx.artifact("image", &root, &path, None, Some(index_base + index));
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
        let [name, caption_name] = [image_ext(&config.ext), "txt"].map(|ext| format!("{stem}.{ext}"));
        let (path, caption) = (folder.join(&name), folder.join(&caption_name));
        // That of an earlier run: an image that exists is finished once its name is recorded.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(EngineError::io(&path, error)),
            _ => {}
        }
        finished.add(index, name.clone())?;
        if let Some(copies) = &copies {
            image_io::save(&source, &copies.join(&name), &[])?;
            image_io::write(&copies.join(&caption_name), task.prompt.as_bytes())?;
        }
        image_io::write(&caption, task.prompt.as_bytes())?;
        cx.artifact("prompt", &root, &caption, None, Some(index_base + index));
        image_io::save(
            &result,
            &path,
            &[("parameters", &png_parameters(&request, sampler, seed))],
        )?;
        cx.log(
            "info",
            format!(
                "{}: from {}, seed {seed}",
                artifact_name(&root, &path),
                task.path.display()
            ),
        );
        cx.artifact("image", &root, &path, None, Some(index_base + index));
        done += 1;
        progress.step(cx, done, total);
    }
    finished.clear();
    Ok(Outcome::Completed)
}

/// The folder that a process writes to. Where several processes of one job write to the same folder, each but the first gets a folder
/// in it, because their results may have the same names.
fn own_folder(
    process: &Img2ImgProcess,
    folder: &Path,
    cx: &Context<'_>,
    shares_folder: impl Fn(&Img2ImgProcess) -> bool,
) -> PathBuf {
    let mut is_shared = false;
    for (position, other) in cx.job.process.iter().enumerate() {
        let ProcessKind::Img2Img(other) = &other.kind else {
            continue;
        };
        if std::ptr::eq(&raw const **other, process) {
            return match is_shared {
                true => folder.join(format!("process_{position}")),
                false => folder.to_path_buf(),
            };
        }
        is_shared |= cx.spec.output_root.is_some() || shares_folder(other);
    }
    folder.to_path_buf()
}

/// The names of the results, without their suffix: those of their images, as in ai-toolkit. An image gets a number if one before it has
/// the same name, or if a source image of that name is in a folder that is written to.
fn result_stems(tasks: &[Task], written: &[&Path]) -> Vec<String> {
    let stem = |task: &Task| task.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    // Some file systems do not tell capital letters from small ones.
    let key = |stem: &str| stem.to_lowercase();
    let canonical = |path: &Path| std::fs::canonicalize(path).ok();
    let written: Vec<PathBuf> = written.iter().filter_map(|folder| canonical(folder)).collect();
    let is_written_to = |task: &&Task| {
        let folder = task.path.parent().and_then(canonical);
        folder.is_some_and(|folder| written.contains(&folder))
    };
    let sources: HashSet<String> = tasks.iter().map(|task| key(&stem(task))).collect();
    let mut used: HashSet<String> = tasks
        .iter()
        .filter(is_written_to)
        .map(|task| key(&stem(task)))
        .collect();
    let mut names = Vec::with_capacity(tasks.len());
    for task in tasks {
        let stem = stem(task);
        if used.insert(key(&stem)) {
            names.push(stem);
            continue;
        }
        let mut number = 1u64;
        let name = loop {
            let name = format!("{stem}_{number}");
            if !sources.contains(&key(&name)) && used.insert(key(&name)) {
                break name;
            }
            number += 1;
        };
        names.push(name);
    }
    names
}

/// The settings of one image. As in ai-toolkit, its caption is the prompt as it is: a `--` begins no flag.
fn request(process: &Img2ImgProcess, prompt: &str, index: u64, source: &RgbImage, job_seed: u64) -> ImageRequest {
    let config = &process.generate;
    let seed = match config.seed {
        -1 => random_seed(job_seed, index) as i64,
        seed if config.walk_seed => seed.wrapping_add(index as i64),
        seed => seed,
    };
    ImageRequest {
        prompt: prompt.to_owned(),
        prompt_2: None,
        negative_prompt: config.neg.clone(),
        negative_prompt_2: None,
        width: source.width(),
        height: source.height(),
        seed: Some(seed),
        guidance_scale: config.guidance_scale,
        guidance_rescale: config.guidance_rescale,
        steps: config.sample_steps.max(1),
        network_multiplier: 1.0,
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

/// Width and height of the images of a process that changes images, as they are changed, as far as its data sets can be read. `inputs`: the
/// local path of each path in the config. Headers are read, and nothing is written.
#[must_use]
pub fn changed_image_sizes(
    job: &JobSpec,
    process: &Img2ImgProcess,
    inputs: &BTreeMap<String, PathBuf>,
) -> BTreeSet<(u32, u32)> {
    let Ok(spec) = preview_spec(inputs) else {
        return BTreeSet::new();
    };
    let mut events = Vec::new();
    let cx = Context {
        spec: &spec,
        job,
        events: &mut events,
        stop: &StopSignal::new(),
        requests: &OutputRequests::new(),
        log_file: LogFile::default(),
    };
    image_sizes(process, &cx).unwrap_or_default()
}

/// Sides of images are multiples of this number of pixels: those of a training, but images without buckets have their own size.
fn divisibility(process: &Img2ImgProcess, config: &DatasetConfig) -> u32 {
    match config.buckets {
        true => process.model.arch.name.bucket_divisibility(),
        false => 8,
    }
}

/// Width and height of the images of all data sets, as they are changed.
fn image_sizes(process: &Img2ImgProcess, cx: &Context<'_>) -> Result<BTreeSet<(u32, u32)>> {
    let mut sizes = BTreeSet::new();
    for config in &process.datasets {
        for resolution in config.resolution.iter() {
            let options = options(config, *resolution, cx)?;
            let scan = DatasetScan::read(&options, false)?;
            sizes.extend(scan.bucket_sizes(&options, divisibility(process, config)));
        }
    }
    Ok(sizes)
}

/// Those of the folders of results that are below a data set's folder. The images in them are results of earlier runs. Where results are
/// written into the data set's own folder, they cannot be distinguished from its images.
fn results_below(dataset: &Path, results: &[&Path]) -> Vec<PathBuf> {
    let canonical = |path: &Path| std::fs::canonicalize(path).ok();
    let Some(dataset) = canonical(dataset) else {
        return Vec::new();
    };
    let results = results.iter().filter_map(|folder| canonical(folder));
    results
        .filter(|folder| folder.starts_with(&dataset) && *folder != dataset)
        .collect()
}

/// Whether an image is in one of these folders, whose paths are canonical.
fn is_below(image: &Path, folders: &[PathBuf]) -> bool {
    let folder = image.parent().and_then(|folder| std::fs::canonicalize(folder).ok());
    folder.is_some_and(|folder| folders.iter().any(|results| folder.starts_with(results)))
}

/// The tasks of all data sets, in order. `results`: the folders that are written to.
fn tasks(process: &Img2ImgProcess, results: &[&Path], cx: &mut Context<'_>) -> Result<Vec<Task>> {
    let mut out = Vec::new();
    for config in &process.datasets {
        // It only stands for placeholders, as in ai-toolkit; a data set's own word is added to captions without it.
        let word = process.generate.trigger_word.as_deref();
        let word = word.filter(|_| config.trigger_word.is_none());
        for resolution in config.resolution.iter() {
            let options = options(config, *resolution, cx)?;
            let folders = results_below(&options.path, results);
            let (dataset, warnings) = Dataset::open(options, divisibility(process, config), cx.spec.seed)?;
            for warning in warnings {
                cx.log("warn", warning);
            }
            let mut left_out = None;
            for item in &dataset.items {
                if !folders.is_empty() && is_below(&item.path, &folders) {
                    left_out.get_or_insert(&item.path);
                    continue;
                }
                let index = out.len() as u64;
                let mut generator = generator_for(cx.spec.seed, "img2img/caption", index, 0);
                let caption = match word {
                    Some(word) => item.caption.replace("[trigger]", word).replace("[name]", word),
                    None => item.caption.clone(),
                };
                let prompt = build_caption(&caption, &dataset.options.captions, &mut generator);
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
            if let Some(first) = left_out {
                cx.log(
                    "warn",
                    format!(
                        "{} and other images in folders that results are written to are left out",
                        first.display()
                    ),
                );
            }
        }
    }
    if out.is_empty() {
        return Err(EngineError::bad_input("`datasets`: the data sets have no image"));
    }
    Ok(out)
}

/// Converts a `datasets` entry at one resolution.
fn options(config: &DatasetConfig, resolution: u32, cx: &Context<'_>) -> Result<DatasetOptions> {
    let path = config
        .path()
        .ok_or_else(|| EngineError::bad_input("datasets: an entry has no `folder_path`"))?;
    let captions_file = config.captions_file.as_ref().map(|path| cx.local_path(path));
    Ok(DatasetOptions {
        path: cx.local_path(path)?,
        stay_in_folder: cx.has_staged_inputs(),
        resolution,
        repeats: config.num_repeats.max(1) as usize,
        caption_ext: config.caption_ext.clone(),
        default_caption: config.default_caption.clone(),
        short_captions: config.use_short_captions,
        captions: caption_rules(config, cx)?,
        captions_file: captions_file.transpose()?,
        excluded: config.excluded_images.clone(),
        buckets: config.buckets,
        size: config.size.map(|ImageSize(width, height)| (width, height)),
        square_crop: config.square_crop,
        random_crop: config.random_crop,
        scale: config.scale,
        flip_x: config.flip_x,
        flip_y: config.flip_y,
        ..DatasetOptions::default()
    })
}
