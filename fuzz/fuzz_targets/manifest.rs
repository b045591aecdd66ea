#![no_main]

#[path = "../src/unstructured.rs"]
mod unstructured;
#[path = "../src/manifest.rs"]
mod manifest;

libfuzzer_sys::fuzz_target!(|data: &[u8]| manifest::run(data));
