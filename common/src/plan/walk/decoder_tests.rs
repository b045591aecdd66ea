//! Walks over language models that generate texts.

use super::build::{AdapterOptions, Builder, ComponentOptions, LoraLayers};
use super::{Backend, Decoder, DecoderRows, Form, Walk};
use crate::plan::names::NameFilter;
use crate::plan::shapes::{LanguageKind, LanguageShapes};

fn starcoder2() -> LanguageShapes {
    LanguageShapes {
        kind: LanguageKind::Decoder,
        width: 3072,
        heads: 24,
        kv_heads: 2,
        head_width: 128,
        intermediate: 12_288,
        layers: 30,
        vocabulary: 49_152,
        positions: 16_384,
        window: 4096,
        ..LanguageShapes::default()
    }
}

fn small(learned_positions: bool, gated: bool, untied: bool) -> LanguageShapes {
    LanguageShapes {
        width: 128,
        heads: 4,
        kv_heads: 2,
        head_width: 32,
        intermediate: 256,
        layers: 3,
        vocabulary: 500,
        positions: 256,
        window: 16,
        learned_positions,
        gated,
        untied,
        ..starcoder2()
    }
}

fn options(backend: Backend, rank: Option<f64>) -> ComponentOptions {
    ComponentOptions {
        width: backend.width,
        cpu: backend.is_cpu(),
        trained: rank.is_none().then(NameFilter::default),
        adapter: rank.map(|rank| AdapterOptions {
            rank,
            ..AdapterOptions::default()
        }),
        lora_layers: LoraLayers::Blocks(&["h", "layers"]),
        ..ComponentOptions::default()
    }
}

#[test]
fn parameters_are_those_of_transformers() {
    let llama = LanguageShapes {
        width: 4096,
        heads: 32,
        kv_heads: 32,
        intermediate: 11_008,
        layers: 32,
        vocabulary: 32_000,
        window: 0,
        gated: true,
        untied: true,
        ..starcoder2()
    };
    for (shapes, parameters) in [(starcoder2(), 3_030_371_328.0), (llama, 6_738_415_616.0)] {
        let mut builder = Builder::new(options(Backend::CPU, None), 0);
        Decoder::new(&mut builder, &shapes, None);
        assert_eq!(builder.weights.parameters, parameters);
        let trained: f64 = builder.weights.trained.iter().map(|tensor| tensor.elements).sum();
        assert_eq!(trained, parameters);
    }
    // A LoRA of rank 16 on all linear layers of the blocks, as peft counts it.
    let mut builder = Builder::new(options(Backend::CPU, Some(16.0)), 0);
    Decoder::new(&mut builder, &starcoder2(), None);
    let trained: f64 = builder.weights.trained.iter().map(|tensor| tensor.elements).sum();
    let sides = [6144.0, 3328.0, 3328.0, 6144.0, 15_360.0, 15_360.0];
    assert_eq!(trained, 30.0 * 16.0 * sides.iter().sum::<f64>());
}

#[test]
fn everything_is_freed_after_a_step() {
    let rows = DecoderRows {
        rows: 3.0,
        tokens: 40.0,
        is_packed: true,
    };
    for form in [Form::Cpu, Form::Cuda, Form::Metal] {
        for (learned, gated, untied) in [(true, false, false), (false, false, true), (false, true, false)] {
            for rank in [None, Some(8.0)] {
                let width = if form == Form::Cpu { 4.0 } else { 2.0 };
                let backend = Backend { width, form };
                let peak = |rows: DecoderRows, checkpointed: bool, drops: bool| {
                    let mut builder = Builder::new(options(backend, rank), 0);
                    let decoder = Decoder::new(&mut builder, &small(learned, gated, untied), None);
                    let walk = Walk::new(backend);
                    decoder.train(&walk, rows, checkpointed, drops).unwrap();
                    assert_eq!(walk.meter.live(), 0.0, "{form:?} {learned} {gated} {untied} {rank:?}");
                    walk.peak()
                };
                let what = format!("{form:?} {learned} {gated} {untied} {rank:?}");
                let whole = peak(rows, false, false);
                assert!(peak(rows, true, false) < whole, "{what}");
                assert!(peak(rows, false, true) <= whole, "{what}");
                let more = DecoderRows { rows: 6.0, ..rows };
                assert!(peak(more, false, false) > whole, "{what}");
                let alone = DecoderRows {
                    is_packed: false,
                    ..rows
                };
                assert!(peak(alone, false, false) < whole, "{what}");
            }
        }
    }
}
