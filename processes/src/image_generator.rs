//! Shared by the processes that generate images: the loaded model, the list of finished images, and image metadata.

use super::context::Context;
use super::denoiser_lora::load_denoiser_lora;
use crate::adapters::{LoadedAdapter, load_lora};
use crate::device;
use crate::error::{EngineError, Result};
use crate::families::Model;
use crate::image_io;
use aitk_common::fsutil::{self, regular};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::model::ModelConfig;
use aitk_common::job::prompt::ImageRequest;
use aitk_common::job::{JobSpec, ProcessKind, naming};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A loaded model with its LoRA.
pub(super) struct ImageGenerator {
    pub(super) model: Box<dyn Model>,
    pub(super) lora: Option<LoadedAdapter>,
    pub(super) v_prediction: bool,
}

impl ImageGenerator {
    /// Loads the model and LoRA of a `model` section onto the attempt's device.
    pub(super) fn load(config: &ModelConfig, cx: &mut Context<'_>) -> Result<Self> {
        cx.phase("loading model");
        let compute = device::open_with_dtype(cx.spec.device, config.dtype.name())?;
        for note in &compute.notes {
            cx.log("info", note.clone());
        }
        let mut model = cx.load_model(config, &compute, Default::default(), None)?.model;
        let lora = match &config.lora_path {
            None => None,
            Some(path) => {
                let path = cx.local_path(path)?;
                let loaded = load_lora(&mut model.parts(), &path, 1.0)?;
                cx.log_loaded_lora(&path, &loaded);
                Some(loaded)
            }
        };
        // It has its full strength in every image: `--m` sets that of `lora_path`.
        if let Some(path) = &config.inference_lora_path {
            let path = cx.local_path(path)?;
            load_denoiser_lora(&mut *model, &path, 1.0, cx)?;
        }
        Ok(Self {
            model,
            lora,
            v_prediction: config.is_v_pred,
        })
    }
}

/// The finished images of a process, recorded in a file next to them while it runs, so that another attempt at the same
/// job does not generate them again.
pub(super) struct FinishedImages {
    file: PathBuf,
    record: FinishedRecord,
}

/// The content of the file.
#[derive(Default, Serialize, Deserialize)]
struct FinishedRecord {
    /// File names by image index.
    #[serde(rename = "pictures")]
    images: BTreeMap<u64, String>,
}

impl FinishedRecord {
    /// Reads a record. The file may be anything: the folder is the user's.
    fn read(file: &Path) -> Option<Self> {
        serde_json::from_slice(&regular::read(file, MAX_TEXT_FILE_BYTES).ok()?).ok()
    }
}

impl FinishedImages {
    /// Reads the record of this job and process in `folder`, if there is one.
    pub(super) fn open(folder: &Path, cx: &Context<'_>, process: &impl Serialize) -> Result<Self> {
        let text = serde_json::to_vec(process).map_err(|e| EngineError::Internal(e.to_string()))?;
        let process_hash = hex::encode(Sha256::digest(&text));
        let file = folder.join(".aitk").join(format!(
            "pictures-{}-{}.json",
            cx.spec.job_id.as_str(),
            &process_hash[..12]
        ));
        // With a damaged record the images are generated again, nothing else.
        let mut record = FinishedRecord::read(&file).unwrap_or_default();
        record.images.retain(|_, name| {
            if name.contains(['/', '\\']) {
                return false;
            }
            let exists = folder.join(&*name).is_file();
            if !exists {
                // The attempt ended before the image was written: its prompt file is left over.
                let _ = std::fs::remove_file(folder.join(&*name).with_extension("txt"));
            }
            exists
        });
        Ok(Self { file, record })
    }

    /// The file name of image `index`, if it is finished.
    pub(super) fn get(&self, index: u64) -> Option<&str> {
        self.record.images.get(&index).map(String::as_str)
    }

    /// Records the name of an image that will be written next. Images are written atomically, so the image is finished
    /// once there is a file of that name.
    pub(super) fn add(&mut self, index: u64, name: String) -> Result<()> {
        self.record.images.insert(index, name);
        if let Some(folder) = self.file.parent() {
            fsutil::create_dir_all(folder).map_err(image_io::from_fs_error)?;
        }
        let text = serde_json::to_vec(&self.record).map_err(|e| EngineError::Internal(e.to_string()))?;
        image_io::write(&self.file, &text)
    }

    /// Removes the record when all images are generated: the next run of the same config generates new ones.
    pub(super) fn clear(self) {
        let _ = std::fs::remove_file(&self.file);
        if let Some(folder) = self.file.parent() {
            // This fails if the folder has other files, which is intended.
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// The index of a process's first image artifact: processes of one job must not use the same indices.
pub(super) fn artifact_index_base(job: &JobSpec, is_own: impl Fn(&ProcessKind) -> bool) -> u64 {
    let position = job
        .process
        .iter()
        .position(|process| is_own(&process.kind))
        .unwrap_or(0);
    position as u64 * 1_000_000_000
}

/// The suffix of image files, without the dot. Config validation allows four of them; this check keeps a name from becoming a path if a spec
/// was not validated.
pub(super) fn image_ext(ext: &str) -> &str {
    match ext.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        true => ext,
        false => "png",
    }
}

/// An unused file name `<unix ms>_<count>.<ext>` in `folder`.
pub(super) fn image_name(folder: &Path, count: u64, ext: &str) -> String {
    let ext = image_ext(ext);
    let mut now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_millis() as u64);
    loop {
        let name = naming::generated_file(now, count, ext);
        if !folder.join(&name).exists() {
            return name;
        }
        now += 1;
    }
}

/// A request as a prompt with flags, with which aitk generates the same image again.
pub(super) fn prompt_with_flags(request: &ImageRequest, seed: u64) -> String {
    let mut text = request.prompt.clone();
    if !request.negative_prompt.is_empty() {
        text += &format!(" --n {}", request.negative_prompt);
    }
    if let Some(prompt_2) = &request.prompt_2 {
        text += &format!(" --p2 {prompt_2}");
    }
    if let Some(negative_2) = request.negative_prompt_2.as_ref().filter(|text| !text.is_empty()) {
        text += &format!(" --n2 {negative_2}");
    }
    text += &format!(
        " --w {} --h {} --seed {} --cfg {} --steps {}",
        request.width,
        request.height,
        i64::from_ne_bytes(seed.to_ne_bytes()),
        request.guidance_scale,
        request.steps
    );
    if request.guidance_rescale != 0.0 {
        text += &format!(" --gr {}", request.guidance_rescale);
    }
    if request.network_multiplier != 1.0 {
        text += &format!(" --m {}", request.network_multiplier);
    }
    if let Some(control) = request.ctrl_img.as_ref().filter(|path| !path.is_empty()) {
        text += &format!(" --ctrl_img {control}");
    }
    text
}

/// The `parameters` text of a PNG, in the format that image viewers for Stable Diffusion read.
pub(super) fn png_parameters(request: &ImageRequest, sampler: &str, seed: u64) -> String {
    let mut text = request.prompt.clone();
    if !request.negative_prompt.is_empty() {
        text += &format!("\nNegative prompt: {}", request.negative_prompt);
    }
    text += &format!(
        "\nSteps: {}, Sampler: {sampler}, CFG scale: {}, Seed: {}, Size: {}x{}",
        request.steps,
        request.guidance_scale,
        i64::from_ne_bytes(seed.to_ne_bytes()),
        request.width,
        request.height
    );
    if request.network_multiplier != 1.0 {
        text += &format!(", LoRA strength: {}", request.network_multiplier);
    }
    // Viewers read the lines before this one as prompt and negative prompt, and quoted text here as one value.
    for (title, second) in [
        ("Prompt 2", &request.prompt_2),
        ("Negative prompt 2", &request.negative_prompt_2),
    ] {
        if let Some(second) = second {
            text += &format!(", {title}: {}", serde_json::Value::from(second.as_str()));
        }
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use aitk_common::job::generate::GenerateConfig;
    use aitk_common::job::prompt::PromptFlags;

    #[test]
    fn a_record_that_is_too_long_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("record.json");
        let mut text = br#"{"pictures": {"3": "a.png"}}"#.to_vec();
        std::fs::write(&file, &text).unwrap();
        assert_eq!(FinishedRecord::read(&file).unwrap().images[&3], "a.png");
        text.resize(MAX_TEXT_FILE_BYTES as usize + 1, b' ');
        std::fs::write(&file, &text).unwrap();
        assert!(FinishedRecord::read(&file).is_none());
        assert!(FinishedRecord::read(folder.path()).is_none());
    }

    #[test]
    fn a_saved_prompt_gives_the_request_again() {
        let written = "a cat --p2 a dog, \"big\" --n blurry --n2 dark --w 72 --h 64 --steps 4";
        let request = GenerateConfig::default().request(written, None);
        let flags = PromptFlags::parse(&prompt_with_flags(&request, 7));
        assert!(flags.problems.is_empty(), "{:?}", flags.problems);
        assert_eq!(
            (flags.prompt, flags.prompt_2),
            (request.prompt.clone(), request.prompt_2.clone())
        );
        assert_eq!(flags.negative_prompt, Some(request.negative_prompt.clone()));
        assert_eq!(flags.negative_prompt_2, request.negative_prompt_2);
        let text = png_parameters(&request, "euler", 7);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[..2], ["a cat", "Negative prompt: blurry"]);
        assert!(
            lines[2].ends_with(r#", Prompt 2: "a dog, \"big\"", Negative prompt 2: "dark""#),
            "{text}"
        );
    }
}
