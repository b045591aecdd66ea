//! Choices for random trainings on random devices.

use super::{AutoKeys, Correction, LARGE_BATCH_TOKENS, TrainingFit, contexts};
use crate::capability::DeviceKind;
use crate::plan::parameter_counts::{CompactWeights, ParameterCounts};
use crate::plan::profile::MemoryProfile;
use crate::plan::shapes::{LanguageKind, LanguageShapes};
use crate::plan::training_memory::{StepSize, TrainingMemory};
use serde_json::{Value, json};

/// A small generator of random numbers (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::try_from(self.below(values.len() as u64)).unwrap()]
    }

    fn flag(&mut self) -> bool {
        self.below(2) == 1
    }
}

struct Case {
    body: Value,
    counts: ParameterCounts,
    profile: MemoryProfile,
    kind: DeviceKind,
}

fn draw(random: &mut Random) -> Case {
    let (heads, layers) = (random.one_of(&[2, 4, 8, 16]), random.one_of(&[2u32, 3, 6]));
    let width = heads * 64;
    let (learned, gated) = random.one_of(&[(true, false), (false, false), (false, true)]);
    let vocabulary = random.one_of(&[1000u32, 16_384, 49_152]);
    let shapes = LanguageShapes {
        kind: LanguageKind::Decoder,
        width,
        heads,
        kv_heads: random.one_of(&[1, heads]),
        head_width: 64,
        intermediate: width * random.one_of(&[2, 4]),
        layers,
        vocabulary,
        positions: random.one_of(&[256, 2048, 5000, 16_384]),
        window: random.one_of(&[0, 128]),
        learned_positions: learned,
        gated,
        untied: random.flag(),
    };
    let denoiser = u64::from(vocabulary * width) + u64::from(12 * layers) * u64::from(width) * u64::from(width);
    let counts = ParameterCounts {
        denoiser,
        denoiser_stored: CompactWeights {
            halves: if random.flag() { denoiser } else { 0 },
            ..CompactWeights::default()
        },
        decoder: Some(shapes),
        ..ParameterCounts::default()
    };
    let auto = json!("auto");
    let network = random.flag().then(|| json!({"linear": random.one_of(&[4, 64])}));
    let mut body = json!({
        "context": random.one_of(&[64, 256, 1024]),
        "packing": random.flag(),
        "model": {"dtype": "bfloat16", "quantize": network.is_some() && random.flag(), "qtype": random.one_of(&["nf4", "int8"])},
        "train": {
            "batch_size": "auto",
            "gradient_accumulation": 1 + random.below(40),
            "gradient_checkpointing": random.flag(),
            "optimizer": random.one_of(&["adamw", "adamw8bit", "adafactor"]),
        },
    });
    body["network"] = network.unwrap_or(Value::Null);
    if random.flag() {
        body["context"] = auto.clone();
    }
    if random.flag() {
        body["train"]["gradient_checkpointing"] = auto;
    }
    let (kind, profiles) = random.one_of(&[
        (DeviceKind::Cpu, MemoryProfile::on(true)),
        (DeviceKind::Cuda, MemoryProfile::on(false)),
        (DeviceKind::Metal, MemoryProfile::on(false)),
    ]);
    Case {
        body,
        counts,
        profile: random.one_of(&profiles),
        kind,
    }
}

#[test]
fn random_choices_are_within_the_limit_and_the_next_larger_ones_are_not() {
    let mut random = Random(17);
    let (mut capped, mut larger_ones, mut nothing) = (0, 0, 0);
    for case in 0..120 {
        let Case {
            body,
            counts,
            profile,
            kind,
        } = draw(&mut random);
        let keys = AutoKeys::of(&body);
        let memory = TrainingMemory::new(&body, counts).unwrap();
        let fit = TrainingFit::new(keys, memory, profile, kind);
        let positions = counts.decoder.unwrap().positions;
        let least = fit.bytes(keys.smallest(positions));
        // From too little to plenty.
        let limit = least / 100 * (80 + random.below(120) * random.below(30));
        let context = fit.context(limit);
        let choice = fit.choose(context, limit);
        let what = format!("case {case}: {body} on {kind:?} under {profile:?}, {limit} bytes: {choice:?}");
        assert_eq!(choice.bytes, fit.bytes(choice.step), "{what}");
        assert_eq!(choice.fits, choice.bytes <= limit, "{what}");
        assert_eq!(choice.step.context, context, "{what}");
        if !choice.fits {
            nothing += 1;
            assert!(limit < fit.bytes(StepSize { rows: 1, ..choice.step }), "{what}");
            assert_eq!(choice.step.rows, 1, "{what}");
            continue;
        }
        // Every row of a step is in one of its batches.
        let rows = keys.rows();
        assert!(
            choice.step.rows * choice.batches >= rows && choice.step.rows * (choice.batches - 1) < rows,
            "{what}"
        );
        assert!(choice.step.rows <= rows, "{what}");
        assert!(keys.context.is_some() || context <= positions, "{what}");
        // The next larger batch is beyond the limit, or the step has one batch.
        if let Some(next) = keys
            .batch_sizes()
            .into_iter()
            .rev()
            .find(|size| *size > choice.step.rows)
        {
            let next = fit.bytes(keys.step(next, context, choice.step.checkpointed));
            larger_ones += 1;
            let is_fast_enough = keys.checkpointed.is_none() && !choice.step.checkpointed;
            assert!(next > limit || is_fast_enough, "{what}: {next} bytes");
        } else {
            capped += 1;
        }
        // So is the next longer context.
        if keys.context.is_none() {
            let smallest = keys.smallest(positions);
            for longer in contexts(positions).into_iter().filter(|longer| *longer > context) {
                assert!(
                    fit.bytes(StepSize {
                        context: longer,
                        ..smallest
                    }) > limit,
                    "{what}: {longer}"
                );
            }
        }
        // Without gradient checkpointing where that leaves large batches.
        if keys.checkpointed.is_none() && choice.step.checkpointed {
            let without = AutoKeys {
                checkpointed: Some(false),
                ..keys
            };
            let without = TrainingFit::new(without, memory, profile, kind).choose(context, limit);
            let is_large = without.batches == 1 || without.step.rows * context >= LARGE_BATCH_TOKENS;
            assert!(!(without.fits && is_large), "{what}: {without:?}");
        }
    }
    assert!(
        capped > 8 && larger_ones > 20 && nothing > 2,
        "{capped}, {larger_ones}, {nothing}"
    );
}

#[test]
fn batches_of_a_step_are_of_equal_size() {
    let sizes = |rows: u32| {
        AutoKeys {
            batch_size: None,
            accumulation: rows,
            context: Some(64),
            checkpointed: Some(true),
        }
        .batch_sizes()
    };
    assert_eq!(sizes(1), [1]);
    assert_eq!(sizes(8), [8, 4, 3, 2, 1]);
    assert_eq!(sizes(7), [7, 4, 3, 2, 1]);
    // For every number of batches, the fewest rows.
    for rows in 1..200u32 {
        let mut expected: Vec<u32> = (1..=rows).map(|batches| rows.div_ceil(batches)).collect();
        expected.dedup();
        assert_eq!(sizes(rows), expected, "{rows}");
    }
    assert!(sizes(65_536).len() < 600);
}

#[test]
fn contexts_end_at_the_positions_of_the_model() {
    assert_eq!(contexts(300), [300]);
    assert_eq!(contexts(2048), [2048, 1536, 1024, 768, 512]);
    assert_eq!(contexts(0), [512]);
    assert_eq!(contexts(u32::MAX)[0], 1 << 20);
}

#[test]
fn a_step_that_took_more_makes_later_ones_smaller_and_one_that_took_less_larger() {
    let mut random = Random(5);
    let (mut fewer, mut more) = (0, 0);
    for _ in 0..60 {
        let Case {
            body,
            counts,
            profile,
            kind,
        } = draw(&mut random);
        let keys = AutoKeys::of(&body);
        let fit = TrainingFit::new(keys, TrainingMemory::new(&body, counts).unwrap(), profile, kind);
        let limit = fit.bytes(keys.smallest(counts.decoder.unwrap().positions)) / 10 * (11 + random.below(20));
        let choice = fit.choose(fit.context(limit), limit);
        let of = |difference: f64| {
            let corrected = fit.corrected(Correction {
                difference,
                measured: Some(choice.step),
            });
            assert!((corrected.bytes(choice.step) as f64 - choice.bytes as f64 - difference).abs() < 2.0);
            corrected.choose(choice.step.context, limit).step.rows
        };
        let spare = limit as f64 - choice.bytes as f64;
        fewer += u32::from(of(0.3 * limit as f64) < choice.step.rows);
        more += u32::from(of(-0.3 * limit as f64) > choice.step.rows);
        // A step that is still within the limit stays as it is; one that took what was predicted, too.
        assert!(of(0.0) == choice.step.rows && of(spare * 0.5) >= choice.step.rows.min(of(0.0)));
    }
    assert!(fewer > 10 && more > 10, "{fewer}, {more}");
}
