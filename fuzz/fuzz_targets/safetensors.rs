#![no_main]

#[path = "../src/unstructured.rs"]
mod unstructured;
#[path = "../src/safetensors.rs"]
mod safetensors;
#[path = "../src/scratch.rs"]
mod scratch;

libfuzzer_sys::fuzz_target!(|data: &[u8]| safetensors::run(data));
