//! The network whose features of the predicted and of the true image are compared (`train.latent_feature_extractor_path`): which one a value names,
//! and what it needs.

use super::process::TrainerProcess;
use super::schema::ReadContext;
use super::train::TrainConfig;

/// The repository with the VGG16 of torchvision, on which LPIPS is based.
pub const VGG16_REPOSITORY: &str = "timm/vgg16.tv_in1k";

/// The repository with the SigLIP 2 of version 3, for square images.
pub const SIGLIP2_SQUARE_REPOSITORY: &str = "google/siglip2-so400m-patch16-512";

/// The repository with the SigLIP 2 of versions 4 and 5, for images of any shape.
pub const SIGLIP2_NAFLEX_REPOSITORY: &str = "google/siglip2-so400m-patch16-naflex";

/// The repository with the DINOv3 of version 6. Its owner grants access on request.
pub const DINOV3_REPOSITORY: &str = "facebook/dinov3-vith16plus-pretrain-lvd1689m";

/// The repository with the heads of the TIPSv2 of versions 7 and 8.
pub const TIPS_REPOSITORY: &str = "google/tipsv2-b14-dpt";

/// The repository with the vision transformer of the TIPSv2 of versions 7 and 8.
pub const TIPS_ENCODER_REPOSITORY: &str = "google/tipsv2-b14";

/// The repository with the Sapiens 2 of version 9.
pub const SAPIENS_REPOSITORY: &str = "facebook/sapiens2-pretrain-1b";

/// The key, and the older name that has precedence.
const KEYS: [&str; 2] = ["latent_feature_extractor_path", "diffusion_feature_extractor_path"];

/// The key of a second network.
const SECOND_KEY: &str = "latent_feature_extractor_second_path";

/// The key of what version 8 does.
const PARTIAL_STEP_KEY: &str = "latent_feature_extractor_partial_step";

/// The version that compares images after a small step.
const PARTIAL_STEP_VERSION: &str = "v8";

/// Where a feature extractor is, and the weight of its loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FeatureExtractorSource<'a> {
    /// The key of `train` that names it.
    pub key: &'static str,
    /// A file, a folder or a repository.
    pub path: &'a str,
    /// Where a second network is, which some have.
    pub second: Option<&'a str>,
    /// Whether images after a small step are compared.
    pub partial_step: bool,
    /// The weight of its loss.
    pub weight: f64,
}

/// The repository of the network of a version.
fn repository_of(version: &str) -> Option<&'static str> {
    match version {
        "v3" => Some(SIGLIP2_SQUARE_REPOSITORY),
        "v4" | "v5" => Some(SIGLIP2_NAFLEX_REPOSITORY),
        "v6" => Some(DINOV3_REPOSITORY),
        "v7" | PARTIAL_STEP_VERSION => Some(TIPS_REPOSITORY),
        "v9" => Some(SAPIENS_REPOSITORY),
        "v10" => Some(VGG16_REPOSITORY),
        _ => None,
    }
}

/// The repository of the second network of a version, if it has two.
fn second_repository_of(version: &str) -> Option<&'static str> {
    match version {
        "v3" => Some(VGG16_REPOSITORY),
        "v7" | PARTIAL_STEP_VERSION => Some(TIPS_ENCODER_REPOSITORY),
        _ => None,
    }
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
            second: self.latent_feature_extractor_second_path.as_deref(),
            partial_step: self.latent_feature_extractor_partial_step,
            weight: self
                .diffusion_feature_extractor_weight
                .unwrap_or(self.latent_feature_loss_weight),
        })
    }

    /// Replaces the names of versions by the repositories of their networks.
    pub(super) fn resolve_feature_extractors(&mut self) {
        if let Some(source) = self.feature_extractor() {
            let second = source.second.or_else(|| second_repository_of(source.path));
            let second = second.map(ToOwned::to_owned);
            let partial_step = source.partial_step || source.path == PARTIAL_STEP_VERSION;
            self.latent_feature_extractor_second_path = second;
            self.latent_feature_extractor_partial_step = partial_step;
        }
        for path in [
            &mut self.latent_feature_extractor_path,
            &mut self.diffusion_feature_extractor_path,
        ] {
            if let Some(repository) = path.as_deref().and_then(repository_of) {
                *path = Some(repository.to_owned());
            }
        }
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
        let second = opened.is_none().then_some(SECOND_KEY);
        KEYS.into_iter().filter(move |key| Some(*key) != opened).chain(second)
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
        if train.feature_extractor().is_some() {
            return;
        }
        for (key, is_set) in [
            (SECOND_KEY, train.latent_feature_extractor_second_path.is_some()),
            (PARTIAL_STEP_KEY, train.latent_feature_extractor_partial_step),
        ] {
            if is_set {
                cx.warn_at(&format!("train.{key}"), format!("has no effect without `{own}`"));
            }
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
    fn the_older_names_have_precedence_and_versions_are_repositories() {
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
        for (version, repository) in [
            ("v3", super::SIGLIP2_SQUARE_REPOSITORY),
            ("v4", super::SIGLIP2_NAFLEX_REPOSITORY),
            ("v5", super::SIGLIP2_NAFLEX_REPOSITORY),
            ("v6", super::DINOV3_REPOSITORY),
            ("v7", super::TIPS_REPOSITORY),
            ("v8", super::TIPS_REPOSITORY),
            ("v9", super::SAPIENS_REPOSITORY),
            ("v10", super::VGG16_REPOSITORY),
        ] {
            let job = read(&format!("{own}: {version}"));
            assert!(job.spec.unsupported().errors.is_empty(), "{version}");
            let process = job.spec.process[0].trainer().unwrap();
            assert_eq!(process.feature_extractor().unwrap().partial_step, version == "v8");
            let inputs = job.spec.inputs();
            let input = inputs.iter().find(|input| input.key.ends_with(own)).unwrap();
            assert!(
                input.may_be_repository() && input.config_path == repository,
                "{input:?}"
            );
        }
    }

    #[test]
    fn a_version_with_two_networks_has_two_inputs() {
        let second = |lines: &str| {
            let job = load_yaml(&config(lines)).unwrap();
            let inputs = job.spec.inputs().into_iter();
            let paths = inputs.filter(|input| input.key.ends_with(super::SECOND_KEY));
            let warned = job
                .warnings
                .iter()
                .any(|warning| warning.key.ends_with(super::SECOND_KEY));
            (paths.map(|input| input.config_path).collect::<Vec<_>>(), warned)
        };
        let own = "latent_feature_extractor_path";
        assert_eq!(
            second(&format!("{own}: v3")),
            (vec![super::VGG16_REPOSITORY.into()], false)
        );
        assert_eq!(
            second("diffusion_feature_extractor_path: v3"),
            (vec![super::VGG16_REPOSITORY.into()], false)
        );
        assert_eq!(
            second(&format!("{own}: v3\n{}: a.safetensors", super::SECOND_KEY)),
            (vec!["a.safetensors".into()], false)
        );
        assert_eq!(
            second(&format!("{own}: v8")),
            (vec![super::TIPS_ENCODER_REPOSITORY.into()], false)
        );
        assert_eq!(second(&format!("{own}: v4")), (vec![], false));
        assert_eq!(second(&format!("{}: a.safetensors", super::SECOND_KEY)), (vec![], true));
        let alone = load_yaml(&config(&format!("{}: true", super::PARTIAL_STEP_KEY))).unwrap();
        let warned = alone
            .warnings
            .iter()
            .any(|warning| warning.key.ends_with(super::PARTIAL_STEP_KEY));
        assert!(warned, "{:?}", alone.warnings);
    }

    #[test]
    fn diffusion_models_are_refused() {
        let text = config("latent_feature_extractor_path: v10").replace("arch: flux", "arch: sdxl");
        let error = load_yaml(&text).unwrap_err().to_string();
        assert!(
            error.contains("latent_feature_extractor_path") && error.contains("sdxl"),
            "{error}"
        );
    }
}
