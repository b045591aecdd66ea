//! Generates `docs/config-keys.md`: every key, its meaning and its status in this release. Generated from the declarations that
//! read configs; a test checks that the file is up to date.

use super::adapter::AdapterConfig;
use super::caption::{CaptionConfig, CaptionProcess};
use super::cluster::ClusterConfig;
use super::dataset::DatasetConfig;
use super::decorator::DecoratorConfig;
use super::embedding::EmbeddingConfig;
use super::extension::ExtensionProcess;
use super::extract::{ExtractProcess, RescaleLoraProcess};
use super::generate::{GenerateConfig, Img2ImgConfig};
use super::layer_rank::LayerRank;
use super::lm_export::{LmExportModelConfig, LmExportProcess, LmExportSaveConfig};
use super::lm_generate;
use super::lm_generate::{FillItem, LmGenerateConfig, LmGenerateProcess};
use super::lm_lora::LmLoraConfig;
use super::lm_trainer::{
    LmDatasetConfig, LmNetworkConfig, LmSampleConfig, LmSaveConfig, LmTrainConfig, LmTrainerModelConfig,
    LmTrainerProcess, LmValidationConfig,
};
use super::logging::LoggingConfig;
use super::lr_factor::LrFactor;
use super::model::ModelConfig;
use super::network::{NetworkConfig, NetworkKwargs};
use super::process::{GenerateProcess, Img2ImgProcess, TrainerProcess};
use super::sample::{SampleConfig, SampleItem};
use super::save::SaveConfig;
use super::schema::{FieldInfo, SectionInfo, SupportLevel};
use super::slider::{ReferenceDataset, Replacement, SliderAnchor, SliderConfig, SliderTarget};
use super::spec::{ConfigSection, Document};
use super::train::{EmaConfig, TrainConfig, ValidationConfig, ValidationItem};
use std::fmt::Write as _;

const INTRODUCTION: &str = "\
# Config keys

This page is for people who write job configs: every key, its default, and what this release does with it. It is generated from the
declarations in `common/src/job`; change those and run
`AITK_UPDATE_GOLDEN=1 cargo test -p aitk-common config_keys`.

| In the last column | means |
|---|---|
| works | does what it says |
| accepted | has no influence on the result, so there is no message |
| with `x` | only matters together with `x`, which works, is ignored with a warning, or is refused |
| warning | ignored, with a warning before the job starts; the result stays what was asked for |
| refused | ignoring it would change the result: the job does not start unless the value is the default or off |
| later | read and checked, but the feature that uses the key does not run in this release |

A key that is in none of these tables is ignored with a warning. If it is within two edits of a known key of its
section, or a name that diffusers, transformers, sd-scripts or peft have for one (`learning_rate`, `max_train_steps`, `network_dim`), it is an error
that names that key. An explicit `null` counts as absent.

`${VAR}` in a value is replaced from the environment or from `.env` before the job is sent; a variable that is not
set is an error. A variable that holds a secret (by its name, such as `HF_TOKEN`, or by the form of its value) is not
replaced, because jobs are stored and shown: the job keeps `${HF_TOKEN}`, with a warning. No key needs a secret;
for private models set `HF_TOKEN` where the worker runs (and list them with `--hub-allow`). `device` of ai-toolkit's configs (`cuda:0`) is accepted
and has no effect, as in ai-toolkit; `cluster.device` requests a kind of device.
";

/// The sections of the page: heading, keys, and whether this release refuses all of them.
fn sections() -> Vec<(&'static str, SectionInfo, bool)> {
    vec![
        ("The document", Document::describe(), false),
        ("`config`", ConfigSection::describe(), false),
        ("`cluster` (ours)", ClusterConfig::describe(), false),
        ("`config.process[]`: trainers", TrainerProcess::describe(), false),
        ("`model`", ModelConfig::describe(), false),
        ("`network`", NetworkConfig::describe(), false),
        ("`network.network_kwargs`", NetworkKwargs::describe(), false),
        ("`train`", TrainConfig::describe(), false),
        ("`train.ema_config`", EmaConfig::describe(), false),
        ("`datasets[]`", DatasetConfig::describe(), false),
        ("`save`", SaveConfig::describe(), false),
        ("`sample`, `first_sample`", SampleConfig::describe(), false),
        ("`sample.samples[]`", SampleItem::describe(), false),
        ("`logging`", LoggingConfig::describe(), false),
        ("`config.process[]`: `to_folder`", GenerateProcess::describe(), false),
        ("`generate` of `to_folder`", GenerateConfig::describe(), false),
        ("`config.process[]`: `batch_img2img`", Img2ImgProcess::describe(), false),
        ("`generate` of `batch_img2img`", Img2ImgConfig::describe(), false),
        (
            "`config.process[]`: `lm_generate` (ours)",
            LmGenerateProcess::describe(),
            false,
        ),
        (
            "`model` of `lm_generate`",
            lm_generate::LmGenerateModelConfig::describe(),
            false,
        ),
        ("`generate` of `lm_generate`", LmGenerateConfig::describe(), false),
        ("`generate.fill[]` of `lm_generate`", FillItem::describe(), false),
        (
            "`config.process[]`: `lm_export` (ours)",
            LmExportProcess::describe(),
            false,
        ),
        ("`model` of `lm_export`", LmExportModelConfig::describe(), false),
        (
            "`model.loras[]` of `lm_generate` and `lm_export`",
            LmLoraConfig::describe(),
            false,
        ),
        ("`save` of `lm_export`", LmExportSaveConfig::describe(), false),
        ("`network.layer_ranks[]` (ours)", LayerRank::describe(), false),
        ("`train.lr_factors[]` (ours)", LrFactor::describe(), false),
        ("`train.validation_config`", ValidationConfig::describe(), false),
        (
            "`train.validation_config.validation_items[]`",
            ValidationItem::describe(),
            false,
        ),
        ("`embedding`", EmbeddingConfig::describe(), false),
        ("`adapter`", AdapterConfig::describe(), false),
        ("`decorator`", DecoratorConfig::describe(), false),
        ("`slider`", SliderConfig::describe(), false),
        ("`slider.targets[]`", SliderTarget::describe(), false),
        ("`slider.anchors[]`", SliderAnchor::describe(), false),
        ("`slider.datasets[]`", ReferenceDataset::describe(), false),
        (
            "`config.process[]`: `lm_trainer` (ours)",
            LmTrainerProcess::describe(),
            false,
        ),
        ("`model` of `lm_trainer`", LmTrainerModelConfig::describe(), false),
        ("`network` of `lm_trainer`", LmNetworkConfig::describe(), false),
        ("`datasets[]` of `lm_trainer`", LmDatasetConfig::describe(), false),
        ("`validation` of `lm_trainer`", LmValidationConfig::describe(), false),
        ("`train` of `lm_trainer`", LmTrainConfig::describe(), false),
        ("`save` of `lm_trainer`", LmSaveConfig::describe(), false),
        ("`sample` of `lm_trainer`", LmSampleConfig::describe(), false),
        ("`replacements[]`", Replacement::describe(), true),
        ("`config.process[]`: captioners", CaptionProcess::describe(), true),
        ("`caption`", CaptionConfig::describe(), true),
        (
            "`config.process[]`: `locon`, `lora` (extract)",
            ExtractProcess::describe(),
            false,
        ),
        (
            "`config.process[]`: `rescale_lora`",
            RescaleLoraProcess::describe(),
            false,
        ),
        (
            "`config.process[]`: `extension:NAME`",
            ExtensionProcess::describe(),
            false,
        ),
    ]
}

/// Returns the whole page.
#[must_use]
pub fn markdown() -> String {
    let mut page = INTRODUCTION.to_owned();
    for (heading, section, is_refused) in sections() {
        let _ = write!(page, "\n## {heading}\n\n");
        if is_refused {
            page.push_str(
                "These keys are read and checked, but the feature that uses them does not run in this release.\n\n",
            );
        }
        page.push_str("| key | value | default | meaning | this release |\n|---|---|---|---|---|\n");
        for field in section.fields.iter().filter(|field| !field.rare) {
            write_row(&mut page, field, is_refused);
        }
        let rare: Vec<&FieldInfo> = section.fields.iter().filter(|field| field.rare).collect();
        if !rare.is_empty() {
            page.push_str("\nRarely used, known by name only: ");
            let listed: Vec<String> = rare
                .iter()
                .map(|field| format!("`{}` ({})", field.key, describe_status(field.status)))
                .collect();
            let _ = writeln!(page, "{}.", listed.join(", "));
        }
        for field in section.fields.iter().filter(|field| !field.values.is_empty()) {
            write_values(&mut page, field);
        }
    }
    page
}

fn write_row(page: &mut String, field: &FieldInfo, is_refused: bool) {
    let default = match field.default.as_str() {
        "" | "null" => "–".to_owned(),
        text if text.contains(' ') || text.contains('`') || text == "required" => text.to_owned(),
        text => format!("`{text}`"),
    };
    let kind = if field.values.is_empty() || field.kind.starts_with("list of") {
        field.kind.clone()
    } else {
        "a name, below".to_owned()
    };
    let status = if is_refused {
        "later".to_owned()
    } else {
        describe_status(field.status)
    };
    let _ = writeln!(
        page,
        "| `{}` | {} | {} | {} | {} |",
        field.key,
        escape_cell(&kind),
        escape_cell(&default),
        escape_cell(&field.doc.replace('\n', " ")),
        escape_cell(&status)
    );
}

fn escape_cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn describe_status(status: SupportLevel) -> String {
    match status {
        SupportLevel::Works => "works".into(),
        SupportLevel::Accepted(why) => format!("accepted: {why}"),
        SupportLevel::DependsOn(key) => format!("with `{key}`"),
        SupportLevel::Ignored(why) => format!("warning: {why}"),
        SupportLevel::Refused(why) => format!("refused: {why}"),
    }
}

fn write_values(page: &mut String, field: &FieldInfo) {
    let listed = |keep: fn(SupportLevel) -> bool| -> String {
        let names: Vec<String> = field
            .values
            .iter()
            .filter(|(_, status)| keep(*status))
            .map(|(name, _)| format!("`{name}`"))
            .collect();
        names.join(", ")
    };
    let works = listed(|status| !matches!(status, SupportLevel::Refused(_)));
    let refused = listed(|status| matches!(status, SupportLevel::Refused(_)));
    // The values of a list of processes are those of the key `type` of each.
    let key = if field.key == "process" {
        "`type` in `process`".to_owned()
    } else {
        format!("`{}`", field.key)
    };
    let _ = write!(page, "\nValues of {key}: {works}");
    if refused.is_empty() {
        page.push_str(".\n");
    } else {
        let _ = writeln!(page, "; refused: {refused}.");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn config_keys_page_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/config-keys.md");
        let page = markdown();
        if std::env::var_os("AITK_UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == page,
            "run `AITK_UPDATE_GOLDEN=1 cargo test -p aitk-common config_keys`"
        );
    }

    #[test]
    fn every_key_is_documented() {
        for (heading, section, _) in sections() {
            for field in section.fields.iter().filter(|field| !field.rare) {
                assert!(!field.doc.is_empty(), "{heading}: {}", field.key);
            }
        }
    }
}
