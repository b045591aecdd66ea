//! `train.merge_network_on_save`: what it changes for the rest of a training, and checks of it against the other keys.

use super::network::NetworkType;
use super::process::TrainerProcess;
use super::schema::ReadContext;

/// The key, for messages.
const KEY: &str = "train.merge_network_on_save";

impl TrainerProcess {
    /// Whether each save merges the network into the model (`train.merge_network_on_save`).
    #[must_use]
    pub fn merges_network(&self) -> bool {
        self.train.merge_network_on_save && self.network.is_some()
    }

    /// Whether saves are whole models: of a full fine-tune, or with the merged network.
    #[must_use]
    pub fn saves_whole_model(&self) -> bool {
        self.trains_whole_model() || self.merges_network()
    }

    /// Checks `train.merge_network_on_save` against the other keys.
    pub(super) fn check_merge(&self, cx: &mut ReadContext) {
        if !self.train.merge_network_on_save {
            return;
        }
        let Some(network) = &self.network else {
            cx.warn_at(KEY, "has no effect: there is no `network` to merge");
            return;
        };
        let (train, model) = (&self.train, &self.model);
        if network.kind == NetworkType::Dora {
            cx.error_at(
                KEY,
                "cannot be used with `network.type: dora`, which ai-toolkit does not merge either: use `lora`",
            );
        }
        if network.network_kwargs.dora_wd {
            cx.error_at(
                KEY,
                "cannot be used together with `network.network_kwargs.dora_wd`, whose magnitudes cannot start anew: set it to false",
            );
        }
        if train.ema_config.use_ema {
            cx.error_at(
                KEY,
                "cannot be used together with `train.ema_config`: an average over a LoRA that starts anew at each save would add \
                 merged changes a second time; set `use_ema: false`",
            );
        }
        let merged = [
            (train.train_unet && model.quantize, "model.quantize"),
            (
                train.train_text_encoder && model.quantizes_text_encoder(),
                "model.quantize_te",
            ),
        ];
        for (on, key) in merged {
            if on {
                let message = "cannot be used together with `train.merge_network_on_save`: most of a LoRA's change would be rounded away in \
                               a quantised weight; set it to false";
                cx.error_at(key, message);
            }
        }
        if model.offloads_layers() {
            cx.error_at(
                "model.layer_offloading",
                "cannot be used together with `train.merge_network_on_save`, which changes the weights in memory: set it to false",
            );
        }
        if model.lora_path.is_some() {
            cx.error_at(
                "model.lora_path",
                "cannot be used together with `train.merge_network_on_save`, whose saves would not include this LoRA; merge it into \
                 the model first",
            );
        }
        if train.train_text_encoder && model.arch.name.takes_parts() {
            cx.error_at(
                "train.train_text_encoder",
                format!(
                    "cannot be used together with `train.merge_network_on_save`: a saved model of `arch: {}` has the transformer alone",
                    model.arch
                ),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, LoadOptions, parse};

    /// The errors of a process with these lines.
    fn errors(lines: &str) -> String {
        let text = format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: sd_trainer\n      training_folder: out\n      \
             datasets: [{{folder_path: cats}}]\n{lines}"
        );
        let read = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default());
        read.err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn a_full_finetune_of_a_transformer_trains_no_text_encoder() {
        for arch in ["flux", "flux_kontext", "sd3", "chroma", "zimage"] {
            let job = |network: &str| {
                errors(&format!(
                    "      model: {{name_or_path: models/m, arch: {arch}}}\n{network}      \
                     train: {{steps: 2, train_text_encoder: true, noise_scheduler: flowmatch}}\n      save: {{save_format: \
                     diffusers}}\n      sample: {{sampler: flowmatch}}\n"
                ))
            };
            assert!(job("").contains("train.train_text_encoder"), "{arch}: {}", job(""));
            if arch == "sd3" {
                assert_eq!(job("      network: {type: lora}\n"), "", "{arch}");
            }
        }
        let whole =
            "      model: {name_or_path: models/sd, arch: sd15}\n      train: {steps: 2, train_text_encoder: true}\n";
        assert_eq!(errors(whole), "");
    }

    #[test]
    fn what_a_merged_network_excludes_is_named() {
        let job = |model: &str, network: &str, train: &str| {
            errors(&format!(
                "      model: {{name_or_path: models/sd, {model}}}\n      network: {{type: {network}}}\n      \
                 train: {{merge_network_on_save: true, {train}}}\n"
            ))
        };
        assert_eq!(job("arch: sd15", "lora", "steps: 2"), "");
        for (model, network, train, expected) in [
            ("arch: sd15", "dora", "steps: 2", "use `lora`"),
            ("arch: sd15", "lora", "ema_config: {use_ema: true}", "use_ema: false"),
            ("arch: sd15, quantize: true", "lora", "steps: 2", "model.quantize"),
            (
                "arch: sd15, layer_offloading: true",
                "lora",
                "steps: 2",
                "layer_offloading",
            ),
            (
                "arch: sd15, lora_path: a.safetensors",
                "lora",
                "steps: 2",
                "model.lora_path",
            ),
            (
                "arch: flux",
                "lora",
                "train_text_encoder: true",
                "the transformer alone",
            ),
            (
                "arch: sd15",
                "lora",
                "merge_network_on_save_strength: 1e9",
                "expected a number",
            ),
        ] {
            let found = job(model, network, train);
            assert!(found.contains(expected), "{model} {network} {train}: {found}");
        }
    }
}
