//! 200 truncations and 200 single-bit flips are all detected, and no damaged file is loaded.

use crate::support::{Random, files_below, save};
use aitk_common::checkpoint::Checkpoint;
use std::fs;
use std::path::{Path, PathBuf};

/// A damaged version of a file: its content, and a description of the damage.
struct Damage {
    file: PathBuf,
    content: Vec<u8>,
    how: String,
}

/// Creates 200 truncations and 200 bit flips, spread evenly over the files, at random positions.
fn make_damages(folder: &Path) -> Vec<Damage> {
    let files = files_below(folder);
    let mut random = Random::new(7);
    let mut all = Vec::new();
    for round in 0..400 {
        let file = files[(round / 2) % files.len()].clone();
        let mut content = fs::read(folder.join(&file)).unwrap();
        let how = if round % 2 == 0 {
            // Both ends of each file first, then random positions.
            let length = match round / 2 {
                at if at < files.len() => content.len() - 1,
                at if at < 2 * files.len() => 0,
                _ => random.below(content.len()),
            };
            content.truncate(length);
            format!("cut to {length} bytes")
        } else {
            let bit = random.below(content.len() * 8);
            content[bit / 8] ^= 1 << (bit % 8);
            format!("bit {bit} flipped")
        };
        all.push(Damage { file, content, how });
    }
    all
}

#[test]
fn damage_in_a_folder_is_detected_and_the_older_checkpoint_is_used() {
    let place = tempfile::tempdir().unwrap();
    save(place.path(), 1, 3000);
    let folder = save(place.path(), 2, 3000);
    let files = files_below(&folder);
    assert_eq!(files.len(), 4, "three files and the manifest: {files:?}");
    let all = make_damages(&folder);
    assert_eq!(all.len(), 400);
    for damage in &all {
        let path = folder.join(&damage.file);
        let intact = fs::read(&path).unwrap();
        fs::write(&path, &damage.content).unwrap();
        let error = Checkpoint::open(&folder).map(|_| ()).unwrap_err();
        let context = format!("{} {}: {error}", damage.file.display(), damage.how);
        assert!(
            error.is_damage() && error.to_string().contains(damage.file.to_str().unwrap()),
            "{context}"
        );
        let scan = Checkpoint::scan(place.path()).unwrap();
        assert_eq!(scan.newest.map(|found| found.step()), Some(1), "{context}");
        assert_eq!(scan.rejected.len(), 1, "{context}");
        fs::write(&path, intact).unwrap();
    }
    assert_eq!(
        Checkpoint::newest(place.path()).unwrap().map(|found| found.step()),
        Some(2)
    );
}

#[test]
fn a_missing_file_a_link_and_a_renamed_folder_count_as_damage() {
    let place = tempfile::tempdir().unwrap();
    let folder = save(place.path(), 5, 100);
    let moved = place.path().join("step_000000006");
    fs::rename(&folder, &moved).unwrap();
    assert!(Checkpoint::open(&moved).is_err());
    assert!(Checkpoint::newest(place.path()).unwrap().is_none());
    fs::rename(&moved, &folder).unwrap();
    let (file, elsewhere) = (folder.join("adapter.safetensors"), place.path().join("elsewhere"));
    fs::rename(&file, &elsewhere).unwrap();
    assert!(
        Checkpoint::open(&folder)
            .unwrap_err()
            .to_string()
            .contains("adapter.safetensors")
    );
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&elsewhere, &file).unwrap();
        assert!(
            Checkpoint::open(&folder)
                .unwrap_err()
                .to_string()
                .contains("regular file")
        );
    }
    assert!(
        Checkpoint::open(&place.path().join("absent"))
            .unwrap_err()
            .to_string()
            .contains("no manifest")
    );
}

#[cfg(feature = "storage")]
#[tokio::test]
async fn damage_in_object_storage_is_detected_and_no_checkpoint_appears() {
    use aitk_common::storage::{ObjectBlobs, StorageError, checkpoints};
    let place = tempfile::tempdir().unwrap();
    let source = save(&place.path().join("run"), 2, 1000);
    let store_folder = place.path().join("store");
    let store = ObjectBlobs::open(&format!("file://{}", store_folder.display())).unwrap();
    let manifest = checkpoints::upload(&store, &source, &mut |_| {}).await.unwrap();
    let target = place.path().join("target");
    for damage in make_damages(&store_folder) {
        let path = store_folder.join(&damage.file);
        let intact = fs::read(&path).unwrap();
        fs::write(&path, &damage.content).unwrap();
        let error = checkpoints::fetch(&store, manifest, &target, &mut |_| {})
            .await
            .map(|_| ())
            .unwrap_err();
        assert!(
            matches!(error, StorageError::Corrupt { .. }),
            "{} {}: {error}",
            damage.file.display(),
            damage.how
        );
        let left = fs::read_dir(&target).map(|entries| entries.count()).unwrap_or(0);
        assert_eq!(left, 0, "{} {}", damage.file.display(), damage.how);
        fs::write(&path, intact).unwrap();
    }
    let fetched = checkpoints::fetch(&store, manifest, &target, &mut |_| {})
        .await
        .unwrap();
    assert_eq!(fetched.manifest(), Checkpoint::open(&source).unwrap().manifest());
    for file in files_below(&source) {
        assert_eq!(
            fs::read(source.join(&file)).unwrap(),
            fs::read(fetched.folder().join(&file)).unwrap()
        );
    }
}
