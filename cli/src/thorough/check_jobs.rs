//! The jobs that are run on each device: files and configs.

use super::child::{JobOutcome, run_job};
use crate::demo;
use crate::failure::Failure;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the demo's training gave on a device.
#[derive(Debug)]
pub(super) struct Training {
    /// The loss of each step, in order.
    pub losses: Vec<f64>,
    /// Images before the first step.
    pub before: Vec<PathBuf>,
    /// Images after the last step.
    pub after: Vec<PathBuf>,
}

/// A folder with the demo's model and data set, and configs.
#[derive(Debug)]
pub(super) struct CheckJobs {
    folder: PathBuf,
    /// Steps of the demo's training.
    steps: u64,
}

impl CheckJobs {
    /// Writes the demo's model and data set into a new folder.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn unpack(folder: &Path, steps: u64) -> Result<Self, Failure> {
        demo::extract(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            steps,
        })
    }

    /// The folder of the demo's model.
    pub(super) fn demo_model(&self) -> PathBuf {
        self.folder.join("base")
    }

    /// A folder for another model.
    pub(super) fn folder(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Runs the demo's training with images before and after, as the job `name`, which must be new.
    ///
    /// # Errors
    /// When it fails or does not end in time.
    pub(super) async fn train(
        &self,
        name: &str,
        device: &str,
        dtype: &str,
        limit: Duration,
    ) -> Result<Training, Failure> {
        let process = json!({
            "type": "sd_trainer",
            "training_seed": 42,
            "network": {"type": "lora", "linear": 16, "linear_alpha": 16, "conv": 16, "conv_alpha": 16},
            "save": {"dtype": "float16", "save_every": self.steps},
            "datasets": [{"folder_path": self.folder("dataset"), "caption_ext": "txt", "resolution": 64}],
            "train": {
                "batch_size": 4, "steps": self.steps, "optimizer": "adamw", "lr": 1e-3, "lr_scheduler": "constant",
                "noise_scheduler": "ddpm", "min_snr_gamma": 5.0, "noise_offset": 0.2, "dtype": dtype,
                "gradient_checkpointing": false,
            },
            "model": {"name_or_path": self.demo_model(), "arch": "sd1"},
            "sample": {
                "sampler": "ddim", "sample_every": self.steps, "width": 64, "height": 64, "seed": 42, "walk_seed": true,
                "guidance_scale": 4, "sample_steps": 10, "neg": "", "format": "png",
                "samples": [{"prompt": "a blue triangle"}, {"prompt": "a red circle on a gray background"}],
            },
            "logging": {"log_every": 1},
        });
        let outcome = self.run(name, process, Value::Null, device, limit).await?;
        let images = |wanted: u64| {
            let some = outcome.images.iter().filter(|((step, _), _)| *step == wanted);
            some.map(|(_, path)| path.clone()).collect::<Vec<_>>()
        };
        Ok(Training {
            losses: outcome.losses.values().copied().collect(),
            before: images(0),
            after: images(self.steps),
        })
    }

    /// Writes a data set of one image with a caption, and returns its folder.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn write_dataset(&self, side: u32) -> Result<PathBuf, Failure> {
        let folder = self.folder(&format!("dataset_{side}"));
        let failed = |error: &dyn std::fmt::Display| {
            Failure::failed(format!("cannot write a data set to {}: {error}", folder.display()))
        };
        fs::create_dir_all(&folder).map_err(|error| failed(&error))?;
        let image = image::RgbImage::from_fn(side, side, |x, y| image::Rgb([x as u8, y as u8, (x ^ y) as u8]));
        image.save(folder.join("pattern.png")).map_err(|error| failed(&error))?;
        fs::write(folder.join("pattern.txt"), "a blue triangle").map_err(|error| failed(&error))?;
        Ok(folder)
    }

    /// Runs one process as the job `name`.
    ///
    /// # Errors
    /// When it fails or does not end in time.
    pub(super) async fn run(
        &self,
        name: &str,
        mut process: Value,
        cluster: Value,
        device: &str,
        limit: Duration,
    ) -> Result<JobOutcome, Failure> {
        let (job, key) = if process.get("type").is_some_and(|kind| kind == "sd_trainer") {
            ("extension", "training_folder")
        } else {
            ("generate", "output_folder")
        };
        if let Some(fields) = process.as_object_mut() {
            fields.insert(key.to_owned(), json!(self.folder("results")));
        }
        let mut config = json!({"job": job, "config": {"name": name, "process": [process]}});
        if let Some(fields) = config.as_object_mut().filter(|_| !cluster.is_null()) {
            fields.insert("cluster".to_owned(), cluster);
        }
        let path = self.folder.join(format!("{name}.json"));
        fs::write(&path, format!("{config:#}")).map_err(|error| Failure::file("write", &path, &error))?;
        run_job(&self.folder, &path, device, limit).await
    }
}
