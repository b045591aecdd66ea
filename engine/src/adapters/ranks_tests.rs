//! Layers with ranks of their own: of the config, or of a LoRA file.

use super::*;
use crate::rng::TorchGenerator;
use crate::testing::{tiny_sd, unet_part};
use candle_core::DType;
use std::collections::BTreeMap;
use std::path::Path;

fn config() -> AdapterConfig {
    let rank = |rank, alpha| Rank { rank, alpha };
    let entry = |contains: &str, linear, conv| LayerRank {
        contains: contains.into(),
        linear,
        conv,
    };
    AdapterConfig {
        rank: 4,
        alpha: 2.0,
        layer_ranks: vec![
            entry("attn1", rank(0, 1.0), rank(0, 1.0)),
            // With dots and without.
            entry("down_blocks.0.", rank(2, 3.0), rank(5, 0.5)),
            entry("mid_block_attentions", rank(7, 7.0), rank(0, 1.0)),
            // The first entry counts.
            entry("down_blocks", rank(6, 1.0), rank(0, 1.0)),
        ],
        ..AdapterConfig::default()
    }
}

/// The rank and the alpha of each layer that is saved.
fn ranks(network: &AdapterNetwork) -> BTreeMap<String, (usize, f32)> {
    let tensors = network.tensors(DType::F32).unwrap();
    let down = tensors.iter().filter_map(|(name, tensor)| {
        let layer = name.strip_suffix(".lora_down.weight")?;
        let alpha = tensors[&format!("{layer}.alpha")].to_scalar::<f32>().unwrap();
        Some((layer.to_owned(), (tensor.dims()[0], alpha)))
    });
    down.collect()
}

fn attach(config: &AdapterConfig, file: Option<&AdapterFile>) -> crate::error::Result<AdapterNetwork> {
    let mut model = tiny_sd();
    let mut generator = TorchGenerator::manual_seed(9);
    AdapterNetwork::attach_as(&Lora, config, file, &mut [unet_part(&mut model)], &mut generator)
}

fn save(network: &AdapterNetwork, path: &Path) -> AdapterFile {
    let bytes = lora_file_bytes(&network.tensors(DType::F32).unwrap(), BTreeMap::new()).unwrap();
    std::fs::write(path, bytes).unwrap();
    AdapterFile::open(path).unwrap()
}

#[test]
fn layers_have_the_ranks_of_the_first_entry_with_their_name() {
    let found = ranks(&attach(&config(), None).unwrap());
    let of = |name: &str| found.get(name).copied();
    let block = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0";
    assert_eq!(of(&format!("{block}_attn1_to_q")), None);
    assert_eq!(of(&format!("{block}_attn2_to_q")), Some((2, 3.0)));
    // A larger convolution, though the network has none.
    assert_eq!(of("lora_unet_down_blocks_0_resnets_0_conv1"), Some((5, 0.5)));
    assert_eq!(of("lora_unet_mid_block_resnets_0_conv1"), None);
    assert_eq!(of("lora_unet_mid_block_attentions_0_proj_in"), Some((7, 7.0)));
    assert_eq!(of("lora_unet_down_blocks_1_resnets_0_time_emb_proj"), Some((6, 1.0)));
    assert_eq!(of("lora_unet_down_blocks_1_resnets_0_conv1"), None);
    assert_eq!(of("lora_unet_up_blocks_0_resnets_0_time_emb_proj"), Some((4, 2.0)));
}

#[test]
fn layers_have_the_ranks_of_a_file_and_those_it_lacks_are_not_trained() {
    let folder = tempfile::tempdir().unwrap();
    let network = attach(&config(), None).unwrap();
    let file = save(&network, &folder.path().join("a.safetensors"));
    let other = AdapterConfig {
        rank: 16,
        ..AdapterConfig::default()
    };
    let again = attach(&other, Some(&file)).unwrap();
    assert_eq!(ranks(&again), ranks(&network));
    let report = again.load(&file).unwrap();
    assert_eq!(
        (
            report.loaded,
            report.missing.len(),
            report.unknown.len(),
            report.resized
        ),
        (network.layers(), 0, 0, 0)
    );
    // The filters of the config select among them.
    let some = AdapterConfig {
        only_if_contains: vec!["mid_block".into()],
        ..other
    };
    let some = ranks(&attach(&some, Some(&file)).unwrap());
    assert!(!some.is_empty() && some.keys().all(|name| name.contains("mid_block")));
}

#[test]
fn a_file_without_ranks_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = tiny_sd();
    let mut generator = TorchGenerator::manual_seed(9);
    let config = AdapterConfig::default();
    let parts = &mut [unet_part(&mut model)];
    let loha = AdapterNetwork::attach_as(&Loha, &config, None, parts, &mut generator).unwrap();
    let file = save(&loha, &folder.path().join("a.safetensors"));
    let error = attach(&config, Some(&file)).unwrap_err().to_string();
    assert!(
        error.contains("ranks_of_pretrained_lora") && error.contains("LoHa"),
        "{error}"
    );
}
