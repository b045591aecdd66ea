//! Compares augmentations with albumentations and Pillow.

use super::geometry::rotated;
use super::*;
use crate::data::{
    ControlOptions, ControlRole, ControlSource, Dataset, DatasetOptions, MaskOptions, MaskSource, load_control,
    load_mask,
};
use crate::rng::generator_for;
use crate::testing::fixtures;
use aitk_common::job::augmentation::{Border, KNOWN, read_augmentations};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The image of `tests/reference/make_augmentations.py`.
fn image() -> RgbImage {
    RgbImage::from_fn(8, 6, |x, y| {
        image::Rgb([x * 255 / 7, y * 255 / 5, 255 - (x + y) * 255 / 12].map(|value| value as u8))
    })
}

/// The bytes of the changed pixels of the image.
fn of_pixels(change: impl Fn([u8; 3]) -> [u8; 3]) -> Vec<u8> {
    image().pixels().flat_map(|pixel| change(pixel.0)).collect()
}

/// The largest difference, and the mean difference.
fn differences(ours: &[u8], theirs: &[u8]) -> (u8, f64) {
    assert_eq!(ours.len(), theirs.len());
    let each = ours.iter().zip(theirs).map(|(a, b)| a.abs_diff(*b));
    let sum: u32 = each.clone().map(u32::from).sum();
    (each.max().unwrap(), f64::from(sum) / theirs.len() as f64)
}

#[test]
fn augmentations_give_the_images_of_albumentations_and_pillow() {
    let text = std::fs::read_to_string(fixtures().join("augmentations.json")).unwrap();
    let expected: BTreeMap<String, String> = serde_json::from_str(&text).unwrap();
    let mut failures = Vec::new();
    for (name, hexadecimal) in &expected {
        let mut words = name.split(' ');
        let method = words.next().unwrap();
        let n: Vec<f64> = words.map(|number| number.parse().unwrap()).collect();
        let (one, size) = ([1.0; 2], (8, 6));
        let warped =
            |angle, factors, shift, border| rotated(size, angle, factors, shift, border).apply(&image()).into_raw();
        // The largest and the mean difference. OpenCV rounds positions to 1/32 pixel, and L*a*b* with tables.
        let (ours, largest, mean): (Vec<u8>, u8, f64) = match method {
            "brightness_contrast" => (colors::multiply_add(image(), n[0], n[1] * 255.0).into_raw(), 0, 0.0),
            "brightness_contrast_mean" => (
                colors::multiply_add(image(), n[0], n[1] * colors::mean(&image())).into_raw(),
                0,
                0.0,
            ),
            "hsv" => (colors::shift_hsv(image(), [n[0], n[1], n[2]]).into_raw(), 1, 0.05),
            "jitter" => (colors::jitter_step(image(), n[0] as usize, n[1]).into_raw(), 1, 0.05),
            "gray" => (colors::to_gray(image()).into_raw(), 0, 0.0),
            "blur" => (filters::gaussian_blur(&image(), n[0] as u32, n[1]).into_raw(), 1, 0.3),
            "sharpen" => (filters::sharpen(&image(), n[0], n[1]).into_raw(), 1, 0.05),
            "clahe" => {
                let blue: Vec<u8> = image().pixels().map(|pixel| pixel.0[2]).collect();
                let equal = clahe::equalize(&blue, [8, 6], n[0], [n[1] as usize, n[2] as usize]);
                (equal, 1, 0.1)
            }
            "lab" => (of_pixels(clahe::to_lab), 1, 0.2),
            "from_lab" => {
                let lab = hex::decode(&expected["lab"]).unwrap();
                let colors = lab
                    .chunks(3)
                    .flat_map(|color| clahe::from_lab([color[0], color[1], color[2]]));
                (colors.collect(), 2, 0.2)
            }
            "noise" => {
                let mut image = image();
                let last = (image.len() - 1) as f64;
                for (index, value) in image.iter_mut().enumerate() {
                    let noise = -12.3 + 24.6 * index as f64 / last;
                    *value = colors::add(*value, noise);
                }
                (image.into_raw(), 0, 0.0)
            }
            "rotate" => (warped(n[0], one, [0.0; 2], Border::Reflect101), 2, 0.6),
            "rotate_constant" => (warped(n[0], one, [0.0; 2], Border::Constant([10, 20, 30])), 4, 0.6),
            "shift_scale_rotate" => (warped(15.0, [1.2, 0.9], [1.5, -0.8], Border::Reflect101), 2, 0.6),
            "pillow" => (pillow::jitter_step(image(), n[0] as usize, n[1]).into_raw(), 0, 0.0),
            "equalize" => {
                let nearest = |image: &RgbImage, width, height| {
                    image::imageops::resize(image, width, height, image::imageops::FilterType::Nearest)
                };
                let equal = pillow::equalize(nearest(&image(), 32, 24));
                // The upper left pixel of each square; all four are the same.
                (nearest(&equal, 8, 6).into_raw(), 0, 0.0)
            }
            other => panic!("{other}"),
        };
        let theirs = hex::decode(hexadecimal).unwrap();
        let found = differences(&ours, &theirs);
        println!("{name}: {found:?}");
        if found.0 > largest || found.1 > mean {
            failures.push(format!("{name}: differences {found:?}\n{ours:?}\n{theirs:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn augmentations(entries: &[Value]) -> Augmentations {
    Augmentations {
        list: read_augmentations(entries).unwrap(),
        replay: true,
        ..Augmentations::default()
    }
}

#[test]
fn every_augmentation_changes_an_image_and_gives_the_same_for_the_same_seed() {
    let certain = |name: &&str| json!({"method": name, "params": {"p": 1.0}});
    for name in KNOWN {
        let one = augmentations(&[certain(&name)]);
        let apply = |seed| one.apply(image(), &mut generator_for(seed, "test", 0, 0));
        assert_eq!(apply(1), apply(1), "{name}");
        assert_ne!(apply(1).image, image(), "{name}");
        // In so small tiles, no clip limit of the range matters.
        let has_fixed_result = matches!(name, "HorizontalFlip" | "VerticalFlip" | "ToGray" | "CLAHE");
        assert_eq!((1..9).all(|seed| apply(seed) == apply(1)), has_fixed_result, "{name}");
        let moves = !apply(1).moves.is_empty();
        assert_eq!(
            moves,
            ["HorizontalFlip", "VerticalFlip", "Rotate"].contains(&name),
            "{name}"
        );
    }
    let all = augmentations(&KNOWN.iter().map(certain).collect::<Vec<_>>());
    let shuffled = Augmentations {
        shuffle: true,
        ..all.clone()
    };
    let apply = |set: &Augmentations| set.apply(image(), &mut generator_for(7, "test", 0, 0)).image;
    assert_eq!((apply(&all), apply(&shuffled)), (apply(&all), apply(&shuffled)));
    assert_ne!(apply(&all), apply(&shuffled));
}

#[test]
fn an_augmentation_is_applied_with_its_chance() {
    let flips = |chance: f64| {
        let one = augmentations(&[json!({"method": "HorizontalFlip", "params": {"p": chance}})]);
        let flipped = |seed| {
            !one.apply(image(), &mut generator_for(seed, "test", 0, 0))
                .moves
                .is_empty()
        };
        (0..400).filter(|seed| flipped(*seed)).count()
    };
    assert_eq!((flips(0.0), flips(1.0)), (0, 400));
    // 3 standard deviations.
    assert!((70..=130).contains(&flips(0.25)), "{}", flips(0.25));
    // torchvision's equaliser changes one image of five; the other is always on.
    let built_in = |name: &str| Augmentations {
        built_in: vec![BuiltInAugmentation::from_name(name).unwrap()],
        ..Augmentations::default()
    };
    let large = image::imageops::resize(&image(), 32, 24, image::imageops::FilterType::Nearest);
    let changed = |name: &str| {
        let set = built_in(name);
        let apply = |seed| set.apply(large.clone(), &mut generator_for(seed, "test", 0, 0)).image;
        (0..400).filter(|seed| apply(*seed) != large).count()
    };
    assert!((56..=104).contains(&changed("RandomEqualize")));
    assert!(changed("ColorJitter") >= 399);
}

#[test]
fn sides_of_a_blur_are_odd_and_in_their_range() {
    for (range, expected) in [([3, 7], vec![3, 5, 7]), ([0, 3], vec![0, 1, 3]), ([5, 5], vec![5])] {
        let mut sides: Vec<u32> = (0..100)
            .map(|share| filters::odd_side(range, f64::from(share) / 100.0))
            .collect();
        sides.dedup();
        assert_eq!(sides, expected);
    }
}

/// A pixel that is far outside of the image, with each border.
#[test]
fn images_of_one_pixel_can_be_changed() {
    let one = RgbImage::from_pixel(1, 1, image::Rgb([10, 200, 30]));
    for border in [Border::Replicate, Border::Reflect, Border::Wrap, Border::Reflect101] {
        assert_eq!(rotated((1, 1), 33.0, [0.1; 2], [5.0; 2], border).apply(&one), one);
    }
    // Positions beyond every whole number: the image shrinks to nothing.
    let shrunk = rotated((3, 3), 10.0, [1e-30; 2], [0.0; 2], Border::Constant([1, 2, 3]));
    assert_eq!(shrunk.apply(&RgbImage::new(3, 3)).get_pixel(0, 0).0, [1, 2, 3]);
    let all: Vec<Value> = KNOWN
        .iter()
        .map(|name| json!({"method": name, "params": {"p": 1.0}}))
        .collect();
    let changed = augmentations(&all).apply(one, &mut generator_for(1, "test", 0, 0));
    assert_eq!(changed.image.dimensions(), (1, 1));
}

#[test]
fn masks_and_control_images_follow_their_images() {
    let dir = tempfile::tempdir().unwrap();
    let folder = |name: &str| {
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        folder
    };
    let (images, masks, controls) = (folder("images"), folder("masks"), folder("controls"));
    for folder in [&images, &masks, &controls] {
        image::imageops::resize(&image(), 32, 32, image::imageops::FilterType::Nearest)
            .save(folder.join("a.png"))
            .unwrap();
    }
    let options = DatasetOptions {
        path: images,
        resolution: 32,
        masks: Some(MaskOptions {
            source: MaskSource::Folder(masks),
            invert: false,
            min_value: 0.0,
        }),
        controls: Some(ControlOptions {
            role: ControlRole::Condition,
            source: ControlSource::Folders(vec![controls]),
            background: None,
            full_size: true,
        }),
        ..DatasetOptions::default()
    };
    let (dataset, _) = Dataset::open(options, 8, 42).unwrap();
    let item = &dataset.items[0];
    let (mask, control) = (item.mask.as_ref().unwrap(), item.control.as_ref().unwrap());
    let moves = [SpatialChange::FlipX, SpatialChange::FlipY];
    let mut turned = load_mask(item, mask, &[]).unwrap();
    turned.reverse();
    assert_eq!(load_mask(item, mask, &moves).unwrap(), turned);
    let numbers = |moves: &[SpatialChange]| {
        let pixels = load_control(item, control, moves).unwrap();
        pixels.to_vec3::<f32>().unwrap()
    };
    let mut turned = numbers(&[]);
    turned.iter_mut().for_each(|channel| {
        channel.reverse();
        channel.iter_mut().for_each(|row| row.reverse());
    });
    assert_eq!(numbers(&moves), turned);
}

/// Parameters at random, those that a config may have, on images of any small size: the size stays, and the same seed gives the same
/// image.
#[test]
fn random_parameters_change_images_of_any_size() {
    const NAMES: [&str; 27] = [
        "p",
        "limit",
        "border_mode",
        "value",
        "shift_limit",
        "shift_limit_x",
        "shift_limit_y",
        "scale_limit",
        "rotate_limit",
        "contrast_limit",
        "brightness_limit",
        "brightness_by_max",
        "hue_shift_limit",
        "sat_shift_limit",
        "val_shift_limit",
        "brightness",
        "contrast",
        "saturation",
        "hue",
        "blur_limit",
        "sigma_limit",
        "var_limit",
        "mean",
        "per_channel",
        "alpha",
        "clip_limit",
        "tile_grid_size",
    ];
    let mut accepted = BTreeMap::<&str, u32>::new();
    for round in 0..20_000 {
        let mut random = generator_for(round, "augment/parameters", 0, 0);
        let mut below = |count: usize| random.randint(0, count as i64, 1)[0] as usize;
        let method = KNOWN[below(KNOWN.len())];
        let mut params = serde_json::Map::new();
        for _ in 0..below(3) {
            let number = |at: usize| {
                [
                    0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 8.0, 31.0, 90.0, 180.0, 255.0, 1000.0, -1.0, -0.3,
                ][at]
            };
            let value = match below(5) {
                0 => json!(number(below(14))),
                1 => json!([number(below(14)), number(below(14))]),
                2 => json!(below(2) == 0),
                3 => json!(below(300)),
                _ => json!([below(40), below(40)]),
            };
            params.insert(NAMES[below(NAMES.len())].to_owned(), value);
        }
        params.insert("p".into(), json!(1.0));
        let Ok(list) = read_augmentations(&[json!({"method": method, "params": params})]) else {
            continue;
        };
        *accepted.entry(method).or_default() += 1;
        let (width, height) = (1 + below(20) as u32, 1 + below(20) as u32);
        let image = RgbImage::from_fn(width, height, |x, y| {
            image::Rgb([x * 90, y * 70, x * y].map(|value| (value % 256) as u8))
        });
        let augmentations = Augmentations {
            list,
            built_in: vec![BuiltInAugmentation::ColorJitter, BuiltInAugmentation::RandomEqualize],
            ..Augmentations::default()
        };
        let change = || augmentations.apply(image.clone(), &mut generator_for(round, "augment", 0, 0));
        let changed = change();
        assert_eq!(changed.image.dimensions(), (width, height), "{method} {params:?}");
        assert_eq!(changed, change());
    }
    assert!(
        accepted.len() == KNOWN.len() && accepted.values().all(|count| *count > 20),
        "{accepted:?}"
    );
}
