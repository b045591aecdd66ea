//! Keys whose default is derived from other keys. A job has a value for each of them. In a config made from the job that value
//! would count as set by the user and would not follow the keys it is derived from, so it is removed.

use super::arch::{Arch, ArchName};
use super::change;
use super::dataset::DatasetConfig;
use super::model::ModelConfig;
use super::network::NetworkConfig;
use super::node::Node;
use super::process::{Process, ProcessKind};
use super::sample::SampleConfig;
use super::schema::join;
use super::spec::{ConfigSection, JobSpec};

/// Removes derived keys from a config made from a job. Keys that the job's file sets stay.
pub(super) fn remove_derived_keys(config: &mut Node, spec: &JobSpec) {
    for (index, process) in spec.process.iter().enumerate() {
        let path = format!("config.process[{index}]");
        let is_written = |key: &str| spec.positions.contains_key(&join(&path, key));
        let keys = derived_keys(process, &spec.config, &is_written);
        for key in keys.iter().filter(|key| !is_written(key)) {
            change::remove(config, &join(&path, key));
        }
    }
}

/// Returns the keys of a process whose value equals the derived one.
fn derived_keys(process: &Process, body: &ConfigSection, is_written: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut keys = DerivedKeys::default();
    // `dtype` and `model.dtype` are always equal, and one of them must stay.
    let dtype = if is_written("dtype") { "model.dtype" } else { "dtype" };
    match &process.kind {
        ProcessKind::Train(process) => {
            let inherited = process.training_folder.is_some() && process.training_folder == body.training_folder;
            keys.add(inherited, "training_folder");
            let inherited = process.log_dir.is_some() && process.log_dir == body.log_dir;
            keys.add(inherited, "log_dir");
            if let Some(network) = &process.network {
                add_network_keys(network, &mut keys);
            }
            add_model_keys(&process.model, &mut keys);
            add_sample_keys(&process.sample, "sample", &mut keys);
            if let Some(sample) = &process.first_sample {
                add_sample_keys(sample, "first_sample", &mut keys);
            }
            add_datasets_keys(&process.datasets, &mut keys);
        }
        ProcessKind::Generate(process) => {
            keys.add(true, dtype);
            add_model_keys(&process.model, &mut keys);
        }
        ProcessKind::Img2Img(process) => {
            keys.add(true, dtype);
            add_model_keys(&process.model, &mut keys);
            add_datasets_keys(&process.datasets, &mut keys);
        }
        ProcessKind::Extract(process) => {
            keys.add(process.dtype == Some(body.dtype), "dtype");
            keys.add(process.extract_unet == Some(body.extract_unet), "extract_unet");
            let text_encoder = process.extract_text_encoder == Some(body.extract_text_encoder);
            keys.add(text_encoder, "extract_text_encoder");
        }
        ProcessKind::Extension(process) => {
            let inherited = process.training_folder.is_some() && process.training_folder == body.training_folder;
            keys.add(inherited, "training_folder");
        }
        ProcessKind::LmTrain(process) => {
            let inherited = process.training_folder.is_some() && process.training_folder == body.training_folder;
            keys.add(inherited, "training_folder");
        }
        ProcessKind::LmGenerate(_)
        | ProcessKind::LmExport(_)
        | ProcessKind::Caption(_)
        | ProcessKind::RescaleLora(_)
        | ProcessKind::Rare(_) => {}
    }
    keys.0
}

/// Derived keys, as paths below a process.
#[derive(Default)]
struct DerivedKeys(Vec<String>);

impl DerivedKeys {
    fn add(&mut self, is_derived: bool, key: &str) {
        if is_derived {
            self.0.push(key.to_owned());
        }
    }
}

fn add_network_keys(network: &NetworkConfig, keys: &mut DerivedKeys) {
    keys.add(network.rank == Some(network.linear), "network.linear");
    keys.add(network.linear_alpha == network.alpha, "network.linear_alpha");
    keys.add(network.conv_alpha == network.conv.map(f64::from), "network.conv_alpha");
}

fn add_model_keys(model: &ModelConfig, keys: &mut DerivedKeys) {
    let arch = model.legacy_arch().map_or(ArchName::Sd1, |(arch, _)| arch);
    keys.add(model.arch == Arch::from(arch), "model.arch");
}

fn add_sample_keys(sample: &SampleConfig, section: &str, keys: &mut DerivedKeys) {
    let derived = sample.samples == sample.samples_of_prompts();
    keys.add(derived, &format!("{section}.samples"));
}

fn add_datasets_keys(datasets: &[DatasetConfig], keys: &mut DerivedKeys) {
    for (index, dataset) in datasets.iter().enumerate() {
        let legacy = dataset.caption_type.as_ref() == Some(&dataset.caption_ext);
        keys.add(legacy, &format!("datasets[{index}].caption_ext"));
        let controls = dataset.numbered_controls();
        let numbered = !controls.is_empty() && dataset.control_path.0 == controls;
        keys.add(numbered, &format!("datasets[{index}].control_path"));
    }
}
