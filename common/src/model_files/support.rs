//! Checks whether this release supports a model.

use super::ModelFileKind;
use crate::job::arch::ArchName;
use crate::job::schema::SupportLevel;
use std::fmt;

/// The reason why a model is not supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedModel(String);

impl fmt::Display for UnsupportedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UnsupportedModel {}

/// The supported families, for error messages.
fn supported() -> String {
    let supported = ArchName::ALL
        .iter()
        .filter(|arch| matches!(arch.status(), SupportLevel::Works));
    let names: Vec<String> = supported
        .map(|arch| match arch {
            ArchName::Sd1 => "Stable Diffusion 1.x (`arch: sd1`)".to_owned(),
            ArchName::Sd2 => "Stable Diffusion 2.x (`arch: sd2`)".to_owned(),
            ArchName::Sdxl => "Stable Diffusion XL (`arch: sdxl`)".to_owned(),
            ArchName::Sd3 => "Stable Diffusion 3.5 (`arch: sd3`)".to_owned(),
            ArchName::Flux => "FLUX.1 (`arch: flux`)".to_owned(),
            ArchName::FluxKontext => "FLUX.1 Kontext (`arch: flux_kontext`)".to_owned(),
            ArchName::Chroma => "Chroma (`arch: chroma`)".to_owned(),
            ArchName::Zimage => "Z-Image (`arch: zimage`)".to_owned(),
            other => format!("`arch: {other}`"),
        })
        .collect();
    format!("this release runs {}", names.join(", "))
}

/// Checks that this release can run a model as `configured`, the value or default of `model.arch`. `path` is the model's path
/// in the config.
///
/// # Errors
/// When the model is not supported. The message names what was found, the evidence, and what is supported.
pub fn check_supported(path: &str, configured: ArchName, identity: &ModelFileKind) -> Result<(), UnsupportedModel> {
    let refuse = |text: String| Err(UnsupportedModel(text));
    match identity {
        ModelFileKind::Model {
            family,
            evidence,
            missing,
        } => {
            let runs = family.variant.is_none()
                && family
                    .arch
                    .is_some_and(|arch| matches!(arch.status(), SupportLevel::Works));
            // FLUX.1 Kontext has the tensors of dev: only a pipeline's class name tells them apart.
            let is_kontext_alike = configured == ArchName::FluxKontext && family.arch == Some(ArchName::Flux);
            if runs && (family.arch == Some(configured) || is_kontext_alike) {
                if missing.is_empty() {
                    return Ok(());
                }
                return refuse(format!(
                    "{path} is not a complete {family} model: it has no {} ({evidence}); put a U-Net alone into the `unet` \
                     folder of a diffusers folder",
                    missing.join(" and no ")
                ));
            }
            let says = match family.arch {
                Some(arch) if arch == configured => String::new(),
                _ => format!(", and `model.arch` of the config is `{configured}`"),
            };
            let advice = match (runs, family.arch) {
                (true, Some(arch)) => format!("set `arch: {arch}`"),
                _ => supported(),
            };
            refuse(format!("{path} is {family}: {evidence}{says}; {advice}"))
        }
        ModelFileKind::Other { what, evidence } => refuse(format!(
            "{path} is {what}, not a base model: {evidence}; {}, from a diffusers folder or one .safetensors or .gguf file",
            supported()
        )),
        ModelFileKind::Pickle { evidence } => refuse(format!(
            "{path} is a pickle file, which can run code when it is opened: {evidence}; use the model as .safetensors or .gguf, \
             or convert it on a machine that holds nothing valuable"
        )),
        ModelFileKind::Unknown { evidence } => refuse(format!(
            "{path} is not a known model: {evidence}; {}, from a diffusers folder or one .safetensors or .gguf file",
            supported()
        )),
    }
}
