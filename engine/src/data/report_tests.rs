//! The report of a data set is what training makes of it, for any folder.

use super::*;
use image::{DynamicImage, RgbImage};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// What may lie in a data set.
#[derive(Clone, Debug)]
enum Thing {
    /// An image of this size; with a caption of its own, or a blank one, or none.
    Image(u32, u32, Option<bool>),
    /// A file that is called an image and is none.
    Broken,
    /// Another file.
    Other(&'static str),
}

fn thing() -> impl Strategy<Value = Thing> {
    prop_oneof![
        6 => (16..200u32, 16..200u32, prop_oneof![Just(None), Just(Some(true)), Just(Some(false))])
            .prop_map(|(w, h, caption)| Thing::Image(w, h, caption)),
        1 => Just(Thing::Broken),
        1 => prop_oneof![Just("gif"), Just("txt"), Just("mp4")].prop_map(Thing::Other),
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

fn fill(folder: &Path, things: &[Thing]) {
    for (number, thing) in things.iter().enumerate() {
        // Some of it in a folder of its own.
        let folder = folder.join(if number % 3 == 0 { "below" } else { "" });
        std::fs::create_dir_all(&folder).unwrap();
        let at = |ending: &str| folder.join(format!("{number}.{ending}"));
        match thing {
            Thing::Image(w, h, caption) => {
                DynamicImage::from(RgbImage::new(*w, *h)).save(at("png")).unwrap();
                if let Some(text) = caption {
                    std::fs::write(at("txt"), if *text { "a caption" } else { " \n" }).unwrap();
                }
            }
            Thing::Broken => std::fs::write(at("png"), "no image").unwrap(),
            Thing::Other(ending) => std::fs::write(at(ending), "x").unwrap(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn the_report_is_what_training_makes_of_it(things in prop::collection::vec(thing(), 0..14), options in options()) {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path(), &things);
        let options = DatasetOptions { path: folder.path().to_owned(), ..options };
        let report = DatasetReport::of(&options, "set", 16);
        prop_assert!(!folder.path().join(".aitk_size.json").exists(), "a report keeps nothing");
        let (report, (dataset, warnings)) = match (report, Dataset::open(options.clone(), 16, 7)) {
            (Ok(report), Ok(trained)) => (report, trained),
            (Err(_), Err(_)) => return Ok(()),
            (report, trained) => return Err(TestCaseError::fail(format!("{report:?} against {:?}", trained.map(|_| ())))),
        };
        let mut buckets: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        for item in &dataset.items {
            *buckets.entry(item.plan.bucket).or_default() += 1;
        }
        let told: BTreeMap<(u32, u32), u64> =
            report.buckets.iter().map(|bucket| ((bucket.width, bucket.height), bucket.images)).collect();
        prop_assert_eq!(told, buckets);
        prop_assert_eq!(report.items, dataset.items.len() as u64);
        prop_assert_eq!(report.batches, batches(&[dataset], 7, false).len() as u64);
        let count = |wanted: fn(&Thing) -> bool| things.iter().filter(|thing| wanted(thing)).count() as u64;
        prop_assert_eq!(report.captioned, count(|thing| matches!(thing, Thing::Image(_, _, Some(true)))));
        prop_assert_eq!(report.uncaptioned.count, count(|thing| matches!(thing, Thing::Image(_, _, None | Some(false)))));
        prop_assert_eq!(report.unreadable.count, count(|thing| matches!(thing, Thing::Broken)));
        prop_assert_eq!(report.ignored.values().sum::<u64>(), count(|thing| matches!(thing, Thing::Other(_))));
        // What nobody has a caption for is said, unless there is a default.
        let silent = report.uncaptioned.count == 0 || options.default_caption.is_some();
        prop_assert_eq!(report.caption_warning.is_none(), silent);
        prop_assert_eq!(warnings.iter().filter(|warning| warning.contains("no caption")).count(), usize::from(!silent));
    }
}

#[test]
fn missing_captions_are_said_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path(), &vec![Thing::Image(64, 64, Some(true)); 4]);
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
fn an_image_without_its_end_is_found_and_one_with_a_film_behind_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.png");
    // Not of one colour, so that every part of the files says something.
    let image = DynamicImage::from(RgbImage::from_fn(64, 64, |x, y| {
        image::Rgb([(x * 37 + y * 91) as u8, (x * y) as u8, (x * x + 7 * y) as u8])
    }));
    for ending in ["png", "jpg", "webp"] {
        let path = whole.with_extension(ending);
        image.save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(!crate::image_io::is_cut_off(&path), "{ending}");
        let cut = folder.path().join(format!("cut.{ending}"));
        std::fs::write(&cut, &bytes[..bytes.len() - 8]).unwrap();
        assert!(crate::image_io::is_cut_off(&cut), "{ending}");
        std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
        assert!(crate::image_io::is_cut_off(&cut), "{ending}");
    }
    let photo = std::fs::read(whole.with_extension("jpg")).unwrap();
    let film = vec![0x5a; 1 << 20];
    std::fs::write(folder.path().join("film.jpg"), [photo, film].concat()).unwrap();
    let options = DatasetOptions {
        path: folder.path().to_owned(),
        ..DatasetOptions::default()
    };
    let cut_off = DatasetReport::of(&options, "set", 16).unwrap().cut_off;
    assert_eq!(cut_off.first, ["cut.jpg", "cut.png", "cut.webp"]);
}
