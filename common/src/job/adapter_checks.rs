//! What an `adapter` changes for the rest of a training, and checks of it against the other keys.

use super::adapter::{AdapterConfig, AdapterType};
use super::arch::ArchName;
use super::process::TrainerProcess;
use super::prompt::ImageRequest;
use super::sample::SampleConfig;
use super::save::SaveFormat;
use super::schema::{ReadContext, SupportLevel};

/// The downscale factor of a T2I-Adapter for SDXL with its own autoencoder. The first features are added after the first downsampling.
const SDXL_DOWNSCALE: u32 = 16;

impl TrainerProcess {
    /// Whether samples and data sets have control images.
    #[must_use]
    pub fn takes_control_images(&self) -> bool {
        self.adapter.is_some() || self.model.arch.name.takes_control_image()
    }

    /// Whether saves are folders: of whole models as diffusers writes them, and of ControlNets.
    #[must_use]
    pub fn saves_folders(&self) -> bool {
        match &self.adapter {
            Some(adapter) => adapter.kind.saves_folders(),
            None => self.saves_whole_model() && self.save.save_format == SaveFormat::Diffusers,
        }
    }

    /// The images of a `sample` or `first_sample` section. One without a control image gets one of `adapter.test_img_path`, as in
    /// ai-toolkit.
    #[must_use]
    pub fn sample_requests(&self, section: &SampleConfig) -> Vec<ImageRequest> {
        let mut requests = section.requests(self.sample_trigger());
        let images = self.adapter.iter().flat_map(|adapter| adapter.test_img_path.iter());
        // An empty list gives none.
        for (request, image) in requests.iter_mut().zip(images.cycle()) {
            if request.ctrl_img.as_deref().is_none_or(str::is_empty) {
                request.ctrl_img = Some(image.clone());
            }
        }
        requests
    }

    /// Checks an adapter against the other keys.
    pub(super) fn check_adapter(&self, cx: &mut ReadContext) {
        // A type that is refused is reported alone.
        let Some(adapter) = self
            .adapter
            .as_ref()
            .filter(|adapter| !matches!(adapter.kind.status(), SupportLevel::Refused(_)))
        else {
            return;
        };
        let arch = self.model.arch.name;
        if !matches!(arch, ArchName::Sd1 | ArchName::Sd2 | ArchName::Sdxl) {
            cx.error_at(
                "adapter",
                format!(
                    "T2I-Adapters and ControlNets are trained for the U-Nets of Stable Diffusion and SDXL, and this is `arch: {arch}`: \
                     remove `adapter`"
                ),
            );
            return;
        }
        self.check_adapter_alone(cx);
        check_t2i(adapter, arch, cx);
        let train = &self.train;
        if adapter.kind == AdapterType::ControlNet {
            for (on, key) in [(train.do_cfg, "do_cfg"), (train.do_random_cfg, "do_random_cfg")] {
                if on {
                    cx.error_at(
                        &format!("train.{key}"),
                        "cannot be used with `adapter.type: control_net`, in ai-toolkit neither: remove it",
                    );
                }
            }
        }
        for (index, dataset) in self.datasets.iter().enumerate() {
            if dataset.control_key().is_none() {
                cx.error_at(
                    &format!("datasets[{index}]"),
                    "an adapter learns from control images: add `control_path`, a folder with a file of the same stem for each image, or \
                     `controls`",
                );
            }
        }
    }

    /// Checks that nothing else is trained beside an adapter.
    fn check_adapter_alone(&self, cx: &mut ReadContext) {
        for (on, other) in [
            (self.network.is_some(), "network"),
            (self.embedding.is_some(), "embedding"),
        ] {
            if on {
                cx.error_at(
                    "adapter",
                    format!("cannot be used together with `{other}` yet: an adapter is trained alone"),
                );
            }
        }
        if self.slider.is_some() || self.kind.is_slider() {
            cx.error_at("adapter", "cannot be used in a slider");
        }
        if self.train.train_text_encoder {
            cx.error_at(
                "train.train_text_encoder",
                "remove it: an `adapter` is trained alone, and the text encoder stays as it is",
            );
        }
    }
}

/// Checks the network of a T2I-Adapter that is made anew.
fn check_t2i(adapter: &AdapterConfig, arch: ArchName, cx: &mut ReadContext) {
    if adapter.kind != AdapterType::T2i || adapter.name_or_path.is_some() {
        return;
    }
    if adapter.adapter_type.of_arch(arch).is_none() {
        cx.error_at(
            "adapter.adapter_type",
            format!(
                "`{}` is for Stable Diffusion 1.x and 2.x: SDXL has `full_adapter_xl`",
                adapter.adapter_type
            ),
        );
    } else if arch == ArchName::Sdxl && adapter.downscale_factor != SDXL_DOWNSCALE {
        // No error: the factor depends on the autoencoder, whose config is read with the model.
        cx.warn_at(
            "adapter.downscale_factor",
            format!(
                "expected {SDXL_DOWNSCALE} for SDXL, found {}: the U-Net adds the first features after the first downsampling, where a value has \
                 {SDXL_DOWNSCALE} x {SDXL_DOWNSCALE} pixels; set `downscale_factor: {SDXL_DOWNSCALE}`, unless the model has another autoencoder \
                 than SDXL's",
                adapter.downscale_factor
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, JobSpec, LoadOptions, LoadedJob, parse};

    fn read(arch: &str, set: &str, lines: &str) -> Result<JobSpec, String> {
        read_job(arch, set, lines).map(|job| job.spec)
    }

    fn read_job(arch: &str, set: &str, lines: &str) -> Result<LoadedJob, String> {
        let text = format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: sd_trainer\n      training_folder: out\n      datasets: [{set}]\n      \
             model: {{name_or_path: models/sd, arch: {arch}}}\n{lines}"
        );
        let read = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default());
        read.map_err(|error| error.to_string())
    }

    const SET: &str = "{folder_path: cats, control_path: edges}";
    const T2I: &str = "      adapter: {type: t2i, train: true}\n";

    fn error(arch: &str, set: &str, lines: &str) -> String {
        match read(arch, set, lines) {
            Ok(spec) => spec.unsupported().to_string(),
            Err(error) => error,
        }
    }

    #[test]
    fn an_adapter_is_trained_alone_on_control_images_of_a_u_net() {
        let spec = read("sd15", SET, T2I).unwrap();
        assert!(spec.unsupported().is_ok(), "{}", spec.unsupported());
        let trainer = spec.process[0].trainer().unwrap();
        assert!(!trainer.trains_whole_model() && !trainer.saves_whole_model() && !trainer.saves_folders());
        let with = |more: &str| format!("{T2I}{more}");
        for (arch, set, lines, key) in [
            ("flux", SET, T2I.to_owned(), "adapter"),
            ("sd15", "{folder_path: cats}", T2I.to_owned(), "datasets[0]"),
            ("sd15", SET, with("      network: {type: lora}\n"), "adapter"),
            ("sd15", SET, with("      embedding: {trigger: vorx}\n"), "adapter"),
            (
                "sd15",
                SET,
                with("      train: {train_text_encoder: true}\n"),
                "train.train_text_encoder",
            ),
            (
                "sd15",
                SET,
                with("      train: {correct_pred_norm: true}\n"),
                "train.correct_pred_norm",
            ),
            (
                "sdxl",
                SET,
                "      adapter: {train: true, adapter_type: light_adapter, downscale_factor: 16}\n".to_owned(),
                "adapter.adapter_type",
            ),
            (
                "sd15",
                SET,
                "      adapter: {type: control_net, train: true}\n      train: {do_cfg: true}\n".to_owned(),
                "train.do_cfg",
            ),
        ] {
            let found = error(arch, set, &lines);
            assert!(found.contains(&format!("config.process[0].{key}")), "{lines}: {found}");
        }
    }

    /// The autoencoder of a model decides whether another factor is right, and only the model has its config.
    #[test]
    fn another_factor_than_that_of_sdxl_s_autoencoder_is_a_warning() {
        let warnings = |lines: &str| {
            let job = read_job("sdxl", SET, lines).unwrap();
            assert!(job.spec.unsupported().is_ok(), "{}", job.spec.unsupported());
            job.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert!(warnings("      adapter: {train: true, downscale_factor: 16}\n").is_empty());
        // A file or folder has its own.
        assert!(warnings("      adapter: {train: true, name_or_path: nets/t2i}\n").is_empty());
        for (lines, found) in [(T2I, 8), ("      adapter: {train: true, downscale_factor: 4}\n", 4)] {
            let said = warnings(lines).join("\n");
            let expected = format!("config.process[0].adapter.downscale_factor: expected 16 for SDXL, found {found}");
            assert!(
                said.contains(&expected) && said.contains("set `downscale_factor: 16`"),
                "{said}"
            );
        }
    }

    #[test]
    fn samples_get_the_control_images_of_the_adapter_in_turn() {
        let lines = "      adapter: {train: true, test_img_path: [a.png, b.png]}\n      sample:\n        prompts: [one, 'two --ctrl_img c.png', \
                     three, 'four --a 0.5']\n";
        let spec = read("sd15", SET, lines).unwrap();
        // The strength of the adapter is no flag without an effect.
        let report = spec.unsupported();
        assert!(report.errors.is_empty() && report.warnings.is_empty(), "{report}");
        let trainer = spec.process[0].trainer().unwrap();
        let requests = trainer.sample_requests(&trainer.sample);
        let images: Vec<&str> = requests
            .iter()
            .filter_map(|request| request.ctrl_img.as_deref())
            .collect();
        assert_eq!(images, ["a.png", "c.png", "a.png", "b.png"]);
        let scales: Vec<f64> = requests
            .iter()
            .map(|request| request.adapter_conditioning_scale)
            .collect();
        assert_eq!(scales, [1.0, 1.0, 1.0, 0.5]);
        let found = error("sd15", SET, &format!("{T2I}      sample:\n        prompts: [one]\n"));
        assert!(
            found.contains("sample.prompts[0]") && found.contains("test_img_path"),
            "{found}"
        );
    }

    #[test]
    fn a_controlnet_is_saved_as_a_folder() {
        let spec = read("sd15", SET, "      adapter: {type: control_net, train: true}\n").unwrap();
        assert!(spec.process[0].trainer().unwrap().saves_folders());
        let rate = "      adapter: {train: true}\n      train: {lr: 1.0e-4, adapter_lr: 1.0e-5}\n";
        let spec = read("sd15", SET, rate).unwrap();
        assert_eq!(spec.process[0].trainer().unwrap().learning_rate(), 1e-5);
        // As `lr`.
        let found = error("sd15", SET, &rate.replace("1.0e-5", "-0.01"));
        assert!(found.contains("train.adapter_lr"), "{found}");
    }
}
