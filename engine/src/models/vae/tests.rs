//! Compares tiling with diffusers (`tests/reference/make_tiles.py`), and tests configs that are refused.

use super::*;
use crate::testing::{fixtures, gap, largest};
use candle_core::safetensors;

#[test]
fn tiling_matches_diffusers() {
    let fixture = safetensors::load(fixtures().join("models/vae_tiles.safetensors"), &Device::Cpu).unwrap();
    let whole = AutoencoderKl::open(&fixtures().join("tiny_sd/vae"), DType::F32, &Device::Cpu).unwrap();
    let tiled = whole.clone().tiled(true);
    let decoded = tiled.decode(&fixture["latents"]).unwrap();
    let expected = &fixture["decoded"];
    assert!(gap(&decoded, expected) < 1e-4 * largest(expected));
    let encoded = tiled.encode(&fixture["images"]).unwrap();
    for (name, found) in [("mean", &encoded.mean), ("logvar", &encoded.logvar)] {
        assert!(gap(found, &fixture[name]) < 1e-4 * largest(&fixture[name]), "{name}");
    }
    // Close to the untiled result, but not equal.
    let difference = gap(&decoded, &whole.decode(&fixture["latents"]).unwrap());
    assert!(difference > 0.0 && difference < 0.5 * largest(expected), "{difference}");
}

#[test]
fn an_image_that_fits_in_a_tile_is_not_tiled() {
    let whole = AutoencoderKl::open(&fixtures().join("tiny_sd/vae"), DType::F32, &Device::Cpu).unwrap();
    let latents = Tensor::arange(0f32, 4.0 * 32.0 * 32.0, &Device::Cpu)
        .unwrap()
        .sin()
        .unwrap();
    let latents = latents.reshape((1, 4, 32, 32)).unwrap();
    let tiled = whole.clone().tiled(true).decode(&latents).unwrap();
    assert_eq!(gap(&tiled, &whole.decode(&latents).unwrap()), 0.0);
}

#[test]
fn a_scaling_factor_of_zero_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = fixtures().join("tiny_sd/vae");
    for entry in std::fs::read_dir(&tiny).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let text = std::fs::read_to_string(tiny.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut open = |factor: serde_json::Value| {
        config["scaling_factor"] = factor;
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        AutoencoderKl::open(folder.path(), DType::F32, &Device::Cpu).map(drop)
    };
    open(0.5.into()).unwrap();
    let error = open(0.into()).unwrap_err().to_string();
    let folder_name = folder.path().display().to_string();
    assert!(
        error.contains(&folder_name) && error.contains("`scaling_factor` is 0, expected"),
        "{error}"
    );
}

crate::testing::in_portable_mode! {
    tiling_matches_diffusers,
}
