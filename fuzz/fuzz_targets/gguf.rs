#![no_main]

#[path = "../src/dice.rs"]
mod dice;
#[path = "../src/gguf.rs"]
mod gguf;
#[path = "../src/scratch.rs"]
mod scratch;

libfuzzer_sys::fuzz_target!(|data: &[u8]| gguf::run(data));
