//! Comparison of networks and masks with `tests/reference/make_control_masks.py`, and files that are refused.

use super::source_image::standardised;
use super::{ControlGenerator, Network, mask};
use crate::image_io::{self, Filter};
use crate::testing::{fixtures, in_portable_mode, largest};
use crate::weights::write_tensors;
use aitk_common::job::controls::ControlType;
use candle_core::{DType, Device, Tensor};
use image::RgbImage;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    fixtures().join("control_generators/masks").join(name)
}

fn tensors(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file(name), &Device::Cpu).unwrap()
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// An image of pixels [height, width, 3].
fn image(tensor: &Tensor) -> RgbImage {
    let (height, width, _) = tensor.dims3().unwrap();
    RgbImage::from_raw(width as u32, height as u32, bytes(tensor)).unwrap()
}

/// Checks that a mask has these values [height, width] in each channel, up to 1.
fn assert_is_mask(found: &RgbImage, expected: &Tensor, name: &str) {
    let (height, width) = expected.dims2().unwrap();
    assert_eq!(found.dimensions(), (width as u32, height as u32));
    let differences = found.pixels().zip(bytes(expected)).map(|(found, expected)| {
        assert!(found.0.iter().all(|value| *value == found.0[0]));
        found.0[0].abs_diff(expected)
    });
    let differences: Vec<u8> = differences.collect();
    let share = differences.iter().filter(|d| **d > 0).count() as f64 / differences.len() as f64;
    let most = differences.into_iter().max().unwrap();
    println!("{name}: {share:.1e} of the values differ, by at most {most}");
    assert!(most <= 1 && share < 0.01, "{name}: {share:.1e}, {most}");
}

fn network(kind: ControlType) -> ControlGenerator {
    let name = match kind {
        ControlType::Mask => "birefnet.safetensors",
        _ => "matting.safetensors",
    };
    ControlGenerator::open(kind, &file(name), &Device::Cpu).unwrap()
}

fn networks_match_the_reference() {
    let reference = tensors("results.safetensors");
    let image = image(&reference["image"]);
    for (name, kind) in [("matting", ControlType::Sapiens2Mask), ("birefnet", ControlType::Mask)] {
        let network = network(kind).network;
        let of = |key: &str| &reference[&format!("{name}/{key}")];
        let expected = of("y");
        let (_, _, height, width) = expected.dims4().unwrap();
        let scaled = image_io::resize(&image, width as u32, height as u32, Filter::Bilinear);
        let x = standardised(&scaled, &Device::Cpu).unwrap();
        let found = match &network {
            Network::Matting(network) => network.forward(&x).unwrap(),
            Network::Foreground(network) => network.forward(&x).unwrap(),
            _ => unreachable!(),
        };
        assert_eq!(found.dims(), expected.dims());
        let difference = largest(&(found - expected).unwrap()) / largest(expected);
        println!("{name}: {difference:.1e}");
        assert!(difference < 1e-5, "{name}: {difference:.1e}");
        let found = match &network {
            Network::Matting(network) => mask::generate_of_people(network, &image, &Device::Cpu),
            Network::Foreground(network) => mask::generate_of_foreground(network, &image, 64, &Device::Cpu),
            _ => unreachable!(),
        };
        assert_is_mask(&found.unwrap(), of("mask"), name);
    }
}

#[test]
fn networks_find_what_the_originals_find() {
    networks_match_the_reference();
}

#[test]
fn people_are_looked_for_at_the_sizes_of_ai_toolkit() {
    let sizes = tensors("results.safetensors")["matting/sizes"]
        .to_vec2::<i64>()
        .unwrap();
    for size in sizes {
        let [width, height, expected_width, expected_height] = size[..] else {
            unreachable!()
        };
        let found = mask::matting_size((width as u32, height as u32), 8);
        assert_eq!(found, (expected_width as u32, expected_height as u32), "{size:?}");
    }
    // A strip would need more memory than any machine has.
    assert_eq!(mask::matting_size((1_000_000, 1), 16), (8192, 16));
}

/// The error about a network whose tensors were changed, when it is opened and when its shapes are checked.
fn changed(kind: ControlType, name: &str, change: impl Fn(&mut BTreeMap<String, Tensor>)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut weights: BTreeMap<String, Tensor> = tensors(name).into_iter().collect();
    change(&mut weights);
    write_tensors(&mut std::fs::File::create(&path).unwrap(), &weights, &BTreeMap::new()).unwrap();
    let errors = [
        ControlGenerator::open(kind, folder.path(), &Device::Cpu).err(),
        ControlGenerator::open_layout(kind, &path).err(),
    ];
    let [opened, layout] = errors.map(|error| error.map(|error| error.to_string()).unwrap_or_default());
    assert_eq!(opened, layout);
    opened
}

#[test]
fn files_without_a_matting_head_are_refused() {
    let kind = ControlType::Sapiens2Mask;
    let refused = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| changed(kind, "matting.safetensors", change);
    assert_eq!(refused(&|_| {}), "");
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let head = |name: &str| format!("decode_head.{name}");
    let message = refused(&|weights| {
        weights.remove(&head("conv_matting.weight"));
    });
    assert!(message.contains("Sapiens 2 with its matting head"), "{message}");
    for name in ["conv_layers.3.bias", "input_conv.0.weight"] {
        let message = refused(&|weights| {
            weights.remove(&head(name));
        });
        assert!(message.contains(name), "{message}");
    }
    let message = refused(&|weights| {
        weights.remove("backbone.rope_embed.periods");
    });
    assert!(message.contains("rope_embed.periods"), "{message}");
    let message = refused(&|weights| {
        weights.insert(head("conv_matting.weight"), zeros(&[3, 3, 1, 1]));
    });
    assert!(message.contains("conv_matting.weight"), "{message}");
    let message = refused(&|weights| {
        weights.insert(head("upsample_blocks.1.0.weight"), zeros(&[18, 6, 3, 3]));
    });
    assert!(message.contains("upsample_blocks.1.0"), "{message}");
    let message = refused(&|weights| {
        weights.insert(head("upsample_blocks.1.0.weight"), zeros(&[2, 6, 3, 3]));
    });
    assert!(message.contains("upsample_blocks.1.0"), "{message}");
    let message = refused(&|weights| {
        weights.insert(head("conv_layers.0.weight"), zeros(&[5000, 4, 3, 3]));
    });
    assert!(message.contains("at most 4096"), "{message}");
    // The last step is missing, so that the mask would be smaller than the image.
    let message = refused(&|weights| {
        for name in ["weight", "bias"] {
            weights.remove(&head(&format!("upsample_blocks.2.0.{name}")));
        }
        weights.insert(head("conv_layers.0.weight"), zeros(&[4, 5, 3, 3]));
    });
    assert!(message.contains("enlarge 4 times: expected 8"), "{message}");
    let wrong = ControlGenerator::open(
        kind,
        Path::new(&fixtures().join("control_generators/teed.safetensors")),
        &Device::Cpu,
    );
    assert!(wrong.unwrap_err().to_string().contains("`sapiens2_mask`"));
}

#[test]
fn other_kinds_of_birefnet_are_refused() {
    let kind = ControlType::Mask;
    let refused = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| changed(kind, "birefnet.safetensors", change);
    assert_eq!(refused(&|_| {}), "");
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let table = "bb.layers.0.blocks.0.attn.relative_position_bias_table";
    for (name, text) in [
        ("decoder.gdt_convs_attn_4.0.weight", "a BiRefNet"),
        (table, "not a Swin transformer"),
        ("squeeze_module.0.conv_in.weight", "one `squeeze_module`"),
        ("squeeze_module.0.bn_in.running_var", "no batch norms"),
        ("decoder.ipt_blk5.conv1.weight", "does not get the image"),
        (
            "squeeze_module.0.dec_att.aspp1.atrous_conv.regular_conv.weight",
            "no deformable convolutions",
        ),
        (
            "bb.layers.2.blocks.0.mlp.fc1.weight",
            "bb.layers.2.blocks.0.mlp.fc1.weight",
        ),
        ("bb.norm3.bias", "bb.norm3.bias"),
        ("decoder.decoder_block1.dec_att.bn1.running_mean", "bn1.running_mean"),
        (
            "decoder.lateral_block2.conv.weight",
            "decoder.lateral_block2.conv.weight",
        ),
        ("decoder.conv_out1.0.bias", "decoder.conv_out1.0.bias"),
    ] {
        let message = refused(&|weights| {
            weights.remove(name).unwrap();
        });
        assert!(message.contains(text), "{name}: {message}");
    }
    let branch = "decoder.decoder_block4.dec_att.aspp_deforms.1.atrous_conv";
    for (name, shape, text) in [
        (table.to_owned(), &[25, 3][..], "heads whose number divides 4"),
        (table.to_owned(), &[24, 1], "distances in a window"),
        (table.to_owned(), &[25], "distances in a window"),
        ("squeeze_module.1.conv_in.weight".into(), &[1], "one `squeeze_module`"),
        ("decoder.decoder_block4.conv_resi.weight".into(), &[1], "`ResBlk`"),
        (format!("{branch}.regular_conv.weight"), &[3, 2, 2, 2], "odd side"),
        (
            format!("{branch}.regular_conv.weight"),
            &[5, 2, 3, 3],
            "aspp_deforms.1.bn",
        ),
        (format!("{branch}.offset_conv.weight"), &[9, 2, 3, 3], "offset_conv"),
        (format!("{branch}.regular_conv.weight"), &[3, 2, 17, 17], "at most 15"),
        (
            "decoder.ipt_blk4.conv_out.weight".into(),
            &[10_000, 1, 3, 3],
            "at most 8192",
        ),
        ("decoder.ipt_blk4.conv1.weight".into(), &[1, 3, 3, 3], "ipt_blk4.conv1"),
        ("bb.patch_embed.proj.weight".into(), &[4, 3], "convolution"),
        ("bb.layers.0.blocks.0.mlp.fc1.weight".into(), &[4], "mlp.fc1"),
    ] {
        let message = refused(&|weights| {
            weights.insert(name.clone(), zeros(shape));
        });
        assert!(message.contains(text), "{name}: {message}");
    }
}

#[test]
fn places_far_outside_of_the_image_have_no_values() {
    let reference = tensors("results.safetensors");
    let mut weights: BTreeMap<String, Tensor> = tensors("birefnet.safetensors").into_iter().collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for value in [f32::INFINITY, f32::NAN, -3e38] {
        for (name, tensor) in &mut weights {
            if name.ends_with("offset_conv.bias") {
                *tensor = Tensor::full(value, tensor.shape(), &Device::Cpu).unwrap();
            }
        }
        write_tensors(&mut std::fs::File::create(&path).unwrap(), &weights, &BTreeMap::new()).unwrap();
        let Network::Foreground(network) = ControlGenerator::open(ControlType::Mask, &path, &Device::Cpu)
            .unwrap()
            .network
        else {
            unreachable!()
        };
        mask::generate_of_foreground(&network, &image(&reference["image"]), 64, &Device::Cpu).unwrap();
    }
}

in_portable_mode! {
    networks_match_the_reference,
}
