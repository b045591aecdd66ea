//! Against Pillow (`tests/reference/make_images.py`), and against bad files.

use super::*;
use candle_core::safetensors;
use std::collections::HashMap;
use std::path::PathBuf;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/images")
}

fn pillow() -> HashMap<String, Tensor> {
    safetensors::load(folder().join("pillow.safetensors"), &Device::Cpu).unwrap()
}

fn image(tensor: &Tensor) -> RgbImage {
    let (height, width, _) = tensor.dims3().unwrap();
    let bytes = tensor.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    RgbImage::from_raw(width as u32, height as u32, bytes).unwrap()
}

/// The largest difference of two images, or what else is different.
fn difference(ours: &RgbImage, theirs: &RgbImage) -> Result<u8, String> {
    if ours.dimensions() != theirs.dimensions() {
        return Err(format!("{:?} instead of {:?}", ours.dimensions(), theirs.dimensions()));
    }
    Ok(ours
        .as_raw()
        .iter()
        .zip(theirs.as_raw())
        .map(|(a, b)| a.abs_diff(*b))
        .max()
        .unwrap_or(0))
}

#[test]
fn resizing_gives_the_bytes_of_pillow() {
    let tensors = pillow();
    let mut cases = 0;
    for (name, tensor) in &tensors {
        let base = match name.split_once(':') {
            Some(("resize", _)) => image(&tensors["base"]),
            Some(("tall", _)) => image(&tensors["tall"]),
            _ => continue,
        };
        let theirs = image(tensor);
        let filter = match name.split(':').nth(1).unwrap() {
            "box" => Filter::Box,
            "bilinear" => Filter::Bilinear,
            "bicubic" => Filter::Bicubic,
            _ => Filter::Lanczos,
        };
        let ours = resize(&base, theirs.width(), theirs.height(), filter);
        assert_eq!(difference(&ours, &theirs), Ok(0), "{name}");
        cases += 1;
    }
    assert_eq!(cases, 32 + 28);
}

#[test]
fn files_open_as_pillow_opens_them() {
    let tensors = pillow();
    let mut wrong = Vec::new();
    let mut cases = 0;
    for (name, tensor) in tensors.iter().filter(|(name, _)| name.starts_with("file:")) {
        let file = &name["file:".len()..];
        let ours = open_rgb(&folder().join(file)).unwrap();
        let theirs = image(tensor);
        // Decoders of lossy WebP may round differently.
        let allowed = if file.starts_with("lossy") { 4 } else { 0 };
        match difference(&ours, &theirs) {
            Ok(d) if d <= allowed => {}
            other => wrong.push(format!("{file}: {other:?}")),
        }
        if dimensions(&folder().join(file)).unwrap() != theirs.dimensions() {
            wrong.push(format!("{file}: dimensions"));
        }
        cases += 1;
    }
    wrong.sort();
    assert!(
        wrong.is_empty(),
        "{} of {cases} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(cases >= 38);
}

/// A PNG header of this size and nothing behind it.
fn png_header(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = encode(&RgbImage::new(1, 1), Format::Png, &[]).unwrap();
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    let mut crc = u32::MAX;
    for byte in &bytes[12..29] {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0xedb8_8320
            } else {
                crc >> 1
            };
        }
    }
    bytes[29..33].copy_from_slice(&(!crc).to_be_bytes());
    bytes
}

#[test]
fn bad_files_are_one_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.png");
    let complaint = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let message = open_rgb(&path).unwrap_err().to_string();
        assert!(message.contains("bad.png"), "{message}");
        message
    };
    assert!(complaint(b"").contains("empty"));
    assert!(complaint(b"hello, I am no image").contains("not an image"));
    assert!(complaint(b"GIF89a\x01\x00\x01\x00\x00\x00\x00").contains("Gif"));
    assert!(complaint(&png_header(30_000, 30_000)).contains("30000 x 30000"));
    assert!(dimensions(&path).unwrap_err().to_string().contains("30000 x 30000"));
    for file in [
        "rgb.png",
        "420.jpg",
        "444.jpg",
        "gray.jpg",
        "progressive.jpg",
        "rough422.jpg",
        "rgb.webp",
        "lossy.webp",
    ] {
        let whole = std::fs::read(folder().join(file)).unwrap();
        for keep in [5, 20, 40, whole.len() / 2, whole.len() * 9 / 10] {
            std::fs::write(&path, &whole[..keep]).unwrap();
            assert!(
                open_rgb(&path).is_err(),
                "{file} cut to {keep} of {} bytes",
                whole.len()
            );
        }
        // What stands behind the image is nobody's business.
        std::fs::write(&path, [whole.as_slice(), b"behind"].concat()).unwrap();
        assert!(open_rgb(&path).is_ok(), "{file} with more behind it");
        let mut noisy = whole.clone();
        for i in (30..noisy.len()).step_by(7) {
            noisy[i] ^= 0x5a;
        }
        std::fs::write(&path, &noisy).unwrap();
        let _ = open_rgb(&path);
    }
    let half = |file: &str| {
        let whole = std::fs::read(folder().join(file)).unwrap();
        complaint(&whole[..whole.len() / 2])
    };
    for file in ["420.jpg", "progressive.jpg"] {
        assert!(half(file).contains("cut off"), "{}", half(file));
    }
    let missing = open_rgb(&dir.path().join("none.png")).unwrap_err().to_string();
    assert!(missing.contains("none.png"));
}

#[test]
fn images_are_saved_whole_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let original = image(&pillow()["base"]);
    for (suffix, allowed) in [("png", 0), ("webp", 0), ("jpg", 80)] {
        let path = dir.path().join(format!("a.{suffix}"));
        save(&original, &path, &[("parameters", "ein Würfel, seed 7")]).unwrap();
        let back = open_rgb(&path).unwrap();
        assert!(difference(&back, &original).unwrap() <= allowed, "{suffix}");
    }
    let png = std::fs::read(dir.path().join("a.png")).unwrap();
    assert!(png.windows(11).any(|w| w == b"parameters\0"));
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        3,
        "nothing is left behind"
    );
    assert!(
        save(&original, &dir.path().join("a.bmp"), &[])
            .unwrap_err()
            .to_string()
            .contains("bmp")
    );
    assert!(save(&original, &dir.path().join("none/a.png"), &[]).is_err());
}

#[test]
fn tensors_and_back() {
    let original = image(&pillow()["base"]);
    let tensor = to_tensor(&original, &Device::Cpu).unwrap();
    assert_eq!(tensor.dims(), [3, 23, 37]);
    let back = from_tensor(&tensor.unsqueeze(0).unwrap()).unwrap();
    assert_eq!(back[0], original);
}
