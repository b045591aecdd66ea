#![no_main]

#[path = "../src/dice.rs"]
mod dice;
#[path = "../src/safetensors.rs"]
mod safetensors;
#[path = "../src/scratch.rs"]
mod scratch;

libfuzzer_sys::fuzz_target!(|data: &[u8]| safetensors::run(data));
