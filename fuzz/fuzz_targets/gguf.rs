#![no_main]

#[path = "../src/gguf.rs"]
mod gguf;
#[path = "../src/scratch.rs"]
mod scratch;
#[path = "../src/unstructured.rs"]
mod unstructured;

libfuzzer_sys::fuzz_target!(|data: &[u8]| gguf::run(data));
