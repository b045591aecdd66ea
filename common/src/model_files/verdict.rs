//! What this release does with the files of a model.

use super::Identity;
use crate::job::arch::ArchName;
use crate::job::schema::Status;
use std::fmt;

/// Why a model is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// Families that this release runs, for people.
fn supported() -> String {
    let runs = ArchName::ALL
        .iter()
        .filter(|arch| matches!(arch.status(), Status::Works));
    let names: Vec<String> = runs
        .map(|arch| match arch {
            ArchName::Sd1 => "Stable Diffusion 1.x (`arch: sd1`)".to_owned(),
            other => format!("`arch: {other}`"),
        })
        .collect();
    format!("this release runs {}", names.join(", "))
}

/// Whether a model of these files can be run as `configured`, which is what the config says or leaves at its default.
/// `path` is the model as the config names it.
///
/// # Errors
/// When no engine of this release runs it: what was found, by what evidence, and what is supported.
pub fn check(path: &str, configured: ArchName, identity: &Identity) -> Result<(), Refusal> {
    let refuse = |text: String| Err(Refusal(text));
    match identity {
        Identity::Model {
            family,
            evidence,
            missing,
        } => {
            let runs =
                family.variant.is_none() && family.arch.is_some_and(|arch| matches!(arch.status(), Status::Works));
            if runs && family.arch == Some(configured) {
                if missing.is_empty() {
                    return Ok(());
                }
                return refuse(format!(
                    "{path} is not a complete {family} model: it has no {} ({evidence}); a U-Net alone belongs into the `unet` \
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
        Identity::Other { what, evidence } => refuse(format!(
            "{path} is {what}, not a base model: {evidence}; {}, from a diffusers folder or one .safetensors or .gguf file",
            supported()
        )),
        Identity::Pickle { evidence } => refuse(format!(
            "{path} is a pickle file, which can run code when it is opened: {evidence}; take the model as .safetensors or .gguf, \
             or convert it on a machine that may be lost"
        )),
        Identity::Unknown { evidence } => refuse(format!(
            "{path} is no model that is known here: {evidence}; {}, from a diffusers folder or one .safetensors or .gguf file",
            supported()
        )),
    }
}
