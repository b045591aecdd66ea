//! Machines die, freeze and come back, and storage goes wrong, at random moments: every job ends with the result of an
//! undisturbed run, and nothing is left behind.
//!
//! A few fixed rounds by default. The long form, with outages of up to 30 seconds:
//!
//! ```text
//! AITK_CHAOS_ROUNDS=50 cargo test --workspace --test chaos -- --nocapture
//! ```
//!
//! `AITK_CHAOS_SEED` is the seed of the first round (the following ones count up), so a round that failed runs again
//! with its seed and `AITK_CHAOS_ROUNDS=1`. The seed decides what happens and what it waits for; how far a process has
//! come by then is up to the machine.

#![allow(clippy::print_stdout, reason = "a long test says how far it is")]

use aitk_tests::chaos::plan::Plan;
use aitk_tests::chaos::{Cluster, check, round};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Of the short form: chosen so that together they have every kind of wound.
const SHORT: [u64; 2] = [1, 2];

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.trim().parse().ok()
}

#[test]
fn whatever_happens_the_result_is_the_same_and_nothing_is_left_behind() {
    let rounds = number("AITK_CHAOS_ROUNDS");
    let (seeds, outage): (Vec<u64>, Duration) = match rounds {
        None => (SHORT.to_vec(), Duration::from_secs(3)),
        Some(rounds) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let first = number("AITK_CHAOS_SEED").unwrap_or(now.as_secs());
            ((first..first + rounds).collect(), Duration::from_secs(30))
        }
    };
    let folder = tempfile::tempdir().expect("there is room for the test");
    let root = folder.path().canonicalize().expect("the folder is there");
    let mut cluster = Cluster::start(env!("CARGO_BIN_EXE_s3-server"), &root);
    let lease = cluster.pool.setup().lease;
    for (at, seed) in seeds.iter().enumerate() {
        let plan = Plan::draw(*seed, lease, outage);
        println!("round {} of {}, {plan}", at + 1, seeds.len());
        let ended = round::run(&mut cluster, &plan);
        let made: Vec<String> = ended
            .made
            .iter()
            .map(|(at, wound)| format!("{:.1} s {wound}", at.as_secs_f64()))
            .collect();
        let attempts = ended.watched.iter().filter(|event| event.is_assignment()).count();
        println!(
            "  {:.1} s, {attempts} attempts, {} of {} wounds made",
            ended.took.as_secs_f64(),
            made.len(),
            plan.wounds.len()
        );
        let faults = check::faults(&cluster, &ended);
        if !faults.is_empty() {
            // Kept for a look at its logs.
            let kept = folder.keep();
            panic!(
                "{}\n\nmade:\n{}\n\nrun it again with AITK_CHAOS_SEED={seed} AITK_CHAOS_ROUNDS=1; everything lies in {}\n{}",
                faults.join("\n"),
                made.join("\n"),
                kept.display(),
                cluster.tails()
            );
        }
    }
    for machine in &mut cluster.machines {
        let process = machine.process.as_mut().expect("every machine is up");
        assert_eq!(
            process.terminate(Duration::from_secs(20)),
            Some(0),
            "{}",
            process.tail()
        );
    }
}
