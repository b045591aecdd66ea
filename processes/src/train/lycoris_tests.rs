//! Whole jobs that train other types of adapters than LoRA: they resume exactly, write the names of ai-toolkit, and have the tensors
//! that the planner counts.

use super::adapter_options::{adapter_config, adapter_type};
use super::resume_exactness::check_resumption;
use super::tests::{logs, losses, run_spec, spec, trainer};
use super::transformer_test_runs::{complete, flow_trainer, tensors};
use crate::adapters::{AdapterFile, AdapterNetwork, LoraTensors};
use crate::families::{self, LoadOptions, PartRole};
use crate::rng::TorchGenerator;
use crate::testing::{chroma_folder, fixtures, sampled_cases, zimage_folder};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::ArchName;
use aitk_common::job::dtype::DType;
use aitk_common::job::layer_rank::LayerRank;
use aitk_common::job::network::{NetworkConfig, NetworkKwargs, NetworkType};
use aitk_common::job::optimizer::OptimizerName;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::values::{Integer, OneOrMany};
use aitk_common::plan::output::RunOutput;
use aitk_common::plan::parameter_counts::ParameterCounts;
use std::collections::BTreeSet;
use std::path::Path;

fn network(kind: NetworkType) -> NetworkConfig {
    NetworkConfig {
        kind,
        linear: 2,
        linear_alpha: 1.0,
        conv: Some(3),
        conv_alpha: Some(6.0),
        lokr_full_rank: false,
        lokr_factor: Integer(2),
        ..NetworkConfig::default()
    }
}

/// With every kind of dropout.
fn dropping(kind: NetworkType) -> NetworkConfig {
    NetworkConfig {
        dropout: Some(0.2),
        network_kwargs: NetworkKwargs {
            rank_dropout: Some(0.3),
            module_dropout: Some(0.4),
            ..NetworkKwargs::default()
        },
        ..network(kind)
    }
}

/// With the kinds of dropout of LyCORIS.
fn dropping_outputs(kind: NetworkType) -> NetworkConfig {
    let is_lora = kind == NetworkType::Locon;
    NetworkConfig {
        network_kwargs: NetworkKwargs {
            rank_dropout: Some(0.3).filter(|_| !is_lora),
            output_dropout: Some(0.3).filter(|_| is_lora),
            module_dropout: Some(0.4),
            ..NetworkKwargs::default()
        },
        ..network(kind)
    }
}

/// With a Tucker decomposition of convolutions.
fn with_cores(kind: NetworkType) -> NetworkConfig {
    NetworkConfig {
        conv: Some(2),
        network_kwargs: NetworkKwargs {
            use_cp: true,
            ..NetworkKwargs::default()
        },
        ..network(kind)
    }
}

/// With magnitudes of the outputs or of the inputs of each layer.
fn decomposed(kind: NetworkType, on_outputs: bool) -> NetworkConfig {
    NetworkConfig {
        network_kwargs: NetworkKwargs {
            dora_wd: true,
            wd_on_out: on_outputs,
            module_dropout: Some(0.2),
            ..NetworkKwargs::default()
        },
        ..network(kind)
    }
}

/// With a trained number for each layer.
fn with_scalar(kind: NetworkType) -> NetworkConfig {
    NetworkConfig {
        network_kwargs: NetworkKwargs {
            use_scalar: true,
            ..NetworkKwargs::default()
        },
        ..network(kind)
    }
}

/// With ranks of their own for some layers.
fn with_layer_ranks(kind: NetworkType) -> NetworkConfig {
    let entry = |contains: &str, linear, conv| LayerRank {
        contains: contains.into(),
        linear,
        linear_alpha: Some(1.0),
        conv,
        ..LayerRank::default()
    };
    NetworkConfig {
        layer_ranks: vec![
            entry("attn1", Some(0), None),
            entry("down_blocks.0", Some(2), Some(1)),
            entry("to_k", None, Some(0)),
            entry("proj_out", Some(5), None),
        ],
        ..network(kind)
    }
}

/// With whole differences of some layers.
fn with_differences(kind: NetworkType) -> NetworkConfig {
    NetworkConfig {
        network_kwargs: NetworkKwargs {
            full_if_contains: OneOrMany(vec![
                "conv_in".to_owned(),
                "mid_block".to_owned(),
                "layers.0".to_owned(),
            ]),
            parameter_threshold: 1000,
            ..NetworkKwargs::default()
        },
        ..network(kind)
    }
}

#[test]
fn every_type_of_adapter_of_a_unet_resumes_exactly() {
    let locon = network(NetworkType::Locon);
    let full = NetworkConfig {
        lokr_full_rank: true,
        lokr_factor: Integer(-1),
        ..network(NetworkType::Lokr)
    };
    for (network, optimizer) in sampled_cases(vec![
        (network(NetworkType::Lokr), OptimizerName::AdamW8Bit),
        (full, OptimizerName::Adafactor),
        (locon.clone(), OptimizerName::Adafactor),
        (locon, OptimizerName::AdamW8Bit),
        (network(NetworkType::Dora), OptimizerName::AdamW),
        (network(NetworkType::Loha), OptimizerName::Adafactor),
        (network(NetworkType::Fullrank), OptimizerName::AdamW8Bit),
        (dropping(NetworkType::Dora), OptimizerName::AdamW),
        (dropping_outputs(NetworkType::Lokr), OptimizerName::AdamW),
        (dropping_outputs(NetworkType::Loha), OptimizerName::AdamW),
        (dropping_outputs(NetworkType::Locon), OptimizerName::AdamW),
        (with_cores(NetworkType::Lora), OptimizerName::Adafactor),
        (with_cores(NetworkType::Locon), OptimizerName::AdamW),
        (with_cores(NetworkType::Loha), OptimizerName::AdamW8Bit),
        (with_cores(NetworkType::Lokr), OptimizerName::AdamW),
        (decomposed(NetworkType::Lora, false), OptimizerName::AdamW),
        (decomposed(NetworkType::Loha, true), OptimizerName::Adafactor),
        (decomposed(NetworkType::Lokr, true), OptimizerName::AdamW8Bit),
        (with_scalar(NetworkType::Loha), OptimizerName::AdamW8Bit),
        (with_scalar(NetworkType::Lokr), OptimizerName::Adafactor),
        (with_scalar(NetworkType::Lora), OptimizerName::AdamW),
        (with_differences(NetworkType::Lora), OptimizerName::Prodigy),
        (with_layer_ranks(NetworkType::Lora), OptimizerName::AdamW),
    ]) {
        check_resumption(&|root| {
            let mut process = trainer(root, 6);
            process.network = Some(network.clone());
            process.train.optimizer = optimizer;
            process
        });
    }
}

#[test]
fn a_network_with_the_ranks_of_a_file_starts_from_it_and_resumes_exactly() {
    let start = fixtures().join("lora/sd_scripts_original.safetensors");
    let network = NetworkConfig {
        pretrained_lora_path: Some(start.display().to_string()),
        ranks_of_pretrained_lora: true,
        ..NetworkConfig::default()
    };
    let process = |root: &Path| {
        let mut process = trainer(root, 6);
        process.train.train_text_encoder = true;
        process.network = Some(network.clone());
        process
    };
    check_resumption(&process);
    let dir = tempfile::tempdir().unwrap();
    let mut unchanged = process(dir.path());
    (unchanged.train.lr, unchanged.train.steps) = (0.0, 1);
    complete(unchanged);
    let (theirs, ours) = (
        AdapterFile::open(&start).unwrap(),
        tensors(&dir.path().join("out/tiny/tiny.safetensors")),
    );
    assert_eq!(ours.len(), 3 * theirs.modules.len());
    for module in &theirs.modules {
        let expected = module.tensors.as_any().downcast_ref::<LoraTensors>().unwrap();
        let same = ours.iter().any(|(name, down)| {
            name.ends_with("lora_down.weight")
                && down.dims() == expected.down.dims()
                && crate::testing::gap(down, &expected.down) < 1e-6
        });
        assert!(same, "{}", module.stem);
    }
}

#[test]
fn a_lokr_of_a_transformer_resumes_exactly_and_is_in_samples() {
    let model = zimage_folder(false);
    let process = |root: &Path| {
        let mut process = flow_trainer(root, ArchName::Zimage, model.path(), 6);
        process.network = Some(NetworkConfig {
            lokr_full_rank: true,
            ..network(NetworkType::Lokr)
        });
        process.train.gradient_checkpointing = true;
        process
    };
    check_resumption(&process);
    let dir = tempfile::tempdir().unwrap();
    let mut with_samples = process(dir.path());
    with_samples.train.disable_sampling = false;
    with_samples.train.lr = 0.05;
    with_samples.sample.sampler = aitk_common::job::sampler::SamplerName::FlowMatch;
    with_samples.sample.samples = vec![SampleItem {
        prompt: "a red circle".into(),
        ..SampleItem::default()
    }];
    (
        with_samples.sample.width,
        with_samples.sample.height,
        with_samples.sample.sample_steps,
    ) = (32, 32, 2);
    let events = complete(with_samples);
    let samples = events.iter().filter_map(|event| match event {
        ChildEvent::Artifact { kind, path, .. } if kind == "sample" => Some(std::fs::read(path).unwrap()),
        _ => None,
    });
    let samples: Vec<Vec<u8>> = samples.collect();
    assert_eq!(samples.len(), 2);
    assert_ne!(samples[0], samples[1], "the LoKr has no effect on samples");
    let found = tensors(&dir.path().join("out/tiny/tiny.safetensors"));
    for name in [
        "diffusion_model.layers.0.attention.to_q.lokr_w1",
        "diffusion_model.layers.0.attention.to_q.lokr_w2",
        "diffusion_model.layers.0.attention.to_q.alpha",
    ] {
        assert!(found.contains_key(name), "{name} in {:?}", found.keys());
    }
}

/// Adapters are in float32 beside a model in half precision.
#[test]
fn a_portable_training_of_an_adapter_has_the_same_losses_in_every_dtype() {
    for kind in sampled_cases(vec![
        NetworkType::Lokr,
        NetworkType::Dora,
        NetworkType::Loha,
        NetworkType::Fullrank,
    ]) {
        check_dtypes(kind);
    }
}

fn check_dtypes(kind: NetworkType) {
    let losses_on = |device: Option<DeviceRef>, dtype: DType| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 4);
        process.network = Some(network(kind));
        process.train.dtype = dtype;
        let mut spec = spec(process);
        spec.device = device.unwrap_or(spec.device);
        let (outcome, events) = run_spec(&spec);
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        losses(&events)
    };
    let expected = losses_on(None, DType::F32);
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::BF16, 0.03)] {
        let found = losses_on(Some(DeviceRef::PORTABLE_CPU), dtype);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            let error = (found / expected - 1.0).abs();
            assert!(
                error < tolerance,
                "{kind} in {dtype:?}: a loss of {found}, not {expected}"
            );
        }
    }
}

/// Each type is saved with the names that the programs know that read it.
#[test]
fn saved_files_have_the_names_of_their_type() {
    for (network, names) in [
        (
            network(NetworkType::Dora),
            &["lora_down.weight", "lora_up.weight", "alpha", "dora_scale"][..],
        ),
        (
            network(NetworkType::Loha),
            &["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"],
        ),
        (
            with_scalar(NetworkType::Loha),
            &["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"],
        ),
        (network(NetworkType::Fullrank), &["diff", "diff_b"]),
        (
            decomposed(NetworkType::Loha, false),
            &[
                "hada_w1_a",
                "hada_w1_b",
                "hada_w2_a",
                "hada_w2_b",
                "alpha",
                "dora_scale",
            ],
        ),
        (
            with_differences(NetworkType::Lora),
            &["diff", "diff_b", "lora_down.weight", "lora_up.weight", "alpha"],
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 2);
        process.network = Some(network.clone());
        complete(process);
        let path = dir.path().join("out/tiny/tiny.safetensors");
        let suffixes: BTreeSet<String> = tensors(&path)
            .keys()
            .map(|name| name.split_once('.').unwrap().1.to_owned())
            .collect();
        let expected: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(suffixes, expected);
        assert!(AdapterFile::open(&path).unwrap().unknown.is_empty());
    }
}

/// The scalar of a LoCon is in its file as a part of `lora_up`, which is zero before it is trained.
#[test]
fn a_locon_is_saved_without_its_scalar() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 2);
    process.network = Some(network(NetworkType::Locon));
    process.train.lr = 0.01;
    complete(process);
    let file = AdapterFile::open(&dir.path().join("out/tiny/tiny.safetensors")).unwrap();
    assert!(file.unknown.is_empty());
    for module in &file.modules {
        let lora: &LoraTensors = module.tensors.as_any().downcast_ref().unwrap();
        assert_eq!(lora.scalar, 1.0);
        let largest = lora.up.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        // Adam moves the scalar by about the learning rate at each step, and the numbers of `up` were up to sqrt(6 / rank).
        assert!(largest > 1e-3 && largest < 0.1, "{}: {largest}", module.stem);
    }
}

/// The bytes of a save of this network, by the planner.
fn planned_bytes(process: &TrainerProcess, network: NetworkConfig) -> u64 {
    let mut process = process.clone();
    process.network = Some(network);
    let counts = ParameterCounts::read(Path::new(&process.model.name_or_path));
    RunOutput::of(&process, counts).save_bytes.unwrap()
}

/// The numbers that the engine trains with this network.
fn trained_numbers(process: &TrainerProcess, network: &NetworkConfig) -> u64 {
    let path = Path::new(&process.model.name_or_path);
    let mut model = families::load(path, process.model.arch.name, &LoadOptions::cpu()).unwrap();
    let mut parts = model.parts();
    parts.retain(|part| part.role == PartRole::Denoiser);
    let (adapter, config) = (adapter_type(network).unwrap(), adapter_config(network));
    let mut generator = TorchGenerator::manual_seed(1);
    let network = AdapterNetwork::attach_as(&*adapter, &config, None, &mut parts, &mut generator).unwrap();
    network.params().iter().map(|param| param.var.elem_count() as u64).sum()
}

#[test]
fn the_planner_counts_the_numbers_that_are_trained() {
    let dir = tempfile::tempdir().unwrap();
    let (chroma, zimage) = (chroma_folder(), zimage_folder(false));
    for (arch, model) in [
        (ArchName::Sd1, fixtures().join("tiny_sd")),
        (ArchName::Sdxl, fixtures().join("tiny_sdxl")),
        (ArchName::Chroma, chroma.path().to_path_buf()),
        (ArchName::Flux, fixtures().join("tiny_flux")),
        (ArchName::Sd3, fixtures().join("tiny_sd35")),
        (ArchName::Zimage, zimage.path().to_path_buf()),
    ] {
        let process = flow_trainer(dir.path(), arch, &model, 1);
        let lora = |rank| NetworkConfig {
            linear: rank,
            conv: None,
            ..network(NetworkType::Lora)
        };
        // What does not depend on the rank.
        let header = 2 * planned_bytes(&process, lora(1)) - planned_bytes(&process, lora(2));
        let lokr = network(NetworkType::Lokr);
        let full = |factor| NetworkConfig {
            lokr_full_rank: true,
            lokr_factor: Integer(factor),
            ..lokr.clone()
        };
        let mut networks = vec![lora(3), full(-1), full(4), lokr.clone()];
        networks.push(NetworkConfig {
            conv: None,
            transformer_only: false,
            lokr_factor: Integer(-1),
            ..lokr
        });
        networks.extend([NetworkType::Dora, NetworkType::Loha, NetworkType::Fullrank].map(network));
        for on_outputs in [true, false] {
            networks.extend([NetworkType::Loha, NetworkType::Lokr].map(|kind| decomposed(kind, on_outputs)));
        }
        networks.push(NetworkConfig {
            lokr_full_rank: true,
            ..decomposed(NetworkType::Lokr, true)
        });
        networks.extend([NetworkType::Lora, NetworkType::Loha, NetworkType::Lokr].map(with_scalar));
        networks.extend([NetworkType::Lora, NetworkType::Lokr].map(with_differences));
        networks.extend([NetworkType::Lora, NetworkType::Lokr].map(with_layer_ranks));
        networks.extend([NetworkType::Lora, NetworkType::Lokr].map(|kind| NetworkConfig {
            all_layers: true,
            ..with_differences(kind)
        }));
        for (both, unbalanced) in [(true, false), (false, true), (true, true)] {
            let mut split = network(NetworkType::Lokr);
            split.network_kwargs.decompose_both = both;
            split.network_kwargs.unbalanced_factorization = unbalanced;
            split.network_kwargs.smaller_factor_first = unbalanced;
            (split.linear, split.conv) = (1, Some(1));
            networks.push(split);
        }
        let mut norms_of_lycoris = network(NetworkType::Loha);
        norms_of_lycoris.network_kwargs.train_norm = true;
        networks.push(norms_of_lycoris);
        if !arch.is_flow() {
            for (whole, classes) in [
                (true, "UNet2DConditionModel"),
                (true, "Attention"),
                (false, "ResnetBlock2D"),
            ] {
                let mut network = network(NetworkType::Lora);
                network.all_layers = true;
                network.network_kwargs.full_train_in_out = whole;
                network.network_kwargs.target_lin_modules = OneOrMany(vec![classes.to_owned()]);
                networks.push(network);
            }
            networks.extend(
                [
                    NetworkType::Lora,
                    NetworkType::Locon,
                    NetworkType::Loha,
                    NetworkType::Lokr,
                ]
                .map(with_cores),
            );
            networks.push(decomposed(NetworkType::Lora, true));
            networks.push(decomposed(NetworkType::Lora, false));
            let mut both = with_cores(NetworkType::Loha);
            both.network_kwargs.dora_wd = true;
            networks.push(both);
            networks.push(network(NetworkType::Locon));
            networks.push(NetworkConfig {
                conv: None,
                ..network(NetworkType::Lycoris)
            });
        }
        for network in networks {
            let planned = (planned_bytes(&process, network.clone()) - header) / 4;
            assert_eq!(planned, trained_numbers(&process, &network), "{arch}: {network:?}");
        }
    }
}
