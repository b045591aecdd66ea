//! Control images compared with the fixture of `tests/reference/make_train_kontext.py`, and which file belongs to which image.

use super::*;
use crate::testing::{fixtures, gap};
use aitk_common::job::dataset::GuidanceType;
use candle_core::{Device, Tensor};
use image::{Rgb, RgbImage};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

pub(super) const BACKGROUND: [u8; 3] = [200, 30, 90];
/// The sides of buckets are multiples of this.
pub(super) const UNIT: u32 = 16;

pub(super) fn options(root: &Path, folders: &[&str]) -> DatasetOptions {
    DatasetOptions {
        path: root.join("data"),
        resolution: 64,
        controls: Some(ControlOptions {
            role: ControlRole::Condition,
            source: ControlSource::Folders(folders.iter().map(|name| root.join(name)).collect()),
            background: Some(BACKGROUND),
            full_size: true,
        }),
        ..DatasetOptions::default()
    }
}

fn fixture() -> PathBuf {
    fixtures().join("train_kontext")
}

/// A copy of the fixture's images, because opening a data set writes a cache of sizes.
fn copied() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for folder in ["data", "controls"] {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
        for entry in std::fs::read_dir(fixture().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, dir.path().join(folder).join(path.file_name().unwrap())).unwrap();
        }
    }
    dir
}

pub(super) fn open(options: DatasetOptions) -> (Dataset, Warnings) {
    Dataset::open(options, UNIT, 0).unwrap()
}

pub(super) fn error(options: DatasetOptions) -> String {
    let report = DatasetReport::read(&options, "data", UNIT).unwrap_err().to_string();
    let error = Dataset::open(options, UNIT, 0).unwrap_err().to_string();
    assert_eq!(report, error, "a report has the error of the training");
    error
}

#[test]
fn control_images_have_the_pixels_of_ai_toolkit() {
    let dir = copied();
    let expected = candle_core::safetensors::load(fixture().join("pixels.safetensors"), &Device::Cpu).unwrap();
    let mut compared = 0;
    for full_size in [true, false] {
        let mut options = options(dir.path(), &["controls"]);
        (options.flip_x, options.flip_y) = (true, true);
        options.controls.as_mut().unwrap().full_size = full_size;
        let (dataset, warnings) = open(options);
        let squeezed: Vec<&String> = warnings.iter().filter(|text| text.contains("aspect ratio")).collect();
        assert_eq!(squeezed.len(), usize::from(full_size), "{warnings:?}");
        for item in &dataset.items {
            let stem = item.path.file_stem().unwrap().to_string_lossy().into_owned();
            let (kind, flips) = (if full_size { "whole" } else { "small" }, [item.flip_x, item.flip_y]);
            let name = format!("{kind}:{stem}:{}{}", u8::from(flips[0]), u8::from(flips[1]));
            let Some(expected) = expected.get(&name) else { continue };
            let found = load_control(item, item.control.as_ref().unwrap(), &[]).unwrap();
            match full_size {
                true => {
                    let bytes = ((found + 1.0).unwrap() * 127.5).unwrap().round().unwrap();
                    let expected = expected.to_dtype(candle_core::DType::F32).unwrap();
                    assert_eq!(gap(&bytes, &expected.permute((2, 0, 1)).unwrap()), 0.0, "{name}");
                }
                false => {
                    let difference = gap(&found, expected);
                    assert!(difference < 1e-5, "{name}: {difference:.1e}");
                    // Without flips: a flipped copy has the same control image.
                    let flipped = TrainingImage {
                        flip_x: true,
                        ..item.clone()
                    };
                    let flipped = load_control(&flipped, item.control.as_ref().unwrap(), &[]).unwrap();
                    assert_eq!(gap(&flipped, &found), 0.0, "{name}");
                }
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 6);
}

pub(super) fn save(path: &Path, (width, height): (u32, u32), color: u8) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    RgbImage::from_pixel(width, height, Rgb([color; 3])).save(path).unwrap();
}

#[test]
fn each_image_has_the_control_image_of_its_stem() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for name in [
        "data/a.png",
        "data/sub/b.jpg",
        "one/a.webp",
        "one/a.jpeg",
        "two/b.PNG",
        "two/c.png",
        "two/a.txt",
    ] {
        match name.ends_with("txt") {
            true => std::fs::write(root.join(name), "no image").unwrap(),
            false if name.ends_with("PNG") => {
                save(&root.join("two/b.png"), (32, 32), 1);
                std::fs::rename(root.join("two/b.png"), root.join(name)).unwrap();
            }
            false => save(&root.join(name), (32, 32), 1),
        }
    }
    let (dataset, warnings) = open(options(root, &["one", "two"]));
    let found: Vec<String> = dataset
        .items
        .iter()
        .map(|item| {
            let control = item.control.as_ref().unwrap();
            control.path.strip_prefix(root).unwrap().display().to_string()
        })
        .collect();
    // Of several files with one stem: jpg, jpeg, png, webp.
    assert_eq!(found, ["one/a.jpeg", "two/b.PNG"]);
    assert!(!warnings.iter().any(|text| text.contains("control")), "{warnings:?}");
    let report = DatasetReport::read(&options(root, &["one", "two"]), "data", UNIT).unwrap();
    assert_eq!((report.controls, report.control_warnings), (Some(2), Vec::new()));

    // A control image that two folders have.
    save(&root.join("two/a.png"), (32, 32), 1);
    let message = error(options(root, &["one", "two"]));
    assert!(
        ["data/a.png", "one/a.jpeg", "two/a.png", "control_path"]
            .iter()
            .all(|part| message.contains(part)),
        "{message}"
    );
    // Images without one.
    let message = error(options(root, &["one"]));
    for part in [
        "data: 1 of 2 images",
        "sub/b.jpg",
        "b.jpg, b.jpeg, b.png or b.webp",
        "/one (datasets: control_path)",
    ] {
        assert!(message.contains(part), "{part} in {message}");
    }
    let message = error(options(root, &["one", "three"]));
    assert!(
        message.contains("/three: there is no such folder of control images"),
        "{message}"
    );
    // Damaged and empty files are errors before anything is trained.
    for bytes in [&b"not an image"[..], b""] {
        std::fs::write(root.join("two/b.PNG"), bytes).unwrap();
        let message = error(options(root, &["two"]));
        assert!(message.contains("two/b.PNG"), "{message}");
    }
}

#[test]
fn pairs_of_images_follow_them_and_a_missing_one_is_an_error() {
    let dir = copied();
    let paired = |folder: &str| {
        let mut options = options(dir.path(), &[folder]);
        let controls = options.controls.as_mut().unwrap();
        (controls.role, controls.background) = (ControlRole::Paired, None);
        (options.flip_x, options.guidance) = (true, Some(GuidanceType::Polarity));
        options
    };
    let (dataset, _) = open(paired("controls"));
    for item in &dataset.items {
        let control = item.control.as_ref().unwrap();
        assert_eq!(control.path.file_stem(), item.path.file_stem());
        // An image that is its own pair has the same pixels, also flipped.
        let itself = Control {
            path: item.path.clone(),
            content: item.content.clone(),
            ..control.clone()
        };
        let pixels = load_control(item, &itself, &[]).unwrap();
        assert_eq!(gap(&pixels, &load_pixels(item).unwrap()), 0.0);
    }
    let report = DatasetReport::read(&paired("controls"), "data", UNIT).unwrap();
    assert_eq!(report.controls_noun, "paired images");
    let stem = dataset.items[0]
        .path
        .file_stem()
        .unwrap()
        .to_string_lossy()
        .into_owned();
    std::fs::remove_file(&dataset.items[0].control.as_ref().unwrap().path).unwrap();
    let message = error(paired("controls"));
    for part in [
        "have no paired image",
        format!("there is no {stem}.jpg").as_str(),
        "(datasets: unconditional_path)",
    ] {
        assert!(message.contains(part), "{part} in {message}");
    }
}

#[test]
fn halves_of_one_file_have_the_pixels_of_two_files() {
    let dir = tempfile::tempdir().unwrap();
    for folder in ["data", "right", "left"] {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
    }
    for (number, (width, height)) in [(40, 32), (75, 100), (33, 20)].into_iter().enumerate() {
        let image = |shift: u32| {
            RgbImage::from_fn(width, height, |x, y| {
                Rgb([(x * 6 + shift) as u8, (y * 7) as u8, shift as u8])
            })
        };
        let (left, right) = (image(3), image(90));
        // One column in the middle is in no half.
        let both = RgbImage::from_fn(2 * width + 1, height, |x, y| match x {
            x if x < width => *left.get_pixel(x, y),
            x if x == width => Rgb([0, 255, 0]),
            x => *right.get_pixel(x - width - 1, y),
        });
        for (folder, image) in [("data", &both), ("right", &right), ("left", &left)] {
            image
                .save(dir.path().join(folder).join(format!("{number}.png")))
                .unwrap();
        }
    }
    let open = |options: DatasetOptions| Dataset::open(options, UNIT, 3).unwrap().0.items;
    let halves = open(DatasetOptions {
        controls: None,
        side_by_side: true,
        ..options(dir.path(), &[])
    });
    let two = open(DatasetOptions {
        path: dir.path().join("right"),
        ..options(dir.path(), &["left"])
    });
    let values = |x: Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(halves.len(), 3);
    for (half, whole) in halves.iter().zip(&two) {
        assert_eq!((half.size, half.plan), (whole.size, whole.plan));
        assert_eq!(values(load_pixels(half).unwrap()), values(load_pixels(whole).unwrap()));
        let [left, control] =
            [half, whole].map(|item| load_control(item, item.control.as_ref().unwrap(), &[]).unwrap());
        assert_eq!(values(left), values(control));
        let [own, control] = [
            half.latent_key("sd1"),
            half.control_key(half.control.as_ref().unwrap(), "sd1"),
        ];
        assert_ne!(own.hash(&half.content, "vae"), control.hash(&half.content, "vae"));
        assert_ne!(
            own.hash(&half.content, "vae"),
            LatentKey {
                half: None,
                ..own.clone()
            }
            .hash(&half.content, "vae")
        );
    }
}

#[test]
fn a_folder_of_control_images_in_the_data_set_gives_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["data/a.png", "data/before/a.png", "data/_controls/a.png"] {
        save(&dir.path().join(name), (32, 32), 1);
    }
    let warnings = |folder: &str| open(options(dir.path(), &[folder])).1.join("\n");
    let found = warnings("data/before");
    assert!(
        found.contains("data/before: this folder of control images is in the data set"),
        "{found}"
    );
    assert!(!warnings("data/_controls").contains("trained on too"));
}

#[cfg(unix)]
#[test]
fn control_images_of_a_submitted_job_may_not_be_links_out_of_their_folder() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    save(&root.join("data/a.png"), (32, 32), 1);
    save(&root.join("secret.png"), (32, 32), 1);
    std::fs::create_dir(root.join("one")).unwrap();
    let staged = |folder| DatasetOptions {
        stay_in_folder: true,
        ..options(root, &[folder])
    };
    let mut messages = Vec::new();
    for target in ["secret.png", "nowhere.png"] {
        let link = root.join("one/a.png");
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(root.join(target), &link).unwrap();
        messages.push(error(staged("one")));
        assert_eq!(
            Dataset::open(options(root, &["one"]), UNIT, 0).is_ok(),
            target == "secret.png"
        );
    }
    // The message does not tell whether the target exists.
    assert!(
        messages[0].contains("one/a.png") && messages[0] == messages[1],
        "{messages:?}"
    );
    std::fs::remove_file(root.join("one/a.png")).unwrap();
    save(&root.join("one/a.png"), (32, 32), 1);
    open(staged("one"));
}

#[test]
fn the_cache_key_of_a_control_latent_has_all_that_it_depends_on() {
    let dir = tempfile::tempdir().unwrap();
    save(&dir.path().join("data/a.png"), (32, 32), 1);
    save(&dir.path().join("one/a.png"), (32, 32), 2);
    let (dataset, _) = open(options(dir.path(), &["one"]));
    let item = &dataset.items[0];
    let control = item.control.clone().unwrap();
    let hash =
        |item: &TrainingImage, control: &Control| item.control_key(control, "flux1").hash(&control.content, "vae");
    let base = hash(item, &control);
    let own = item.latent_key("flux1");
    // Also where both files are the same.
    assert_ne!(own.hash(&control.content, "vae"), base);
    assert_ne!(
        own.ai_toolkit_hash(),
        item.control_key(&control, "flux1").ai_toolkit_hash()
    );
    let changed = |change: fn(&mut TrainingImage, &mut Control)| {
        let (mut item, mut control) = (item.clone(), control.clone());
        change(&mut item, &mut control);
        hash(&item, &control)
    };
    for other in [
        changed(|_, control| control.content = "other".into()),
        changed(|_, control| control.background = Some([0, 0, 1])),
        changed(|_, control| control.full_size = false),
        changed(|_, control| control.path = "one/a.jpg".into()),
        changed(|item, _| item.flip_x = true),
        changed(|item, _| item.plan.crop = (1, 0)),
    ] {
        assert_ne!(other, base);
    }
    // The metadata of the latent's file are the fields of its key.
    let cache = LatentCache::new("vae", 16, 8);
    let key = item.control_key(&control, "flux1");
    let latent = Tensor::zeros((16, 4, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
    cache.write(&item.path, None, &key, &control.content, &latent).unwrap();
    let bytes = std::fs::read(cache.path(&item.path, None, &key, &control.content)).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let fields: HashMap<String, String> = header.metadata().clone().unwrap();
    assert_eq!(fields["control"], "true");
    assert_eq!(fields["content_sha256"], control.content);
    assert_eq!(fields["full_size_control_images"], "true");
    assert!(
        fields["control_transparent_color"]
            .replace(' ', "")
            .contains("[200,30,90]"),
        "{fields:?}"
    );
    assert!(cache.read(&item.path, None, &key, "edited").is_none());
}

/// What a folder of control images has for one image.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Missing,
    Good(u32, u32),
    Cut,
    Text,
    Folder,
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        5 => (1..80u32, 1..80u32).prop_map(|(width, height)| Kind::Good(width, height)),
        2 => Just(Kind::Missing),
        1 => Just(Kind::Cut),
        1 => Just(Kind::Text),
        1 => Just(Kind::Folder),
    ]
}

fn place(folder: &Path, stem: &str, suffix: &str, kind: Kind) {
    let path = folder.join(format!("{stem}.{suffix}"));
    match kind {
        Kind::Missing => {}
        Kind::Good(width, height) => save(&path, (width, height), 77),
        Kind::Cut => {
            save(&path, (40, 40), 77);
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..12]).unwrap();
        }
        Kind::Text => std::fs::write(&path, "a text").unwrap(),
        Kind::Folder => std::fs::create_dir_all(&path).unwrap(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    /// Whatever is in the folders, each image has its own control image of its own size, or one error names an image or a file.
    #[test]
    fn folders_of_control_images_are_used_or_refused(
        files in prop::collection::vec((kind(), kind(), prop_oneof![Just("png"), Just("jpg"), Just("webp")]), 1..5),
        has_second in any::<bool>(),
        full_size in any::<bool>(),
        [flip_x, flip_y, buckets] in any::<[bool; 3]>(),
        shape in (20..120u32, 20..120u32),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for folder in ["one", "two"] {
            std::fs::create_dir(root.join(folder)).unwrap();
        }
        let mut good = BTreeMap::new();
        let mut is_good = true;
        for (index, (first, second, suffix)) in files.iter().enumerate() {
            let stem = format!("p{index}");
            save(&root.join("data").join(format!("{stem}.png")), shape, 10);
            place(&root.join("one"), &stem, suffix, *first);
            if has_second {
                place(&root.join("two"), &stem, suffix, *second);
            }
            let second = if has_second { *second } else { Kind::Missing };
            let folder = match (first, second) {
                (Kind::Good(..), Kind::Missing) => "one",
                (Kind::Missing, Kind::Good(..)) => "two",
                _ => { is_good = false; "" }
            };
            good.insert(format!("{stem}.png"), root.join(folder).join(format!("{stem}.{suffix}")));
        }
        let mut options = DatasetOptions { flip_x, flip_y, buckets, ..options(root, &["one", "two"]) };
        options.controls.as_mut().unwrap().full_size = full_size;
        let read = DatasetReport::read(&options, "data", UNIT);
        match Dataset::open(options, UNIT, 0) {
            Ok((dataset, _)) => {
                prop_assert!(is_good);
                prop_assert_eq!(read.unwrap().controls, Some(files.len() as u64));
                for item in &dataset.items {
                    let control = item.control.as_ref().unwrap();
                    let name = item.path.file_name().unwrap().to_string_lossy().into_owned();
                    prop_assert_eq!(&control.path, &good[&name]);
                    let (width, height) = item.plan.bucket;
                    let pixels = load_control(item, control, &[]).unwrap();
                    prop_assert_eq!(pixels.dims(), [3, height as usize, width as usize]);
                }
            }
            Err(error) => {
                let error = error.to_string();
                prop_assert!(!is_good, "{error}");
                prop_assert!((0..files.len()).any(|index| error.contains(&format!("p{index}."))), "{error}");
                prop_assert_eq!(read.unwrap_err().to_string(), error);
            }
        }
    }
}

#[test]
fn control_images_from_the_same_folder_are_each_other_image_equally_often() {
    let dir = copied();
    // A folder below with one image, which has no other one.
    let alone = dir.path().join("data/alone");
    std::fs::create_dir(&alone).unwrap();
    std::fs::copy(dir.path().join("data/a.png"), alone.join("a.png")).unwrap();
    let mut options = options(dir.path(), &["controls"]);
    options.controls = None;
    let drawn = SameFolderControlOptions {
        background: BACKGROUND,
        full_size: true,
    };
    options.same_folder_controls = Some(drawn);
    (options.repeats, options.flip_x) = (3, true);
    let (dataset, _) = open(options);
    assert_eq!(dataset.items.len(), 6 * 3 * 2);
    let draws = 4000;
    let mut generator = crate::rng::TorchGenerator::manual_seed(5);
    for item in dataset.items.iter().take(6) {
        let mut counts: BTreeMap<PathBuf, usize> = BTreeMap::new();
        for _ in 0..draws {
            let control = drawn.draw(&dataset.items, item, &mut generator);
            let owner = dataset.items.iter().find(|other| other.path == control.path).unwrap();
            assert_eq!(control.content, owner.content);
            *counts.entry(control.path).or_default() += 1;
        }
        if item.path.starts_with(&alone) {
            assert_eq!(counts.into_keys().collect::<Vec<_>>(), std::slice::from_ref(&item.path));
            continue;
        }
        assert_eq!(counts.len(), 4, "{counts:?}");
        assert!(!counts.contains_key(&item.path), "{counts:?}");
        // Four standard deviations of a binomial distribution.
        let expected = draws as f64 / 4.0;
        let spread = 4.0 * (expected * 0.75).sqrt();
        assert!(
            counts.values().all(|count| (*count as f64 - expected).abs() < spread),
            "{counts:?}"
        );
    }
    // Its pixels are cropped as the item is.
    let item = &dataset.items[0];
    let control = drawn.draw(&dataset.items, item, &mut generator);
    let pixels = load_control(item, &control, &[]).unwrap();
    let (width, height) = item.plan.bucket;
    assert_eq!(pixels.dims(), [3, height as usize, width as usize]);
}
