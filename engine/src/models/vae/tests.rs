//! Compares tiling and FLUX.1's autoencoder with diffusers (`tests/reference/make_tiles.py`, `make_models_flux.py`), and tests
//! configs that are refused.

use super::*;
use crate::autograd::gradients;
use crate::image_io;
use crate::media::Media;
use crate::models::codec::Codec;
use crate::testing::{fixtures, gap, largest};
use candle_core::{Var, safetensors};

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

#[test]
fn sizes_of_no_model_are_refused() {
    let folder = fixtures().join("tiny_sd/vae");
    type Change = fn(&mut VaeConfig);
    let changes: [(Change, &str); 6] = [
        (|config| config.latent_channels = usize::MAX / 2, "`latent_channels`"),
        (|config| config.latent_channels = 0, "`latent_channels`"),
        (|config| config.out_channels = usize::MAX, "`out_channels`"),
        (|config| config.norm_num_groups = 0, "`norm_num_groups`"),
        (
            |config| config.block_out_channels = vec![usize::MAX / 2; 2],
            "`block_out_channels`",
        ),
        (|config| config.block_out_channels = vec![32; 70], "has 70 numbers"),
    ];
    for (change, expected) in changes {
        let mut config: VaeConfig = config::read(&folder.join("config.json")).unwrap();
        change(&mut config);
        let weights = Weights::open(&folder, DType::F32, &Device::Cpu).unwrap();
        let error = AutoencoderKl::new(&weights, &config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_autoencoder_of_flux_and_its_gradients_match_diffusers() {
    let fixture = safetensors::load(fixtures().join("models/flux_vae.safetensors"), &Device::Cpu).unwrap();
    let model = AutoencoderKl::open(&fixtures().join("tiny_flux/vae"), DType::F32, &Device::Cpu).unwrap();
    assert_eq!((model.scale_factor(), model.latent_channels()), (8, vec![16]));
    let close = |what: &str, found: &Tensor| {
        let error = gap(found, &fixture[what]) / largest(&fixture[what]);
        assert!(error < 1e-4, "{what}: {error}");
    };
    let image = Var::from_tensor(&fixture["image"]).unwrap();
    let latent = Var::from_tensor(&fixture["latent"]).unwrap();
    let (_, found) = gradients(|| {
        let moments = model.encode(&image)?;
        close("mean", &moments.mean);
        close("logvar", &moments.logvar);
        let both = Tensor::cat(&[&moments.mean, &moments.logvar], 1)?;
        Ok::<_, crate::error::EngineError>((both * &fixture["probe_moments"])?.sum_all()?)
    })
    .unwrap();
    close("grad_image", found.get(&image).unwrap());
    let (_, found) = gradients(|| {
        let decoded = model.decode(&latent)?;
        close("decoded", &decoded);
        Ok::<_, crate::error::EngineError>((decoded * &fixture["probe_decoded"])?.sum_all()?)
    })
    .unwrap();
    close("grad_latent", found.get(&latent).unwrap());
}

/// The latents that the transformer sees are shifted and scaled.
#[test]
fn the_codec_of_flux_shifts_and_scales_latents() {
    let fixture = safetensors::load(fixtures().join("models/flux_vae.safetensors"), &Device::Cpu).unwrap();
    let model = AutoencoderKl::open(&fixtures().join("tiny_flux/vae"), DType::F32, &Device::Cpu).unwrap();
    let mut no_noise = |shape: &[usize]| Ok(Tensor::zeros(shape, DType::F32, &Device::Cpu)?);
    let latents = Codec::encode(&model, &fixture["image"], &mut no_noise).unwrap();
    let scaled = &fixture["scaled"];
    assert!(gap(&latents[0], scaled) < 1e-4 * largest(scaled));
    let found = Codec::decode(&model, std::slice::from_ref(scaled)).unwrap();
    let expected = image_io::from_tensor(&fixture["from_scaled"]).unwrap();
    let [Media::Image(found)] = found.as_slice() else {
        panic!("{found:?}");
    };
    let pairs = found.as_raw().iter().zip(expected[0].as_raw());
    assert!(pairs.clone().all(|(a, b)| a.abs_diff(*b) <= 1));
    assert!(pairs.filter(|(a, b)| a != b).count() < 5);
}

crate::testing::in_portable_mode! {
    the_autoencoder_of_flux_and_its_gradients_match_diffusers,
    the_codec_of_flux_shifts_and_scales_latents,
    tiling_matches_diffusers,
}
