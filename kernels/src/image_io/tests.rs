//! Compares with Pillow (`tests/reference/make_images.py`), and reads bad files.

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

fn to_image(tensor: &Tensor) -> RgbImage {
    let (height, width, _) = tensor.dims3().unwrap();
    let bytes = tensor.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    RgbImage::from_raw(width as u32, height as u32, bytes).unwrap()
}

/// The largest difference of two images. An error if their sizes differ.
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
fn resizing_matches_pillow_byte_for_byte() {
    let tensors = pillow();
    let mut cases = 0;
    for (name, tensor) in &tensors {
        let base = match name.split_once(':') {
            Some(("resize", _)) => to_image(&tensors["base"]),
            Some(("tall", _)) => to_image(&tensors["tall"]),
            _ => continue,
        };
        let theirs = to_image(tensor);
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
    let mut failures = Vec::new();
    let mut cases = 0;
    for (name, tensor) in tensors.iter().filter(|(name, _)| name.starts_with("file:")) {
        let file = &name["file:".len()..];
        let ours = open_rgb(&folder().join(file)).unwrap();
        let theirs = to_image(tensor);
        // Decoders of lossy WebP may round differently.
        let allowed = if file.starts_with("lossy") { 4 } else { 0 };
        match difference(&ours, &theirs) {
            Ok(d) if d <= allowed => {}
            other => failures.push(format!("{file}: {other:?}")),
        }
        if dimensions(&folder().join(file)).unwrap() != theirs.dimensions() {
            failures.push(format!("{file}: dimensions"));
        }
        cases += 1;
    }
    failures.sort();
    assert!(
        failures.is_empty(),
        "{} of {cases} differ:\n{}",
        failures.len(),
        failures.join("\n")
    );
    assert!(cases >= 38);
}

/// Pillow 13 reads the alphas 1, 128, 0 and 255 from these files.
#[test]
fn of_an_alpha_channel_of_16_bits_the_upper_byte_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("alpha.png");
    let values = [0x01ff_u16, 0x80ff, 0x00f0, 0xff00];
    let rgba = image::ImageBuffer::from_fn(4, 1, |x, _| image::Rgba([values[x as usize]; 4]));
    let grey = image::ImageBuffer::from_fn(4, 1, |x, _| image::LumaA([values[x as usize]; 2]));
    for image in [DynamicImage::ImageRgba16(rgba), DynamicImage::ImageLumaA16(grey)] {
        image.save(&path).unwrap();
        let alpha: Vec<u8> = open_alpha(&path).unwrap().pixels().map(|pixel| pixel[0]).collect();
        assert_eq!(alpha, [1, 128, 0, 255], "{:?}", image.color());
    }
}

/// A PNG whose header claims this size.
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
fn a_file_that_is_too_large_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.jpg");
    std::fs::write(&path, encode(&RgbImage::new(4, 4), Format::Jpeg, &[]).unwrap()).unwrap();
    assert_eq!(dimensions(&path).unwrap(), (4, 4));
    // The rest is a hole, which takes no space on the disk.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(MAX_FILE_BYTES + 1).unwrap();
    for error in [open_rgb(&path).map(drop), dimensions(&path).map(drop)] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("large.jpg: the file has 1073741825 bytes"), "{error}");
    }
}

#[test]
fn bad_files_are_errors_that_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.png");
    let error_of = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let message = open_rgb(&path).unwrap_err().to_string();
        assert!(message.contains("bad.png"), "{message}");
        message
    };
    assert!(error_of(b"").contains("empty"));
    assert!(error_of(b"hello, I am no image").contains("not an image"));
    assert!(error_of(b"GIF89a\x01\x00\x01\x00\x00\x00\x00").contains("Gif"));
    assert!(error_of(&png_header(30_000, 30_000)).contains("30000 x 30000"));
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
        // Data after the end of the image is ignored.
        std::fs::write(&path, [whole.as_slice(), b"behind"].concat()).unwrap();
        assert!(open_rgb(&path).is_ok(), "{file} with data after its end");
        let mut noisy = whole.clone();
        for i in (30..noisy.len()).step_by(7) {
            noisy[i] ^= 0x5a;
        }
        std::fs::write(&path, &noisy).unwrap();
        let _ = open_rgb(&path);
    }
    let error_of_half = |file: &str| {
        let whole = std::fs::read(folder().join(file)).unwrap();
        error_of(&whole[..whole.len() / 2])
    };
    for file in ["420.jpg", "progressive.jpg"] {
        assert!(error_of_half(file).contains("cut off"), "{}", error_of_half(file));
    }
    let missing = open_rgb(&dir.path().join("none.png")).unwrap_err().to_string();
    assert!(missing.contains("none.png"));
}

#[test]
fn saved_images_can_be_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let original = to_image(&pillow()["base"]);
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
        "no temporary file is left"
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
fn an_image_survives_the_conversion_to_a_tensor_and_back() {
    let original = to_image(&pillow()["base"]);
    let tensor = to_tensor(&original, &Device::Cpu).unwrap();
    assert_eq!(tensor.dims(), [3, 23, 37]);
    let back = from_tensor(&tensor.unsqueeze(0).unwrap()).unwrap();
    assert_eq!(back[0], original);
}

/// The end marker of the thumbnail in a photo's header is not that of the photo.
#[test]
fn a_cut_jpeg_with_a_thumbnail_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("photo.jpg");
    RgbImage::from_fn(64, 64, |x, y| {
        image::Rgb([(x * 37 + y * 91) as u8, (x * y) as u8, (x * x) as u8])
    })
    .save(&path)
    .unwrap();
    let plain = std::fs::read(&path).unwrap();
    let thumbnail = b"Exif\0\0\xff\xd8\xff\xc0thumbnail\xff\xd9";
    let length = u16::try_from(thumbnail.len() + 2).unwrap().to_be_bytes();
    let header = [&plain[..2], &[0xff, 0xe1], &length, thumbnail].concat();
    let photo = [header.as_slice(), &plain[2..]].concat();
    let is_cut = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        is_cut_off(&path)
    };
    assert!(!is_cut(&photo));
    assert!(!is_cut(&[photo.as_slice(), &[0; 100]].concat()), "data after the end");
    for end in [
        header.len(),
        header.len() + 3,
        header.len() + 40,
        photo.len() - 100,
        photo.len() - 2,
    ] {
        assert!(is_cut(&photo[..end]), "{end} of {}", photo.len());
    }
}

#[test]
fn tensors_without_pixels_are_no_images() {
    for shape in [(1, 3, 0, 8), (1, 3, 8, 0), (2, 3, 0, 0)] {
        let images = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        let error = from_tensor(&images).unwrap_err().to_string();
        assert!(error.contains("with pixels"), "{shape:?}: {error}");
    }
    let none = Tensor::zeros((0, 3, 8, 8), candle_core::DType::F32, &Device::Cpu).unwrap();
    assert!(from_tensor(&none).unwrap().is_empty());
}
