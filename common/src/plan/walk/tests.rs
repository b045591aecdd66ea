//! Walks over small models.

use super::build::{AdapterKind, AdapterOptions, Builder, ComponentOptions, LayerSizes};
use super::meter::MetaTensor;
use super::tensors::{Activation, NormActivation};
use super::{Backend, Form, Residuals, UNet, Vae, Walk};
use crate::plan::names::NameFilter;
use crate::plan::shapes::{BlockShapes, UNetShapes, VaeShapes};

const CPU: Backend = Backend::CPU;

fn unet_shapes() -> UNetShapes {
    let block = BlockShapes {
        channels: 32,
        layers: 1,
        heads: 2,
        transformer_layers: 1,
        down_attention: true,
        up_attention: true,
    };
    let mut shapes = UNetShapes {
        in_channels: 4,
        out_channels: 4,
        conv_in_kernel: 3,
        conv_out_kernel: 3,
        downsample_padding: 1,
        context: 48,
        mid_block: true,
        ..UNetShapes::default()
    };
    shapes.blocks[..2].copy_from_slice(&[block, BlockShapes { channels: 64, ..block }]);
    shapes
}

fn options(adapter: Option<f64>) -> ComponentOptions {
    ComponentOptions {
        width: 4.0,
        cpu: true,
        lora_prefix: "lora_unet",
        adapter: adapter.map(|rank| AdapterOptions {
            rank,
            ..AdapterOptions::default()
        }),
        ..ComponentOptions::default()
    }
}

fn inputs(walk: &Walk, side: f64, batch: f64) -> [MetaTensor; 2] {
    [
        walk.tensor([batch, 4.0, side, side], false),
        walk.tensor([batch, 77.0, 48.0, 1.0], false),
    ]
}

#[test]
fn parameters_are_those_of_diffusers() {
    // `sum(p.numel() for p in UNet2DConditionModel(...).parameters())` of the published models.
    for (name, millions) in [("sd1", 859.52), ("sd2", 865.91), ("sdxl", 2567.46)] {
        let family = crate::plan::families::of(name).unwrap();
        let mut builder = Builder::new(options(None), 0);
        UNet::new(&mut builder, &family.shapes.unet);
        let found = builder.weights.parameters / 1e6;
        assert!((found - millions).abs() < 0.01, "{name}: {found}");
    }
    let vae = crate::plan::families::of("sd1").unwrap().shapes.vae;
    let mut builder = Builder::new(options(None), 0);
    Vae::new(&mut builder, &vae);
    assert!(
        (builder.weights.parameters / 1e6 - 83.65).abs() < 0.01,
        "{}",
        builder.weights.parameters
    );
}

#[test]
fn everything_is_freed_after_a_pass() {
    for form in [
        Form::Cpu,
        Form::Cuda,
        Form::Metal,
        Form::Portable,
        Form::EmulatedKernels,
    ] {
        for (width, dropout, checkpointed) in [(4.0, false, true), (2.0, false, false), (2.0, true, true)] {
            let width = if form == Form::Cpu { 4.0 } else { width };
            let mut options = options(Some(4.0));
            options.width = width;
            if let Some(adapter) = &mut options.adapter {
                (adapter.dropout, adapter.conv_rank) = (dropout, Some(2.0));
            }
            let mut builder = Builder::new(options, 0);
            let unet = UNet::new(&mut builder, &unet_shapes());
            let walk = Walk::new(Backend { width, form });
            {
                let [sample, context] = inputs(&walk, 16.0, 1.0);
                let gradients = walk.forward_backward(false, || {
                    unet.forward(&walk, &sample, (&context, &Residuals::default()), checkpointed)
                        .unwrap()
                });
                let bytes: f64 = gradients.values().map(|gradient| 4.0 * gradient.elements()).sum();
                let trained: f64 = builder.weights.trained.iter().map(|tensor| 4.0 * tensor.elements).sum();
                assert_eq!(
                    bytes, trained,
                    "every trained tensor gets a gradient of its size: {form:?}"
                );
                assert!(walk.peak() > bytes);
            }
            assert_eq!(walk.meter.live(), 0.0, "{form:?}");
        }
    }
}

/// Norms and scores are float32 also in 16 bits, and a product in 16 bits exists beside them.
#[test]
fn half_the_bytes_per_number_are_not_half_the_memory() {
    let mut builder = Builder::new(options(None), 0);
    let unet = UNet::new(&mut builder, &unet_shapes());
    let peak = |width: f64, side: f64| {
        let walk = Walk::new(Backend {
            width,
            form: Form::Metal,
        });
        let [sample, context] = inputs(&walk, side, 1.0);
        unet.forward(&walk, &sample, (&context, &Residuals::default()), false)
            .unwrap();
        walk.peak()
    };
    let ratio = peak(2.0, 64.0) / peak(4.0, 64.0);
    assert!((0.7..1.2).contains(&ratio), "{ratio}");
    // All scores of 128 x 128 latents would be 2 GiB: two heads, 16384 queries and keys.
    assert!(peak(4.0, 128.0) < 0.6e9, "{}", peak(4.0, 128.0));
}

#[test]
fn checkpointing_keeps_less_and_larger_inputs_take_more() {
    let mut builder = Builder::new(options(Some(4.0)), 0);
    let unet = UNet::new(&mut builder, &unet_shapes());
    let peak = |side: f64, batch: f64, checkpointed: bool| {
        let walk = Walk::new(CPU);
        let [sample, context] = inputs(&walk, side, batch);
        walk.forward_backward(false, || {
            unet.forward(&walk, &sample, (&context, &Residuals::default()), checkpointed)
                .unwrap()
        });
        walk.peak()
    };
    assert!(peak(32.0, 1.0, true) < 0.6 * peak(32.0, 1.0, false));
    assert!(peak(64.0, 1.0, true) > 3.5 * peak(32.0, 1.0, true));
    assert!(peak(64.0, 2.0, false) > 1.9 * peak(64.0, 1.0, false));
}

#[test]
fn a_pass_without_gradients_takes_most_in_its_widest_step() {
    let mut builder = Builder::new(options(None), 0);
    let unet = UNet::new(&mut builder, &unet_shapes());
    let walk = Walk::new(CPU);
    let [sample, context] = inputs(&walk, 64.0, 1.0);
    unet.forward(&walk, &sample, (&context, &Residuals::default()), false)
        .unwrap();
    // In tensors of the first block: the widest step has the input, the hidden layer of the MLP of 8 times its width, half of
    // it, and what is left of the block.
    let tensors = walk.peak() / (4.0 * 32.0 * 64.0 * 64.0);
    assert!((14.0..22.0).contains(&tensors), "{tensors}");
}

#[test]
fn a_tiled_autoencoder_needs_the_memory_of_a_tile() {
    let shapes = VaeShapes {
        in_channels: 3,
        out_channels: 3,
        latent_channels: 4,
        layers: 1,
        channels: [32, 64, 0, 0, 0, 0],
        mid_attention: true,
        sample_size: 64,
    };
    let vae = Vae::new(&mut Builder::new(options(None), 0), &shapes);
    let peak = |side: f64, tiled: bool| {
        let walk = Walk::new(CPU);
        vae.decode(&walk, [side; 2], tiled);
        walk.peak()
    };
    assert_eq!(peak(64.0, true), peak(64.0, false));
    assert!(peak(256.0, true) < 0.3 * peak(256.0, false));
}

#[test]
fn filters_and_streaming_follow_the_names_and_the_order_of_layers() {
    let attention = ComponentOptions {
        adapter: Some(AdapterOptions {
            rank: 4.0,
            filter: NameFilter {
                only_if_contains: vec!["attn1".into()],
                ..NameFilter::default()
            },
            ..AdapterOptions::default()
        }),
        ..options(None)
    };
    let mut builder = Builder::new(attention, 0);
    UNet::new(&mut builder, &unet_shapes());
    // Two down, one middle and four up transformers, four layers each, down and up.
    assert_eq!(builder.weights.trained.len(), 7 * 4 * 2);

    let resident = |streamed: f64| {
        let mut builder = Builder::new(
            ComponentOptions {
                streamed,
                ..options(None)
            },
            0,
        );
        UNet::new(&mut builder, &unet_shapes());
        builder.weights.resident
    };
    let (none, half, all) = (resident(0.0), resident(0.5), resident(1.0));
    // Biases and norms stay.
    assert!(all < 0.05 * none, "{all} {none}");
    assert!((0.4..0.6).contains(&(half / none)), "{half} {none}");
}

/// A norm and an activation in a row, with the bytes that are live after the forward pass.
#[test]
fn norms_and_activations_keep_their_inputs() {
    let mut options = options(None);
    options.trained = Some(NameFilter::default());
    let mut builder = Builder::new(options, 0);
    let norm = builder.norm("norm", 32.0);
    let walk = Walk::new(CPU);
    let tensor = 4.0 * 32.0 * 8.0 * 8.0;
    let kept = std::cell::Cell::new(0.0);
    walk.forward_backward(false, || {
        let x = walk.tensor([1.0, 32.0, 8.0, 8.0], false);
        let normed = walk.norm(&x, norm, NormActivation::None);
        drop(x);
        let y = walk.activation(&normed, Activation::Silu);
        drop(normed);
        kept.set(walk.meter.live());
        y
    });
    // The input of the norm, that of the activation, and the result.
    assert_eq!(kept.get(), 3.0 * tensor);
    assert_eq!(walk.meter.live(), 0.0);
}

/// A linear layer of 64 inputs and 96 outputs with a LoHa of rank 8, for 200 tokens: its factors are two of [96, 8] and two of [8, 64].
#[test]
fn a_loha_keeps_its_changed_weight_and_copies_of_its_factors() {
    let mut options = options(Some(8.0));
    if let Some(adapter) = &mut options.adapter {
        adapter.kind = AdapterKind::Loha;
    }
    let mut builder = Builder::new(options, 0);
    let layer = builder.layer("proj", LayerSizes::linear(64.0, 96.0, true));
    let walk = Walk::new(CPU);
    let x = walk.tensor([1.0, 200.0, 64.0, 1.0], false);
    let mut live = 0.0;
    let gradients = walk.forward_backward(false, || {
        let y = walk.linear(&layer, &x);
        live = walk.meter.live();
        y
    });
    let factors = 2.0 * 8.0 * (64.0 + 96.0);
    assert_eq!(live, 4.0 * (200.0 * (64.0 + 96.0) + 64.0 * 96.0 + factors));
    let numbers: f64 = gradients.values().map(MetaTensor::elements).sum();
    assert_eq!(numbers, factors);
}
