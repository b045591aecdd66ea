#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| aitk_fuzz::wire::run(data));
