//! How a base layer is changed: LoRA and its file dialects.
