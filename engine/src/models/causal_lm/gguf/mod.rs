//! Decoders in GGUF files, with the names and the metadata of llama.cpp (its `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py`).

mod architecture;
mod export;
mod import;
mod metadata;
mod pre_tokenizer;
mod rope_export;
mod rope_import;
mod tokenizer_export;
mod tokenizer_import;

pub use export::GgufExport;
pub(super) use import::GgufModel;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
