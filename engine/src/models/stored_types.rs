//! Checks the types in which tensors are stored, for models and adapters of which only names and shapes are read.

use crate::error::Result;
use crate::weights::{Index, Weights};

/// Checks that the used tensors of a file are stored in types that can be read. Reading another one gives the same error.
///
/// # Errors
/// When one is of another type, such as `BOOL`. The error names the file, the tensor and its type.
pub(crate) fn check_stored_types(index: &Index, is_used: impl Fn(&str) -> bool) -> Result<()> {
    // A single whole number, such as the alpha of a LoRA, is read whatever its type.
    let is_checked = |name: &str, shape: &[usize]| is_used(name) && shape.iter().product::<usize>() != 1;
    let checked = index.renamed(|name, shape| is_checked(name, shape).then(|| (name.to_owned(), shape.to_vec())));
    checked.check_types()
}

/// As [`check_stored_types`], for the tensors from which a part was built. `built`: the weights that recorded which tensors were requested;
/// if they recorded none, nothing is checked.
///
/// # Errors
/// As [`check_stored_types`].
pub(crate) fn check_types_of_built(index: &Index, built: &Weights) -> Result<()> {
    match built.requested_tensors() {
        Some(used) => check_stored_types(index, |name| used.contains(name)),
        None => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::adapters::check_lora;
    use crate::families;
    use crate::testing::{copy_folder, fixtures};
    use aitk_common::job::arch::ArchName;
    use aitk_common::model_files::PartPaths;
    use std::path::Path;

    const LORA_TENSOR: &str = "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight";

    /// Changes the type of a tensor in the header of a file. `I32` has as many bytes as `F32`.
    fn store_as_integers(file: &Path, tensor: &str) {
        let bytes = std::fs::read(file).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let text = String::from_utf8(bytes[8..header].to_vec()).unwrap();
        let (before, after) = text.split_once(&format!("\"{tensor}\":")).unwrap();
        let after = after.replacen("F32", "I32", 1);
        let changed = format!("{before}\"{tensor}\":{after}");
        assert_eq!(changed.len(), text.len());
        std::fs::write(file, [&bytes[..8], changed.as_bytes(), &bytes[header..]].concat()).unwrap();
    }

    #[test]
    fn tensors_of_other_types_are_found_without_reading_them() {
        for (arch, folder, file, tensor) in [
            (
                ArchName::Sd1,
                "tiny_sd",
                "unet/diffusion_pytorch_model.safetensors",
                "conv_in.weight",
            ),
            (
                ArchName::Sd1,
                "tiny_sd",
                "text_encoder/model.safetensors",
                "embeddings.token_embedding.weight",
            ),
            (
                ArchName::Sd3,
                "tiny_sd35",
                "transformer/diffusion_pytorch_model.safetensors",
                "context_embedder.bias",
            ),
            (
                ArchName::Flux,
                "tiny_flux",
                "text_encoder_2/model-00001-of-00002.safetensors",
                "encoder.block.0.layer.0.SelfAttention.k.weight",
            ),
            (
                ArchName::Sd3,
                "tiny_sd35",
                "vae/diffusion_pytorch_model.safetensors",
                "decoder.conv_in.weight",
            ),
        ] {
            let model = tempfile::tempdir().unwrap();
            copy_folder(&fixtures().join(folder), model.path());
            families::check(model.path(), arch, &PartPaths::default()).unwrap();
            store_as_integers(&model.path().join(file), tensor);
            let error = families::check(model.path(), arch, &PartPaths::default()).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains(file) && error.contains(&format!("tensor `{tensor}` is stored as I32")),
                "{error}"
            );
        }
    }

    #[test]
    fn an_adapter_of_another_type_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("lora.safetensors");
        std::fs::copy(fixtures().join("lora/ai_toolkit.safetensors"), &file).unwrap();
        let check = || {
            let error = check_lora(&file, &fixtures().join("tiny_sd"), ArchName::Sd1, &PartPaths::default()).err();
            error.map(|error| error.to_string())
        };
        assert_eq!(check(), None);
        // A single number is read from any integer.
        store_as_integers(&file, "lora_te_text_model_encoder_layers_0_mlp_fc1.alpha");
        assert_eq!(check(), None);
        store_as_integers(&file, LORA_TENSOR);
        let error = check().unwrap();
        assert!(
            error.contains(&format!("tensor `{LORA_TENSOR}` is stored as I32")),
            "{error}"
        );
    }
}
