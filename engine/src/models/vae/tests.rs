//! Tiles, against diffusers (`tests/reference/make_tiles.py`).

use super::*;
use crate::testing::{fixtures, gap, largest};
use candle_core::safetensors;

#[test]
fn tiles_are_those_of_diffusers() {
    let fixture = safetensors::load(fixtures().join("models/vae_tiles.safetensors"), &Device::Cpu).unwrap();
    let whole = AutoencoderKl::open(&fixtures().join("tiny_sd/vae"), DType::F32, &Device::Cpu).unwrap();
    let tiled = whole.clone().tiled(true);
    let decoded = tiled.decode(&fixture["latents"]).unwrap();
    let expected = &fixture["decoded"];
    assert!(gap(&decoded, expected) < 1e-4 * largest(expected));
    let encoded = tiled.encode(&fixture["pictures"]).unwrap();
    for (name, found) in [("mean", &encoded.mean), ("logvar", &encoded.logvar)] {
        assert!(gap(found, &fixture[name]) < 1e-4 * largest(&fixture[name]), "{name}");
    }
    // Not the whole one, but near it.
    let apart = gap(&decoded, &whole.decode(&fixture["latents"]).unwrap());
    assert!(apart > 0.0 && apart < 0.5 * largest(expected), "{apart}");
}

#[test]
fn what_fits_into_a_tile_is_done_whole() {
    let whole = AutoencoderKl::open(&fixtures().join("tiny_sd/vae"), DType::F32, &Device::Cpu).unwrap();
    let latents = Tensor::arange(0f32, 4.0 * 32.0 * 32.0, &Device::Cpu)
        .unwrap()
        .sin()
        .unwrap();
    let latents = latents.reshape((1, 4, 32, 32)).unwrap();
    let tiled = whole.clone().tiled(true).decode(&latents).unwrap();
    assert_eq!(gap(&tiled, &whole.decode(&latents).unwrap()), 0.0);
}
