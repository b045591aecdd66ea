//! Tests of data sets, caches and batches.

use super::*;
use crate::data::DatasetOptions;
use candle_core::{DType, Device, Tensor};
use std::path::Path;

#[cfg(unix)]
#[test]
fn a_pipe_in_a_data_set_is_an_error_and_does_not_block() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("x.png");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(
        discover(dir.path(), false, false)
            .unwrap_err()
            .to_string()
            .contains("x.png")
    );
    let caption = dir.path().join("a.txt");
    let _other = std::os::unix::net::UnixListener::bind(&caption).unwrap();
    let message = read_caption(&dir.path().join("a.png"), ".txt", None)
        .unwrap_err()
        .to_string();
    assert!(message.contains("a.txt"), "{message}");
}

#[test]
fn the_latent_key_has_ai_toolkits_hash() {
    let key = LatentKey {
        filename: "a.png".into(),
        plan: plan_bucket(1920, 1080, 1024, 32, false),
        flip_x: false,
        flip_y: false,
        latent_space: "flux1".into(),
        normalization: None,
        is_clamped: false,
        control: None,
        half: None,
    };
    assert_eq!(key.ai_toolkit_hash(), "iJjM-TQwokKK_Kq5MY63gQ");
    assert_ne!(key.hash("one", "vae"), key.hash("two", "vae"));
    assert_ne!(
        LatentKey {
            flip_x: true,
            ..key.clone()
        }
        .ai_toolkit_hash(),
        key.ai_toolkit_hash()
    );
    let normalised = LatentKey {
        normalization: Some("sdxl"),
        ..key.clone()
    };
    assert_ne!(normalised.hash("one", "vae"), key.hash("one", "vae"));
    let clamped = LatentKey {
        is_clamped: true,
        ..normalised.clone()
    };
    assert_ne!(clamped.hash("one", "vae"), normalised.hash("one", "vae"));
}

#[test]
fn cached_latents_are_verified_and_those_of_ai_toolkit_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.png");
    std::fs::write(&image, b"content").unwrap();
    let key = LatentKey {
        filename: "a.png".into(),
        plan: plan_bucket(64, 64, 64, 16, false),
        flip_x: false,
        flip_y: false,
        latent_space: "sd1".into(),
        normalization: None,
        is_clamped: false,
        control: None,
        half: None,
    };
    let cache = LatentCache::new("vae", 4, 8);
    assert!(cache.read(&image, None, &key, "c1").is_none());
    let latent = Tensor::arange(0f32, 256.0, &Device::Cpu)
        .unwrap()
        .reshape((4, 8, 8))
        .unwrap();
    cache.write(&image, None, &key, "c1", &latent).unwrap();
    let same = |t: &Tensor| {
        t.flatten_all().unwrap().to_vec1::<f32>().unwrap() == latent.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert!(same(&cache.read(&image, None, &key, "c1").unwrap()));
    assert!(cache.read(&image, None, &key, "edited").is_none());
    assert!(LatentCache::new("other", 4, 8).read(&image, None, &key, "c1").is_none());
    // Any damage is detected.
    let path = cache.path(&image, None, &key, "c1");
    let bytes = std::fs::read(&path).unwrap();
    for at in [bytes.len() - 1, bytes.len() - 700, 9] {
        let mut broken = bytes.clone();
        broken[at] ^= 1;
        std::fs::write(&path, &broken).unwrap();
        assert!(cache.read(&image, None, &key, "c1").is_none(), "flip at {at}");
    }
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(cache.read(&image, None, &key, "c1").is_none());
    // A latent next to the image is not found in a worker's folder, and the other way round.
    let elsewhere = dir.path().join("derived");
    assert!(cache.read(&image, Some(&elsewhere), &key, "c1").is_none());
    cache.write(&image, Some(&elsewhere), &key, "c1", &latent).unwrap();
    assert!(same(&cache.read(&image, Some(&elsewhere), &key, "c1").unwrap()));
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 1);
    // A cache file that ai-toolkit wrote.
    let theirs = path.with_file_name(format!("a_{}.safetensors", key.ai_toolkit_hash()));
    candle_core::safetensors::save(&std::collections::HashMap::from([("latent", latent.clone())]), &theirs).unwrap();
    assert!(same(&cache.read(&image, None, &key, "c1").unwrap()));
    // Files of other contents: whole numbers, and more bytes than a latent needs.
    let whole = latent.to_dtype(DType::U8).unwrap();
    let long = Tensor::zeros(1 << 19, DType::F32, &Device::Cpu).unwrap();
    for tensors in [
        vec![("latent", whole)],
        vec![("latent", latent.clone()), ("other", long)],
    ] {
        let tensors = std::collections::HashMap::from_iter(tensors);
        candle_core::safetensors::save(&tensors, &theirs).unwrap();
        assert!(cache.read(&image, None, &key, "c1").is_none());
    }
}

fn options(path: &Path) -> DatasetOptions {
    DatasetOptions {
        path: path.to_path_buf(),
        resolution: 64,
        batch_size: 2,
        captions: CaptionRules::default(),
        ..DatasetOptions::default()
    }
}

fn write_image(path: &Path, w: u32, h: u32) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    image::RgbImage::from_fn(w, h, |x, y| image::Rgb([x as u8, y as u8, 7]))
        .save(path)
        .unwrap();
}

#[test]
fn folders_are_listed_as_in_the_config_reference() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for name in [
        "b.png",
        "a.PNG",
        "sub/c.png",
        ".hidden.png",
        ".dot/d.png",
        "_controls/e.png",
        "_controls/sub/f.png",
    ] {
        write_image(&root.join(name).with_extension("png"), 64, 64);
        if name == "a.PNG" {
            std::fs::rename(root.join("a.png"), root.join("a.PNG")).unwrap();
        }
    }
    std::fs::write(root.join("notes.txt"), "x").unwrap();
    let listing = discover(root, false, false).unwrap();
    let names: Vec<_> = listing
        .images
        .iter()
        .map(|p| p.strip_prefix(root).unwrap().to_str().unwrap())
        .collect();
    // As in ai-toolkit, only the images directly in `_controls` are left out.
    assert_eq!(names, ["_controls/sub/f.png", "a.PNG", "b.png", "sub/c.png"]);

    std::fs::write(
        root.join("set.json"),
        r#"{"b.png": {"caption": "long", "caption_short": "short"}}"#,
    )
    .unwrap();
    let listing = discover(&root.join("set.json"), true, false).unwrap();
    assert_eq!(listing.captions[&root.join("b.png")], "short");
    // Paths that start at a folder above, as those of ai-toolkit, which starts at the current folder; those beside the file come first.
    let of_sub = root.join("sub/set.json");
    let text = r#"{"sub/c.png": {"caption": "C"}, "a.PNG": {"caption": "A"}, "c.png": {}, "_controls/e.png": {}}"#;
    std::fs::write(&of_sub, text).unwrap();
    let above = |path: &str| std::fs::canonicalize(root).unwrap().join(path);
    let listing = discover(&of_sub, false, false).unwrap();
    assert_eq!(listing.images.len(), 3, "{:?}", listing.images);
    assert_eq!(listing.captions[&above("a.PNG")], "A");
    assert_eq!(listing.captions[&above("sub/c.png")], "C");
    assert!(listing.images.contains(&root.join("sub/c.png")));
    write_image(&root.join("sub/sub/c.png"), 64, 64);
    let listing = discover(&of_sub, false, false).unwrap();
    assert_eq!(listing.captions[&root.join("sub/sub/c.png")], "C");
    std::fs::remove_file(root.join("sub/sub/c.png")).unwrap();
    // What was sent with a job stays in its folder.
    let message = discover(&of_sub, false, true).unwrap_err().to_string();
    assert!(message.contains("does not exist"), "{message}");
    std::fs::remove_file(&of_sub).unwrap();
    std::fs::write(root.join("set.json"), r#"{"gone.png": {"caption": "x"}}"#).unwrap();
    assert!(
        discover(&root.join("set.json"), false, false)
            .unwrap_err()
            .to_string()
            .contains("gone.png")
    );
}

#[test]
fn a_captions_file_has_captions_and_decides_which_images_are_trained() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("set");
    for name in ["a.png", "b.png", "sub/b.png", "c.png"] {
        write_image(&folder.join(name), 64, 64);
    }
    std::fs::write(folder.join("a.txt"), "of a file beside the image").unwrap();
    let file = dir.path().join("meta.json");
    let scan = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let mut options = DatasetOptions {
            captions_file: Some(file.clone()),
            ..options(&folder)
        };
        options.captions.tags.separator = Some(";".into());
        DatasetScan::read(&options, false)
    };
    let found = scan(r#"{"a": {"caption": "A", "tags": "x, y"}, "/old/set/sub/b.png": {"caption": "B"}, "c.png": {}}"#)
        .unwrap();
    let captions: Vec<(&str, &str)> = found
        .images
        .iter()
        .map(|image| {
            (
                image.path.strip_prefix(&folder).unwrap().to_str().unwrap(),
                image.caption.as_str(),
            )
        })
        .collect();
    assert_eq!(captions, [("a.png", "A;x, y"), ("c.png", ""), ("sub/b.png", "B")]);
    let with_file = DatasetOptions {
        captions_file: Some(file.clone()),
        ..options(&folder)
    };
    let warning = found.caption_warning(&with_file).unwrap();
    assert!(
        warning.contains("1 of 3 images have no caption in") && warning.contains("meta.json (c.png)"),
        "{warning}"
    );
    for (text, expected) in [
        (r#"{"a": {}, "d.png": {}}"#, "its image `d.png` is not in"),
        (r#"{"a": {}, "a.png": {}}"#, "are entries for the same image"),
        ("[]", "expected a JSON object"),
    ] {
        let error = scan(text).unwrap_err().to_string();
        assert!(
            error.contains("datasets.captions_file") && error.contains(expected),
            "{error}"
        );
    }
}

#[test]
fn an_image_that_scale_makes_too_large_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    write_image(&dir.path().join("a.png"), 100, 100);
    let check = |scale: f64| {
        let options = DatasetOptions {
            scale,
            ..options(dir.path())
        };
        DatasetScan::read(&options, false).unwrap().check_images(&options)
    };
    // The limit is 178,956,970 pixels, a square of 13,377.
    check(133.77).unwrap();
    let error = check(133.78).unwrap_err().to_string();
    assert!(error.contains("a.png") && error.contains("scale: 133.78"), "{error}");
}

#[test]
fn square_crops_enlarge_small_images_and_are_not_random() {
    let dir = tempfile::tempdir().unwrap();
    write_image(&dir.path().join("small.png"), 40, 30);
    write_image(&dir.path().join("large.png"), 200, 100);
    let plans = |random_crop: bool| {
        let options = DatasetOptions {
            square_crop: true,
            random_crop,
            ..options(dir.path())
        };
        let (set, _) = Dataset::open(options, 16, 1).unwrap();
        set.items.iter().map(|item| item.plan).collect::<Vec<_>>()
    };
    let centred = plans(false);
    assert!(centred.iter().all(|plan| plan.bucket == (64, 64)));
    assert_eq!([centred[0].crop, centred[1].crop], [(32, 0), (11, 0)]);
    assert_eq!(plans(true), centred);
}

/// As ai-toolkit's `PairedImageDataset.get_prompt_item`.
#[test]
fn captions_of_image_pairs_are_beside_the_negative_image_first() {
    let dir = tempfile::tempdir().unwrap();
    let (positive, negative) = (dir.path().join("positive"), dir.path().join("negative"));
    for (folder, texts) in [
        (
            &positive,
            [
                Some("of the positive"),
                Some("a,, b\n\n c\r\nd,"),
                None,
                Some("of the positive"),
            ],
        ),
        (&negative, [Some("of the negative"), None, None, Some(" \n")]),
    ] {
        for (number, text) in texts.iter().enumerate() {
            write_image(&folder.join(format!("{number}.png")), 64, 64);
            if let Some(text) = text {
                std::fs::write(folder.join(format!("{number}.txt")), text).unwrap();
            }
        }
    }
    let pairs = DatasetOptions {
        controls: Some(ControlOptions {
            role: ControlRole::Negative,
            source: ControlSource::Folders(vec![negative.clone()]),
            background: None,
            full_size: true,
        }),
        default_caption: Some("a class".into()),
        stay_in_folder: true,
        ..options(&positive)
    };
    let captions = |options: &DatasetOptions| -> Vec<String> {
        let scan = DatasetScan::read(options, false).unwrap();
        scan.images.into_iter().map(|image| image.caption).collect()
    };
    assert_eq!(captions(&pairs), ["of the negative", "a, b, c, d", "a class", ""]);
    // Two halves of one image.
    let halves = DatasetOptions {
        controls: None,
        side_by_side: true,
        ..pairs.clone()
    };
    assert_eq!(
        captions(&halves),
        ["of the positive", "a, b, c, d", "a class", "of the positive"]
    );
    // A caption may not lead out of the folder of negative images.
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("/etc/hostname", negative.join("2.txt")).unwrap();
        let error = DatasetScan::read(&pairs, false).unwrap_err().to_string();
        assert!(error.contains("2.txt` is not a file of this data set"), "{error}");
    }
}

#[test]
fn excluded_images_are_left_out_and_have_to_exist() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a.png", "b.png", "sub/b.png"] {
        write_image(&dir.path().join(name), 64, 64);
    }
    let excluding = |names: &[&str]| DatasetOptions {
        excluded: names.iter().map(|name| (*name).to_owned()).collect(),
        ..options(dir.path())
    };
    let read = |names: &[&str]| DatasetScan::read(&excluding(names), false);
    let images = |names: &[&str]| -> Vec<String> {
        let scan = read(names).unwrap();
        let relative = scan
            .images
            .iter()
            .map(|image| image.path.strip_prefix(dir.path()).unwrap());
        relative.map(|path| path.display().to_string()).collect()
    };
    assert_eq!(images(&["b.png"]), ["a.png", "sub/b.png"]);
    assert_eq!(images(&["sub/b.png", "a.png"]), ["b.png"]);
    for name in ["c.png", "", "../a.png"] {
        let error = read(&[name]).unwrap_err().to_string();
        assert!(
            error.contains("datasets.excluded_images") && error.contains(&format!("`{name}`")),
            "{error}"
        );
    }
}

/// A data set that was sent with a job may hold arbitrary lists and links. No file outside its folder is opened, and
/// the error does not reveal which files exist.
#[cfg(unix)]
#[test]
fn a_data_set_that_must_stay_in_its_folder_opens_nothing_outside() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("set");
    let secret = dir.path().join("secret.png");
    write_image(&secret, 64, 64);
    write_image(&root.join("a.png"), 64, 64);
    let list = root.join("set.json");
    let error = |name: &str| {
        std::fs::write(&list, format!(r#"{{"{name}": {{"caption": "x"}}}}"#)).unwrap();
        discover(&list, false, true).unwrap_err().to_string().replace(name, "")
    };
    let message = error(secret.to_str().unwrap());
    assert!(message.contains("is not a file of this data set"), "{message}");
    assert_eq!(message, error("/nowhere/secret.png"));
    assert_eq!(message, error("../secret.png"));
    // A job that runs in place may use any file of its user.
    std::fs::write(&list, r#"{"../secret.png": {"caption": "x"}}"#).unwrap();
    assert_eq!(discover(&list, false, false).unwrap().images.len(), 1);
    std::fs::remove_file(&list).unwrap();

    let confined = || DatasetOptions {
        stay_in_folder: true,
        ..options(&root)
    };
    Dataset::open(confined(), 16, 1).unwrap();
    let error_of = |options: DatasetOptions| Dataset::open(options, 16, 1).unwrap_err().to_string();
    std::os::unix::fs::symlink("/etc/passwd", root.join("a.txt")).unwrap();
    assert!(error_of(confined()).contains("a.txt` is not a file of this data set"));
    std::fs::remove_file(root.join("a.txt")).unwrap();
    for link in ["b.png", "folder"] {
        std::os::unix::fs::symlink(dir.path(), root.join(link)).unwrap();
        assert!(
            error_of(confined()).contains("is not a file of this data set"),
            "{link}"
        );
        std::fs::remove_file(root.join(link)).unwrap();
    }
    let masks = dir.path().join("masks");
    std::fs::create_dir(&masks).unwrap();
    std::os::unix::fs::symlink(&secret, masks.join("a.png")).unwrap();
    let masked = DatasetOptions {
        masks: Some(MaskOptions {
            source: MaskSource::Folder(masks),
            invert: false,
            min_value: 0.0,
        }),
        ..confined()
    };
    assert!(error_of(masked).contains("is not a file of this data set"));
    let parent_suffix = DatasetOptions {
        caption_ext: "/../../secret.png".into(),
        ..options(&root)
    };
    assert!(error_of(parent_suffix).contains("caption_ext"));
}

#[cfg(unix)]
#[test]
fn devices_in_a_data_set_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    for path in ["/dev/zero", "/dev/null"] {
        let message = discover(Path::new(path), false, false).unwrap_err().to_string();
        assert!(message.contains("a device, not a file"), "{message}");
    }
    write_image(&dir.path().join("a.png"), 64, 64);
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("a.txt")).unwrap();
    let message = Dataset::open(options(dir.path()), 16, 1).unwrap_err().to_string();
    assert!(message.contains("a.txt") && message.contains("a device"), "{message}");
}

#[test]
fn batches_are_the_same_in_every_epoch_and_only_their_order_changes() {
    let dir = tempfile::tempdir().unwrap();
    for i in 0..5 {
        write_image(&dir.path().join(format!("p{i}.png")), 64, if i == 4 { 32 } else { 64 });
    }
    let (dataset, warnings) = Dataset::open(
        DatasetOptions {
            flip_x: true,
            repeats: 2,
            ..options(dir.path())
        },
        16,
        1,
    )
    .unwrap();
    assert!(
        warnings.iter().all(|warning| warning.contains("no caption")),
        "{warnings:?}"
    );
    assert_eq!(dataset.items.len(), 20);
    assert_eq!(dataset.items.iter().filter(|i| i.flip_x).count(), 10);
    let sets = [dataset];
    let all = batches(&sets, 3, false);
    assert_eq!(all, batches(&sets, 3, false));
    assert_ne!(all, batches(&sets, 4, false));
    for batch in &all {
        assert_eq!(batch.items.len(), 2);
        let bucket = |i: &usize| sets[0].items[*i].plan.bucket;
        assert_eq!(bucket(&batch.items[0]), bucket(&batch.items[1]));
    }
    let mut seen: Vec<usize> = all.iter().flat_map(|b| b.items.clone()).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..20).collect::<Vec<_>>());
    let mut order = epoch_order(all.len(), 3, 0, false);
    assert_ne!(order, epoch_order(all.len(), 3, 1, false));
    order.sort_unstable();
    assert_eq!(order, (0..all.len()).collect::<Vec<_>>());

    // A short last batch repeats its own items.
    let (odd, _) = Dataset::open(
        DatasetOptions {
            batch_size: 3,
            ..options(dir.path())
        },
        16,
        1,
    )
    .unwrap();
    assert!(batches(&[odd], 1, false).iter().all(|b| b.items.len() == 3));
}

#[test]
fn sizes_are_cached_and_too_large_images_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    write_image(&dir.path().join("a.png"), 64, 48);
    Dataset::open(options(dir.path()), 16, 1).unwrap();
    let text = std::fs::read_to_string(dir.path().join(".aitk_size.json")).unwrap();
    assert!(
        text.contains("\"__version__\":\"0.1.2\"") && text.contains("\"a.png\":[64,48,"),
        "{text}"
    );
    assert_eq!(
        SizeCache::open(dir.path(), dir.path()).get(&dir.path().join("a.png")),
        Some((64, 48))
    );
    write_image(&dir.path().join("a.png"), 32, 32);
    assert_eq!(
        SizeCache::open(dir.path(), dir.path()).get(&dir.path().join("a.png")),
        None
    );

    // A PNG header that claims 30,000 x 30,000 pixels.
    let mut huge = std::fs::read(dir.path().join("a.png")).unwrap();
    huge[16..20].copy_from_slice(&30_000u32.to_be_bytes());
    huge[20..24].copy_from_slice(&30_000u32.to_be_bytes());
    let crc = crc32fast::hash(&huge[12..29]);
    huge[29..33].copy_from_slice(&crc.to_be_bytes());
    std::fs::write(dir.path().join("huge.png"), &huge).unwrap();
    let message = Dataset::open(options(dir.path()), 16, 1).unwrap_err().to_string();
    assert!(message.contains("huge.png") && message.contains("30000"), "{message}");
}

#[test]
fn pixels_are_scaled_cropped_and_flipped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.png");
    write_image(&path, 100, 50);
    let (set, _) = Dataset::open(
        DatasetOptions {
            flip_x: true,
            ..options(dir.path())
        },
        16,
        1,
    )
    .unwrap();
    let plan = set.items[0].plan;
    let plain = load_pixels(&set.items[0]).unwrap();
    assert_eq!(plain.dims(), [3, plan.bucket.1 as usize, plan.bucket.0 as usize]);
    let flipped = load_pixels(&set.items[1]).unwrap();
    let red = |t: &Tensor, x: usize| t.get(0).unwrap().get(3).unwrap().to_vec1::<f32>().unwrap()[x];
    let last = plan.bucket.0 as usize - 1;
    assert!(red(&plain, 0) < red(&plain, last) && red(&flipped, 0) > red(&flipped, last));
    assert!(set.items.iter().all(|i| i.content.len() == 64));
}

/// As in ai-toolkit, whose contrast step limits the images of a batch that are encoded in each step.
#[test]
fn normalised_pixels_are_limited_where_latents_are_not_cached() {
    let dir = tempfile::tempdir().unwrap();
    let white = image::RgbImage::from_pixel(64, 64, image::Rgb([255; 3]));
    white.save(dir.path().join("a.png")).unwrap();
    let largest = |change: &dyn Fn(&mut DatasetOptions)| {
        let mut options = DatasetOptions {
            normalization: Some(ImageStatistics::DATASET),
            ..options(dir.path())
        };
        change(&mut options);
        let (set, _) = Dataset::open(options, 16, 1).unwrap();
        let pixels = load_pixels(&set.items[0]).unwrap();
        pixels.max_all().unwrap().to_scalar::<f32>().unwrap()
    };
    // (1 + 0.3227) / 0.5139, of blue.
    let unlimited = 2.5738;
    assert_eq!(largest(&|_| {}), 1.0);
    for change in [
        &(|options: &mut DatasetOptions| options.regularisation = true) as &dyn Fn(&mut DatasetOptions),
        &|options: &mut DatasetOptions| options.cache_latents = true,
        &|options: &mut DatasetOptions| options.cache_latents_to_disk = true,
    ] {
        assert!((largest(change) - unlimited).abs() < 1e-3);
    }
}
