//! Job configs: reads a YAML or JSON config, replaces variables, validates it and returns a [`JobSpec`] with every default set.
//!
//! Each section is declared once, in the file of its name (see [`schema`]). That declaration generates the section's type, its
//! reader, its documentation and its checks in [`JobSpec::unsupported`].

pub mod adapter;
mod adapter_checks;
pub mod arch;
pub mod augmentation;
mod augmentation_params;

pub mod auto;
pub mod caption;
pub mod change;
mod checks;
pub mod cluster;
mod compound;
mod control_images;
pub mod controls;
pub mod dataset;
mod declare;
pub mod decorator;
mod decorator_checks;
mod derived;
pub mod dtype;
pub mod ema;
pub mod embedding;
mod embedding_checks;
pub mod error;
pub mod extension;
pub mod extension_job;
pub mod extract;
pub mod feature_extractor;
mod foreign_keys;
mod from_json;
pub mod generate;
mod inputs;
pub(crate) mod json;
pub mod layer_rank;
pub mod limits;
pub mod lm_export;
pub mod lm_generate;
pub mod lm_lora;
pub mod lm_trainer;
mod load;
mod location;
pub mod logging;
pub mod lokr;
pub mod lora_containers;
pub mod lr_factor;
mod merge_checks;
mod misplaced_keys;
pub mod model;
pub mod negative_prompts;

pub mod naming;
pub mod network;
pub mod node;
mod objective;
pub mod optimizer;
pub mod optimizer_params;
mod outputs;
mod paired_images;
pub mod paths;
pub mod process;
mod process_type;
pub mod prompt;
mod read_context;
pub mod reference;
pub mod repository;
pub mod sample;
pub mod sampler;
pub mod save;
pub mod scalar;
pub mod schema;
mod secret;
pub mod slider;
mod slider_checks;
pub mod spec;
pub mod template;
pub mod train;
mod universal;
pub mod validation;
pub mod values;
mod yaml;
mod yaml_errors;

pub use crate::plan::qtype::QType;
pub use error::{Finding, JobError, Support, summary};
pub use load::{LoadOptions, LoadedJob, dotenv, env_with, find, load, parse, yaml_to_json};
pub use process::{JobKind, Process, ProcessKind, ProcessType};
pub use schema::{Input, InputKind, SupportLevel};
pub use spec::JobSpec;

use serde::{Deserialize, Serialize};

/// The file format of a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// YAML 1.1, with the rules of ai-toolkit's loader.
    Yaml,
    /// JSON.
    Json,
    /// JSON with comments and trailing commas.
    Jsonc,
}

impl Format {
    /// `yaml`, `json` or `jsonc`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Yaml => "yaml",
            Self::Json => "json",
            Self::Jsonc => "jsonc",
        }
    }

    /// The format with this name or file extension (without dot).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "yaml" | "yml" => Some(Self::Yaml),
            "json" => Some(Self::Json),
            "jsonc" => Some(Self::Jsonc),
            _ => None,
        }
    }
}

#[cfg(test)]
mod example_tests;
#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod image_option_tests;
#[cfg(test)]
mod mistake_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod network_tests;
#[cfg(test)]
mod numeric_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod slider_tests;
#[cfg(test)]
mod tests;
