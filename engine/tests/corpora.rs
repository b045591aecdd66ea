//! Runs the fuzz targets on the saved corpora (`fuzz/corpus`), without a fuzzer.

#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking; the fuzzer has these files as a library"
)]

#[path = "../../fuzz/src/captions.rs"]
mod captions;
#[path = "../../fuzz/src/gguf.rs"]
mod gguf;
#[path = "../../fuzz/src/replay.rs"]
mod replay;
#[path = "../../fuzz/src/safetensors.rs"]
mod safetensors;
#[path = "../../fuzz/src/scratch.rs"]
mod scratch;
#[path = "../../fuzz/src/unstructured.rs"]
mod unstructured;

use replay::replay;

#[test]
fn the_corpus_of_captions_prompts_and_buckets_does_not_panic() {
    replay("captions", captions::run);
}

#[test]
fn the_corpus_of_safetensors_files_does_not_panic() {
    replay("safetensors", safetensors::run);
}

#[test]
fn the_corpus_of_gguf_files_and_random_bytes_do_not_panic() {
    replay("gguf", gguf::run);
    // Random bytes from a fixed seed too.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..2_000_usize {
        let mut bytes = vec![if round % 8 == 0 { 1 } else { 2 }];
        bytes.extend((0..40 + round % 160).map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        }));
        gguf::run(&bytes);
    }
}
