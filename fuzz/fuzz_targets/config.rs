#![no_main]

#[path = "../src/config.rs"]
mod config;
#[path = "../src/dice.rs"]
mod dice;

libfuzzer_sys::fuzz_target!(|data: &[u8]| config::run(data));
