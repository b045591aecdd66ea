//! A data set of 1,000 files is uploaded to an S3 server: each byte once, and nothing the second time, counted by the server.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use aitk_tests::cluster::{Setup, TestCluster};
use aitk_tests::jobs::training_config;
use aitk_tests::s3::S3;
use std::path::Path;

/// Writes 500 images with captions, 1,000 files, some of them with the same content. Returns the total bytes of the distinct
/// contents.
fn write_dataset(folder: &Path) -> u64 {
    std::fs::create_dir_all(folder).unwrap();
    let mut distinct = std::collections::BTreeMap::new();
    for number in 0..500_u32 {
        let kind = number % 480;
        let image = image::RgbImage::from_fn(64, 64, |x, y| {
            let [a, b] = [(kind & 0xff) as u8, (kind >> 8) as u8];
            image::Rgb([x as u8 ^ a, y as u8 ^ b, (x * y) as u8 ^ a])
        });
        let path = folder.join(format!("{number:04}.png"));
        image.save(&path).unwrap();
        let caption = folder.join(format!("{number:04}.txt"));
        std::fs::write(&caption, format!("image number {number}")).unwrap();
        for file in [path, caption] {
            let bytes = std::fs::read(file).unwrap();
            let length = bytes.len() as u64;
            distinct.insert(bytes, length);
        }
    }
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1000);
    distinct.values().sum()
}

#[test]
fn a_thousand_files_are_sent_once_and_then_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let distinct = write_dataset(&root.join("dataset"));
    std::fs::write(root.join("job.yaml"), training_config("shapes", &root, 2, 100)).unwrap();
    let s3 = S3::start(env!("CARGO_BIN_EXE_s3-server"), &root);
    let cluster = TestCluster::start_with(Setup::new(&root).storage(s3.url(), s3.environment()));

    // The data set, the model's files and the snapshots.
    let submitted = cluster.aitk_json(["submit", "job.yaml", "--json"]);
    let first = s3.traffic();
    let stored: u64 = blobs(&s3.root.join("aitk/blobs")).iter().sum();
    assert_eq!(
        first.bytes_in, stored,
        "each byte that is stored was sent once: {submitted}"
    );
    assert_eq!(
        first.puts as usize,
        blobs(&s3.root.join("aitk/blobs")).len(),
        "one request for each blob"
    );
    let inputs = submitted["inputs"].as_array().unwrap();
    let data = inputs
        .iter()
        .find(|input| input["path"].as_str().unwrap().ends_with("dataset"))
        .unwrap();
    assert_eq!(data["files"], 1000, "{submitted}");
    assert_eq!(data["sent_bytes"], distinct, "{submitted}");
    assert!(first.bytes_in > distinct);

    cluster.aitk_ok(["submit", "job.yaml"]);
    let second = s3.traffic();
    assert_eq!(
        (second.bytes_in, second.puts),
        (first.bytes_in, first.puts),
        "nothing is sent again"
    );

    // One changed caption: only the caption and the new snapshot are uploaded.
    std::fs::write(root.join("dataset/0007.txt"), "a new caption").unwrap();
    cluster.aitk_ok(["submit", "job.yaml"]);
    assert_eq!(s3.traffic().puts, first.puts + 2);
}

fn blobs(folder: &Path) -> Vec<u64> {
    let mut sizes = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(data) if data.is_dir() => sizes.extend(blobs(&entry.path())),
            Ok(data) => sizes.push(data.len()),
            Err(_) => {}
        }
    }
    sizes
}
