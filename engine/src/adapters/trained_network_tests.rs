//! Trained networks of every type on whole models: their names, shapes and alphas in files, and what a training that starts from a file gets.

use super::test_helpers::{flux, transformer, unet};
use super::*;
use crate::families::{self, Model};
use crate::rng::TorchGenerator;
use crate::testing::{gap, largest, tiny_sd};
use crate::weights::Weight;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

fn config(rank: usize, conv_rank: Option<usize>) -> AdapterConfig {
    AdapterConfig {
        rank,
        alpha: 1.5,
        conv_rank,
        conv_alpha: 2.5,
        ..AdapterConfig::default()
    }
}

const FULL: usize = 9_999_999_999;

fn attach(adapter: &dyn AdapterType, config: &AdapterConfig, model: &mut dyn Model) -> AdapterNetwork {
    let mut parts = model.parts();
    parts.retain(|part| part.role == families::PartRole::Denoiser);
    AdapterNetwork::attach_as(adapter, config, None, &mut parts, &mut TorchGenerator::manual_seed(9)).unwrap()
}

fn randomise(network: &AdapterNetwork) {
    let mut generator = TorchGenerator::manual_seed(4);
    for p in network.params() {
        let values = generator.uniform(p.var.elem_count(), -0.3, 0.3);
        p.var
            .set(&Tensor::from_vec(values, p.var.shape(), &Device::Cpu).unwrap())
            .unwrap();
    }
}

fn write(network: &AdapterNetwork, path: &Path, dtype: DType) -> BTreeMap<String, Tensor> {
    let tensors = network.tensors(dtype).unwrap();
    std::fs::write(path, lora_file_bytes(&tensors, BTreeMap::new()).unwrap()).unwrap();
    tensors
}

const SQUARE: Lokr = Lokr::SQUARE;
const OLD: Lokr = Lokr {
    factor: Some(4),
    old_names: true,
    ..Lokr::SQUARE
};

/// A new network changes nothing, a saved one gives the same output when it is loaded, and a training can start from it.
#[test]
fn trained_networks_are_saved_with_the_names_of_ai_toolkit_and_load_again() {
    let lokr = [
        (SQUARE, config(FULL, Some(FULL))),
        (SQUARE, config(2, Some(1))),
        (
            Lokr {
                factor: Some(2),
                ..SQUARE
            },
            config(2, None),
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    for is_flux in [false, true] {
        let model = || -> Box<dyn Model> { if is_flux { flux() } else { Box::new(tiny_sd()) } };
        let answer = |model: &dyn Model| if is_flux { transformer(model) } else { unet(model) };
        let plain = answer(&*model());
        let mut cases: Vec<(&dyn AdapterType, AdapterConfig)> = Vec::new();
        cases.extend(
            lokr.iter()
                .map(|(lokr, config)| (lokr as &dyn AdapterType, config.clone())),
        );
        match is_flux {
            true => cases.push((&OLD, config(2, None))),
            false => cases.push((&Locon, config(4, Some(2)))),
        }
        for (adapter, config) in cases {
            let mut trained = model();
            let network = attach(adapter, &config, &mut *trained);
            assert_eq!(
                gap(&answer(&*trained), &plain),
                0.0,
                "{adapter:?} changes the model before it is trained"
            );
            randomise(&network);
            let expected = answer(&*trained);
            assert!(gap(&expected, &plain) > 0.01, "{adapter:?}");
            write(&network, &path, DType::F32);
            let mut other = model();
            let loaded = load_lora(&mut other.parts(), &path, 1.0).unwrap();
            assert!(
                loaded.unknown.is_empty() && loaded.layers == network.layers(),
                "{adapter:?}"
            );
            let difference = gap(&answer(&*other), &expected) / largest(&expected);
            assert!(difference < 1e-5, "{adapter:?}: {difference}");
            let mut third = model();
            let resumed = attach(adapter, &config, &mut *third);
            let report = resumed.load(&AdapterFile::open(&path).unwrap()).unwrap();
            assert_eq!((report.missing.len(), report.unknown.len(), report.resized), (0, 0, 0));
            let difference = gap(&answer(&*third), &expected) / largest(&expected);
            assert!(difference < 1e-5, "{adapter:?}: {difference}");
        }
    }
}

#[test]
fn names_shapes_and_alphas_are_those_of_ai_toolkit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let q = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q";
    let dims = |tensors: &BTreeMap<String, Tensor>, name: String| tensors[&name].dims().to_vec();
    let alpha = |tensors: &BTreeMap<String, Tensor>, name: &str| -> f32 {
        tensors[&format!("{name}.alpha")]
            .to_dtype(DType::F32)
            .unwrap()
            .to_scalar()
            .unwrap()
    };
    let mut sd = tiny_sd();
    let full = write(&attach(&SQUARE, &config(FULL, Some(FULL)), &mut sd), &path, DType::F16);
    assert_eq!(dims(&full, format!("{q}.lokr_w1")), [4, 4]);
    assert_eq!(dims(&full, format!("{q}.lokr_w2")), [4, 4]);
    assert_eq!(alpha(&full, q), f32::INFINITY, "9999999999 in float16");
    assert_eq!(dims(&full, "lora_unet_conv_in.lokr_w1".into()), [4, 2]);
    assert_eq!(dims(&full, "lora_unet_conv_in.lokr_w2".into()), [4, 2, 3, 3]);
    let low = Lokr {
        factor: Some(2),
        ..SQUARE
    };
    let low = write(&attach(&low, &config(2, Some(1)), &mut tiny_sd()), &path, DType::F32);
    assert_eq!(dims(&low, format!("{q}.lokr_w1")), [2, 2]);
    assert_eq!(dims(&low, format!("{q}.lokr_w2_a")), [8, 2]);
    assert_eq!(dims(&low, format!("{q}.lokr_w2_b")), [2, 8]);
    assert_eq!(alpha(&low, q), 1.5);
    assert_eq!(dims(&low, "lora_unet_conv_in.lokr_w2_b".into()), [1, 2 * 9]);
    assert_eq!(alpha(&low, "lora_unet_conv_in"), 2.5);
    // A layer whose second matrix is not split has the configured rank as its alpha.
    let wide = write(&attach(&SQUARE, &config(2, None), &mut tiny_sd()), &path, DType::F32);
    assert_eq!(dims(&wide, format!("{q}.lokr_w2")), [4, 4]);
    assert_eq!(alpha(&wide, q), 2.0);

    let locon = write(&attach(&Locon, &config(4, Some(2)), &mut tiny_sd()), &path, DType::F32);
    assert_eq!(dims(&locon, format!("{q}.lora_down.weight")), [4, 16]);
    assert!(locon.contains_key("lora_unet_down_blocks_0_resnets_0_conv1.lora_up.weight"));
    assert!(locon.keys().any(|name| name.contains("time_emb_proj")));
    for name in locon.keys() {
        let outside = ["conv_in", "conv_out", "time_embedding", "scalar"]
            .iter()
            .any(|part| name.contains(part));
        assert!(!outside, "{name}");
    }

    // The alpha of a transformer is its rank, but for old names.
    let q = "transformer.transformer_blocks.0.attn.to_q";
    let four = Lokr {
        factor: Some(4),
        ..SQUARE
    };
    let dotted = write(&attach(&four, &config(2, None), &mut *flux()), &path, DType::F32);
    assert_eq!(dims(&dotted, format!("{q}.lokr_w2_a")), [8, 2]);
    assert_eq!(alpha(&dotted, q), 2.0);
    let old = write(&attach(&OLD, &config(2, None), &mut *flux()), &path, DType::F32);
    let q = "lycoris_transformer_blocks_0_attn_to_q";
    assert_eq!(dims(&old, format!("{q}.lokr_w1")), [4, 4]);
    assert_eq!(alpha(&old, q), 1.5);
    assert_eq!(old.len(), dotted.len());
}

/// Also where a trained number of zero multiplies matrices that are not zero.
#[test]
fn a_new_network_changes_nothing() {
    let plain = config(2, Some(2));
    let multiplied = AdapterConfig {
        scalar: true,
        ..config(2, Some(2))
    };
    let networks: [(&dyn AdapterType, &AdapterConfig); 5] = [
        (&Lora, &plain),
        (&Lora, &multiplied),
        (&Loha, &multiplied),
        (&SQUARE, &multiplied),
        (&Locon, &plain),
    ];
    for (adapter, config) in networks {
        let network = attach(adapter, config, &mut tiny_sd());
        assert!(network.changes_nothing().unwrap(), "{adapter:?}");
        randomise(&network);
        assert!(!network.changes_nothing().unwrap(), "{adapter:?}");
    }
}

/// It scales the whole layer: programs take alpha / rank.
#[test]
fn an_alpha_is_saved_as_it_was_trained_with() {
    let of_tenths = AdapterConfig {
        alpha: 0.3,
        ..config(2, None)
    };
    let lokr = Lokr {
        factor: Some(2),
        ..SQUARE
    };
    let types: [&dyn AdapterType; 3] = [&Lora, &Loha, &lokr];
    for adapter in types {
        let network = attach(adapter, &of_tenths, &mut tiny_sd());
        let mut rounded = 0;
        for (name, tensor) in network.tensors(DType::BF16).unwrap() {
            if !name.ends_with(".alpha") {
                assert_eq!(tensor.dtype(), DType::BF16, "{name}");
                continue;
            }
            let alpha: f32 = tensor.to_dtype(DType::F32).unwrap().to_scalar().unwrap();
            // That of whole matrices is the rank.
            assert!([0.3, 2.0].contains(&alpha), "{adapter:?}: {name}: {alpha}");
            rounded += usize::from(alpha == 0.3);
        }
        assert!(rounded > 0, "{adapter:?}");
    }
}

#[test]
fn a_file_of_another_type_or_form_is_an_error_that_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let refused = |network: &AdapterNetwork, part: &str| {
        let error = network
            .load(&AdapterFile::open(&path).unwrap())
            .unwrap_err()
            .to_string();
        assert!(error.contains(part) && error.contains("x.safetensors"), "{error}");
    };
    let full = config(FULL, Some(FULL));
    let lokr = attach(&SQUARE, &full, &mut tiny_sd());
    let low_rank = attach(
        &Lokr {
            factor: Some(2),
            ..SQUARE
        },
        &config(2, None),
        &mut tiny_sd(),
    );
    let lora = attach(&Lora, &config(4, None), &mut tiny_sd());
    write(&lora, &path, DType::F32);
    refused(&lokr, "the file has a LoRA of it, and this job trains a LoKr");
    write(&lokr, &path, DType::F32);
    refused(&lora, "the file has a LoKr of it, and this job trains a LoRA");
    refused(&low_rank, "lokr_full_rank: true");
    let other = attach(
        &Lokr {
            factor: Some(2),
            ..SQUARE
        },
        &full,
        &mut tiny_sd(),
    );
    refused(&other, "network.lokr_factor");
    // LyCORIS' order of the factors, which earlier imports did not write.
    let in_order = |smaller_first: bool| {
        let splits = LokrSplits {
            smaller_first,
            ..LokrSplits::default()
        };
        let eight = Lokr {
            factor: Some(8),
            splits,
            ..SQUARE
        };
        attach(&eight, &full, &mut tiny_sd())
    };
    write(&in_order(false), &path, DType::F32);
    refused(&in_order(true), "network_kwargs.smaller_factor_first");
    write(&in_order(true), &path, DType::F32);
    refused(&in_order(false), "network_kwargs.smaller_factor_first");
    let error = AdapterNetwork::attach_as(
        &Locon,
        &config(4, None),
        None,
        &mut flux().parts(),
        &mut TorchGenerator::manual_seed(1),
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("network.type: locon") && error.contains("`type: lokr`"),
        "{error}"
    );
}

/// A LoKr of another alpha keeps its strength in a training that starts from it, whose own scale is another one.
#[test]
fn a_training_keeps_the_strength_of_the_file_it_starts_from() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let two = Lokr {
        factor: Some(2),
        ..SQUARE
    };
    let mut trained = tiny_sd();
    let network = attach(&two, &config(2, Some(2)), &mut trained);
    randomise(&network);
    write(&network, &path, DType::F32);
    let expected = unet(&trained);
    for other in [
        AdapterConfig {
            alpha: 6.0,
            conv_alpha: 1.0,
            ..config(2, Some(2))
        },
        config(FULL, Some(FULL)),
    ] {
        let mut model = tiny_sd();
        let network = attach(&two, &other, &mut model);
        network.load(&AdapterFile::open(&path).unwrap()).unwrap();
        let gap = gap(&unet(&model), &expected) / largest(&expected);
        assert!(gap < 1e-5, "{other:?}: {gap}");
    }
}

/// `decompose_both` and `unbalanced_factorization` of LyCORIS: the shapes of its matrices, the change by their products, and files that are
/// read and trained on.
#[test]
fn both_matrices_of_a_lokr_are_split_as_by_lycoris() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let config = config(1, Some(1));
    let q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q";
    let name = format!("lora_unet_{}", q.replace('.', "_"));
    for (factor, unbalanced, first, second) in [
        (None, false, [4, 4], [4, 4]),
        (Some(2), false, [2, 2], [8, 8]),
        (Some(2), true, [8, 2], [2, 8]),
        (Some(8), false, [2, 2], [8, 8]),
    ] {
        let adapter = Lokr {
            factor,
            splits: LokrSplits {
                smaller_first: true,
                unbalanced,
                decompose_both: true,
            },
            ..SQUARE
        };
        let mut trained = tiny_sd();
        let plain = unet(&trained);
        let network = attach(&adapter, &config, &mut trained);
        assert_eq!(gap(&unet(&trained), &plain), 0.0, "{adapter:?}");
        randomise(&network);
        let saved = write(&network, &path, DType::F32);
        let matrix = |suffix: &str| saved.get(&format!("{name}.{suffix}")).cloned();
        let product = |whole: &str, [rows, columns]: [usize; 2]| {
            // A matrix whose larger side is not above twice the rank is whole.
            let is_whole = rows.max(columns) <= 2;
            let found = match is_whole {
                true => matrix(whole).unwrap(),
                false => {
                    let [left, right] = ["a", "b"].map(|side| matrix(&format!("{whole}_{side}")).unwrap());
                    assert_eq!((left.dims(), right.dims()), (&[rows, 1][..], &[1, columns][..]));
                    left.matmul(&right).unwrap()
                }
            };
            assert_eq!(found.dims(), [rows, columns], "{adapter:?}: {whole}");
            found
        };
        let (first, second) = (product("lokr_w1", first), product("lokr_w2", second));
        // The alpha is 1.5, and the rank 1.
        let expected = (kronecker(&first, &second) * 1.5).unwrap();
        let weight = Weight::Plain(Tensor::zeros(expected.shape(), DType::F32, &Device::Cpu).unwrap());
        let change = network.layers_by_path()[&("unet", q)].change(&weight).unwrap();
        assert!(gap(&change, &expected) / largest(&expected) < 1e-5, "{adapter:?}");

        let expected = unet(&trained);
        let mut other = tiny_sd();
        load_lora(&mut other.parts(), &path, 1.0).unwrap();
        let mut third = tiny_sd();
        let resumed = attach(&adapter, &config, &mut third);
        resumed.load(&AdapterFile::open(&path).unwrap()).unwrap();
        // One that is trained with a whole first matrix starts from it too.
        let whole = Lokr {
            splits: LokrSplits {
                decompose_both: false,
                ..adapter.splits
            },
            ..adapter
        };
        let mut fourth = tiny_sd();
        let from_products = attach(&whole, &config, &mut fourth);
        from_products.load(&AdapterFile::open(&path).unwrap()).unwrap();
        for model in [&other, &third, &fourth] {
            let error = gap(&unet(model), &expected) / largest(&expected);
            assert!(error < 1e-5, "{adapter:?}: {error}");
        }
        // Not the other way round.
        if first.dims().iter().all(|side| *side <= 2) {
            continue;
        }
        write(&from_products, &path, DType::F32);
        let error = resumed
            .load(&AdapterFile::open(&path).unwrap())
            .unwrap_err()
            .to_string();
        assert!(error.contains("decompose_both: false"), "{error}");
    }
}

/// The Kronecker product of two matrices.
fn kronecker(first: &Tensor, second: &Tensor) -> Tensor {
    let ((a, c), (b, d)) = (first.dims2().unwrap(), second.dims2().unwrap());
    let first = first.reshape((a, 1, c, 1)).unwrap();
    let second = second.reshape((1, b, 1, d)).unwrap();
    first.broadcast_mul(&second).unwrap().reshape((a * b, c * d)).unwrap()
}

/// As LyCORIS' modules with `rs_lora`: the scale is alpha / sqrt(rank), of two whole matrices sqrt(rank). Programs that read alpha / rank,
/// and 1 for two whole matrices, get the same change.
#[test]
fn a_rank_stabilised_network_is_read_as_it_was_trained() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let two = Lokr {
        factor: Some(2),
        ..SQUARE
    };
    let config = AdapterConfig {
        rank_stabilised: true,
        ..config(2, Some(3))
    };
    let (q, root) = (
        "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
        2f64.sqrt(),
    );
    let name = format!("lora_unet_{}", q.replace('.', "_"));
    let alpha = |tensors: &BTreeMap<String, Tensor>, layer: &str| {
        f64::from(tensors[&format!("{layer}.alpha")].to_scalar::<f32>().unwrap())
    };
    let types: [(&dyn AdapterType, bool); 4] = [(&Lora, true), (&Loha, true), (&two, true), (&SQUARE, false)];
    for (adapter, has_alpha) in types {
        let mut trained = tiny_sd();
        let network = attach(adapter, &config, &mut trained);
        randomise(&network);
        let params = network.params().into_iter();
        let params: HashMap<String, Tensor> = params.map(|p| (p.name, p.var.as_detached_tensor())).collect();
        let matrix = |suffix: &str| params.get(&format!("{name}.{suffix}")).cloned();
        let product = |left: &str, right: &str| Some(matrix(left)?.matmul(&matrix(right)?).unwrap());
        let usual = 1.5 / root;
        let (whole, scale) = if let Some(product) = product("lora_up.weight", "lora_down.weight") {
            (product, usual)
        } else if let Some(first) = product("hada_w1_a", "hada_w1_b") {
            ((first * product("hada_w2_a", "hada_w2_b").unwrap()).unwrap(), usual)
        } else {
            let first = matrix("lokr_w1").unwrap();
            match product("lokr_w2_a", "lokr_w2_b") {
                Some(second) => (kronecker(&first, &second), usual),
                None => (kronecker(&first, &matrix("lokr_w2").unwrap()), root),
            }
        };
        let expected = (whole * scale).unwrap();
        let weight = Weight::Plain(Tensor::zeros(expected.shape(), DType::F32, &Device::Cpu).unwrap());
        let change = network.layers_by_path()[&("unet", q)].change(&weight).unwrap();
        let error = gap(&change, &expected) / largest(&expected);
        assert!(error < 1e-5, "{adapter:?}: {error}");

        let saved = write(&network, &path, DType::F32);
        if has_alpha {
            assert!((alpha(&saved, &name) - 1.5 * root).abs() < 1e-6, "{adapter:?}");
            let conv = alpha(&saved, "lora_unet_conv_in");
            assert!((conv - 2.5 * 3f64.sqrt()).abs() < 1e-6, "{adapter:?}: {conv}");
        }
        let expected = unet(&trained);
        let mut other = tiny_sd();
        load_lora(&mut other.parts(), &path, 1.0).unwrap();
        let mut third = tiny_sd();
        let resumed = attach(adapter, &config, &mut third);
        resumed.load(&AdapterFile::open(&path).unwrap()).unwrap();
        for (model, what) in [(&other, "read"), (&third, "resumed")] {
            let error = gap(&unet(model), &expected) / largest(&expected);
            assert!(error < 1e-5, "{adapter:?}, {what}: {error}");
        }
    }
    // The scale of a transformer is 1, but for old names.
    let old = write(&attach(&OLD, &config, &mut *flux()), &path, DType::F32);
    let of_old = alpha(&old, "lycoris_transformer_blocks_0_attn_to_q");
    assert!((of_old - 1.5 * root).abs() < 1e-6, "{of_old}");
    let error = AdapterNetwork::attach_as(
        &Lora,
        &config,
        None,
        &mut flux().parts(),
        &mut TorchGenerator::manual_seed(1),
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("network_kwargs.rs_lora"), "{error}");
}
