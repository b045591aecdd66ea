#![no_main]

#[path = "../src/config.rs"]
mod config;
#[path = "../src/unstructured.rs"]
mod unstructured;

libfuzzer_sys::fuzz_target!(|data: &[u8]| config::run(data));
