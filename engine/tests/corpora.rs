//! What the fuzzer found worth keeping (`fuzz/corpus`), through the very functions that it calls, without a fuzzer.

#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking; the fuzzer has these files as a library"
)]

#[path = "../../fuzz/src/captions.rs"]
mod captions;
#[path = "../../fuzz/src/dice.rs"]
mod dice;
#[path = "../../fuzz/src/replay.rs"]
mod replay;
#[path = "../../fuzz/src/safetensors.rs"]
mod safetensors;
#[path = "../../fuzz/src/scratch.rs"]
mod scratch;

use replay::replay;

#[test]
fn captions_prompts_and_buckets() {
    replay("captions", captions::run);
}

#[test]
fn weights_files() {
    replay("safetensors", safetensors::run);
}
