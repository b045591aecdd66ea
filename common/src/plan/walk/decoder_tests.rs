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

/// A LoRA of the layers that a config selects.
fn lora_options(backend: Backend, rank: f64, only: &[&str], ignored: &[&str]) -> ComponentOptions {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    let mut options = options(backend, Some(rank));
    options.lora_prefix = "model";
    options.adapter.as_mut().unwrap().filter = NameFilter {
        only_if_contains: texts(only),
        ignore_if_contains: texts(ignored),
    };
    options
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
    let trained = |only: &[&str], ignored: &[&str]| -> f64 {
        let mut builder = Builder::new(lora_options(Backend::CPU, 16.0, only, ignored), 0);
        Decoder::new(&mut builder, &starcoder2(), None);
        builder.weights.trained.iter().map(|tensor| tensor.elements).sum()
    };
    let sides = [6144.0, 3328.0, 3328.0, 6144.0, 15_360.0, 15_360.0];
    let layers = 30.0 * 16.0 * sides.iter().sum::<f64>();
    assert_eq!(trained(&[], &[]), layers);
    // The embedding layer has one if its own name is there.
    let table = 16.0 * (49_152.0 + 3072.0);
    assert_eq!(trained(&["layers", "embed_tokens"], &[]), layers + table);
    assert_eq!(trained(&["model.embed_tokens"], &[]), table);
    assert_eq!(trained(&["model."], &[]), layers);
    assert_eq!(trained(&["layers", "embed_tokens"], &["embed"]), layers);
}

/// Filters that select all layers and tables.
const TABLES: &[&str] = &["layers", "h.", "embed_tokens", "wte", "wpe"];

#[test]
fn everything_is_freed_after_a_step() {
    let rows = DecoderRows {
        rows: 3.0,
        tokens: 40.0,
        is_packed: true,
    };
    for form in [Form::Cpu, Form::Cuda, Form::Metal] {
        for (learned, gated, untied) in [(true, false, false), (false, false, true), (false, true, false)] {
            // With and without adapters of the tables.
            for (rank, only) in [(None, &[][..]), (Some(8.0), &[][..]), (Some(8.0), TABLES)] {
                let width = if form == Form::Cpu { 4.0 } else { 2.0 };
                let backend = Backend { width, form };
                let peak = |rows: DecoderRows, checkpointed: bool, drops: bool| {
                    let options = match rank {
                        Some(rank) => lora_options(backend, rank, only, &[]),
                        None => options(backend, None),
                    };
                    let mut builder = Builder::new(options, 0);
                    let decoder = Decoder::new(&mut builder, &small(learned, gated, untied), None);
                    let walk = Walk::new(backend);
                    decoder.train(&walk, rows, checkpointed, drops).unwrap();
                    assert_eq!(
                        walk.meter.live(),
                        0.0,
                        "{form:?} {learned} {gated} {untied} {rank:?} {only:?}"
                    );
                    walk.peak()
                };
                let what = format!("{form:?} {learned} {gated} {untied} {rank:?} {only:?}");
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

/// The backward pass goes on to the first block, and the gradients of the matrices are there.
#[test]
fn a_lora_of_a_table_needs_memory_in_a_step() {
    let rows = DecoderRows {
        rows: 2.0,
        tokens: 64.0,
        is_packed: true,
    };
    let peak = |only: &[&str]| {
        let mut builder = Builder::new(lora_options(Backend::CPU, 8.0, only, &[]), 0);
        let decoder = Decoder::new(&mut builder, &small(false, true, false), None);
        let walk = Walk::new(Backend::CPU);
        decoder.train(&walk, rows, true, false).unwrap();
        walk.peak()
    };
    // At least the gradients of both matrices, of 500 rows and 128 features, in float32.
    let more = peak(&["layers", "embed_tokens"]) - peak(&["layers"]);
    assert!(more >= 4.0 * 8.0 * (500.0 + 128.0), "{more}");
}
