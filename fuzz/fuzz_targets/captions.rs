#![no_main]

#[path = "../src/captions.rs"]
mod captions;
#[path = "../src/scratch.rs"]
mod scratch;
#[path = "../src/unstructured.rs"]
mod unstructured;

libfuzzer_sys::fuzz_target!(|data: &[u8]| captions::run(data));
