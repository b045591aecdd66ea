//! Checks the settings of a training that depend on the model: from its configs, names and shapes, before anything is loaded.

use super::image_adapter::{at_key, check_numbers};
use super::{objective, samples, size_check, target};
use crate::adapters::AdapterFile;
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families;
use crate::image_adapters::{self, AdapterRequest};
use aitk_common::job::process::TrainerProcess;
use aitk_common::model_files::PartPaths;
use std::path::Path;

/// Checks that a training can start on a model: what the model predicts fits the options of the loss, the sampler can make the samples, the
/// model has positions for their sizes and those of a slider, the network has layers to train, `train.lr_factors` are for some of its tensors, and the whole model
/// can be saved in the format of the config. `parts`: where parts come from that `model` does not have. `ranks_file`: the file of
/// `network.pretrained_lora_path`, if it is there.
///
/// # Errors
/// The error with which the training would end after loading the model.
pub fn check_settings(
    process: &TrainerProcess,
    model: &Path,
    parts: &PartPaths,
    ranks_file: Option<&Path>,
) -> Result<()> {
    let mut model = families::load_without_weights(model, process.model.arch.name, parts)?;
    objective::objective(process, &*model)?;
    samples::check_samplers(process, &*model)?;
    size_check::check_sizes(process, &*model)?;
    let takes_ranks = process
        .network
        .as_ref()
        .is_some_and(|network| network.ranks_of_pretrained_lora);
    let ranks_file = ranks_file
        .filter(|_| takes_ranks)
        .map(AdapterFile::open_layout)
        .transpose()?;
    // Without the file its ranks are not known.
    if takes_ranks && ranks_file.is_none() {
        return Ok(());
    }
    target::check(process, &mut *model, ranks_file.as_ref())
}

/// Checks that the adapter of images at `path` is one of the type of the config, has finite numbers, and fits the model. Of the model it reads
/// configs, names and shapes, of the adapter every number. `model`: the path of the base model, and where parts come from that it does not
/// have. `None`: it is not on this machine.
///
/// # Errors
/// The error with which the training would end after loading the model, with the key of the adapter before it; or an error of the model.
pub fn check_image_adapter(process: &TrainerProcess, path: &Path, model: Option<(&Path, &PartPaths)>) -> Result<()> {
    let Some(config) = &process.adapter else {
        return Ok(());
    };
    let arch = process.model.arch.name;
    let fits = match model {
        None => image_adapters::check_files(config, path, arch),
        Some((model, parts)) => {
            let model = families::load_without_weights(model, arch, parts)?;
            let request = AdapterRequest {
                config,
                arch,
                path: Some(path),
                seed: 0,
                checkpointing: Checkpointing::Off,
            };
            let target = model.image_adapter_target()?;
            image_adapters::find(config.kind).and_then(|kind| kind.check(&request, &target))
        }
    };
    fits.and_then(|()| check_numbers(path)).map_err(at_key)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::check_settings;
    use crate::testing::{copy_folder, fixtures};
    use aitk_common::job::arch::ArchName;
    use aitk_common::job::lr_factor::LrFactor;
    use aitk_common::job::network::NetworkConfig;
    use aitk_common::job::process::{ProcessType, TrainerProcess};
    use aitk_common::job::sample::SampleItem;
    use aitk_common::job::sampler::SamplerName;
    use aitk_common::job::save::SaveFormat;
    use aitk_common::job::slider::SliderConfig;
    use aitk_common::job::train::LossTarget;
    use aitk_common::job::values::{ImageSize, OneOrMany};
    use aitk_common::model_files::PartPaths;

    fn check(arch: ArchName, folder: &str, change: impl Fn(&mut TrainerProcess)) -> Result<(), String> {
        let mut process = TrainerProcess::default();
        process.model.arch.name = arch;
        process.network = Some(NetworkConfig::default());
        change(&mut process);
        let model = fixtures().join(folder);
        check_settings(&process, &model, &PartPaths::default(), None).map_err(|error| error.to_string())
    }

    fn refused(arch: ArchName, folder: &str, message: &str, change: impl Fn(&mut TrainerProcess)) {
        let error = check(arch, folder, change).unwrap_err();
        assert!(error.contains(message), "{error}");
    }

    fn without(layers: &str) -> impl Fn(&mut TrainerProcess) {
        let network = NetworkConfig {
            network_kwargs: aitk_common::job::network::NetworkKwargs {
                only_if_contains: Some(OneOrMany(vec![layers.to_owned()])),
                ..Default::default()
            },
            ..NetworkConfig::default()
        };
        move |process| process.network = Some(network.clone())
    }

    fn sample(prompt: &str) -> SampleItem {
        SampleItem {
            prompt: prompt.to_owned(),
            ..SampleItem::default()
        }
    }

    #[test]
    fn a_sampler_that_cannot_make_the_steps_of_the_samples_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path();
        copy_folder(&fixtures().join("tiny_sd"), model);
        let config = model.join("scheduler/scheduler_config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(
            &config,
            text.replace("\"skip_prk_steps\": true", "\"skip_prk_steps\": false"),
        )
        .unwrap();
        let check = |steps, disabled| {
            let mut process = TrainerProcess {
                network: Some(NetworkConfig::default()),
                ..TrainerProcess::default()
            };
            process.sample.sampler = SamplerName::Pndm;
            process.sample.sample_steps = steps;
            process.sample.samples = vec![sample("a cat")];
            process.train.disable_sampling = disabled;
            check_settings(&process, model, &PartPaths::default(), None).map_err(|error| error.to_string())
        };
        let error = check(3, false).unwrap_err();
        assert!(
            error.contains("sample.sampler: ") && error.contains("at least 4 steps"),
            "{error}"
        );
        assert_eq!(check(4, false), Ok(()));
        assert_eq!(check(3, true), Ok(()));
    }

    /// `tiny_sd35` has positions for 256 x 256 pixels.
    #[test]
    fn a_sample_beyond_the_positions_of_the_model_is_found() {
        let check = |width: u32, prompt: &str, disabled| {
            check(ArchName::Sd3, "tiny_sd35", |process| {
                process.sample.sampler = SamplerName::FlowMatch;
                (process.sample.width, process.sample.height) = (width, 64);
                process.sample.samples = ["a", prompt].map(sample).to_vec();
                process.train.disable_sampling = disabled;
            })
        };
        assert_eq!(check(256, "b", false), Ok(()));
        let error = check(272, "b", false).unwrap_err();
        assert!(
            error.contains("sample.samples[0]: an image of 272 x 64 pixels is too large"),
            "{error}"
        );
        let error = check(256, "b --h 512", false).unwrap_err();
        assert!(
            error.contains("sample.samples[1]: an image of 256 x 512 pixels"),
            "{error}"
        );
        assert_eq!(check(272, "b", true), Ok(()));
    }

    #[test]
    fn a_size_of_a_slider_beyond_the_positions_of_the_model_is_found() {
        let check = |kind: ProcessType, side: u32| {
            check(ArchName::Sd3, "tiny_sd35", |process| {
                process.kind = kind;
                process.sample.sampler = SamplerName::FlowMatch;
                process.slider = Some(SliderConfig {
                    resolutions: vec![ImageSize(64, 64), ImageSize(64, side)],
                    ..SliderConfig::default()
                });
            })
        };
        assert_eq!(check(ProcessType::Slider, 256), Ok(()));
        let error = check(ProcessType::Slider, 272).unwrap_err();
        assert!(
            error.contains("slider.resolutions[1]: an image of 64 x 272 pixels is too large"),
            "{error}"
        );
        // It uses no sizes.
        assert_eq!(check(ProcessType::SdTrainer, 272), Ok(()));
    }

    /// `tiny_sd21` says `v_prediction` in its scheduler config, which no key of the config does.
    #[test]
    fn options_of_the_loss_are_compared_with_what_the_model_predicts() {
        let correct = |process: &mut TrainerProcess| process.train.correct_pred_norm = true;
        let source = |process: &mut TrainerProcess| process.train.loss_target = LossTarget::Source;
        check(ArchName::Sd1, "tiny_sd", correct).unwrap();
        check(ArchName::Sd1, "tiny_sd", source).unwrap();
        refused(ArchName::Sd2, "tiny_sd21", "train.correct_pred_norm: ", correct);
        refused(ArchName::Sd2, "tiny_sd21", "train.loss_target: ", source);
    }

    #[test]
    fn a_network_needs_a_layer() {
        for (arch, folder) in [(ArchName::Sd1, "tiny_sd"), (ArchName::Flux, "tiny_flux")] {
            check(arch, folder, |_| ()).unwrap();
            refused(arch, folder, "no layer is left to train", without("no_such_layer"));
        }
    }

    #[test]
    fn a_rate_of_blocks_that_the_network_does_not_have_is_found() {
        let rates = |contains: &'static str| {
            move |process: &mut TrainerProcess| {
                process.train.lr_factors = ["lora_up", contains]
                    .map(|contains| LrFactor {
                        contains: contains.to_owned(),
                        factor: 0.5,
                        ..LrFactor::default()
                    })
                    .to_vec();
            }
        };
        check(ArchName::Sd1, "tiny_sd", rates("down_blocks_0")).unwrap();
        refused(
            ArchName::Sd1,
            "tiny_sd",
            "train.lr_factors[1].contains: no trained tensor has `down_blocks_77` in its name; some of the names are lora_unet_",
            rates("down_blocks_77"),
        );
    }

    #[test]
    fn whole_transformers_are_saved_as_folders() {
        let whole = |process: &mut TrainerProcess| process.network = None;
        let as_folder = |process: &mut TrainerProcess| {
            process.network = None;
            process.save.save_format = SaveFormat::Diffusers;
        };
        check(ArchName::Sd1, "tiny_sd", whole).unwrap();
        for (arch, folder) in [(ArchName::Flux, "tiny_flux"), (ArchName::Sd3, "tiny_sd35")] {
            refused(arch, folder, "save.save_format: ", whole);
            check(arch, folder, as_folder).unwrap();
        }
    }
}
