//! Generates `docs/sd-scripts.md`; a test checks that the file is up to date.

use super::dataset_options::{DATASET, SHARED, SUBSET};
use super::network_arguments::documented_arguments;
use super::option::{Fate, OptionRow, UsedBy};
use super::options::GROUPS;
use std::fmt::Write as _;

const INTRODUCTION: &str = "# Configs of sd-scripts and the kohya GUI

<!-- Made from the program: `AITK_UPDATE_GOLDEN=1 cargo test -p aitk-common sd_scripts_page`. Do not edit. -->

This page is for people who train with kohya's sd-scripts or the kohya GUI and move to aitk with the configs they have: how to import them, what
becomes of each option, and what is trained differently.

    aitk import config.toml                    # prints the YAML that it becomes, and notes on standard error
    aitk import config.toml -o my_lora.yaml
    aitk validate config.toml                  # imports it, and checks model and images
    aitk run config.toml
    aitk submit config.toml --follow

`config.toml` is what `--config_file` of sd-scripts takes, with or without sections, whose names have no meaning. The data set config is the one that
`dataset_config` names, or that of `--dataset-config FILE`. Paths are relative to the current folder, as for sd-scripts. A `.json` file that the
kohya GUI's tabs for LoRAs, DreamBooth or fine-tuning saved is recognised by its keys and imported in the same way; of its other tabs import the TOML
that it writes into the output folder when a training starts.

| if | then |
|---|---|
| the options and the model do not say which script the config is for | an error says so; name it: `aitk run config.toml --script sdxl_train_network`, so with import, validate, fit and submit too |
| an option changes the result, and aitk has no counterpart of it | an error names the option, its line and the reason. Remove it, or choose another value, in a copy of the file |
| an option is ignored, or has a slightly other effect | a note |
| an option is unknown, or is set twice, or contradicts another | an error |
| `max_train_epochs`, `save_every_n_epochs`, `sample_every_n_epochs` or `validation_split` is set | the images are counted, so that their folders must be on this machine |

Scripts: `train_network`, `sdxl_train_network`, `flux_train_network`, `sd3_train_network`, for whole models `train_db`, `fine_tune`,
`sdxl_train`, `flux_train`, `sd3_train`, and for words `train_textual_inversion`, `sdxl_train_textual_inversion`. A script is recognised by
`network_module`, by `token_string`, by options that only one has (`ae`, `clip_g`, `v2`, …), by the content of the model's files if they are on this machine, and else by the name of the model (`sd_xl_base_1.0`, `flux1-dev`, `v1-5-pruned`).
Of the two for whole models of Stable Diffusion 1.x and 2.x, `in_json` says `fine_tune`, and `train_data_dir` without it `train_db`; with a
`dataset_config`, `train_text_encoder` says `fine_tune`, and without that name the script.

## What is trained differently

The YAML states every default of sd-scripts that is not aitk's: the optimizer's numbers, the learning rate, an alpha of 1, the rank, text encoders
that are trained, no buckets, captions in `.caption` files, and so on. What no option decides:

| | sd-scripts | aitk |
|---|---|---|
| random numbers | torch's, from `seed` | those of [randomness.md](randomness.md); the same seed gives another training |
| epochs | counted as sd-scripts counts them: buckets, batches, repeats, regularisation images, `gradient_accumulation_steps` | the steps are in the YAML |
| buckets | a table of sizes between `min_bucket_reso` and `max_bucket_reso`; smaller images are enlarged without `bucket_no_upscale` | the size of the same area at the image's own ratio; smaller images keep their size |
| `validation_split` | the loss of the training with its weights, at the timesteps 200, 400, 600 and 800 (at four others between `min_timestep` and `max_timestep`), every `validate_every_n_steps` steps and at the end of epochs | mean squared errors at these timesteps (`val/loss`), every this many steps or epochs, and after the first and the last step: the figures differ by the weights and the noise |
| regularisation images | in the same batches as the others | at every second step |
| `gradient_accumulation_steps` | gradients are averaged | they are added, so that `loss_multiplier` is 1 / steps, and the loss that is shown is as much smaller |
| `flip_aug` | each image is flipped half of the time | both images; other data sets are repeated twice as often, if they have no flips |
| words (`token_string`) | captions are trained as they are; the vectors are called `word`, `word1`, `word2` | captions without the word get it at their beginning; the vectors are `word`, `word_1`, `word_2` ([textual-inversion.md](textual-inversion.md)) |
| folders | images directly in the folder; `.bmp` too | those in folders below it too; no `.bmp` |
| masks | weights as they are; a position of the latents has the mean of its pixels | weights scaled to 1 on average over a batch; a position of the latents has its upper left pixel, as in ai-toolkit |
| FLUX.1, SD3: q, k and v (and the MLP of single blocks) | one LoRA, or with `split_qkv` one each | one each |
| `${VAR}` and `[name]` in texts | as they are | replaced by a variable of the environment, and by the name of the run, with a note |
| names of files | `output_dir/output_name-step00000500.safetensors` | `training_folder/name/name_000000500.safetensors`; `aitk convert --to sd-scripts` writes sd-scripts' names of layers |

## Options of the training config

A default without a value is off. In the last column, *no influence* means that the result is the same, so that there is no message; options that the
script does not use are ignored with a note, as sd-scripts ignores them.
";

/// Returns the whole page.
#[must_use]
pub fn markdown() -> String {
    let mut page = INTRODUCTION.to_owned();
    for group in GROUPS {
        let _ = write!(page, "\n### {}\n\n", group.title);
        write_table(&mut page, group.options);
    }
    page.push_str("\n### `network_args`\n\n| argument | becomes |\n|---|---|\n");
    for (name, what) in documented_arguments() {
        let _ = writeln!(page, "| `{name}` | {} |", escaped(&what));
    }
    page.push_str(
        "\n## Options of the data set config\n\nA subset takes its options from `[[datasets.subsets]]`, else from `[[datasets]]`, else from `[general]`, \
         else from the training\nconfig, as in sd-scripts. What an option becomes is a key of `datasets[]`.\n",
    );
    for (title, rows) in [
        ("Of `[[datasets]]` and `[general]`", DATASET),
        ("Of `[[datasets.subsets]]`, `[[datasets]]` and `[general]`", SHARED),
        ("Of `[[datasets.subsets]]`", SUBSET),
    ] {
        let _ = write!(page, "\n### {title}\n\n");
        write_table(&mut page, rows);
    }
    page
}

fn write_table(page: &mut String, rows: &[OptionRow]) {
    page.push_str("| option | values | default | of | becomes |\n|---|---|---|---|---|\n");
    for row in rows {
        let default = match row.default {
            "" | "false" => "–".to_owned(),
            text if text.contains(' ') => text.to_owned(),
            text => format!("`{text}`"),
        };
        let what = match row.fate {
            Fate::Translated(what) => what.to_owned(),
            Fate::NoInfluence(why) => format!("no influence: {why}"),
            Fate::Noted(why) => format!("ignored with a note: {why}"),
            Fate::Refused { unless: "", why } => format!("refused: {why}"),
            Fate::Refused { unless, why } => format!("refused except {unless}: {why}"),
        };
        let _ = writeln!(
            page,
            "| `{}` | {} | {default} | {} | {} |",
            row.name,
            escaped(&row.kind.described()),
            scripts(row.used_by),
            escaped(&what)
        );
    }
}

/// The scripts that use an option, in a few words.
fn scripts(used_by: UsedBy) -> String {
    let families: Vec<&str> = [(1, "SD"), (2, "SDXL"), (4, "FLUX.1"), (8, "SD3")]
        .into_iter()
        .filter_map(|(bit, name)| (used_by.0 & bit != 0).then_some(name))
        .collect();
    let families = if families.len() == 4 {
        "all".to_owned()
    } else {
        families.join(", ")
    };
    match used_by.0 & 0xf0 {
        0x10 => format!("{families}; LoRA"),
        0x20 => format!("{families}; whole model"),
        0x40 => format!("{families}; textual inversion"),
        _ => families,
    }
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn sd_scripts_page_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/sd-scripts.md");
        let page = markdown();
        if std::env::var_os("AITK_UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == page,
            "run `AITK_UPDATE_GOLDEN=1 cargo test -p aitk-common sd_scripts_page`"
        );
    }

    #[test]
    fn no_option_is_in_two_lines() {
        for rows in [
            GROUPS
                .iter()
                .flat_map(|group| group.options)
                .map(|row| row.name)
                .collect::<Vec<_>>(),
            [DATASET, SHARED, SUBSET]
                .into_iter()
                .flatten()
                .map(|row| row.name)
                .collect(),
            documented_arguments().map(|(name, _)| name).collect(),
        ] {
            let mut names = rows.clone();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), rows.len(), "{rows:?}");
        }
    }
}
