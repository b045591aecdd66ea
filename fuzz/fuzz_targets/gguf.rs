#![no_main]

#[path = "../src/unstructured.rs"]
mod unstructured;
#[path = "../src/gguf.rs"]
mod gguf;
#[path = "../src/scratch.rs"]
mod scratch;

libfuzzer_sys::fuzz_target!(|data: &[u8]| gguf::run(data));
