//! Walks over small transformers.

use super::build::{AdapterOptions, Builder, ComponentOptions, LoraLayers};
use super::meter::MetaTensor;
use super::{Backend, Conditions, Denoiser, Form, LanguageEncoder, Walk};
use crate::plan::families::{self, Family};
use crate::plan::names::NameFilter;
use crate::plan::shapes::{ModelShapes, TransformerKind};

const NAMES: [&str; 4] = ["chroma", "flux", "sd3", "zimage"];

fn family(name: &str) -> &'static Family {
    families::of(name).unwrap()
}

/// The published shapes with two heads of 32 features and few blocks.
fn small(name: &str) -> ModelShapes {
    let mut shapes = family(name).shapes;
    let transformer = &mut shapes.transformer;
    (transformer.heads, transformer.head_width, transformer.context) = (2, 32, 48);
    transformer.blocks = 3;
    transformer.dual_blocks = u32::from(name == "sd3");
    transformer.single_blocks = transformer.single_blocks.min(2);
    transformer.approximator_layers = transformer.approximator_layers.min(2);
    transformer.approximator_width = transformer.approximator_width.min(40);
    shapes
}

fn options(rank: f64, layers: LoraLayers) -> ComponentOptions {
    ComponentOptions {
        width: 4.0,
        cpu: true,
        lora_prefix: "transformer",
        lora_layers: layers,
        adapter: (rank > 0.0).then(|| AdapterOptions {
            rank,
            ..AdapterOptions::default()
        }),
        ..ComponentOptions::default()
    }
}

fn inputs(walk: &Walk, shapes: &ModelShapes, side: f64, batch: f64) -> (MetaTensor, Conditions) {
    let transformer = &shapes.transformer;
    let tokens = |count: f64, features: u32| walk.tensor([batch, count, f64::from(features), 1.0], false);
    let conditions = Conditions {
        text: tokens(64.0, transformer.context),
        pooled: (transformer.pooled > 0).then(|| tokens(1.0, transformer.pooled)),
        prompt_tokens: 40.0,
        masks_padding: false,
        control: None,
        residuals: Default::default(),
    };
    (walk.tensor([batch, 16.0, side, side], false), conditions)
}

#[test]
fn parameters_are_those_of_diffusers_and_transformers() {
    // `sum(p.numel() for p in …Transformer2DModel(...).parameters())` of the published models, in millions. The table of
    // positions of Stable Diffusion 3.5 is in its files and no parameter there.
    let table = 192.0 * 192.0 * 2432.0 / 1e6;
    for (name, millions) in [
        ("chroma", 8_899.98),
        ("flux", 11_901.41),
        ("sd3", 8_056.63 + table),
        ("zimage", 6_154.91),
    ] {
        let mut builder = Builder::new(options(0.0, LoraLayers::All), 0);
        Denoiser::new(&mut builder, &family(name).shapes);
        let found = builder.weights.parameters / 1e6;
        assert!((found / millions - 1.0).abs() < 1e-4, "{name}: {found}");
    }
    // T5 XXL's encoder; Qwen3 4B without its last layer and without its last norm.
    let layer = 2560.0 * (4096.0 * 2.0 + 1024.0 * 2.0 + 9728.0 * 3.0) + 2.0 * 2560.0 + 2.0 * 128.0;
    let qwen3 = 151_936.0 * 2560.0 + 35.0 * layer;
    for (name, millions) in [("flux", 4762.31), ("zimage", qwen3 / 1e6)] {
        let mut builder = Builder::new(options(0.0, LoraLayers::All), 0);
        LanguageEncoder::new(&mut builder, &family(name).shapes.language, false);
        let found = builder.weights.parameters / 1e6;
        assert!((found / millions - 1.0).abs() < 1e-4, "{name}: {found}");
    }
}

/// Inputs and outputs of every linear layer that gets a LoRA, added up from the published widths and numbers of blocks.
#[test]
fn loras_have_the_parameters_of_the_layers_in_blocks() {
    // A feed-forward network of four times the width.
    let mlp = |w: u64| 2 * (w + 4 * w);
    // A stream of a joint block: four projections, the modulation and the network.
    let stream = |w: u64| 4 * 2 * w + (w + 6 * w) + mlp(w);
    // FLUX.1: 19 double blocks and 38 single ones, whose MLP runs beside their attention.
    let w = 3072;
    let single = (w + 3 * w) + 3 * 2 * w + (w + 4 * w) + (5 * w + w);
    let flux = 19 * 2 * stream(w) + 38 * single;
    // Chroma: the same blocks without modulation, which has no LoRA.
    let chroma = 19 * 2 * (stream(w) - (w + 6 * w)) + 38 * (single - (w + 3 * w));
    // Stable Diffusion 3.5 large: 38 blocks; the last gives no text, which leaves its text's projections and two vectors.
    let w = 2432;
    let sd3 = 37 * 2 * stream(w) + stream(w) + 3 * 2 * w + (w + 2 * w);
    // Z-Image: 30 blocks with a gated network of 10240 features.
    let w = 3840;
    let zimage = 30 * (4 * 2 * w + 3 * (w + 10_240) + (256 + 4 * w));
    for (name, counted) in NAMES.into_iter().zip([chroma, flux, sd3, zimage]) {
        let trained = |options: ComponentOptions| {
            let mut builder = Builder::new(options, 0);
            Denoiser::new(&mut builder, &family(name).shapes);
            builder
                .weights
                .trained
                .iter()
                .map(|tensor| tensor.elements)
                .sum::<f64>()
        };
        let blocks = options(1.0, family(name).lora_layers);
        assert_eq!(trained(blocks.clone()), counted as f64, "{name}");
        assert!(trained(options(1.0, LoraLayers::All)) > counted as f64, "{name}");
        let mut some = blocks;
        some.adapter = Some(AdapterOptions {
            rank: 1.0,
            filter: NameFilter {
                only_if_contains: vec!["to_q".into()],
                ignore_if_contains: vec!["single".into()],
            },
            ..AdapterOptions::default()
        });
        let of_queries = match name {
            "chroma" | "flux" => 19 * 2 * 3072,
            "sd3" => 38 * 2 * 2432,
            _ => 30 * 2 * 3840,
        };
        assert_eq!(trained(some), f64::from(of_queries), "{name}");
    }
}

#[test]
fn everything_is_freed_after_a_pass_and_every_trained_tensor_gets_a_gradient() {
    for name in NAMES {
        for form in [Form::Cpu, Form::Cuda, Form::Metal, Form::Portable] {
            for (width, dropout, checkpointed) in [(4.0, false, true), (2.0, false, false), (2.0, true, true)] {
                let width = if form == Form::Cpu { 4.0 } else { width };
                let mut options = options(4.0, family(name).lora_layers);
                options.width = width;
                if let Some(adapter) = &mut options.adapter {
                    adapter.dropout = dropout;
                }
                let (shapes, mut builder) = (small(name), Builder::new(options, 0));
                let denoiser = Denoiser::new(&mut builder, &shapes);
                let walk = Walk::new(Backend { width, form });
                {
                    let (latents, conditions) = inputs(&walk, &shapes, 16.0, 2.0);
                    let gradients = walk.forward_backward(false, || {
                        denoiser.forward(&walk, &latents, &conditions, checkpointed).unwrap()
                    });
                    let bytes: f64 = gradients.values().map(|gradient| 4.0 * gradient.elements()).sum();
                    let trained: f64 = builder.weights.trained.iter().map(|tensor| 4.0 * tensor.elements).sum();
                    // A block's text that nothing reads gets none: that of the last joint block's output.
                    assert_eq!(bytes, trained, "{name}, {form:?}, {checkpointed}");
                    assert!(walk.peak() > bytes);
                }
                assert_eq!(walk.meter.live(), 0.0, "{name}, {form:?}");
            }
        }
    }
}

#[test]
fn checkpointing_keeps_less_and_a_control_image_is_as_many_tokens_again() {
    for name in NAMES {
        let mut shapes = small(name);
        shapes.transformer.blocks = 8;
        let mut builder = Builder::new(options(4.0, family(name).lora_layers), 0);
        let denoiser = Denoiser::new(&mut builder, &shapes);
        let peak = |side: f64, checkpointed: bool, control: Option<f64>| {
            let walk = Walk::new(Backend::CPU);
            let (latents, mut conditions) = inputs(&walk, &shapes, side, 1.0);
            conditions.control = control;
            walk.forward_backward(false, || {
                denoiser.forward(&walk, &latents, &conditions, checkpointed).unwrap()
            });
            walk.peak()
        };
        assert!(peak(64.0, true, None) < 0.5 * peak(64.0, false, None), "{name}");
        if shapes.transformer.kind == TransformerKind::Flux {
            let (one, two) = (peak(64.0, false, None), peak(64.0, false, Some(1024.0)));
            assert!((1.7..2.0).contains(&(two / one)), "{one} {two}");
        }
    }
}

/// With a mask the scores are float32, and those with the mask are further ones. The padding of a single text is cut.
#[test]
fn masked_text_of_flux_in_a_batch_takes_a_bias_of_the_scores() {
    let shapes = small("flux");
    let mut builder = Builder::new(options(0.0, LoraLayers::All), 0);
    let denoiser = Denoiser::new(&mut builder, &shapes);
    let peak = |form: Form, batch: f64, masks_padding: bool| {
        let width = if form == Form::Cpu { 4.0 } else { 2.0 };
        let walk = Walk::new(Backend { width, form });
        let (latents, mut conditions) = inputs(&walk, &shapes, 64.0, batch);
        conditions.masks_padding = masks_padding;
        denoiser.forward(&walk, &latents, &conditions, false).unwrap();
        walk.peak()
    };
    let (plain, masked) = (peak(Form::Cuda, 2.0, false), peak(Form::Cuda, 2.0, true));
    assert!(masked > 1.5 * plain, "{plain} {masked}");
    assert_eq!(peak(Form::Cuda, 1.0, true), peak(Form::Cuda, 1.0, false));
    assert_eq!(peak(Form::Cpu, 2.0, true), peak(Form::Cpu, 2.0, false));
}

/// The position bias of T5 is large: one number for each pair of tokens and each head.
#[test]
fn a_language_model_keeps_a_layer_and_its_position_bias() {
    let peak_of = |name: &str, batch: f64, tokens: f64, masked: bool| {
        let mut builder = Builder::new(
            ComponentOptions {
                streamed: 1.0,
                ..options(0.0, LoraLayers::All)
            },
            0,
        );
        let shapes = &family(name).shapes.language;
        let encoder = LanguageEncoder::new(&mut builder, shapes, false);
        let walk = Walk::new(Backend::CPU);
        encoder.forward(&walk, batch, tokens, masked).unwrap();
        assert_eq!(walk.meter.live(), 0.0);
        walk.peak() / f64::from(1 << 20)
    };
    let peak = |name: &str, tokens: f64| peak_of(name, 1.0, tokens, false);
    // A weight of 4096 x 10240 numbers, 64 x 512 x 512 of the bias, and tokens of 4096 and 10240 features.
    assert!(
        (160.0 + 64.0..340.0).contains(&peak("flux", 512.0)),
        "{}",
        peak("flux", 512.0)
    );
    // With masked padding each of four prompts has its bias; that of one prompt is gone before the layers run.
    let more = peak_of("flux", 4.0, 512.0, true) - peak_of("flux", 4.0, 512.0, false);
    assert!((3.0 * 63.0..3.0 * 65.0).contains(&more), "{more}");
    assert_eq!(peak_of("flux", 1.0, 512.0, true), peak("flux", 512.0));
    assert!(
        (95.0..110.0).contains(&peak("zimage", 40.0)),
        "{}",
        peak("zimage", 40.0)
    );
}
