#![no_main]

#[path = "../src/captions.rs"]
mod captions;
#[path = "../src/unstructured.rs"]
mod unstructured;
#[path = "../src/scratch.rs"]
mod scratch;

libfuzzer_sys::fuzz_target!(|data: &[u8]| captions::run(data));
