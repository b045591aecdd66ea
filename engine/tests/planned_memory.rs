//! Compares the memory that the planner predicts for GPUs with what the engine takes in portable mode: random models and
//! jobs, each phase by itself, counted by the allocator. A program of its own, because the allocator counts for the whole
//! process. `AITK_MEMORY_SEEDS=1..200` runs other seeds than the usual few.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints what it measured"
)]

mod allocator;
mod trainings;
mod transformers;
mod unets;

use aitk_common::plan::phases::{cpu_phases, emulated_phases, portable_phases};
use aitk_engine::device::portable::{emulated_kernels, portable};
use candle_core::DType;
use std::ops::RangeInclusive;
use std::process::Command;
use trainings::Training;
use unets::{Case, phases};

/// The seeds if none are named: with `AITK_CASES=all` all of them, with `half`, which `.ci/run` sets, half of them, otherwise the first.
const SEEDS: RangeInclusive<u64> = 1..=4;

fn seeds() -> Vec<u64> {
    let Ok(named) = std::env::var("AITK_MEMORY_SEEDS") else {
        let count = match std::env::var("AITK_CASES").as_deref() {
            Ok("all") => SEEDS.count(),
            Ok(_) => SEEDS.count() / 2,
            Err(_) => 1,
        };
        return SEEDS.take(count).collect();
    };
    let (first, last) = named.split_once("..").unwrap_or((&named, &named));
    (first.trim().parse().unwrap()..=last.trim_start_matches('=').trim().parse().unwrap()).collect()
}

/// Whether neither seeds are named nor more cases are wanted.
fn are_few() -> bool {
    ["AITK_CASES", "AITK_MEMORY_SEEDS"]
        .iter()
        .all(|name| std::env::var_os(name).is_none())
}

/// Whether a test is left out. With `AITK_CASES`, which `.ci/run` sets, it runs.
fn skips_long_tests() -> bool {
    if are_few() {
        println!("left out: AITK_CASES=half runs this test");
    }
    are_few()
}

/// Set in a process that runs one test.
const CHILD: &str = "AITK_PLANNED_MEMORY_CHILD";

/// Runs a test of this name in a process of its own, because the allocator counts for the whole process, and with one thread, as the
/// scratch memory of candle's convolutions on a CPU is that of each thread.
fn alone(name: &str, test: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        rayon::ThreadPoolBuilder::new().num_threads(1).build_global().unwrap();
        return test();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&child.stdout);
    println!("{printed}");
    assert!(
        child.status.success() && printed.contains("1 passed"),
        "{name} failed in its process: {}\n{}",
        child.status,
        String::from_utf8_lossy(&child.stderr)
    );
}

/// What is predicted and what was measured, by phase.
struct Comparison {
    /// The least and the most that a prediction may be above what was measured, as fractions.
    limits: RangeInclusive<f64>,
    /// Bytes that a prediction may always differ.
    bytes: f64,
    count: usize,
    outside: Vec<String>,
}

impl Comparison {
    fn within(limits: RangeInclusive<f64>) -> Self {
        Self {
            limits,
            bytes: 0.0,
            count: 0,
            outside: Vec::new(),
        }
    }

    fn add(&mut self, case: &str, phases: Vec<(&'static str, f64, f64)>) {
        for (phase, predicted, measured) in phases {
            let over = predicted / measured - 1.0;
            let is_close = (predicted - measured).abs() < self.bytes || self.limits.contains(&over);
            let line = format!(
                "{case}, {phase}: {:.2} MiB predicted, {:.2} taken, {:+.1} %",
                predicted / MIB,
                measured / MIB,
                100.0 * over
            );
            println!("{line}");
            self.count += 1;
            if !is_close {
                self.outside.push(line);
            }
        }
    }

    fn finish(self) {
        let Self { count, outside, .. } = self;
        assert!(count > 0, "nothing was compared");
        assert!(
            outside.is_empty(),
            "{} of {count} phases:\n{}",
            outside.len(),
            outside.join("\n")
        );
    }
}

#[test]
#[should_panic(expected = "nothing was compared")]
fn a_comparison_of_nothing_fails() {
    Comparison::within(0.0..=1.0).finish();
}

#[test]
fn predictions_for_gpus_are_those_of_portable_mode() {
    alone("predictions_for_gpus_are_those_of_portable_mode", || {
        let mut comparison = Comparison::within(-0.05..=0.10);
        portable(|| {
            for seed in seeds() {
                let case = Case::draw(seed);
                let (training, checkpointed) = (case.training, case.checkpointed);
                let name = format!(
                    "seed {seed}, {} in {:?}, {training:?}, checkpointed {checkpointed}",
                    case.arch, case.dtype
                );
                comparison.add(&name, phases(&case, portable_phases));
            }
        });
        comparison.finish();
    });
}

#[test]
fn predictions_for_cuda_are_those_of_emulated_kernels() {
    alone("predictions_for_cuda_are_those_of_emulated_kernels", || {
        let mut comparison = Comparison {
            // Buffers of candle's products on a CPU.
            bytes: 0.25 * MIB,
            ..Comparison::within(-0.05..=0.10)
        };
        emulated_kernels(|| {
            // An emulated kernel is slow: two seeds if none are named.
            let max = std::env::var_os("AITK_MEMORY_SEEDS").map_or(2, |_| usize::MAX);
            for seed in seeds().into_iter().take(max) {
                let case = Case::draw(seed);
                let name = format!("seed {seed}, {} in {:?}, {:?}", case.arch, case.dtype, case.training);
                let is_half = case.dtype != DType::F32;
                // candle's products of 16-bit matrices need more on a CPU, which is most of an autoencoder.
                let is_compared = |phase: &str| !is_half || !matches!(phase, "decoding" | "encoding");
                let phases = phases(&case, emulated_phases).into_iter();
                comparison.add(&name, phases.filter(|(phase, ..)| is_compared(phase)).collect());
                let case = transformers::Case::draw(seed, false);
                comparison.add(
                    &format!("seed {seed}, {}", case.describe()),
                    case.phases(emulated_phases),
                );
            }
        });
        comparison.finish();
    });
}

#[test]
fn predictions_of_transformers_for_gpus_are_those_of_portable_mode() {
    if skips_long_tests() {
        return;
    }
    alone(
        "predictions_of_transformers_for_gpus_are_those_of_portable_mode",
        || {
            let mut comparison = Comparison::within(-0.05..=0.10);
            portable(|| {
                for seed in seeds() {
                    let case = transformers::Case::draw(seed, false);
                    comparison.add(
                        &format!("seed {seed}, {}", case.describe()),
                        case.phases(portable_phases),
                    );
                }
            });
            comparison.finish();
        },
    );
}

#[test]
fn predictions_of_transformers_for_cpus_are_what_the_kernels_take() {
    alone("predictions_of_transformers_for_cpus_are_what_the_kernels_take", || {
        // What kernels pad, and the buffers of attention, are not predicted: up to a tenth of models that are as small as these.
        let mut comparison = Comparison::within(-0.10..=0.10);
        for seed in seeds() {
            let case = transformers::Case::draw(seed, true);
            comparison.add(&format!("seed {seed}, {}", case.describe()), case.phases(cpu_phases));
        }
        comparison.finish();
    });
}

#[test]
fn predictions_of_chroma_are_what_it_takes() {
    alone("predictions_of_chroma_are_what_it_takes", || {
        let mut comparison = Comparison::within(-0.10..=0.10);
        for seed in seeds() {
            let case = transformers::Case::chroma(seed, true);
            comparison.add(
                &format!("seed {seed} on a CPU, {}", case.describe()),
                case.phases(cpu_phases),
            );
            // Portable mode is slow.
            if !are_few() {
                portable(|| {
                    let case = transformers::Case::chroma(seed, false);
                    comparison.add(
                        &format!("seed {seed}, {}", case.describe()),
                        case.phases(portable_phases),
                    );
                });
            }
        }
        comparison.finish();
    });
}

#[test]
fn predictions_of_steps_with_other_adapters_are_what_they_take() {
    if skips_long_tests() {
        return;
    }
    alone("predictions_of_steps_with_other_adapters_are_what_they_take", || {
        // Of the smallest models here, what no operation shows is up to a fifteenth.
        let mut comparison = Comparison::within(-0.07..=0.10);
        portable(|| {
            for (seed, training) in seeds()
                .into_iter()
                .flat_map(|seed| Training::others(seed).map(|t| (seed, t)))
            {
                let mut case = Case::draw(seed);
                case.training = training;
                let step = phases(&case, portable_phases)
                    .into_iter()
                    .filter(|(phase, ..)| *phase == "step");
                let name = format!("seed {seed}, {} in {:?}, {training:?}", case.arch, case.dtype);
                comparison.add(&name, step.collect());
                let case = transformers::Case::draw(seed, false).training(training);
                let step = case
                    .phases(portable_phases)
                    .into_iter()
                    .filter(|(phase, ..)| *phase == "step");
                comparison.add(&format!("seed {seed}, {}", case.describe()), step.collect());
            }
        });
        comparison.finish();
        let mut comparison = Comparison::within(-0.10..=0.10);
        for (seed, training) in seeds()
            .into_iter()
            .flat_map(|seed| Training::others(seed).map(|t| (seed, t)))
        {
            let case = transformers::Case::draw(seed, true).training(training);
            let step = case
                .phases(cpu_phases)
                .into_iter()
                .filter(|(phase, ..)| *phase == "step");
            comparison.add(&format!("seed {seed} on a CPU, {}", case.describe()), step.collect());
        }
        comparison.finish();
    });
}

#[test]
fn predictions_of_steps_of_decorators_are_what_they_take() {
    alone("predictions_of_steps_of_decorators_are_what_they_take", || {
        let step = |case: &transformers::Case, predict: transformers::Predict| {
            let phases = case.phases(predict).into_iter();
            phases.filter(|(phase, ..)| *phase == "step").collect::<Vec<_>>()
        };
        let mut comparison = Comparison::within(-0.10..=0.10);
        for seed in seeds() {
            let case = transformers::Case::decorator(seed, true);
            comparison.add(
                &format!("seed {seed} on a CPU, {}", case.describe()),
                step(&case, cpu_phases),
            );
            // Portable mode is slow.
            if !are_few() {
                portable(|| {
                    let case = transformers::Case::decorator(seed, false);
                    comparison.add(
                        &format!("seed {seed}, {}", case.describe()),
                        step(&case, portable_phases),
                    );
                });
            }
        }
        comparison.finish();
    });
}

const MIB: f64 = (1 << 20) as f64;
