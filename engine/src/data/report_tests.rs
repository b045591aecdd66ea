//! The report on a data set agrees with what training does, for arbitrary folders.

use super::*;
use image::{DynamicImage, RgbImage};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// A file of a generated data set.
#[derive(Clone, Debug)]
enum TestFile {
    /// An image of this width and height. Caption file: with text (`Some(true)`), blank (`Some(false)`) or none.
    Image(u32, u32, Option<bool>),
    /// A file with the suffix of an image that is not an image.
    Broken,
    /// Another file, by suffix.
    Other(&'static str),
}

fn test_file() -> impl Strategy<Value = TestFile> {
    prop_oneof![
        6 => (16..200u32, 16..200u32, prop_oneof![Just(None), Just(Some(true)), Just(Some(false))])
            .prop_map(|(w, h, caption)| TestFile::Image(w, h, caption)),
        1 => Just(TestFile::Broken),
        1 => prop_oneof![Just("gif"), Just("txt"), Just("mp4")].prop_map(TestFile::Other),
    ]
}

fn options() -> impl Strategy<Value = DatasetOptions> {
    let shape = (1..4usize, 1..4usize, any::<[bool; 2]>(), any::<bool>(), any::<bool>());
    (
        shape,
        prop_oneof![Just(64u32), Just(96), Just(128)],
        prop_oneof![Just(1.0), Just(0.5)],
    )
        .prop_map(
            |((repeats, batch_size, [flip_x, flip_y], square_crop, default), resolution, scale)| DatasetOptions {
                resolution,
                batch_size,
                repeats,
                flip_x,
                flip_y,
                square_crop,
                scale,
                default_caption: default.then(|| "a thing".to_owned()),
                ..DatasetOptions::default()
            },
        )
}

fn write_files(folder: &Path, test_files: &[TestFile]) {
    for (number, test_file) in test_files.iter().enumerate() {
        // A third of the files is in a subfolder.
        let folder = folder.join(if number % 3 == 0 { "below" } else { "" });
        std::fs::create_dir_all(&folder).unwrap();
        let path = |suffix: &str| folder.join(format!("{number}.{suffix}"));
        match test_file {
            TestFile::Image(w, h, caption) => {
                DynamicImage::from(RgbImage::new(*w, *h)).save(path("png")).unwrap();
                if let Some(text) = caption {
                    std::fs::write(path("txt"), if *text { "a caption" } else { " \n" }).unwrap();
                }
            }
            TestFile::Broken => std::fs::write(path("png"), "no image").unwrap(),
            TestFile::Other(suffix) => std::fs::write(path(suffix), "x").unwrap(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn the_report_agrees_with_the_opened_data_set(test_files in prop::collection::vec(test_file(), 0..14), options in options()) {
        let folder = tempfile::tempdir().unwrap();
        write_files(folder.path(), &test_files);
        let options = DatasetOptions { path: folder.path().to_owned(), ..options };
        let report = DatasetReport::read(&options, "set", 16);
        prop_assert!(!folder.path().join(".aitk_size.json").exists(), "a report writes nothing");
        let (report, (dataset, warnings)) = match (report, Dataset::open(options.clone(), 16, 7)) {
            (Ok(report), Ok(trained)) => (report, trained),
            (Err(_), Err(_)) => return Ok(()),
            (report, trained) => return Err(TestCaseError::fail(format!("{report:?} against {:?}", trained.map(|_| ())))),
        };
        let mut buckets: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        for item in &dataset.items {
            *buckets.entry(item.plan.bucket).or_default() += 1;
        }
        let reported: BTreeMap<(u32, u32), u64> =
            report.buckets.iter().map(|bucket| ((bucket.width, bucket.height), bucket.images)).collect();
        prop_assert_eq!(reported, buckets);
        prop_assert_eq!(report.items, dataset.items.len() as u64);
        prop_assert_eq!(report.batches, batches(&[dataset], 7, false).len() as u64);
        let count = |predicate: fn(&TestFile) -> bool| test_files.iter().filter(|test_file| predicate(test_file)).count() as u64;
        prop_assert_eq!(report.captioned, count(|test_file| matches!(test_file, TestFile::Image(_, _, Some(true)))));
        prop_assert_eq!(report.uncaptioned.count, count(|test_file| matches!(test_file, TestFile::Image(_, _, None | Some(false)))));
        prop_assert_eq!(report.unreadable.count, count(|test_file| matches!(test_file, TestFile::Broken)));
        prop_assert_eq!(report.ignored.values().sum::<u64>(), count(|test_file| matches!(test_file, TestFile::Other(_))));
        // There is a warning about images without a caption, unless there is a default caption.
        let no_warning = report.uncaptioned.count == 0 || options.default_caption.is_some();
        prop_assert_eq!(report.caption_warning.is_none(), no_warning);
        prop_assert_eq!(warnings.iter().filter(|warning| warning.contains("no caption")).count(), usize::from(!no_warning));
    }
}

#[test]
fn the_warning_about_missing_captions_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    write_files(folder.path(), &vec![TestFile::Image(64, 64, Some(true)); 4]);
    let options = DatasetOptions {
        path: folder.path().to_owned(),
        caption_ext: ".caption".into(),
        ..DatasetOptions::default()
    };
    let (_, warnings) = Dataset::open(options, 16, 1).unwrap();
    let text = warnings.join("\n");
    assert!(
        text.contains("4 of 4 images have no caption in a .caption file (1.png, 2.png, 0.png, …)"),
        "{text}"
    );
    assert!(
        text.contains("set `caption_ext: .txt`") && text.contains("an empty prompt"),
        "{text}"
    );
}

#[test]
fn a_truncated_image_is_found_and_one_with_data_after_its_end_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.png");
    // Not of one colour, so that no part of the files is redundant.
    let image = DynamicImage::from(RgbImage::from_fn(64, 64, |x, y| {
        image::Rgb([(x * 37 + y * 91) as u8, (x * y) as u8, (x * x + 7 * y) as u8])
    }));
    for suffix in ["png", "jpg", "webp"] {
        let path = whole.with_extension(suffix);
        image.save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(!crate::image_io::is_cut_off(&path), "{suffix}");
        let cut = folder.path().join(format!("cut.{suffix}"));
        std::fs::write(&cut, &bytes[..bytes.len() - 8]).unwrap();
        assert!(crate::image_io::is_cut_off(&cut), "{suffix}");
        std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
        assert!(crate::image_io::is_cut_off(&cut), "{suffix}");
    }
    let photo = std::fs::read(whole.with_extension("jpg")).unwrap();
    let trailing_data = vec![0x5a; 1 << 20];
    std::fs::write(folder.path().join("film.jpg"), [photo, trailing_data].concat()).unwrap();
    let options = DatasetOptions {
        path: folder.path().to_owned(),
        ..DatasetOptions::default()
    };
    let cut_off = DatasetReport::read(&options, "set", 16).unwrap().cut_off;
    assert_eq!(cut_off.first, ["cut.jpg", "cut.png", "cut.webp"]);
}

#[test]
fn masks_that_would_stop_the_training_are_errors_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let (root, masks) = (dir.path().join("set"), dir.path().join("masks"));
    for folder in [&root, &masks] {
        std::fs::create_dir(folder).unwrap();
    }
    for name in ["a.png", "b.png"] {
        RgbImage::new(64, 64).save(root.join(name)).unwrap();
    }
    let options = DatasetOptions {
        path: root,
        resolution: 64,
        default_caption: Some("a thing".into()),
        masks: Some(crate::data::MaskOptions {
            source: crate::data::MaskSource::Folder(masks.clone()),
            invert: false,
            min_value: 0.0,
        }),
        ..DatasetOptions::default()
    };
    let read = || DatasetReport::read(&options, "set", 16);
    let open = || crate::data::Dataset::open(options.clone(), 16, 1);
    RgbImage::new(128, 127).save(masks.join("b.png")).unwrap();
    assert_eq!(read().unwrap().masks, Some(1));
    open().unwrap();

    RgbImage::new(256, 192).save(masks.join("b.png")).unwrap();
    for error in [read().unwrap_err().to_string(), open().unwrap_err().to_string()] {
        assert!(
            error.contains("b.png: the mask has 256 x 192 pixels and its image 64 x 64"),
            "{error}"
        );
    }
    std::fs::write(masks.join("b.png"), "no image").unwrap();
    for error in [read().unwrap_err().to_string(), open().unwrap_err().to_string()] {
        assert!(error.contains("b.png: not an image"), "{error}");
    }
    RgbImage::new(64, 64).save(masks.join("b.png")).unwrap();
    let bytes = std::fs::read(masks.join("b.png")).unwrap();
    std::fs::write(masks.join("b.png"), &bytes[..bytes.len() - 20]).unwrap();
    assert_eq!(read().unwrap().cut_off.count, 1);
}
