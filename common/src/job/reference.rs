//! `docs/config-keys.md`: every key, what it means, and what this release does with it. Made from the same
//! declarations that read configs, so it cannot be wrong; a test keeps the file up to date.

use super::caption::{CaptionConfig, CaptionProcess};
use super::cluster::ClusterConfig;
use super::dataset::DatasetConfig;
use super::generate::{GenerateConfig, Img2ImgConfig};
use super::logging::LoggingConfig;
use super::model::ModelConfig;
use super::modify::{ExtractProcess, RescaleLoraProcess};
use super::network::{NetworkConfig, NetworkKwargs};
use super::process::{GenerateProcess, Img2ImgProcess, TrainerProcess};
use super::sample::{SampleConfig, SampleItem};
use super::save::SaveConfig;
use super::schema::{FieldInfo, SectionInfo, Status};
use super::slider::{EmbeddingConfig, ReferenceDataset, Replacement, SliderAnchor, SliderConfig, SliderTarget};
use super::spec::{ConfigSection, Document};
use super::train::{EmaConfig, TrainConfig, ValidationConfig, ValidationItem};
use std::fmt::Write as _;

const INTRODUCTION: &str = "\
# Config keys

Every key of a job config, its default, and what this release does with it. This file is made from the
declarations in `common/src/job`; change those and run
`AITK_UPDATE_GOLDEN=1 cargo test -p aitk-common config_keys`.

| In the last column | means |
|---|---|
| works | does what it says |
| accepted | has no influence on the result, so nothing is said |
| with `x` | only matters together with `x`, which is works, warning or refused itself |
| warning | ignored, with a warning before the job starts; the result stays what was asked for |
| refused | ignoring it would change the result: the job does not start unless the value is the default or off |

A key that is in none of these tables is ignored with a warning, unless it is within two edits of one that
is: then it is an error that names it. An explicit `null` is read as absent.

`${VAR}` in a value is filled in from the environment or from `.env` before the job is sent; a variable that is not
set is an error. A variable that holds a secret (by its name, such as `HF_TOKEN`, or by the look of its value) is not
filled in, because jobs are stored and shown: the job keeps `${HF_TOKEN}`, with a warning. No key needs a secret;
for private models set `HF_TOKEN` where the worker runs (and list them with `--hub-allow`). `device` of ai-toolkit's configs (`cuda:0`) is accepted and
without effect, as it was there; `cluster.device` asks for a kind of device.
";

/// A heading, what stands below it, and whether all of it is refused for now.
fn chapters() -> Vec<(&'static str, SectionInfo, bool)> {
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
        ("`train.validation_config`", ValidationConfig::describe(), true),
        (
            "`train.validation_config.validation_items[]`",
            ValidationItem::describe(),
            true,
        ),
        ("`embedding`", EmbeddingConfig::describe(), true),
        ("`slider`", SliderConfig::describe(), true),
        ("`slider.targets[]`", SliderTarget::describe(), true),
        ("`slider.anchors[]`", SliderAnchor::describe(), true),
        ("`slider.datasets[]`", ReferenceDataset::describe(), true),
        ("`replacements[]`", Replacement::describe(), true),
        ("`config.process[]`: captioners", CaptionProcess::describe(), true),
        ("`caption`", CaptionConfig::describe(), true),
        (
            "`config.process[]`: `locon`, `lora` (extract)",
            ExtractProcess::describe(),
            true,
        ),
        (
            "`config.process[]`: `rescale_lora`",
            RescaleLoraProcess::describe(),
            true,
        ),
    ]
}

/// The whole page.
#[must_use]
pub fn markdown() -> String {
    let mut page = INTRODUCTION.to_owned();
    for (heading, section, later) in chapters() {
        let _ = write!(page, "\n## {heading}\n\n");
        if later {
            page.push_str("Read and checked, but what uses it does not run in this release.\n\n");
        }
        page.push_str("| key | value | default | meaning | this release |\n|---|---|---|---|---|\n");
        for field in section.fields.iter().filter(|field| !field.rare) {
            row(&mut page, field, later);
        }
        let rare: Vec<&FieldInfo> = section.fields.iter().filter(|field| field.rare).collect();
        if !rare.is_empty() {
            page.push_str("\nSeldom used, known by name: ");
            let listed: Vec<String> = rare
                .iter()
                .map(|field| format!("`{}` ({})", field.key, status(field.status)))
                .collect();
            let _ = writeln!(page, "{}.", listed.join(", "));
        }
        for field in section.fields.iter().filter(|field| !field.values.is_empty()) {
            values(&mut page, field);
        }
    }
    page
}

fn row(page: &mut String, field: &FieldInfo, later: bool) {
    let default = match field.default.as_str() {
        "" | "null" => "–".to_owned(),
        text if text.contains(' ') || text.contains('`') || text == "required" => text.to_owned(),
        text => format!("`{text}`"),
    };
    let kind = if field.values.is_empty() {
        field.kind.clone()
    } else {
        "a name, below".to_owned()
    };
    let status = if later {
        "later".to_owned()
    } else {
        status(field.status)
    };
    let _ = writeln!(
        page,
        "| `{}` | {} | {} | {} | {} |",
        field.key,
        cell(&kind),
        cell(&default),
        cell(&field.doc.replace('\n', " ")),
        cell(&status)
    );
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn status(status: Status) -> String {
    match status {
        Status::Works => "works".into(),
        Status::Accepted(why) => format!("accepted: {why}"),
        Status::With(key) => format!("with `{key}`"),
        Status::Ignored(why) => format!("warning: {why}"),
        Status::Refused(why) => format!("refused: {why}"),
    }
}

fn values(page: &mut String, field: &FieldInfo) {
    let listed = |wanted: fn(Status) -> bool| -> String {
        let names: Vec<String> = field
            .values
            .iter()
            .filter(|(_, status)| wanted(*status))
            .map(|(name, _)| format!("`{name}`"))
            .collect();
        names.join(", ")
    };
    let works = listed(|status| !matches!(status, Status::Refused(_)));
    let refused = listed(|status| matches!(status, Status::Refused(_)));
    let _ = write!(page, "\nValues of `{}`: {works}", field.key);
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
        for (heading, section, _) in chapters() {
            for field in section.fields.iter().filter(|field| !field.rare) {
                assert!(!field.doc.is_empty(), "{heading}: {}", field.key);
            }
        }
    }
}
