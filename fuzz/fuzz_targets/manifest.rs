#![no_main]

#[path = "../src/manifest.rs"]
mod manifest;
#[path = "../src/unstructured.rs"]
mod unstructured;

libfuzzer_sys::fuzz_target!(|data: &[u8]| manifest::run(data));
