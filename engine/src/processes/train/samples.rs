//! Pictures made while training.

use super::super::Context;
use super::Run;
use super::folder::fs_error;
use crate::error::{EngineError, Result};
use crate::image_io::{Format, encode};
use crate::pipelines::{SampleSettings, sample_prompts};
use aitk_common::fsutil;
use aitk_common::job::naming;
use std::io::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

impl Run<'_> {
    /// Makes the pictures of the `sample` section (`first_sample` once, before the first step) with the weights of
    /// this moment, as `samples/<unix ms>__<step>_<index>.<format>`. `false`: asked to stop meanwhile; pictures that
    /// are done stay.
    pub(super) fn sample(&mut self, cx: &mut Context<'_>, step: u64, first: bool) -> Result<bool> {
        let section = match &self.process.first_sample {
            Some(section) if first => section,
            _ => &self.process.sample,
        };
        let requests = section.requests(self.process.trigger_word.as_deref());
        if requests.is_empty() || self.process.train.disable_sampling {
            return Ok(true);
        }
        let suffix = match section.format.as_str() {
            known @ ("jpg" | "jpeg" | "png" | "webp") => known,
            other => {
                cx.log("warn", format!("samples are pictures here: jpg instead of `{other}`"));
                "jpg"
            }
        };
        let format = Format::from_suffix(suffix)?;
        cx.phase("sampling");
        let folder = self.folder.samples();
        fsutil::create_dir_all(&folder).map_err(fs_error)?;
        let root = self.folder.root.clone();
        self.with_averages(|run| {
            let settings = SampleSettings {
                device: &run.compute.device,
                dtype: run.compute.dtype,
                sampler: section.sampler.name(),
                v_prediction: run.process.model.is_v_pred,
                multiplier: Some(&run.network.handle.multiplier),
                job_seed: run.seed,
            };
            let stop = cx.stop.clone();
            let finished = sample_prompts(
                &run.model,
                &settings,
                &requests,
                &mut |_, _| !stop.is_set(),
                &mut |index, request, seed, picture| {
                    let ms = SystemTime::now()
                        .duration_since(UNIX_EPOCH)
                        .map_or(0, |t| t.as_millis() as u64);
                    let path = folder.join(naming::sample_file(ms, step, index, suffix));
                    let text = format!("{} --seed {seed}", request.prompt);
                    let bytes = encode(&picture, format, &[("parameters", &text)])?;
                    fsutil::write_atomic(&path, |out| out.write_all(&bytes)).map_err(fs_error)?;
                    remove_others(&folder, &naming::sample_tail(step, index, suffix), &path);
                    cx.artifact("sample", &root, &path, Some(step), Some(index as u64));
                    Ok(())
                },
            )?;
            Ok::<bool, EngineError>(finished)
        })
    }
}

/// Removes earlier pictures of the same step and index, which a run leaves that had to do a step again.
fn remove_others(folder: &Path, name: &str, keep: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let file = entry.file_name().to_string_lossy().into_owned();
        let stamp = file
            .strip_suffix(name)
            .filter(|s| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit()));
        if stamp.is_some()
            && path != keep
            && let Err(error) = fsutil::remove(&path)
        {
            tracing::warn!(%error, "an older sample stays");
        }
    }
}
