//! The training scripts of sd-scripts, and which of them a config is for.

use super::option::UsedBy;
use super::settings::Settings;
use crate::job::arch::ArchName;
use crate::model_files::{Inventory, ModelFileKind, identify};
use std::path::Path;

/// A family of models, as the scripts divide them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptFamily {
    /// Stable Diffusion 1.x and 2.x.
    Sd,
    /// Stable Diffusion XL.
    Sdxl,
    /// FLUX.1.
    Flux,
    /// Stable Diffusion 3 and 3.5.
    Sd3,
}

/// A training script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// LoRAs of Stable Diffusion 1.x and 2.x.
    TrainNetwork,
    /// LoRAs of SDXL.
    SdxlTrainNetwork,
    /// LoRAs of FLUX.1.
    FluxTrainNetwork,
    /// LoRAs of Stable Diffusion 3.
    Sd3TrainNetwork,
    /// DreamBooth: the whole model of Stable Diffusion 1.x and 2.x.
    TrainDb,
    /// The same, with other defaults.
    FineTune,
    /// The whole model of SDXL.
    SdxlTrain,
    /// The whole transformer of FLUX.1.
    FluxTrain,
    /// The whole transformer of Stable Diffusion 3.
    Sd3Train,
    /// Words for Stable Diffusion 1.x and 2.x.
    TrainTextualInversion,
    /// Words for SDXL.
    SdxlTrainTextualInversion,
}

impl Script {
    /// All scripts that are imported.
    pub const ALL: [Self; 11] = [
        Self::TrainNetwork,
        Self::SdxlTrainNetwork,
        Self::FluxTrainNetwork,
        Self::Sd3TrainNetwork,
        Self::TrainDb,
        Self::FineTune,
        Self::SdxlTrain,
        Self::FluxTrain,
        Self::Sd3Train,
        Self::TrainTextualInversion,
        Self::SdxlTrainTextualInversion,
    ];

    /// Its file name without `.py`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TrainNetwork => "train_network",
            Self::SdxlTrainNetwork => "sdxl_train_network",
            Self::FluxTrainNetwork => "flux_train_network",
            Self::Sd3TrainNetwork => "sd3_train_network",
            Self::TrainDb => "train_db",
            Self::FineTune => "fine_tune",
            Self::SdxlTrain => "sdxl_train",
            Self::FluxTrain => "flux_train",
            Self::Sd3Train => "sd3_train",
            Self::TrainTextualInversion => "train_textual_inversion",
            Self::SdxlTrainTextualInversion => "sdxl_train_textual_inversion",
        }
    }

    /// The script with this name, with or without `.py`.
    ///
    /// # Errors
    /// The names that are known.
    pub fn from_name(name: &str) -> Result<Self, String> {
        let stem = name.strip_suffix(".py").unwrap_or(name);
        Self::ALL
            .into_iter()
            .find(|script| script.name() == stem)
            .ok_or_else(|| {
                let names: Vec<&str> = Self::ALL.into_iter().map(Self::name).collect();
                format!(
                    "`{}` is not a script that can be imported; known: {}",
                    name.escape_debug(),
                    names.join(", ")
                )
            })
    }

    /// The family that it trains.
    #[must_use]
    pub const fn family(self) -> ScriptFamily {
        match self {
            Self::TrainNetwork | Self::TrainDb | Self::FineTune | Self::TrainTextualInversion => ScriptFamily::Sd,
            Self::SdxlTrainNetwork | Self::SdxlTrain | Self::SdxlTrainTextualInversion => ScriptFamily::Sdxl,
            Self::FluxTrainNetwork | Self::FluxTrain => ScriptFamily::Flux,
            Self::Sd3TrainNetwork | Self::Sd3Train => ScriptFamily::Sd3,
        }
    }

    /// Whether it trains an adapter.
    #[must_use]
    pub const fn trains_adapter(self) -> bool {
        matches!(
            self,
            Self::TrainNetwork | Self::SdxlTrainNetwork | Self::FluxTrainNetwork | Self::Sd3TrainNetwork
        )
    }

    /// Whether it trains a word for the text encoders.
    #[must_use]
    pub const fn trains_embedding(self) -> bool {
        matches!(self, Self::TrainTextualInversion | Self::SdxlTrainTextualInversion)
    }

    /// Whether it trains the whole model.
    #[must_use]
    pub const fn trains_model(self) -> bool {
        !self.trains_adapter() && !self.trains_embedding()
    }

    /// Whether the model has a transformer, which is trained with flow matching.
    pub(super) const fn is_flow(self) -> bool {
        matches!(self.family(), ScriptFamily::Flux | ScriptFamily::Sd3)
    }

    pub(super) const fn bits(self) -> UsedBy {
        let family = match self.family() {
            ScriptFamily::Sd => 1,
            ScriptFamily::Sdxl => 2,
            ScriptFamily::Flux => 4,
            ScriptFamily::Sd3 => 8,
        };
        let trained = match (self.trains_adapter(), self.trains_embedding()) {
            (true, _) => 0x10,
            (_, true) => 0x40,
            _ => 0x20,
        };
        UsedBy(family | trained)
    }
}

/// Finds the script that a config is for: by its options, else by the content or the name of its model. `has_dataset_config`: whether the
/// command line names one.
///
/// # Errors
/// An option, or nothing, and a message about it, if nothing decides.
pub(super) fn detect(
    settings: &Settings,
    directory: &Path,
    has_dataset_config: bool,
) -> Result<Script, (&'static str, String)> {
    let adapter = settings.text("network_module").is_some()
        || settings.is_set("network_dim")
        || settings.is_set("network_weights")
        || settings.is_set("network_args");
    let is_word = settings.is_set("token_string");
    let family = family(settings, directory).ok_or_else(|| {
        let [sd, others] = match (is_word, adapter) {
            (true, _) => ["train_textual_inversion", " or --script sdxl_train_textual_inversion"],
            (false, true) => [
                "train_network",
                ", --script sdxl_train_network or --script flux_train_network",
            ],
            (false, false) => ["train_db", ", --script sdxl_train or --script flux_train"],
        };
        let message = format!(
            "neither the options nor the model `{}` say which script this config is for: name it, for example with --script {sd} \
             (Stable Diffusion 1.x and 2.x){others}",
            model_of(settings).escape_debug()
        );
        ("pretrained_model_name_or_path", message)
    })?;
    if is_word {
        return match family {
            ScriptFamily::Sd => Ok(Script::TrainTextualInversion),
            ScriptFamily::Sdxl => Ok(Script::SdxlTrainTextualInversion),
            _ => Err((
                "token_string",
                "words are trained for Stable Diffusion 1.x, 2.x and SDXL, in sd-scripts too".to_owned(),
            )),
        };
    }
    Ok(match (family, adapter) {
        (ScriptFamily::Sd, true) => Script::TrainNetwork,
        (ScriptFamily::Sdxl, true) => Script::SdxlTrainNetwork,
        (ScriptFamily::Flux, true) => Script::FluxTrainNetwork,
        (ScriptFamily::Sd3, true) => Script::Sd3TrainNetwork,
        (ScriptFamily::Sdxl, false) => Script::SdxlTrain,
        (ScriptFamily::Flux, false) => Script::FluxTrain,
        (ScriptFamily::Sd3, false) => Script::Sd3Train,
        (ScriptFamily::Sd, false) if settings.is_set("in_json") => Script::FineTune,
        // fine_tune.py reads captions from a metadata file alone, and train_db.py ignores train_text_encoder.
        (ScriptFamily::Sd, false)
            if settings.is_set("train_data_dir") && !settings.is_set("dataset_config") && !has_dataset_config =>
        {
            Script::TrainDb
        }
        (ScriptFamily::Sd, false) if settings.is_set("train_text_encoder") => Script::FineTune,
        (ScriptFamily::Sd, false)
            if settings.is_set("stop_text_encoder_training")
                || settings.is_set("no_token_padding")
                || settings.is_set("reg_data_dir") =>
        {
            Script::TrainDb
        }
        (ScriptFamily::Sd, false) => {
            return Err((
                "dataset_config",
                "there is no network_module, so the whole model is trained, and the options fit train_db as well as fine_tune, \
                        which differ in whether the text encoder is trained: name the script with --script train_db or --script \
                        fine_tune"
                    .to_owned(),
            ));
        }
    })
}

/// The model that a config names; empty for none.
fn model_of(settings: &Settings) -> &str {
    settings.text("pretrained_model_name_or_path").unwrap_or_default()
}

/// The family of models that a config is for, if something says it.
fn family(settings: &Settings, directory: &Path) -> Option<ScriptFamily> {
    match settings.text("network_module") {
        Some(module) if module.ends_with("_flux") => return Some(ScriptFamily::Flux),
        Some(module) if module.ends_with("_sd3") => return Some(ScriptFamily::Sd3),
        _ => {}
    }
    if settings.text("clip_g").is_some() {
        return Some(ScriptFamily::Sd3);
    }
    if settings.text("ae").is_some() {
        return Some(ScriptFamily::Flux);
    }
    let model = model_of(settings);
    if let Some(found) = family_of_files(&directory.join(model)) {
        return Some(found);
    }
    if settings.flag("v2") {
        return Some(ScriptFamily::Sd);
    }
    if settings.is_set("timestep_sampling") || settings.is_set("discrete_flow_shift") {
        return Some(ScriptFamily::Flux);
    }
    if settings.is_set("training_shift") {
        return Some(ScriptFamily::Sd3);
    }
    family_of_name(model)
}

/// The family of a model on this machine, by its configs and the headers of its files.
fn family_of_files(path: &Path) -> Option<ScriptFamily> {
    if !path.exists() {
        return None;
    }
    let ModelFileKind::Model { family, .. } = identify(&Inventory::open(path)) else {
        return None;
    };
    match family.arch? {
        ArchName::Sd1 | ArchName::Sd2 => Some(ScriptFamily::Sd),
        ArchName::Sdxl => Some(ScriptFamily::Sdxl),
        ArchName::Flux => Some(ScriptFamily::Flux),
        ArchName::Sd3 => Some(ScriptFamily::Sd3),
        _ => None,
    }
}

/// The family that the name of a model says. A name that says nothing decides nothing.
fn family_of_name(model: &str) -> Option<ScriptFamily> {
    let name = model.to_lowercase().replace(['-', '_', ' ', '.'], "");
    let says = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let found: Vec<ScriptFamily> = [
        (ScriptFamily::Flux, says(&["flux1", "fluxdev", "fluxschnell"])),
        (ScriptFamily::Sd3, says(&["sd35", "sd3medium", "stablediffusion3"])),
        (ScriptFamily::Sdxl, says(&["sdxl", "stablediffusionxl"])),
        (
            ScriptFamily::Sd,
            says(&[
                "sd15",
                "sdv15",
                "v15pruned",
                "stablediffusionv1",
                "stablediffusion2",
                "v21768",
            ]),
        ),
    ]
    .into_iter()
    .filter_map(|(family, is_named)| is_named.then_some(family))
    .collect();
    match *found.as_slice() {
        [family] => Some(family),
        _ => None,
    }
}
