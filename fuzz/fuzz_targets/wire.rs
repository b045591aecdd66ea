#![no_main]

#[path = "../src/dice.rs"]
mod dice;
#[path = "../src/wire/mod.rs"]
mod wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| wire::run(data));
