//! The network whose features of the predicted and of the true image are compared (`train.latent_feature_extractor_path`): which one a value names,
//! and what it needs.

use super::process::TrainerProcess;
use super::schema::{ReadContext, SupportReport, join};
use super::train::TrainConfig;

/// The repository with the VGG16 of torchvision, on which LPIPS is based.
pub const VGG16_REPOSITORY: &str = "timm/vgg16.tv_in1k";

/// The key, and the older name that has precedence.
const KEYS: [&str; 2] = ["latent_feature_extractor_path", "diffusion_feature_extractor_path"];

/// Where a feature extractor is, and the weight of its loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FeatureExtractorSource<'a> {
    /// The key of `train` that names it.
    pub key: &'static str,
    /// A file, a folder or a repository.
    pub path: &'a str,
    /// The weight of its loss.
    pub weight: f64,
}

impl TrainConfig {
    /// The feature extractor of a training, if it has one. As in ai-toolkit, the older names have precedence.
    #[must_use]
    pub fn feature_extractor(&self) -> Option<FeatureExtractorSource<'_>> {
        let [own, older] = KEYS;
        let (key, path) = match (
            &self.diffusion_feature_extractor_path,
            &self.latent_feature_extractor_path,
        ) {
            (Some(path), _) => (older, path),
            (None, Some(path)) => (own, path),
            (None, None) => return None,
        };
        Some(FeatureExtractorSource {
            key,
            path,
            weight: self
                .diffusion_feature_extractor_weight
                .unwrap_or(self.latent_feature_loss_weight),
        })
    }

    /// Replaces the names of versions by the repositories of their networks.
    pub(super) fn resolve_feature_extractors(&mut self) {
        for path in [
            &mut self.latent_feature_extractor_path,
            &mut self.diffusion_feature_extractor_path,
        ] {
            if path.as_deref() == Some("v10") {
                *path = Some(VGG16_REPOSITORY.to_owned());
            }
        }
    }

    /// Reports a version whose network this release does not have.
    pub(super) fn check_feature_extractor(&self, path: &str, report: &mut SupportReport) {
        let Some(source) = self.feature_extractor() else {
            return;
        };
        let network = match source.path {
            "v3" | "v4" | "v5" => "SigLIP 2",
            "v6" => "DINOv3",
            "v7" | "v8" => "TIPSv2",
            "v9" => "Sapiens 2",
            _ => return,
        };
        report.unsupported(
            join(path, source.key),
            format!(
                "`{}` is not supported yet: aitk does not have its network, {network}. What works: `v10` (VGG16), or a safetensors file of \
                 version 1 or 2",
                source.path
            ),
        );
    }
}

impl TrainerProcess {
    /// The feature extractor whose loss is computed. A slider has losses of its own.
    #[must_use]
    pub fn feature_extractor(&self) -> Option<FeatureExtractorSource<'_>> {
        self.train.feature_extractor().filter(|_| !self.kind.is_slider())
    }

    /// The keys of `train` whose paths are not opened.
    pub(super) fn unopened_feature_extractors(&self) -> impl Iterator<Item = &'static str> + use<> {
        let opened = self.feature_extractor().map(|source| source.key);
        KEYS.into_iter().filter(move |key| Some(*key) != opened)
    }

    /// Warns of a path that another one replaces.
    pub(super) fn check_feature_extractor(&self, cx: &mut ReadContext) {
        let [own, older] = KEYS;
        let train = &self.train;
        if train.latent_feature_extractor_path.is_some() && train.diffusion_feature_extractor_path.is_some() {
            cx.warn_at(
                &format!("train.{own}"),
                format!("has no effect together with `{older}`, its older name, as in ai-toolkit"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::job::tests::{load_yaml, with_line_after};

    fn config(lines: &str) -> String {
        let lines = lines.lines().map(|line| format!("        {line}"));
        with_line_after("steps: 10", &lines.collect::<Vec<_>>().join("\n"))
            .replace("name_or_path: base", "name_or_path: base\n        arch: flux")
    }

    #[test]
    fn the_older_names_have_precedence_and_v10_is_a_repository() {
        let read = |lines: &str| load_yaml(&config(lines)).unwrap();
        let source = |lines: &str| {
            let job = read(lines);
            let process = job.spec.process[0].trainer().unwrap();
            let source = process.feature_extractor().unwrap();
            (source.key, source.path.to_owned(), source.weight)
        };
        let own = "latent_feature_extractor_path";
        assert_eq!(
            source(&format!("{own}: a.safetensors")),
            (own, "a.safetensors".into(), 1.0)
        );
        assert_eq!(
            source(&format!("{own}: v10\nlatent_feature_loss_weight: 0.5")),
            (own, super::VGG16_REPOSITORY.into(), 0.5)
        );
        let older = "diffusion_feature_extractor_path";
        let both = format!(
            "{own}: v10\n{older}: b.safetensors\nlatent_feature_loss_weight: 0.5\ndiffusion_feature_extractor_weight: 2"
        );
        assert_eq!(source(&both), (older, "b.safetensors".into(), 2.0));
        let job = read(&both);
        assert!(
            job.warnings.iter().any(|warning| warning.key.ends_with(own)),
            "{:?}",
            job.warnings
        );
        let paths: Vec<String> = job.spec.inputs().into_iter().map(|input| input.config_path).collect();
        assert!(paths.contains(&"b.safetensors".to_owned()), "{paths:?}");
        assert!(!paths.contains(&super::VGG16_REPOSITORY.to_owned()), "{paths:?}");
        let inputs = read(&format!("{own}: v10")).spec.inputs();
        let input = inputs.iter().find(|input| input.key.ends_with(own)).unwrap();
        assert!(input.may_be_repository(), "{input:?}");
    }

    #[test]
    fn versions_without_a_network_and_diffusion_models_are_refused() {
        for (name, network) in [
            ("v3", "SigLIP 2"),
            ("v6", "DINOv3"),
            ("v8", "TIPSv2"),
            ("v9", "Sapiens 2"),
        ] {
            let job = load_yaml(&config(&format!("diffusion_feature_extractor_path: {name}"))).unwrap();
            let errors = job.spec.unsupported().errors;
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].key.ends_with("diffusion_feature_extractor_path"));
            assert!(
                errors[0].message.contains(network) && errors[0].message.contains("v10"),
                "{errors:?}"
            );
        }
        let text = config("latent_feature_extractor_path: v10").replace("arch: flux", "arch: sdxl");
        let error = load_yaml(&text).unwrap_err().to_string();
        assert!(
            error.contains("latent_feature_extractor_path") && error.contains("sdxl"),
            "{error}"
        );
    }
}
