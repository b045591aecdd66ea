#![no_main]

#[path = "../src/unstructured.rs"]
mod unstructured;
#[path = "../src/wire/mod.rs"]
mod wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| wire::run(data));
