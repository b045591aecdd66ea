//! Data sets in, each byte once, and out again.

use crate::support::{Random, again, files_below, playing};
use aitk_common::hash::ContentHash;
use aitk_common::storage::snapshot::{self, Progress, Scanned, Snapshot};
use aitk_common::storage::{BlobInfo, BlobStore, ObjectBlobs, StorageError, gc};
use async_trait::async_trait;
use bytes::Bytes;
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

/// A store that counts what is sent.
#[derive(Debug)]
struct Counting {
    inner: ObjectBlobs,
    puts: Mutex<BTreeMap<ContentHash, (u64, u64)>>,
    questions: Mutex<u64>,
}

impl Counting {
    fn new(folder: &Path) -> Self {
        let inner = ObjectBlobs::open(&format!("file://{}", folder.display())).unwrap();
        Self {
            inner,
            puts: Mutex::default(),
            questions: Mutex::default(),
        }
    }

    fn count(&self, hash: ContentHash, bytes: u64) {
        let mut puts = self.puts.lock().unwrap();
        let entry = puts.entry(hash).or_default();
        *entry = (entry.0 + 1, entry.1 + bytes);
    }

    /// Calls, bytes, and the most calls for one blob, since the last time.
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
impl BlobStore for Counting {
    async fn has(&self, hashes: &[ContentHash]) -> Result<Vec<bool>, StorageError> {
        *self.questions.lock().unwrap() += 1;
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

fn scan(path: &Path) -> Scanned {
    snapshot::scan(path, &mut |_| {}).unwrap()
}

/// `count` files in folders of 100; every tenth repeats the one before it.
fn data_set(folder: &Path, count: usize) -> u64 {
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
async fn a_thousand_files_are_sent_once_and_never_again() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    let distinct = data_set(&data, 1000);
    let store = Counting::new(&place.path().join("store"));
    let scanned = scan(&data);
    assert_eq!(scanned.snapshot.files.len(), 1000);
    let list = scanned.snapshot.to_bytes().len() as u64;

    let mut seen: Vec<Progress> = Vec::new();
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
    assert_eq!(store.take(), (0, 0, 0), "nothing the second time");
    assert_eq!(
        (second.id, second.bytes_sent, second.bytes_present),
        (first.id, 0, distinct)
    );

    fs::write(data.join("one_more.txt"), b"new").unwrap();
    snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap();
    assert_eq!(store.take().0, 2, "the new file and the new list");
    // 900 contents in batches of 500, and the list: few questions, because each may be a round trip over the net.
    assert!(
        *store.questions.lock().unwrap() <= 9,
        "{}",
        store.questions.lock().unwrap()
    );
}

#[tokio::test]
async fn a_snapshot_comes_out_as_it_went_in_and_a_damaged_cache_heals() {
    let place = tempfile::tempdir().unwrap();
    let (data, cache) = (place.path().join("data"), place.path().join("cache"));
    data_set(&data, 30);
    fs::write(data.join("empty.txt"), b"").unwrap();
    let store = Counting::new(&place.path().join("store"));
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
async fn a_tree_that_is_not_what_was_sent_is_noticed() {
    let place = tempfile::tempdir().unwrap();
    let store = Counting::new(&place.path().join("store"));
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
    // Each kind of change, and whether it shows without hashing.
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
    for (what, shows_at_once, change) in changes {
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
        // A file that was only touched has the right content still; it is hashed again to find that out.
        let is_damage = what != "another time";
        assert_eq!(snapshot::verify(&list, &tree, None).is_err(), is_damage, "{what}");
        assert_eq!(
            snapshot::verify(&list, &tree, Some(&record)).is_err(),
            shows_at_once,
            "{what}"
        );
        // It goes although it is read-only, and comes again as it was.
        aitk_common::fsutil::remove(&tree).unwrap();
        assert!(!tree.exists());
    }
}

#[tokio::test]
async fn a_single_file_keeps_its_name() {
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("model.safetensors");
    fs::write(&model, b"weights").unwrap();
    let store = Counting::new(&place.path().join("store"));
    let id = snapshot::upload(&store, &scan(&model), &mut |_| {}).await.unwrap().id;
    let target = place.path().join("target");
    let list = snapshot::materialise(&store, id, &place.path().join("cache"), &target, &mut |_| {})
        .await
        .unwrap();
    assert_eq!(fs::read(list.local_path(&target).unwrap()).unwrap(), b"weights");
    assert_eq!(list.local_path(&target).unwrap(), target.join("model.safetensors"));
}

#[tokio::test]
async fn a_damaged_blob_never_becomes_a_folder() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    data_set(&data, 20);
    let store_folder = place.path().join("store");
    let store = Counting::new(&store_folder);
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
fn a_scan_leaves_out_what_is_derived_and_refuses_what_lies_elsewhere() {
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
    let names = |scanned: &Scanned| {
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
async fn a_file_that_changes_while_it_is_sent_is_an_error_and_not_a_blob() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("a"), b"before").unwrap();
    let scanned = scan(&data);
    fs::write(data.join("a"), b"after").unwrap();
    let store_folder = place.path().join("store");
    let store = Counting::new(&store_folder);
    let error = snapshot::upload(&store, &scanned, &mut |_| {}).await.unwrap_err();
    assert!(matches!(error, StorageError::Corrupt { .. }), "{error}");
    assert!(files_below(&store_folder).is_empty());
}

const ROLE: &str = "materialise";

/// A process that materialises the snapshot named in the folder.
#[tokio::test(flavor = "multi_thread")]
async fn child() {
    let Some(place) = playing(ROLE) else { return };
    let id = ContentHash::parse(&fs::read_to_string(place.join("id")).unwrap()).unwrap();
    let store = ObjectBlobs::open(place.join("store").to_str().unwrap()).unwrap();
    for round in 0..5 {
        let target = place.join(format!("target-{round}"));
        let cache = place.join("cache");
        let (mut nothing, mut neither) = (|_| {}, |_| {});
        let (first, second) = tokio::join!(
            snapshot::materialise(&store, id, &cache, &target, &mut nothing),
            snapshot::materialise(&store, id, &cache, &target, &mut neither)
        );
        assert_eq!(first.unwrap(), second.unwrap());
    }
}

#[tokio::test]
async fn several_processes_at_once_agree() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    data_set(&data, 60);
    let store = Counting::new(&place.path().join("store"));
    let id = snapshot::upload(&store, &scan(&data), &mut |_| {}).await.unwrap().id;
    fs::write(place.path().join("id"), id.to_hex()).unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| again("snapshots::child", ROLE, place.path()).spawn().unwrap())
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
async fn garbage_is_what_no_root_needs_and_what_is_old() {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    data_set(&data, 10);
    let store = Counting::new(&place.path().join("store"));
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
    // A root that is lost, one that is something else: told, with everything that the others lead to.
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
async fn a_list_that_somebody_forged_is_refused_before_a_file_is_written() {
    let place = tempfile::tempdir().unwrap();
    let store = Counting::new(&place.path().join("store"));
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
async fn what_a_killed_process_left_half_written_goes_when_the_store_is_opened_again() {
    let place = tempfile::tempdir().unwrap();
    let address = format!("file://{}", place.path().display());
    let hash = ContentHash::of(b"kept");
    let store = ObjectBlobs::open(&address).unwrap();
    store.put_bytes(hash, Bytes::from_static(b"kept")).await.unwrap();
    let folder = place.path().join("blobs").join(&hash.to_hex()[..2]);
    fs::write(folder.join(".tmp-half"), b"ha").unwrap();
    assert_eq!(store.list().await.unwrap().len(), 1, "a half-written file is no blob");
    ObjectBlobs::open(&address).unwrap();
    assert_eq!(files_below(&folder), [Path::new(&hash.to_hex())]);
}

#[cfg(unix)]
#[test]
fn pipes_sockets_and_devices_are_refused_with_what_they_are() {
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
