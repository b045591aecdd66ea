#![no_main]

#[path = "../src/dice.rs"]
mod dice;
#[path = "../src/manifest.rs"]
mod manifest;

libfuzzer_sys::fuzz_target!(|data: &[u8]| manifest::run(data));
