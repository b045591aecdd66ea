//! Control images and masks that are made of the images of a data set (`datasets[].controls`): their types, what they exclude, and the networks
//! that make them.

use super::dataset::DatasetConfig;
use super::declare::choices;
use super::process::TrainerProcess;
use super::schema::{ReadContext, SupportReport, join};

/// The repository with the network of `depth`, as in ai-toolkit.
pub const DEPTH_REPOSITORY: &str = "depth-anything/Depth-Anything-V2-Large-hf";
/// The repository with the network of `mask`, as in ai-toolkit.
pub const MASK_REPOSITORY: &str = "ZhengPeng7/BiRefNet_HR";
/// The repository with the network of `sapiens2_mask`, as in ai-toolkit.
pub const SAPIENS2_MASK_REPOSITORY: &str = "facebook/sapiens2-matting-1b";

choices! {
    /// What a file `_controls/NAME.TYPE.jpg` beside an image `NAME` is.
    pub enum ControlType("type of control image") {
        /// A depth map.
        Depth = "depth", Works;
        /// Edges.
        Line = "line", Works;
        /// The skeletons of people.
        Pose = "pose", Works;
        /// The image with its background transparent.
        Inpaint = "inpaint", Refused("only models that aitk does not run (Flex.2) are trained to inpaint");
        /// A loss mask: the foreground is white.
        Mask = "mask", Works;
        /// A loss mask: people are white.
        Sapiens2Mask = "sapiens2_mask", Works;
    }
}

/// A network that makes the control images of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGeneratorSource<'a> {
    /// The key that names it, below the process.
    pub key: String,
    /// The type of the control images.
    pub kind: ControlType,
    /// A file, a folder or a repository.
    pub path: &'a str,
}

impl ControlType {
    /// The key of a data set that names the network which makes files of this type. `None`: aitk does not have such a network.
    #[must_use]
    pub fn generator_key(self) -> Option<&'static str> {
        match self {
            Self::Depth => Some("depth_estimator"),
            Self::Line => Some("line_detector"),
            Self::Mask => Some("background_remover"),
            Self::Sapiens2Mask => Some("matting_model"),
            _ => None,
        }
    }

    /// The repository with the network that makes files of this type where the key names none. `None`: missing files are an error then.
    fn default_generator(self) -> Option<&'static str> {
        match self {
            Self::Depth => Some(DEPTH_REPOSITORY),
            Self::Mask => Some(MASK_REPOSITORY),
            Self::Sapiens2Mask => Some(SAPIENS2_MASK_REPOSITORY),
            _ => None,
        }
    }

    /// Whether it is a loss mask. The others are control images.
    #[must_use]
    pub fn is_mask(self) -> bool {
        matches!(self, Self::Mask | Self::Sapiens2Mask)
    }
}

impl DatasetConfig {
    /// The types in `controls`.
    pub fn control_types(&self) -> impl Iterator<Item = ControlType> {
        self.controls.iter().filter_map(|name| ControlType::from_name(name))
    }

    /// The type of the control images in `controls`, if it has one.
    #[must_use]
    pub fn condition_type(&self) -> Option<ControlType> {
        let is_condition = |kind: &ControlType| !kind.is_mask() && *kind != ControlType::Inpaint;
        self.control_types().find(is_condition)
    }

    /// The type of the loss masks in `controls`, if it has one.
    #[must_use]
    pub fn mask_type(&self) -> Option<ControlType> {
        self.control_types().find(|kind| kind.is_mask())
    }

    /// The value of the key that names the network which makes files of a type.
    fn generator_value(&mut self, kind: ControlType) -> Option<&mut Option<String>> {
        match kind {
            ControlType::Depth => Some(&mut self.depth_estimator),
            ControlType::Line => Some(&mut self.line_detector),
            ControlType::Mask => Some(&mut self.background_remover),
            ControlType::Sapiens2Mask => Some(&mut self.matting_model),
            _ => None,
        }
    }

    /// The network that makes files of a type that are missing: a file, a folder or a repository. `None`: `controls` does not have the type,
    /// or its key names no network.
    #[must_use]
    pub fn control_generator(&self, kind: ControlType) -> Option<&str> {
        if ![self.condition_type(), self.mask_type()].contains(&Some(kind)) {
            return None;
        }
        let path = match kind {
            ControlType::Depth => self.depth_estimator.as_deref(),
            ControlType::Line => self.line_detector.as_deref(),
            ControlType::Mask => self.background_remover.as_deref(),
            ControlType::Sapiens2Mask => self.matting_model.as_deref(),
            ControlType::Pose | ControlType::Inpaint => None,
        };
        path.filter(|path| !path.is_empty())
    }

    /// The keys of networks that are not opened.
    pub(super) fn unopened_control_generators(&self) -> impl Iterator<Item = &'static str> {
        let kinds = ControlType::ALL.iter().copied();
        kinds
            .filter(|kind| self.control_generator(*kind).is_none())
            .filter_map(ControlType::generator_key)
    }

    /// The key that gives the images loss masks, if there is one.
    #[must_use]
    pub fn mask_key(&self) -> Option<&'static str> {
        [
            (self.alpha_mask, "alpha_mask"),
            (self.mask_path.is_some(), "mask_path"),
            (self.mask_type().is_some(), "controls"),
        ]
        .into_iter()
        .find_map(|(on, key)| on.then_some(key))
    }

    /// Removes blank names, which the web UI writes, and reports names that are not types.
    pub(super) fn finish_controls(&mut self, cx: &mut ReadContext) {
        self.controls.0.retain(|name| !name.trim().is_empty());
        for name in &mut self.controls.0 {
            match ControlType::from_name(name.trim()) {
                Some(kind) => *name = kind.name().to_owned(),
                None => {
                    let names: Vec<String> = ControlType::ALL.iter().map(|kind| format!("`{kind}`")).collect();
                    cx.error_at(
                        "controls",
                        format!("`{name}` is not a type of control image; expected {}", names.join(", ")),
                    );
                }
            }
        }
        for kind in [self.condition_type(), self.mask_type()].into_iter().flatten() {
            if let Some(value) = self.generator_value(kind).filter(|value| value.is_none()) {
                *value = kind.default_generator().map(str::to_owned);
            }
        }
    }

    /// Reports types of control images that cannot be used, or not together.
    pub(super) fn check_controls(&self, path: &str, report: &mut SupportReport) {
        let key = join(path, "controls");
        for kind in self.control_types() {
            report.add_status(&key, kind.status(), kind.name());
        }
        let count = |masks: bool| {
            let types = self.control_types().filter(|kind| *kind != ControlType::Inpaint);
            types.filter(|kind| kind.is_mask() == masks).count()
        };
        let other = self.folder_control_key();
        if count(false) > 1 {
            report.error(
                &key,
                "an image has one control image, and these types give it several; ai-toolkit's trainings end with an error then: make a \
                 `datasets` entry of each type, with the same `folder_path`",
            );
        } else if let (Some(other), Some(_)) = (other, self.condition_type()) {
            report.error(
                &key,
                format!("cannot be used with `{other}`: an image has one control image; remove one of them"),
            );
        }
        let has_own_masks = [(self.alpha_mask, "alpha_mask"), (self.mask_path.is_some(), "mask_path")];
        let own_mask = has_own_masks.into_iter().find_map(|(on, key)| on.then_some(key));
        if count(true) > 1 {
            report.error(
                &key,
                "an image has one loss mask, and these types give it several; ai-toolkit uses the last one: remove the others",
            );
        } else if let (Some(other), Some(kind)) = (own_mask, self.mask_type()) {
            report.error(
                &key,
                format!("`{kind}` cannot be used with `{other}`: an image has one loss mask; remove one of them"),
            );
        }
    }
}

impl TrainerProcess {
    /// Sets the network that makes this data set's files of a type to none, because they all exist: it is not downloaded then.
    pub fn leave_out_control_generator(&mut self, dataset: usize, kind: ControlType) {
        let dataset = self.datasets.get_mut(dataset);
        if let Some(value) = dataset.and_then(|dataset| dataset.generator_value(kind)) {
            // Empty, because where the key is missing most types have a default repository.
            *value = value.take().map(|_| String::new());
        }
    }

    /// The networks that make control images of its data sets.
    pub fn control_generators(&self) -> impl Iterator<Item = ControlGeneratorSource<'_>> {
        self.datasets.iter().enumerate().flat_map(|(index, set)| {
            ControlType::ALL.iter().filter_map(move |kind| {
                let path = set.control_generator(*kind)?;
                let key = format!("datasets[{index}].{}", kind.generator_key()?);
                Some(ControlGeneratorSource { key, kind: *kind, path })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::tests::{load_yaml, with_line_after};

    fn config(lines: &str, arch: &str) -> String {
        let lines = lines.lines().map(|line| format!("          {line}"));
        with_line_after("folder_path: images", &lines.collect::<Vec<_>>().join("\n")).replace(
            "name_or_path: base",
            &format!("name_or_path: base\n        arch: {arch}"),
        )
    }

    fn errors(lines: &str, arch: &str) -> Vec<(String, String)> {
        let job = load_yaml(&config(lines, arch)).unwrap();
        let found = job.spec.unsupported().errors.into_iter();
        let short = |key: &str| key.trim_start_matches("config.process[0].").to_owned();
        let found = found.map(|error| (short(&error.key), error.message));
        found.filter(|(key, _)| key.starts_with("datasets")).collect()
    }

    #[test]
    fn names_are_types_and_blank_names_are_none() {
        let set = |lines: &str| {
            let job = load_yaml(&config(lines, "flux_kontext")).unwrap();
            job.spec.process[0].trainer().unwrap().datasets[0].clone()
        };
        for (lines, condition, mask) in [
            ("controls: depth", Some(ControlType::Depth), None),
            (
                "controls: [line, mask]",
                Some(ControlType::Line),
                Some(ControlType::Mask),
            ),
            (
                "controls: [sapiens2_mask, Pose]",
                Some(ControlType::Pose),
                Some(ControlType::Sapiens2Mask),
            ),
            ("controls: ['', ' ']", None, None),
            ("controls: []", None, None),
        ] {
            let set = set(lines);
            assert_eq!((set.condition_type(), set.mask_type()), (condition, mask), "{lines}");
            assert_eq!(errors(lines, "flux_kontext"), [], "{lines}");
        }
        let error = load_yaml(&config("controls: [depht]", "flux_kontext"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("depht") && error.contains("`depth`, `line`"), "{error}");
    }

    #[test]
    fn an_image_has_one_control_image_and_one_mask() {
        for (lines, text) in [
            ("controls: [depth, line]", "entry of each type"),
            ("controls: [depth, depth]", "entry of each type"),
            ("controls: depth\ncontrol_path: before", "`control_path`"),
            ("controls: depth\ncontrol_path_2: before", "`control_path_2`"),
            (
                "controls: depth\ncontrol_from_same_folder: true",
                "`control_from_same_folder`",
            ),
            ("controls: [mask, sapiens2_mask]", "the last one"),
            ("controls: mask\nmask_path: masks", "`mask_path`"),
            ("controls: mask\nalpha_mask: true", "`alpha_mask`"),
            ("controls: inpaint", "Flex.2"),
        ] {
            let found = errors(lines, "flux_kontext");
            assert_eq!(found.len(), 1, "{lines}: {found:?}");
            assert!(
                found[0].0 == "datasets[0].controls" && found[0].1.contains(text),
                "{lines}: {found:?}"
            );
        }
        assert_eq!(errors("controls: [mask]\ncontrol_path: before", "flux_kontext"), []);
    }

    #[test]
    fn networks_that_make_control_images_are_inputs_where_they_are_used() {
        let keys = ControlType::ALL.iter().filter_map(|kind| kind.generator_key());
        let keys: Vec<&str> = keys.collect();
        let inputs = |lines: &str| -> Vec<(String, bool)> {
            let job = load_yaml(&config(lines, "flux_kontext")).unwrap();
            let inputs = job.spec.inputs().into_iter();
            let generators = inputs.filter(|input| keys.iter().any(|key| input.key.ends_with(key)));
            generators
                .map(|input| (input.config_path.clone(), input.may_be_repository()))
                .collect()
        };
        assert_eq!(inputs("controls: depth"), [(DEPTH_REPOSITORY.to_owned(), true)]);
        assert_eq!(
            inputs("controls: depth\ndepth_estimator: models/depth\nline_detector: teed.safetensors"),
            [("models/depth".to_owned(), true)]
        );
        assert_eq!(
            inputs("controls: line\nline_detector: ./teed.safetensors"),
            [("./teed.safetensors".to_owned(), false)]
        );
        assert_eq!(
            inputs("controls: [mask, line]\nline_detector: teed.safetensors\nmatting_model: other"),
            [
                ("teed.safetensors".to_owned(), false),
                (MASK_REPOSITORY.to_owned(), true)
            ]
        );
        assert_eq!(
            inputs("controls: sapiens2_mask"),
            [(SAPIENS2_MASK_REPOSITORY.to_owned(), true)]
        );
        assert_eq!(
            inputs("controls: mask\nbackground_remover: ./model.safetensors"),
            [("./model.safetensors".to_owned(), false)]
        );
        for lines in [
            "controls: mask\nbackground_remover: ''",
            "controls: depth\ndepth_estimator: ''",
            "controls: line",
            "controls: pose\ndepth_estimator: a/b\nline_detector: c",
            "control_path: before\ndepth_estimator: a/b",
        ] {
            assert_eq!(inputs(lines), [], "{lines}");
        }
        let job = load_yaml(&config(
            "controls: [mask, line]\nline_detector: teed.safetensors",
            "flux_kontext",
        ))
        .unwrap();
        let process = job.spec.process[0].trainer().unwrap();
        let sources: Vec<_> = process.control_generators().collect();
        assert_eq!(
            sources,
            [
                ControlGeneratorSource {
                    key: "datasets[0].line_detector".into(),
                    kind: ControlType::Line,
                    path: "teed.safetensors"
                },
                ControlGeneratorSource {
                    key: "datasets[0].background_remover".into(),
                    kind: ControlType::Mask,
                    path: MASK_REPOSITORY
                }
            ]
        );
    }

    #[test]
    fn a_network_that_has_nothing_to_make_is_no_input() {
        for lines in [
            "controls: depth",
            "controls: line\nline_detector: teed.safetensors",
            "controls: mask",
            "controls: sapiens2_mask",
        ] {
            let mut spec = load_yaml(&config(lines, "flux_kontext")).unwrap().spec;
            let count = spec.inputs().len();
            let set = &spec.process[0].trainer().unwrap().datasets[0];
            let kinds = (set.condition_type(), set.mask_type());
            let kind = kinds.0.or(kinds.1).unwrap();
            let process = spec.process[0].trainer_mut().unwrap();
            // There is no such data set.
            process.leave_out_control_generator(1, kind);
            assert_eq!(process.control_generators().count(), 1, "{lines}");
            process.leave_out_control_generator(0, kind);
            assert_eq!(process.control_generators().count(), 0, "{lines}");
            let set = &process.datasets[0];
            assert_eq!((set.condition_type(), set.mask_type()), kinds);
            // As a worker gets it.
            let sent = serde_json::to_string(&spec).unwrap();
            let spec: crate::job::JobSpec = serde_json::from_str(&sent).unwrap();
            assert_eq!(spec.inputs().len(), count - 1, "{lines}");
        }
    }

    #[test]
    fn other_models_have_masks_and_no_control_images() {
        for arch in ["flux", "sdxl"] {
            let found = errors("controls: depth", arch);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(
                found[0].0 == "datasets[0].controls" && found[0].1.contains("flux_kontext"),
                "{found:?}"
            );
            assert_eq!(errors("controls: mask", arch), []);
        }
    }
}
