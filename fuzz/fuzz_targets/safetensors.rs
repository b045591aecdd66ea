#![no_main]

#[path = "../src/safetensors.rs"]
mod safetensors;
#[path = "../src/scratch.rs"]
mod scratch;
#[path = "../src/unstructured.rs"]
mod unstructured;

libfuzzer_sys::fuzz_target!(|data: &[u8]| safetensors::run(data));
