//! Upload, download and garbage collection of snapshots.

use crate::support::{Random, files_below, folder_for_role, reexecute};
use aitk_common::hash::ContentHash;
use aitk_common::storage::snapshot::{self, ScannedSnapshot, Snapshot, SnapshotFile, TransferProgress};
use aitk_common::storage::{BlobInfo, BlobStore, ObjectBlobs, StorageError, gc};
use async_trait::async_trait;
use bytes::Bytes;
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

/// A store that counts uploads and `has` calls.
#[derive(Debug)]
struct CountingStore {
    inner: ObjectBlobs,
    puts: Mutex<BTreeMap<ContentHash, (u64, u64)>>,
    has_calls: Mutex<u64>,
}

impl CountingStore {
    fn new(folder: &Path) -> Self {
        let inner = ObjectBlobs::open(&format!("file://{}", folder.display())).unwrap();
        Self {
            inner,
            puts: Mutex::default(),
            has_calls: Mutex::default(),
        }
    }

    fn count(&self, hash: ContentHash, bytes: u64) {
        let mut puts = self.puts.lock().unwrap();
        let entry = puts.entry(hash).or_default();
        *entry = (entry.0 + 1, entry.1 + bytes);
    }

    /// Upload calls, bytes, and the most calls for one blob, since the last call of this method.
    fn take(&self) -> (u64, u64, u64) {
        let puts = std::mem::take(&mut *self.puts.lock().unwrap());
        let calls = puts.values().map(|put| put.0);
        (
            calls.clone().sum(),
            puts.values().map(|put| put.1).sum(),
            calls.max().unwrap_or(0),
        )
    }
}

#[async_trait]
impl BlobStore for CountingStore {
    async fn has(&self, hashes: &[ContentHash]) -> Result<Vec<bool>, StorageError> {
        *self.has_calls.lock().unwrap() += 1;
        self.inner.has(hashes).await
    }
    async fn put_file(&self, hash: ContentHash, path: &Path) -> Result<(), StorageError> {
        self.count(hash, fs::metadata(path).unwrap().len());
        self.inner.put_file(hash, path).await
    }
    async fn put_bytes(&self, hash: ContentHash, bytes: Bytes) -> Result<(), StorageError> {
        self.count(hash, bytes.len() as u64);
        self.inner.put_bytes(hash, bytes).await
    }
    async fn get_to_file(&self, hash: ContentHash, path: &Path) -> Result<u64, StorageError> {
        self.inner.get_to_file(hash, path).await
    }
    async fn get_bytes(&self, hash: ContentHash, limit: u64) -> Result<Bytes, StorageError> {
        self.inner.get_bytes(hash, limit).await
    }
    async fn delete(&self, hash: ContentHash) -> Result<(), StorageError> {
        self.inner.delete(hash).await
    }
    async fn list(&self) -> Result<Vec<BlobInfo>, StorageError> {
        self.inner.list().await
    }
}

fn scan(path: &Path) -> ScannedSnapshot {
    snapshot::scan(path, &mut |_| {}).unwrap()
}

/// Creates `count` files in folders of 100. Every tenth file has the content of the previous one. Returns the distinct bytes.
fn create_data_set(folder: &Path, count: usize) -> u64 {
    let mut random = Random::new(3);
    let mut distinct = 0;
    let mut content = Vec::new();
    for number in 0..count {
        if number % 10 != 9 {
            let length = 1 + random.below(2000);
            content = random.bytes(length);
            content.extend_from_slice(&(number as u64).to_le_bytes());
            distinct += content.len() as u64;
        }
        let path = folder.join(format!("{:02}/img_{number:04}.png", number / 100));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &content).unwrap();
    }
    distinct
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_uploaded_only_once() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    let distinct = create_data_set(&data, 1000);
    let store = CountingStore::new(&place.path().join("store"));
    let scanned = scan(&data);
    assert_eq!(scanned.snapshot.files.len(), 1000);
    let list = scanned.snapshot.to_bytes().len() as u64;

    let mut seen: Vec<TransferProgress> = Vec::new();
    let first = snapshot::upload(&store, &scanned, &mut |progress| seen.push(progress))
        .await
        .unwrap();
    assert_eq!(
        store.take(),
        (901, distinct + list, 1),
        "900 distinct contents and the list, each once"
    );
    assert_eq!(
        (first.files_sent, first.bytes_sent, first.bytes_present),
        (900, distinct, 0)
    );
    assert!(seen.windows(2).all(|pair| pair[0].bytes <= pair[1].bytes));
    assert_eq!(seen.last().map(|last| (last.bytes, last.files)), Some((distinct, 900)));

    let second = snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap();
    assert_eq!(store.take(), (0, 0, 0), "no uploads the second time");
    assert_eq!(
        (second.id, second.bytes_sent, second.bytes_present),
        (first.id, 0, distinct)
    );

    fs::write(data.join("one_more.txt"), b"new").unwrap();
    snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap();
    assert_eq!(store.take().0, 2, "the new file and the new list");
    // 900 contents in batches of 500, and the list: few `has` calls, because each may be a network round trip.
    assert!(
        *store.has_calls.lock().unwrap() <= 9,
        "{}",
        store.has_calls.lock().unwrap()
    );
}

#[tokio::test]
async fn a_snapshot_round_trips_and_a_damaged_cache_is_repaired() {
    let place = tempfile::tempdir().unwrap();
    let (data, cache) = (place.path().join("data"), place.path().join("cache"));
    create_data_set(&data, 30);
    fs::write(data.join("empty.txt"), b"").unwrap();
    let store = CountingStore::new(&place.path().join("store"));
    let id = snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap().id;
    let one = place.path().join("one");
    let list = snapshot::materialise(&store, id, &cache, &one, &mut |_| {})
        .await
        .unwrap();
    assert_eq!(files_below(&data), files_below(&one));
    assert_eq!(list.local_path(&one).unwrap(), one);
    assert_eq!(scan(&one).snapshot.id(), id);
    for file in files_below(&cache) {
        let path = cache.join(file);
        fs::remove_file(&path).unwrap();
        fs::write(&path, b"rotten").unwrap();
    }
    snapshot::materialise(&store, id, &cache, &place.path().join("two"), &mut |_| {})
        .await
        .unwrap();
    assert_eq!(scan(&place.path().join("two")).snapshot.id(), id);
}

#[tokio::test]
async fn changes_of_a_materialised_tree_are_detected() {
    let place = tempfile::tempdir().unwrap();
    let store = CountingStore::new(&place.path().join("store"));
    let data = place.path().join("data");
    fs::create_dir_all(data.join("deep")).unwrap();
    for (name, text) in [("a.txt", "a"), ("b.txt", "b"), ("deep/c.txt", "c")] {
        fs::write(data.join(name), text).unwrap();
    }
    let id = snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap().id;
    let cache = place.path().join("cache");
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
    let write = |path: &Path, bytes: &[u8]| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(path, bytes).unwrap();
    };
    // Each kind of change, and whether it is detected without hashing.
    type Change<'a> = &'a dyn Fn(&Path);
    let same_size_and_time: Change<'_> = &|tree| {
        let path = tree.join("a.txt");
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        write(&path, b"z");
        File::options()
            .append(true)
            .open(&path)
            .unwrap()
            .set_modified(before)
            .unwrap();
    };
    let changes: [(&str, bool, Change<'_>); 5] = [
        ("another size", true, &|tree| write(&tree.join("a.txt"), b"longer")),
        ("another time", true, &|tree| write(&tree.join("deep/c.txt"), b"c")),
        ("a file more", true, &|tree| {
            fs::set_permissions(tree.join("deep"), fs::Permissions::from_mode(0o755)).unwrap();
            fs::write(tree.join("deep/.tmp-latent"), b"half").unwrap();
        }),
        ("a file less", true, &|tree| {
            fs::set_permissions(tree, fs::Permissions::from_mode(0o755)).unwrap();
            fs::remove_file(tree.join("b.txt")).unwrap();
        }),
        ("another content", false, same_size_and_time),
    ];
    for (what, detected_without_hashing, change) in changes {
        let tree = place.path().join("tree");
        let list = snapshot::materialise(&store, id, &cache, &tree, &mut |_| {})
            .await
            .unwrap();
        assert_eq!(
            (mode(&tree), mode(&tree.join("deep")), mode(&tree.join("a.txt"))),
            (0o555, 0o555, 0o444)
        );
        let record = snapshot::verify(&list, &tree, None).unwrap();
        assert_eq!(snapshot::verify(&list, &tree, Some(&record)).unwrap(), record);
        assert!(!record.is_older(Duration::from_secs(3600), SystemTime::now()));
        assert!(record.is_older(Duration::ZERO, SystemTime::now()));
        change(&tree);
        // A touched file still has the right content, which is only known after hashing it again.
        let is_damage = what != "another time";
        assert_eq!(snapshot::verify(&list, &tree, None).is_err(), is_damage, "{what}");
        assert_eq!(
            snapshot::verify(&list, &tree, Some(&record)).is_err(),
            detected_without_hashing,
            "{what}"
        );
        // It can be removed although it is read-only, and is then materialised again.
        aitk_common::fsutil::remove(&tree).unwrap();
        assert!(!tree.exists());
    }
}

#[tokio::test]
async fn a_single_file_keeps_its_name() {
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("model.safetensors");
    fs::write(&model, b"weights").unwrap();
    let store = CountingStore::new(&place.path().join("store"));
    let id = snapshot::upload(&store, &scan(&model), &mut |_| {}).await.unwrap().id;
    let target = place.path().join("target");
    let list = snapshot::materialise(&store, id, &place.path().join("cache"), &target, &mut |_| {})
        .await
        .unwrap();
    assert_eq!(fs::read(list.local_path(&target).unwrap()).unwrap(), b"weights");
    assert_eq!(list.local_path(&target).unwrap(), target.join("model.safetensors"));
}

#[tokio::test]
async fn a_damaged_blob_is_never_materialised() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    create_data_set(&data, 20);
    let store_folder = place.path().join("store");
    let store = CountingStore::new(&store_folder);
    let id = snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap().id;
    let target = place.path().join("target");
    for (round, file) in files_below(&store_folder).into_iter().enumerate() {
        let cache = place.path().join(format!("cache-{round}"));
        let path = store_folder.join(file);
        let mut content = fs::read(&path).unwrap();
        content[0] ^= 1;
        fs::write(&path, &content).unwrap();
        let error = snapshot::materialise(&store, id, &cache, &target, &mut |_| {})
            .await
            .unwrap_err();
        assert!(matches!(error, StorageError::Corrupt { .. }), "{error}");
        assert!(!target.exists());
        content[0] ^= 1;
        fs::write(&path, &content).unwrap();
    }
}

#[test]
fn a_scan_skips_derived_files_and_refuses_links_that_leave_the_folder() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    for path in [
        "a.png",
        ".DS_Store",
        "_latent_cache/a.safetensors",
        "_t_e_cache/x",
        "sub/_clip_vision_cache/x",
        "sub/b.png",
        ".git/config",
    ] {
        let path = data.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"x").unwrap();
    }
    let names = |scanned: &ScannedSnapshot| {
        scanned
            .snapshot
            .files
            .iter()
            .map(|file| file.path.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&scan(&data)), ["a.png", "sub/b.png"]);
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        symlink("a.png", data.join("inside.png")).unwrap();
        assert_eq!(names(&scan(&data)), ["a.png", "inside.png", "sub/b.png"]);
        fs::write(place.path().join("secret"), b"x").unwrap();
        symlink(place.path().join("secret"), data.join("outside.png")).unwrap();
        let error = snapshot::scan(&data, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("outside.png") && error.contains("link"), "{error}");
        fs::remove_file(data.join("outside.png")).unwrap();
        symlink("..", data.join("sub/loop")).unwrap();
        let error = snapshot::scan(&data, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("deep"), "{error}");
    }
    assert!(snapshot::scan(&place.path().join("absent"), &mut |_| {}).is_err());
}

#[tokio::test]
async fn a_file_that_changes_before_its_upload_is_an_error() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("a"), b"before").unwrap();
    let scanned = scan(&data);
    fs::write(data.join("a"), b"after").unwrap();
    let store_folder = place.path().join("store");
    let store = CountingStore::new(&store_folder);
    let error = snapshot::upload(&store, &scanned, &mut |_| {}).await.unwrap_err();
    assert!(matches!(error, StorageError::Corrupt { .. }), "{error}");
    assert!(files_below(&store_folder).is_empty());
}

const ROLE: &str = "materialise";

/// The child process, which materialises the snapshot whose id is in the folder.
#[tokio::test(flavor = "multi_thread")]
async fn child() {
    let Some(place) = folder_for_role(ROLE) else { return };
    let id = ContentHash::parse(&fs::read_to_string(place.join("id")).unwrap()).unwrap();
    let store = ObjectBlobs::open(place.join("store").to_str().unwrap()).unwrap();
    for round in 0..5 {
        let target = place.join(format!("target-{round}"));
        let cache = place.join("cache");
        let (mut first_progress, mut second_progress) = (|_| {}, |_| {});
        let (first, second) = tokio::join!(
            snapshot::materialise(&store, id, &cache, &target, &mut first_progress),
            snapshot::materialise(&store, id, &cache, &target, &mut second_progress)
        );
        assert_eq!(first.unwrap(), second.unwrap());
    }
}

#[tokio::test]
async fn concurrent_processes_materialise_the_same_files() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    create_data_set(&data, 60);
    let store = CountingStore::new(&place.path().join("store"));
    let id = snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap().id;
    fs::write(place.path().join("id"), id.to_hex()).unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| reexecute("snapshots::child", ROLE, place.path()).spawn().unwrap())
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    for round in 0..5 {
        assert_eq!(scan(&place.path().join(format!("target-{round}"))).snapshot.id(), id);
    }
    let left: Vec<_> = fs::read_dir(place.path())
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(
        left.iter().all(|name| !name.to_string_lossy().starts_with(".tmp-")),
        "{left:?}"
    );
}

#[tokio::test]
async fn old_unreachable_blobs_are_garbage() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    create_data_set(&data, 10);
    let store = CountingStore::new(&place.path().join("store"));
    let id = snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap().id;
    let folder = crate::support::save(&place.path().join("run"), 1, 100);
    let manifest = aitk_common::storage::checkpoints::upload(&store, &folder, &mut |_| {})
        .await
        .unwrap();
    let orphan = ContentHash::of(b"orphan");
    store.put_bytes(orphan, Bytes::from_static(b"orphan")).await.unwrap();

    let roots = gc::Roots {
        snapshots: [id].into(),
        checkpoints: [manifest].into(),
        ..gc::Roots::default()
    };
    let reached = gc::reachable(&store, &roots).await.unwrap();
    assert!(reached.broken.is_empty(), "{:?}", reached.broken);
    let needed = reached.needed;
    let listed = store.list().await.unwrap();
    let now = jiff::Timestamp::now() + Duration::from_secs(100);
    let garbage = gc::unneeded(listed.clone(), &needed, Duration::from_secs(50), now);
    assert_eq!(garbage.iter().map(|blob| blob.hash).collect::<Vec<_>>(), [orphan]);
    assert_eq!(gc::unneeded(listed.clone(), &needed, Duration::from_secs(500), now), []);
    assert_eq!(
        gc::unneeded(listed, &HashSet::new(), Duration::ZERO, now).len(),
        needed.len() + 1
    );
    // A missing root and a root of the wrong kind are reported, together with the blobs of valid roots.
    let lost = ContentHash::of(b"lost");
    let roots = gc::Roots {
        snapshots: [lost, orphan, id].into(),
        checkpoints: [id].into(),
        ..gc::Roots::default()
    };
    let reached = gc::reachable(&store, &roots).await.unwrap();
    let broken: HashSet<_> = reached.broken.iter().map(|(hash, _)| *hash).collect();
    assert_eq!(broken, [lost, orphan, id].into());
    let files: HashSet<_> = scan(&data).snapshot.files.iter().map(|file| file.sha256).collect();
    assert!(reached.needed.is_superset(&files));
}

#[tokio::test]
async fn a_forged_list_is_refused_before_a_file_is_written() {
    let place = tempfile::tempdir().unwrap();
    let store = CountingStore::new(&place.path().join("store"));
    let text = format!(
        r#"{{"format":"aitk-snapshot-1","is_file":false,"files":[{{"path":"../evil","bytes":1,"sha256":"{}"}}]}}"#,
        ContentHash::of(b"x")
    );
    assert!(Snapshot::from_bytes(text.as_bytes()).is_err());
    let id = ContentHash::of(text.as_bytes());
    store.put_bytes(id, text.into()).await.unwrap();
    let target = place.path().join("deep/target");
    let error = snapshot::materialise(&store, id, &place.path().join("cache"), &target, &mut |_| {})
        .await
        .unwrap_err();
    assert!(matches!(error, StorageError::Name(_)), "{error}");
    assert!(!place.path().join("deep").exists());
}

#[tokio::test]
async fn a_list_with_sizes_that_no_disk_has_is_an_error() {
    let place = tempfile::tempdir().unwrap();
    let store = CountingStore::new(&place.path().join("store"));
    let file = |path: &str| SnapshotFile {
        path: path.to_owned(),
        bytes: u64::MAX,
        sha256: ContentHash::of(path.as_bytes()),
    };
    let list = Snapshot::new(vec![file("a"), file("b")], false).unwrap();
    for content in ["a", "b"] {
        let hash = ContentHash::of(content.as_bytes());
        store.put_bytes(hash, content.into()).await.unwrap();
    }
    store.put_bytes(list.id(), list.to_bytes().into()).await.unwrap();
    let (cache, target) = (place.path().join("cache"), place.path().join("target"));
    let error = snapshot::materialise(&store, list.id(), &cache, &target, &mut |_| {})
        .await
        .unwrap_err();
    assert!(matches!(error, StorageError::Malformed { .. }), "{error}");
    assert!(!target.exists());
}

#[tokio::test]
async fn opening_a_store_removes_unfinished_files_of_killed_processes() {
    let place = tempfile::tempdir().unwrap();
    let address = format!("file://{}", place.path().display());
    let hash = ContentHash::of(b"kept");
    let store = ObjectBlobs::open(&address).unwrap();
    store.put_bytes(hash, Bytes::from_static(b"kept")).await.unwrap();
    let folder = place.path().join("blobs").join(&hash.to_hex()[..2]);
    fs::write(folder.join(".tmp-half"), b"ha").unwrap();
    assert_eq!(store.list().await.unwrap().len(), 1, "an unfinished file is not a blob");
    ObjectBlobs::open(&address).unwrap();
    assert_eq!(files_below(&folder), [Path::new(&hash.to_hex())]);
}

#[cfg(unix)]
#[test]
fn pipes_sockets_and_devices_are_refused_with_their_type() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("data/words.txt");
    fs::create_dir(folder.path().join("data")).unwrap();
    fs::write(folder.path().join("data/a.txt"), "a").unwrap();
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (path, named, what) in [
        (folder.path().join("data"), pipe.as_path(), "a pipe"),
        (pipe.clone(), pipe.as_path(), "a pipe"),
        ("/dev/zero".into(), Path::new("/dev/zero"), "a device"),
    ] {
        let error = snapshot::scan(&path, &mut |_| {}).unwrap_err().to_string();
        assert!(
            error.contains(what) && error.contains(named.to_str().unwrap()),
            "{error}"
        );
    }
    fs::remove_file(&pipe).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(&pipe).unwrap();
    let error = snapshot::scan(&folder.path().join("data"), &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(error.contains("a socket"), "{error}");
}
