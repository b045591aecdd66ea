//! Sample images during training.

use super::super::context::Context;
use super::super::rate::Progress;
use super::run::Run;
use crate::error::{EngineError, Result};
use crate::families::Model;
use crate::image_io::{Format, encode};
use crate::pipelines::{SampleSettings, check_sampler, generate_images};
use aitk_common::fsutil;
use aitk_common::job::naming;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::prompt::ImageRequest;
use std::cell::RefCell;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

impl Run<'_> {
    /// Whether all sample images of this step are in the run folder.
    pub(super) fn has_samples(&self, step: u64) -> bool {
        let section = &self.process.sample;
        let count = self.process.sample_requests(section).len();
        let suffix = suffix(&section.format).unwrap_or(FALLBACK_FORMAT);
        let entries = std::fs::read_dir(self.folder.samples()).into_iter().flatten().flatten();
        let files: Vec<String> = entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        (0..count).all(|index| {
            let name = naming::sample_tail(step, index, suffix);
            files.iter().any(|file| is_sample(file, &name))
        })
    }

    /// Whether the config has samples to make during the training.
    pub(super) fn makes_samples(&self) -> bool {
        let requests = self.process.sample_requests(&self.process.sample);
        !self.process.train.disable_sampling && !requests.is_empty()
    }

    /// Makes the samples before the first step of this attempt: where a training begins those of `first_sample`, even with
    /// `skip_first_sample`, as those of step 0; then those of `sample`.
    pub(super) fn sample_before_training(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let train = &self.process.train;
        // In ai-toolkit, step 1 is a beginning, too. Here, a run that was interrupted there has its samples.
        let starts_at_1 = train.start_step == Some(1) && self.configured_start_step != Some(1);
        let begins = self.start_step == 0 || (self.start_step == 1 && starts_at_1);
        let of_sample = !train.skip_first_sample && (begins || train.force_first_sample);
        if begins && self.process.first_sample.is_some() && !self.sample(cx, 0, true)? {
            return Ok(());
        }
        if of_sample {
            self.sample(cx, self.start_step, false)?;
        }
        Ok(())
    }

    /// Samples the images of the `sample` section (`first`: of `first_sample`) with the current weights, as
    /// `samples/<unix ms>__<step>_<index>.<format>`. Returns `false` when the run should stop; finished images are kept.
    pub(super) fn sample(&mut self, cx: &mut Context<'_>, step: u64, first: bool) -> Result<bool> {
        let section = match &self.process.first_sample {
            Some(section) if first => section,
            _ => &self.process.sample,
        };
        let training_step = step;
        let requests = self.process.sample_requests(section);
        // A coordinator keeps one artifact of each step and index: those of `first_sample` come after those of `sample`.
        let index_base = match first {
            true => self.process.sample_requests(&self.process.sample).len() as u64,
            false => 0,
        };
        if requests.is_empty() || self.process.train.disable_sampling {
            return Ok(true);
        }
        let suffix = suffix(&section.format).unwrap_or_else(|| {
            let format = &section.format;
            cx.log(
                "warn",
                format!(
                    "the sample format `{format}` is not an image format that aitk writes; using {FALLBACK_FORMAT}"
                ),
            );
            FALLBACK_FORMAT
        });
        let format = Format::from_suffix(suffix)?;
        cx.phase("sampling");
        let folder = self.folder.samples();
        fsutil::create_dir_all(&folder)?;
        let root = self.folder.root.clone();
        let control_images = cx.control_images(&requests)?;
        let _switched = self.switched_loras.while_sampling();
        let kept = std::mem::take(&mut self.first_samples);
        let mut written = Vec::new();
        let completed = self.with_ema_weights(|run| {
            let settings = SampleSettings {
                // The training itself finds such numbers, and ends with the advice for it.
                refuse_non_finite: false,
                sampler: section.sampler.name(),
                v_prediction: run.process.model.is_v_pred,
                bypass_guidance_embedding: run.process.model.uses_true_cfg(),
                multiplier: run.target.handle().map(|handle| &handle.multiplier),
                control_images: &control_images,
                job_seed: run.seed,
            };
            let stop = cx.stop.clone();
            let start = Instant::now();
            let mut progress = Progress::new();
            let mut steps = 0;
            // Both callbacks emit events.
            let cx = RefCell::new(cx);
            let detached = run.model.detach();
            let completed = generate_images(
                &**detached.as_ref().unwrap_or(&run.model),
                &settings,
                &requests,
                &mut |done, all| {
                    // Called before each step.
                    if done > 0 {
                        progress.step(&mut cx.borrow_mut(), done as u64, all as u64);
                    }
                    steps = all;
                    !stop.is_set()
                },
                &mut |index, request, seed, image| {
                    let cx = &mut cx.borrow_mut();
                    let ms = SystemTime::now()
                        .duration_since(UNIX_EPOCH)
                        .map_or(0, |t| t.as_millis() as u64);
                    let path = folder.join(naming::sample_file(ms, step, index, suffix));
                    let text = format!("{} --seed {seed}", request.prompt);
                    let bytes = encode(&image, format, &[("parameters", &text)])?;
                    fsutil::write_atomic(&path, |out| out.write_all(&bytes))?;
                    cx.artifact("sample", &root, &path, Some(step), Some(index_base + index as u64));
                    written.push(path);
                    let current = kept.iter().chain(&written);
                    remove_older_samples(&folder, &naming::sample_tail(step, index, suffix), current);
                    Ok(())
                },
            )?;
            if completed {
                let (seconds, count) = (start.elapsed().as_secs_f64(), requests.len());
                let (per_image, per_step) = (seconds / count as f64, seconds / steps.max(1) as f64);
                let cx = cx.into_inner();
                cx.log(
                    "info",
                    format!("samples of step {training_step}: {count} in {seconds:.1} s, {per_image:.2} s per image, {per_step:.2} s per sampling step"),
                );
            }
            Ok::<bool, EngineError>(completed)
        })?;
        self.first_samples = if first { written } else { kept };
        Ok(completed)
    }
}

/// Checks that the sampler can make the samples: a training should not fail at its first one. The model needs no weights.
pub(super) fn check_samplers(process: &TrainerProcess, model: &dyn Model) -> Result<()> {
    if process.train.disable_sampling {
        return Ok(());
    }
    for (key, section) in [
        ("sample", Some(&process.sample)),
        ("first_sample", process.first_sample.as_ref()),
    ] {
        let Some(section) = section else { continue };
        let requests = process.sample_requests(section);
        check_sampler(model, section.sampler.name(), process.model.is_v_pred, &requests)
            .map_err(|error| EngineError::bad_input(format!("{key}.sampler: {error}")))?;
    }
    Ok(())
}

/// Checks that every control image of the samples exists and that every sample has one where the model needs it: a training should not
/// fail at its first sample.
pub(super) fn check_control_images(process: &TrainerProcess, cx: &Context<'_>) -> Result<()> {
    if process.train.disable_sampling {
        return Ok(());
    }
    let (arch, takes_control) = (process.model.arch.name, process.takes_control_images());
    for section in [Some(&process.sample), process.first_sample.as_ref()]
        .into_iter()
        .flatten()
    {
        let requests = process.sample_requests(section);
        let has_control = |request: &ImageRequest| request.ctrl_img.as_deref().is_some_and(|path| !path.is_empty());
        if let Some(request) = requests.iter().find(|request| has_control(request) != takes_control) {
            return Err(EngineError::bad_input(match takes_control {
                true if process.adapter.is_some() => format!(
                    "an `adapter` needs control images, and the sample \"{}\" has none: add `--ctrl_img PATH` to its prompt, or \
                     `adapter.test_img_path`, or set `train.disable_sampling: true`",
                    request.prompt
                ),
                true => format!(
                    "`arch: {arch}` changes an image, and the sample \"{}\" has none: add `--ctrl_img PATH` to its prompt, or set \
                     `train.disable_sampling: true`",
                    request.prompt
                ),
                false => format!(
                    "`arch: {arch}` takes no control image: remove `ctrl_img` from the sample \"{}\", or train FLUX.1 Kontext (`arch: \
                     flux_kontext`)",
                    request.prompt
                ),
            }));
        }
        cx.control_images(&requests)?;
    }
    Ok(())
}

/// The format that is used if the config names one that aitk does not write.
const FALLBACK_FORMAT: &str = "jpg";

/// The file suffix of an image format. `None`: aitk does not write it.
fn suffix(format: &str) -> Option<&str> {
    matches!(format, "jpg" | "jpeg" | "png" | "webp").then_some(format)
}

/// Whether a file is the image whose name ends with this step and index (`__000000010_0.png`), at any time.
fn is_sample(file: &str, name: &str) -> bool {
    file.strip_suffix(name)
        .is_some_and(|stamp| !stamp.is_empty() && stamp.bytes().all(|b| b.is_ascii_digit()))
}

/// Removes the images of the same step and index but the `current` ones: they are left when a run repeats a step.
fn remove_older_samples<'a>(folder: &Path, name: &str, current: impl Iterator<Item = &'a PathBuf> + Clone) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let file = entry.file_name().to_string_lossy().into_owned();
        if is_sample(&file, name)
            && !current.clone().any(|current| *current == path)
            && let Err(error) = fsutil::remove(&path)
        {
            tracing::warn!(%error, "cannot remove an older sample");
        }
    }
}
