//! Random lives of a pool, from a seed: users who submit, pause and change their minds; workers that come, sleep, die
//! and repeat themselves; children that hang, devices that are stuck, workers that are refused for a while; a network that
//! loses, delays, reorders and doubles; a coordinator that crashes between any two effects, whose disk is full for a while,
//! and a store that fails. After every step the invariants hold; once the trouble is over, everything ends.
//!
//! A seed replays exactly:
//!
//!     AITK_SIM_SEED=17 cargo test -p aitk-scheduler --lib simulation -- --nocapture
//!
//! The long form, a million events:
//!
//!     AITK_SIM_EVENTS=1000000 cargo test --release -p aitk-scheduler --lib simulation -- --nocapture

mod actions;
mod random;
mod rules;
mod store;
mod worker;
mod world;

use world::World;

/// Events of one life: long enough for a job to be lost and found several times.
const LIFE: u64 = 2_000;
/// Events that the default test suite runs.
const SHORT: u64 = 20_000;
/// Events that show what is rare as well.
const LONG: u64 = 300_000;
const RARE: &str = "parts that a faster device took over";

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn simulation() {
    if let Some(seed) = number("AITK_SIM_SEED") {
        World::new(seed, true).live(LIFE);
        return;
    }
    let wanted = number("AITK_SIM_EVENTS").unwrap_or(SHORT);
    let mut stats = world::Stats::default();
    let mut seed = 1;
    while stats.events < wanted {
        let life = std::panic::catch_unwind(|| World::new(seed, false).live(LIFE));
        match life {
            Ok(one) => stats.add(&one),
            Err(panic) => {
                println!(
                    "replay it with: AITK_SIM_SEED={seed} cargo test -p aitk-scheduler --lib simulation -- --nocapture"
                );
                std::panic::resume_unwind(panic);
            }
        }
        seed += 1;
    }
    println!("{} lives: {stats:?}", seed - 1);
    // A simulation in which nothing goes wrong shows nothing. What comes 25 times in a million events is asked of a long one.
    for (what, count) in stats.troubles() {
        let rare = what == RARE && wanted < LONG;
        assert!(count > 0 || rare, "no {what} in {stats:?}");
    }
}

#[test]
fn a_seed_replays_exactly() {
    let run = || World::new(42, false).live(LIFE);
    assert_eq!(run(), run());
}
