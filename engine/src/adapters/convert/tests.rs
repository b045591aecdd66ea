//! Conversions between the dialects of the fixtures of `tests/reference/make_lora_*.py`.

use super::super::file_layer::RoleTensors;
use super::super::file_readers::read_layer;
use super::super::keys::TensorRole;
use super::super::load::index_layers;
use super::super::*;
use super::join::join;
use super::*;
use crate::families::{LoadOptions, Model, Part};
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, largest, parts_of, sampled_cases};
use aitk_common::job::arch::ArchName;
use std::collections::BTreeSet;
use std::path::PathBuf;

type Changes = BTreeMap<LayerKey, Tensor>;

fn to(dialect: Dialect) -> Conversion {
    Conversion {
        dialect,
        dtype: None,
        rank: None,
    }
}

fn model(folder: &str, arch: ArchName) -> Box<dyn Model> {
    families::load(&fixtures().join(folder), arch, &LoadOptions::cpu()).unwrap()
}

/// The change of every layer that a file has.
fn changes(model: &mut dyn Model, path: &Path) -> Changes {
    let file = AdapterFile::open(path).unwrap();
    let mut parts = model.parts();
    let (found, unknown) = file.resolve(&index_layers(&mut parts).unwrap()).unwrap();
    assert!(unknown.is_empty(), "{}: {unknown:?}", path.display());
    let mut weights: BTreeMap<LayerKey, Weight> = BTreeMap::new();
    for Part { id, layers, .. } in &mut parts {
        layers
            .visit_layers(&mut |name, layer| {
                weights.insert((*id, name.to_owned()), layer.weight().clone());
                Ok(())
            })
            .unwrap();
    }
    let change = |(key, layer): (LayerKey, Arc<dyn FileLayer>)| {
        let site = Site {
            name: key.1.clone(),
            names: AdapterNames::Peft,
            weight: &weights[&key],
            handle: &AdapterHandle::new(1.0),
        };
        let change = layer.adapter(site).unwrap().change(&weights[&key]).unwrap();
        (key, change)
    };
    found.into_iter().map(change).collect()
}

fn compare(found: &Changes, expected: &Changes, tolerance: f32, what: &str) {
    assert_eq!(
        found.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "{what}"
    );
    for (key, change) in found {
        let error = gap(change, &expected[key]) / largest(&expected[key]).max(1e-12);
        assert!(error <= tolerance, "{what}: {key:?} by {error}");
    }
}

fn write(converted: &ConvertedAdapter, path: &Path) {
    std::fs::write(
        path,
        lora_file_bytes(&converted.tensors, converted.metadata.clone()).unwrap(),
    )
    .unwrap();
}

fn stems(path: &Path) -> BTreeSet<String> {
    let file = AdapterFile::open(path).unwrap();
    file.modules.into_iter().map(|module| module.stem).collect()
}

/// The files of a folder, and the dialect of each whose names are compared.
type Files = &'static [(&'static str, Option<Dialect>)];

/// The folder of a family's LoRAs, its model and its files.
const FAMILIES: [(&str, &str, ArchName, Files); 4] = [
    (
        "lora",
        "tiny_sd",
        ArchName::Sd1,
        &[
            ("ai_toolkit", Some(Dialect::AiToolkit)),
            ("ai_toolkit", Some(Dialect::SdScripts)),
            ("diffusers", None),
            ("sd_scripts_original", None),
        ],
    ),
    (
        "lora_sdxl",
        "tiny_sdxl",
        ArchName::Sdxl,
        &[
            ("ai_toolkit", Some(Dialect::AiToolkit)),
            ("comfyui", Some(Dialect::ComfyUi)),
            ("diffusers", Some(Dialect::Diffusers)),
            ("sd_scripts_original", Some(Dialect::SdScripts)),
        ],
    ),
    (
        "lora_flux",
        "tiny_flux",
        ArchName::Flux,
        &[
            ("ai_toolkit", Some(Dialect::AiToolkit)),
            ("comfyui", Some(Dialect::ComfyUi)),
            ("diffusers", Some(Dialect::Diffusers)),
            ("sd_scripts", Some(Dialect::SdScripts)),
            ("sd_scripts_blocks", None),
        ],
    ),
    (
        "lora_sd35",
        "tiny_sd35",
        ArchName::Sd3,
        &[
            ("ai_toolkit", Some(Dialect::AiToolkit)),
            ("comfyui", Some(Dialect::ComfyUi)),
            ("diffusers", Some(Dialect::Diffusers)),
            ("sd_scripts", Some(Dialect::SdScripts)),
        ],
    ),
];

/// Every file in every dialect has the same effect and the names of the other program's file.
#[test]
fn every_dialect_is_converted_to_every_other() {
    let dir = tempfile::tempdir().unwrap();
    for (folder, tiny, arch, files) in FAMILIES {
        let mut model = model(tiny, arch);
        let path = fixtures().join(tiny);
        for (name, _) in files {
            let source = fixtures().join(folder).join(format!("{name}.safetensors"));
            let expected = changes(&mut *model, &source);
            for dialect in Dialect::ALL {
                let what = format!("{folder}/{name} to {}", dialect.name());
                let converted = convert_lora(&source, &path, to(dialect)).unwrap();
                assert!(converted.unknown.is_empty() && converted.layers > 10, "{what}");
                let new = dir.path().join("x.safetensors");
                write(&converted, &new);
                // A scale that is not a power of two is rounded into a matrix.
                compare(&changes(&mut *model, &new), &expected, 1e-6, &what);
                let same = files.iter().find(|(_, of)| *of == Some(dialect));
                let complete = expected.len()
                    == changes(&mut *model, &fixtures().join(folder).join("ai_toolkit.safetensors")).len();
                if let Some((same, _)) = same.filter(|_| complete) {
                    let theirs = stems(&fixtures().join(folder).join(format!("{same}.safetensors")));
                    assert_eq!(stems(&new), theirs, "{what}");
                }
            }
        }
    }
}

/// A network on a tiny model with random numbers, as a file.
fn saved(adapter: &dyn AdapterType, model: &mut dyn Model, alpha: f64, path: &Path) -> BTreeMap<String, Tensor> {
    let config = AdapterConfig {
        rank: 4,
        alpha,
        conv_rank: Some(2),
        conv_alpha: 2.0,
        ..AdapterConfig::default()
    };
    let mut parts = model.parts();
    parts.retain(|part| part.role != families::PartRole::Codec);
    let network =
        AdapterNetwork::attach_as(adapter, &config, None, &mut parts, &mut TorchGenerator::manual_seed(3)).unwrap();
    let mut generator = TorchGenerator::manual_seed(4);
    for param in network.params() {
        let noise = generator.uniform(param.var.elem_count(), 0.05, 0.3);
        let noise = Tensor::from_vec(noise, param.var.shape(), &Device::Cpu).unwrap();
        param.var.set(&(param.var.as_tensor() + noise).unwrap()).unwrap();
    }
    let tensors = network.tensors(DType::F32).unwrap();
    std::fs::write(path, lora_file_bytes(&tensors, BTreeMap::new()).unwrap()).unwrap();
    tensors
}

/// There and back, bit for bit: the scales are powers of two.
#[test]
fn round_trips_through_every_dialect_are_exact() {
    let dir = tempfile::tempdir().unwrap();
    let [source, new] = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
    for (tiny, arch) in sampled_cases(vec![
        ("tiny_sd", ArchName::Sd1),
        ("tiny_sdxl", ArchName::Sdxl),
        ("tiny_flux", ArchName::Flux),
        ("tiny_sd35", ArchName::Sd3),
    ]) {
        let path = fixtures().join(tiny);
        let types: [&dyn AdapterType; 2] = [&Lora, &Dora];
        for (adapter, alpha) in types.into_iter().flat_map(|adapter| [(adapter, 4.0), (adapter, 1.0)]) {
            let original = saved(adapter, &mut *model(tiny, arch), alpha, &source);
            let expected = changes(&mut *model(tiny, arch), &source);
            for dialect in Dialect::ALL {
                let what = format!("{tiny}: {adapter:?} with an alpha of {alpha} in {}", dialect.name());
                let converted = convert_lora(&source, &path, to(dialect)).unwrap_or_else(|e| panic!("{what}: {e}"));
                write(&converted, &new);
                compare(&changes(&mut *model(tiny, arch), &new), &expected, 1e-6, &what);
                let back = convert_lora(&new, &path, to(Dialect::AiToolkit)).unwrap();
                write(&back, &new);
                compare(
                    &changes(&mut *model(tiny, arch), &new),
                    &expected,
                    0.0,
                    &format!("{what} and back"),
                );
                if alpha == 4.0 {
                    assert_eq!(
                        back.tensors.keys().collect::<Vec<_>>(),
                        original.keys().collect::<Vec<_>>(),
                        "{what}"
                    );
                    for (name, tensor) in &back.tensors {
                        let original = original[name].reshape(tensor.shape()).unwrap();
                        assert_eq!(gap(tensor, &original), 0.0, "{what}: {name}");
                    }
                }
            }
        }
    }
}

/// ComfyUI has the text encoder of Stable Diffusion 2.x as `clip_h` (`SD2ClipModel`), and leaves out what has another name.
#[test]
fn comfyui_has_a_name_of_its_own_for_the_text_encoder_of_stable_diffusion_2() {
    let dir = tempfile::tempdir().unwrap();
    let [source, new] = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
    for (tiny, arch, name) in [
        ("tiny_sd", ArchName::Sd1, "clip_l"),
        ("tiny_sd21", ArchName::Sd2, "clip_h"),
    ] {
        saved(&Lora, &mut *model(tiny, arch), 4.0, &source);
        let expected = changes(&mut *model(tiny, arch), &source);
        let converted = convert_lora(&source, &fixtures().join(tiny), to(Dialect::ComfyUi)).unwrap();
        let prefix = format!("text_encoders.{name}.transformer.text_model.");
        let of_text = converted
            .tensors
            .keys()
            .filter(|name| name.starts_with("text_encoders."));
        let of_text: Vec<&String> = of_text.collect();
        assert!(!of_text.is_empty(), "{tiny}");
        assert!(
            of_text.iter().all(|name| name.starts_with(&prefix)),
            "{tiny}: {of_text:?}"
        );
        write(&converted, &new);
        compare(&changes(&mut *model(tiny, arch), &new), &expected, 1e-6, tiny);
    }
}

#[test]
fn other_types_keep_their_tensors_or_become_loras() {
    let dir = tempfile::tempdir().unwrap();
    let [source, new] = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
    let path = fixtures().join("tiny_sd");
    let lokr = Lokr {
        factor: Some(2),
        ..Lokr::SQUARE
    };
    let types: [&dyn AdapterType; 3] = [&Loha, &lokr, &Difference];
    for adapter in types {
        saved(adapter, &mut *model("tiny_sd", ArchName::Sd1), 4.0, &source);
        let expected = changes(&mut *model("tiny_sd", ArchName::Sd1), &source);
        for dialect in Dialect::ALL {
            let what = format!("{adapter:?} to {}", dialect.name());
            match convert_lora(&source, &path, to(dialect)) {
                Err(error) => {
                    assert_eq!(dialect, Dialect::Diffusers, "{what}: {error}");
                    assert!(error.to_string().contains("make a LoRA of it with `--rank`"), "{error}");
                }
                Ok(converted) => {
                    write(&converted, &new);
                    compare(
                        &changes(&mut *model("tiny_sd", ArchName::Sd1), &new),
                        &expected,
                        0.0,
                        &what,
                    );
                }
            }
        }
        // A rank of every singular value loses nothing.
        let whole = Conversion {
            rank: Some(4096),
            ..to(Dialect::Diffusers)
        };
        let converted = convert_lora(&source, &path, whole).unwrap();
        assert_eq!(
            converted.lost_biases > 0,
            format!("{adapter:?}") == "Difference",
            "{adapter:?}"
        );
        write(&converted, &new);
        compare(
            &changes(&mut *model("tiny_sd", ArchName::Sd1), &new),
            &expected,
            1e-5,
            &format!("{adapter:?} as a LoRA"),
        );
    }
}

#[test]
fn a_lower_rank_loses_no_more_than_the_singular_values_that_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let [source, new] = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
    let path = fixtures().join("tiny_flux");
    saved(&Lora, &mut *model("tiny_flux", ArchName::Flux), 4.0, &source);
    let expected = changes(&mut *model("tiny_flux", ArchName::Flux), &source);
    for dialect in [Dialect::AiToolkit, Dialect::ComfyUi] {
        let conversion = Conversion {
            rank: Some(2),
            ..to(dialect)
        };
        let converted = convert_lora(&source, &path, conversion).unwrap();
        write(&converted, &new);
        for (key, found) in changes(&mut *model("tiny_flux", ArchName::Flux), &new) {
            let norm = |t: &Tensor| f64::from(t.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()).sqrt();
            let error = norm(&(&found - &expected[&key]).unwrap());
            let values = Svd::new(&expected[&key]).unwrap();
            let bound: f64 = values
                .values()
                .iter()
                .skip(2)
                .map(|value| value * value)
                .sum::<f64>()
                .sqrt();
            assert!(
                bound > 0.0 && error < bound * 1.001 + 1e-6,
                "{key:?}: {error} of {bound}"
            );
        }
    }
}

#[test]
fn the_metadata_of_sd_scripts_names_no_rank_that_layers_no_longer_have() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("a.safetensors");
    let path = fixtures().join("tiny_sd");
    let tensors = saved(&Lora, &mut *model("tiny_sd", ArchName::Sd1), 4.0, &source);
    let metadata = ["ss_network_dim", "ss_network_alpha"].map(|key| (key.to_owned(), "4".to_owned()));
    std::fs::write(&source, lora_file_bytes(&tensors, metadata.into()).unwrap()).unwrap();
    for (rank, expected) in [(None, "4"), (Some(4096), "4"), (Some(1), "Dynamic")] {
        let conversion = Conversion {
            rank,
            ..to(Dialect::SdScripts)
        };
        let found = convert_lora(&source, &path, conversion).unwrap().metadata;
        assert_eq!(
            [&found["ss_network_dim"], &found["ss_network_alpha"]],
            [expected; 2],
            "{rank:?}"
        );
    }
}

/// A text encoder is needed by a file that has layers of it; VAE, tokenizers, scheduler and T5 never are.
#[test]
fn only_the_parts_that_a_file_changes_are_needed() {
    let dir = tempfile::tempdir().unwrap();
    let lora = fixtures().join("lora_flux/ai_toolkit.safetensors");
    let convert = |lora: &Path, model: &Path| convert_lora(lora, model, to(Dialect::ComfyUi));
    let bytes = |converted: ConvertedAdapter| lora_file_bytes(&converted.tensors, converted.metadata).unwrap();
    let flux = fixtures().join("tiny_flux");
    let transformer = parts_of(&flux, &["transformer"]);
    let alone = bytes(convert(&lora, transformer.path()).unwrap());
    assert_eq!(alone, bytes(convert(&lora, &flux).unwrap()));

    let lora = fixtures().join("lora/ai_toolkit.safetensors");
    let sd = fixtures().join("tiny_sd");
    let without_text = parts_of(&sd, &["unet", "model_index.json"]);
    let error = convert(&lora, without_text.path()).unwrap_err().to_string();
    for part in ["`lora_te_text_model", "no text encoder (folder `text_encoder`)"] {
        assert!(error.contains(part), "{error}");
    }
    let with_text = parts_of(&sd, &["unet", "text_encoder", "model_index.json"]);
    assert_eq!(
        bytes(convert(&lora, with_text.path()).unwrap()),
        bytes(convert(&lora, &sd).unwrap())
    );
    let mut tensors: BTreeMap<String, Tensor> = candle_core::safetensors::load(&lora, &Device::Cpu)
        .unwrap()
        .into_iter()
        .collect();
    tensors.retain(|name, _| !is_of_text(name));
    let of_unet = dir.path().join("unet.safetensors");
    std::fs::write(&of_unet, lora_file_bytes(&tensors, BTreeMap::new()).unwrap()).unwrap();
    assert_eq!(
        bytes(convert(&of_unet, without_text.path()).unwrap()),
        bytes(convert(&of_unet, &sd).unwrap())
    );
    // A file of another family is not said to lack a text encoder.
    let error = convert(
        &fixtures().join("lora_flux/ai_toolkit.safetensors"),
        without_text.path(),
    )
    .unwrap_err();
    assert!(error.to_string().contains("none of its"), "{error}");
}

#[test]
fn number_formats_and_what_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("a.safetensors");
    let sd = fixtures().join("tiny_sd");
    let tensors = saved(&Lora, &mut *model("tiny_sd", ArchName::Sd1), 4.0, &source);
    for (dtype, expected) in [
        (None, DType::F32),
        (Some(SaveDType::F16), DType::F16),
        (Some(SaveDType::BF16), DType::BF16),
    ] {
        let conversion = Conversion {
            dtype,
            ..to(Dialect::AiToolkit)
        };
        let converted = convert_lora(&source, &sd, conversion).unwrap();
        assert_eq!(converted.dtype, expected);
        assert!(converted.tensors.values().all(|tensor| tensor.dtype() == expected));
    }
    let error = |model: PathBuf| {
        convert_lora(&source, &model, to(Dialect::ComfyUi))
            .unwrap_err()
            .to_string()
    };
    let other = error(fixtures().join("tiny_flux"));
    assert!(
        other.contains("no layer of it is in this model's transformer"),
        "{other}"
    );
    assert!(error(dir.path().to_path_buf()).contains(&dir.path().display().to_string()));
    // The difference of a norm, which a conversion would lose.
    let mut with_norm = tensors.clone();
    let norm = "lora_unet_conv_norm_out.diff";
    with_norm.insert(norm.into(), Tensor::zeros(8, DType::F32, &Device::Cpu).unwrap());
    let normed = dir.path().join("norms.safetensors");
    std::fs::write(&normed, lora_file_bytes(&with_norm, BTreeMap::new()).unwrap()).unwrap();
    for dialect in [Dialect::AiToolkit, Dialect::Lycoris] {
        let refused = convert_lora(&normed, &sd, to(dialect)).unwrap_err().to_string();
        assert!(
            refused.contains("difference of a norm, `lora_unet_conv_norm_out` (0 more)"),
            "{refused}"
        );
    }
    // A number above the largest of float16.
    let large: BTreeMap<String, Tensor> = tensors
        .into_iter()
        .map(|(name, t)| (name, (t * 1e7).unwrap()))
        .collect();
    std::fs::write(&source, lora_file_bytes(&large, BTreeMap::new()).unwrap()).unwrap();
    let conversion = Conversion {
        dtype: Some(SaveDType::F16),
        ..to(Dialect::SdScripts)
    };
    let error = convert_lora(&source, &sd, conversion).unwrap_err().to_string();
    assert!(error.contains("float16") || error.contains("f16"), "{error}");
}

/// A LoRA of 16 inputs and 16 outputs with a magnitude of this shape, as LyCORIS saves it.
fn square_dora(seed: u64, shape: &[usize]) -> [(TensorRole, Tensor); 3] {
    let mut generator = TorchGenerator::manual_seed(seed);
    let mut tensor = |dims: &[usize]| {
        let values = generator.uniform(dims.iter().product(), 0.5, 1.0);
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    };
    [
        (TensorRole::Down, tensor(&[2, 16])),
        (TensorRole::Up, tensor(&[16, 2])),
        (TensorRole::DoraScale, tensor(shape)),
    ]
}

/// The shape alone says which axis the magnitude of a layer with as many inputs as outputs has.
#[test]
fn a_magnitude_of_inputs_stays_one_in_a_square_layer() {
    let dir = tempfile::tempdir().unwrap();
    let [source, new] = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
    let stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q";
    for shape in [[1, 16], [16, 1]] {
        let tensors = square_dora(1, &shape).map(|(role, tensor)| {
            let suffix = match role {
                TensorRole::Down => "lora_down.weight",
                TensorRole::Up => "lora_up.weight",
                _ => "dora_scale",
            };
            (format!("{stem}.{suffix}"), tensor)
        });
        let bytes = lora_file_bytes(&BTreeMap::from(tensors), BTreeMap::new()).unwrap();
        std::fs::write(&source, bytes).unwrap();
        let expected = changes(&mut *model("tiny_sd", ArchName::Sd1), &source);
        for dialect in Dialect::ALL {
            let what = format!("{shape:?} to {}", dialect.name());
            match convert_lora(&source, &fixtures().join("tiny_sd"), to(dialect)) {
                Ok(converted) => {
                    write(&converted, &new);
                    compare(
                        &changes(&mut *model("tiny_sd", ArchName::Sd1), &new),
                        &expected,
                        1e-6,
                        &what,
                    );
                    assert!(shape == [16, 1] || dialect != Dialect::Diffusers, "{what}");
                }
                Err(error) => {
                    assert_eq!((shape, dialect), ([1, 16], Dialect::Diffusers), "{what}: {error}");
                    assert!(error.to_string().contains("a magnitude for each input"), "{error}");
                }
            }
        }
    }
}

/// A LoKr with a magnitude, as a training with `dora_wd` saves it: LyCORIS needs every dimension of it, and no other name has its formula.
#[test]
fn magnitudes_beside_other_types_keep_their_name_and_shape() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("a.safetensors");
    let mut generator = TorchGenerator::manual_seed(3);
    let mut tensor = |dims: &[usize]| {
        let values = generator.uniform(dims.iter().product(), 0.5, 1.0);
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    };
    let stem = "lora_unet_down_blocks_0_resnets_0_conv1";
    for shape in [[16, 1, 1, 1], [1, 16, 1, 1]] {
        let tensors = BTreeMap::from([
            (format!("{stem}.alpha"), tensor(&[])),
            (format!("{stem}.lokr_w1"), tensor(&[4, 4])),
            (format!("{stem}.lokr_w2"), tensor(&[4, 4, 3, 3])),
            (format!("{stem}.dora_scale"), tensor(&shape)),
        ]);
        std::fs::write(&source, lora_file_bytes(&tensors, BTreeMap::new()).unwrap()).unwrap();
        for dialect in Dialect::ALL {
            let what = format!("{shape:?} to {}", dialect.name());
            match convert_lora(&source, &fixtures().join("tiny_sd"), to(dialect)) {
                Ok(converted) => {
                    let magnitude = converted.tensors.iter().find(|(name, _)| name.ends_with(".dora_scale"));
                    let (_, magnitude) = magnitude.unwrap_or_else(|| panic!("{what}"));
                    assert_eq!(magnitude.dims(), shape, "{what}");
                    assert_eq!(gap(magnitude, &tensors[&format!("{stem}.dora_scale")]), 0.0, "{what}");
                    if dialect == Dialect::AiToolkit {
                        assert!(
                            converted.tensors.keys().eq(tensors.keys()),
                            "{:?}",
                            converted.tensors.keys()
                        );
                    }
                }
                Err(error) => {
                    assert_eq!(dialect, Dialect::Diffusers, "{what}: {error}");
                    assert!(error.to_string().contains("a DoRA whose change is no LoRA"), "{error}");
                }
            }
        }
    }
}

/// Magnitudes for each input cannot be joined, also where there are as many of them as outputs.
#[test]
fn layers_with_magnitudes_of_inputs_are_not_joined() {
    for (shape, can_join) in [([16, 1], true), ([1, 16], false)] {
        let layer = |seed| {
            let found = RoleTensors {
                tensors: BTreeMap::from(square_dora(seed, &shape)),
                ..RoleTensors::default()
            };
            read_layer(&found).unwrap().unwrap()
        };
        let parts = [(Some(layer(1)), 16), (Some(layer(2)), 16)];
        let joined = join_layers(&parts, false).unwrap();
        assert_eq!(joined.is_some(), can_join, "{shape:?}");
    }
}

/// Layers of which a part has no LoRA are joined with zeros.
#[test]
fn a_missing_part_of_a_joined_layer_is_zero() {
    let lora = |seed: u64| LoraTensors {
        down: Tensor::from_vec(TorchGenerator::manual_seed(seed).randn(6), (2, 3), &Device::Cpu).unwrap(),
        up: Tensor::from_vec(TorchGenerator::manual_seed(seed + 9).randn(8), (4, 2), &Device::Cpu).unwrap(),
        mid: None,
        alpha: Some(1.0),
        scalar: 1.0,
    };
    let (first, second) = (lora(1), lora(2));
    let product = |lora: &LoraTensors| (lora.up.matmul(&lora.down).unwrap() * scale(lora)).unwrap();
    let parts = [(Some(first.clone()), 4), (None, 5), (Some(second.clone()), 4)];
    let joined = join(&parts).unwrap().unwrap();
    let zeros = Tensor::zeros((5, 3), DType::F32, &Device::Cpu).unwrap();
    let expected = Tensor::cat(&[product(&first), zeros, product(&second)], 0).unwrap();
    assert!(gap(&product(&joined), &expected) < 1e-6);
    assert_eq!(joined.rank(), 4);
    assert!(join(&[(None, 4), (None, 5)]).unwrap().is_none());
}
