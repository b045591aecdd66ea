//! Control images and masks beside their images (`datasets[].controls`): which file belongs to which image, and where new ones are.

use super::control_tests::{BACKGROUND, UNIT, error, open, options, save};
use super::*;
use aitk_common::job::controls::ControlType;
use std::path::{Path, PathBuf};

/// A data set whose control images are of this type.
fn beside(root: &Path, kind: ControlType) -> DatasetOptions {
    let mut options = options(root, &[]);
    options.controls.as_mut().unwrap().source = ControlSource::Beside(never_made(kind));
    options
}

/// Files of a type that no network makes.
fn never_made(kind: ControlType) -> ControlsBeside {
    ControlsBeside {
        kind,
        generator: None,
        cache: None,
        writes_cache: false,
    }
}

#[test]
fn control_images_beside_their_images_have_the_names_of_ai_toolkit() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for name in [
        "data/a.png",
        "data/_controls/a.depth.webp",
        "data/_controls/a.depth.png",
        "data/_controls/a.line.jpg",
        "data/_controls/a.png",
        "data/sub/b.c.jpg",
        "data/sub/_controls/b.c.depth.jpeg",
        "data/sub/_controls/b.depth.jpg",
    ] {
        save(&root.join(name), (64, 64), 0);
    }
    let (dataset, _) = open(beside(root, ControlType::Depth));
    let found = dataset.items.iter().map(|item| {
        let control = item.control.as_ref().unwrap();
        assert!(control.full_size && control.background == Some(BACKGROUND));
        control
            .path
            .strip_prefix(root.join("data"))
            .unwrap()
            .display()
            .to_string()
    });
    let found: Vec<String> = found.collect();
    assert_eq!(found, ["_controls/a.depth.png", "sub/_controls/b.c.depth.jpeg"]);
    let report = DatasetReport::read(&beside(root, ControlType::Depth), "data", UNIT).unwrap();
    assert_eq!((report.controls, report.control_files), (Some(2), 4));

    let message = error(beside(root, ControlType::Line));
    for part in [
        "1 of 2 images",
        "`line`",
        "sub/b.c.jpg",
        "sub/_controls/b.c.line.jpg",
        "`line_detector`",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    // A damaged file is an error, not another image's control image.
    std::fs::write(root.join("data/sub/_controls/b.c.depth.jpg"), b"x").unwrap();
    assert!(error(beside(root, ControlType::Depth)).contains("b.c.depth.jpg"));
}

#[test]
fn masks_beside_their_images_are_needed_for_each() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for name in ["data/a.png", "data/_controls/a.mask.webp", "data/b.png"] {
        save(&root.join(name), (64, 64), 0);
    }
    let masked = || DatasetOptions {
        controls: None,
        masks: Some(MaskOptions {
            source: MaskSource::Beside(never_made(ControlType::Mask)),
            invert: false,
            min_value: 0.0,
        }),
        ..options(root, &[])
    };
    let message = error(masked());
    assert!(
        message.contains("1 of 2 images") && message.contains("_controls/b.mask.jpg"),
        "{message}"
    );
    save(&root.join("data/_controls/b.mask.png"), (64, 64), 255);
    let (dataset, _) = open(masked());
    let weights = |index: usize| {
        let item: &TrainingImage = &dataset.items[index];
        load_mask(item, item.mask.as_ref().unwrap(), &[]).unwrap()
    };
    assert!(weights(0).iter().all(|weight| *weight == 0.0) && weights(1).iter().all(|weight| *weight == 1.0));
    let report = DatasetReport::read(&masked(), "data", UNIT).unwrap();
    assert_eq!((report.masks, report.control_files), (Some(2), 0));
}

#[cfg(unix)]
#[test]
fn control_images_beside_their_images_must_stay_in_the_data_set() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    save(&root.join("data/a.png"), (64, 64), 0);
    save(&root.join("secret.png"), (64, 64), 0);
    std::fs::create_dir(root.join("data/_controls")).unwrap();
    for (link, kind) in [("a.depth.png", ControlType::Depth), ("a.mask.png", ControlType::Mask)] {
        let link = root.join("data/_controls").join(link);
        std::os::unix::fs::symlink(root.join("secret.png"), &link).unwrap();
        let mut confined = beside(root, kind);
        confined.stay_in_folder = true;
        if kind.is_mask() {
            confined.controls = None;
            confined.masks = Some(MaskOptions {
                source: MaskSource::Beside(never_made(kind)),
                invert: false,
                min_value: 0.0,
            });
        }
        let message = error(confined);
        assert!(message.contains("is not a file of this data set"), "{message}");
        std::fs::remove_file(link).unwrap();
    }
}

#[test]
fn control_images_that_a_network_makes_are_beside_the_images_or_in_a_cache() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for (name, color) in [
        ("data/a.png", 1),
        ("data/sub/a.png", 2),
        ("data/_controls/a.line.jpg", 3),
    ] {
        save(&root.join(name), (64, 64), color);
    }
    let made = |generator: &str, writes_cache: bool| {
        let beside = ControlsBeside {
            kind: ControlType::Line,
            generator: Some(generator.into()),
            cache: Some(root.join("cache")),
            writes_cache,
        };
        let mut options = options(root, &[]);
        options.controls.as_mut().unwrap().source = ControlSource::Beside(beside.clone());
        (options, beside)
    };
    let (options, beside) = made("teed", false);
    let report = DatasetReport::read(&options, "data", UNIT).unwrap();
    assert_eq!((report.controls, report.controls_to_make), (Some(1), 1));
    assert!(Dataset::open(options.clone(), UNIT, 0).is_err(), "it is made before");

    let image = root.join("data/sub/a.png");
    let paths = beside.new_paths(&image).unwrap();
    assert_eq!(paths[0], root.join("data/sub/_controls/a.line.jpg"));
    assert_eq!(
        (paths.len(), paths[1].parent()),
        (2, Some(root.join("cache").as_path()))
    );
    assert_eq!(made("teed", true).1.new_paths(&image).unwrap(), paths[1..]);
    // An image with other pixels or another network has another file.
    assert_ne!(beside.new_paths(&root.join("data/a.png")).unwrap()[1], paths[1]);
    assert_ne!(made("other", true).1.new_paths(&image).unwrap(), paths[1..]);

    save(&paths[1], (64, 64), 4);
    let found = |options: DatasetOptions| -> Vec<PathBuf> {
        let items = open(options).0.items.into_iter();
        items.map(|item| item.control.unwrap().path).collect()
    };
    assert_eq!(
        found(options.clone()),
        [root.join("data/_controls/a.line.jpg"), paths[1].clone()]
    );
    // The file beside the image has precedence.
    save(&paths[0], (64, 64), 5);
    assert_eq!(found(options)[1], paths[0]);
}

#[test]
fn masks_that_a_network_makes_are_beside_the_images_or_in_a_cache() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for name in ["data/a.png", "data/b.png", "data/_controls/a.mask.webp"] {
        save(&root.join(name), (64, 64), 0);
    }
    let beside = ControlsBeside {
        kind: ControlType::Mask,
        generator: Some("birefnet".into()),
        cache: Some(root.join("cache")),
        writes_cache: false,
    };
    let masked = DatasetOptions {
        controls: None,
        masks: Some(MaskOptions {
            source: MaskSource::Beside(beside.clone()),
            invert: false,
            min_value: 0.0,
        }),
        // Those in the cache are outside of the data set.
        stay_in_folder: true,
        ..options(root, &[])
    };
    let report = DatasetReport::read(&masked, "data", UNIT).unwrap();
    assert_eq!((report.masks, report.masks_to_make), (Some(1), 1));
    assert!(Dataset::open(masked.clone(), UNIT, 0).is_err(), "it is made before");
    let scan = DatasetScan::read(&masked, false).unwrap();
    let image = root.join("data/b.png");
    assert!(scan.images_without(&beside).unwrap().iter().eq([&image]));

    let paths = beside.new_paths(&image).unwrap();
    assert_eq!(paths[0], root.join("data/_controls/b.mask.png"));
    assert!(paths[1].to_str().unwrap().ends_with(".mask.png"), "{paths:?}");
    save(&paths[1], (64, 64), 255);
    let report = DatasetReport::read(&masked, "data", UNIT).unwrap();
    assert_eq!((report.masks, report.masks_to_make), (Some(2), 0));
    let (dataset, _) = open(masked);
    let mask = dataset
        .items
        .iter()
        .find_map(|item| item.mask.clone().filter(|_| item.path == image));
    assert_eq!(mask.unwrap().path, paths[1]);
}
