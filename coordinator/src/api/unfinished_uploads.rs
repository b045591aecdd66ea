//! Uploads whose call broke: their bytes are kept for a while, so that the sender can continue where it stopped.
//!
//! A sender names its uploads (`BlobHeader.upload`), asks how many bytes of one have arrived (`HasRequest.upload`), and sends the rest. A
//! connection that broke may look open on this side for a minute. So an upload that a call still receives can be taken over from it.

use crate::access::Identity;
use crate::blob_access::{UploadReservation, owner_key};
use aitk_common::hash::ContentHash;
use std::collections::HashMap;
use std::collections::hash_map;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tonic::Status;

/// How long the bytes of a broken upload are kept. A worker tries to connect again at least each minute.
const KEPT_FOR: Duration = Duration::from_secs(600);
/// How often expired uploads are removed while there are any.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum uploads kept for one sender and in total: they take disk space. The oldest are removed first.
const MAX_KEPT_PER_SENDER: usize = 8;
const MAX_KEPT: usize = 32;
/// How long a call that continues an upload waits until the broken call has given it up.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest id of an upload, in bytes.
const MAX_ID_BYTES: usize = 64;

/// Names an upload of one sender.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct UploadKey {
    sender: String,
    id: String,
    hash: ContentHash,
}

impl UploadKey {
    /// The key of an upload that its sender can continue; `None` without an id.
    ///
    /// # Errors
    /// `invalid_argument` for an id that is too long.
    pub(super) fn new(who: &Identity, id: &str, hash: ContentHash) -> Result<Option<Self>, Status> {
        if id.len() > MAX_ID_BYTES {
            let message = format!("upload: {} bytes; at most {MAX_ID_BYTES}", id.len());
            return Err(Status::invalid_argument(message));
        }
        Ok((!id.is_empty()).then(|| Self {
            sender: owner_key(who),
            id: id.to_owned(),
            hash,
        }))
    }
}

/// A temporary file; removed when dropped.
#[derive(Debug)]
struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // The file may not exist. Files left by a crash are removed at the next start.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An upload of which a part has arrived.
#[derive(Debug)]
pub(super) struct PartialUpload {
    /// Shared with a thread that opens it: a file that it creates after the upload was given up is removed, too.
    file: Arc<TemporaryFile>,
    /// The size of the blob.
    bytes: u64,
    /// How many bytes from the beginning are in the file.
    received: u64,
    reservation: UploadReservation,
}

impl PartialUpload {
    /// An upload of which nothing has arrived. The file need not exist yet.
    pub(super) fn new(path: PathBuf, bytes: u64, reservation: UploadReservation) -> Self {
        Self {
            file: Arc::new(TemporaryFile(path)),
            bytes,
            received: 0,
            reservation,
        }
    }
}

/// Opens a file to write from `position` on; one from the beginning is created.
fn open_at(path: &Path, position: u64) -> std::io::Result<File> {
    if position == 0 {
        return File::create(path);
    }
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.seek(SeekFrom::Start(position))?;
    Ok(file)
}

/// The state of an upload that a call receives, for other calls.
#[derive(Debug)]
struct ActiveUpload {
    received: AtomicU64,
    /// Another call wants to continue it.
    taken_over: Notify,
}

#[derive(Debug)]
enum Entry {
    Active(Arc<ActiveUpload>),
    Kept { upload: PartialUpload, since: Instant },
}

#[derive(Debug, Default)]
struct Entries {
    by_key: HashMap<UploadKey, Entry>,
    /// Whether the task that removes expired uploads runs.
    is_swept: bool,
}

impl Entries {
    /// Removes the kept uploads that match. Returns how many there were.
    fn remove(&mut self, matches: impl Fn(&UploadKey, Instant) -> bool) -> usize {
        let before = self.by_key.len();
        self.by_key.retain(|key, entry| match entry {
            Entry::Kept { since, .. } => !matches(key, *since),
            Entry::Active(_) => true,
        });
        before - self.by_key.len()
    }

    /// Removes the oldest kept upload that matches while there are `max` or more.
    fn make_room(&mut self, max: usize, matches: impl Fn(&UploadKey) -> bool) {
        loop {
            let kept = self.by_key.iter().filter_map(|(key, entry)| match entry {
                Entry::Kept { since, .. } if matches(key) => Some((*since, key)),
                _ => None,
            });
            if kept.clone().count() < max {
                return;
            }
            let Some(oldest) = kept.min_by_key(|(since, _)| *since).map(|(_, key)| key.clone()) else {
                return;
            };
            self.by_key.remove(&oldest);
        }
    }

    /// How much of the disk the kept uploads take.
    fn kept_bytes(&self) -> u64 {
        let kept = self.by_key.values().map(|entry| match entry {
            Entry::Kept { upload, .. } => upload.received,
            Entry::Active(_) => 0,
        });
        kept.sum()
    }

    fn has_kept(&self) -> bool {
        let mut entries = self.by_key.values();
        entries.any(|entry| matches!(entry, Entry::Kept { .. }))
    }
}

#[derive(Debug, Default)]
struct Inner {
    entries: Mutex<Entries>,
    /// Notified whenever a call ends that received an upload.
    released: Notify,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes uploads that have been kept for as long as this. Returns whether others are left.
    fn sweep(&self, kept_for: Duration) -> bool {
        let mut entries = self.lock();
        entries.remove(|_, since| since.elapsed() >= kept_for);
        entries.is_swept = entries.has_kept();
        entries.is_swept
    }
}

/// All uploads that can be continued. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnfinishedUploads(Arc<Inner>);

impl UnfinishedUploads {
    /// How many bytes of an upload have arrived.
    pub(super) fn received(&self, key: &UploadKey) -> u64 {
        match self.0.lock().by_key.get(key) {
            None => 0,
            Some(Entry::Active(active)) => active.received.load(Ordering::Relaxed),
            Some(Entry::Kept { upload, .. }) => upload.received,
        }
    }

    /// Takes an upload of `bytes` bytes, to continue it at `offset`; from the call that still receives it, if there is one. `None`: there is
    /// no such upload with so many bytes.
    ///
    /// # Errors
    /// `unavailable` if that call does not give it up within [`TAKEOVER_TIMEOUT`], because the storage is storing it. Nothing is lost.
    pub(super) async fn take(&self, key: &UploadKey, bytes: u64, offset: u64) -> Result<Option<PartialUpload>, Status> {
        self.take_within(TAKEOVER_TIMEOUT, key, bytes, offset).await
    }

    async fn take_within(
        &self,
        timeout: Duration,
        key: &UploadKey,
        bytes: u64,
        offset: u64,
    ) -> Result<Option<PartialUpload>, Status> {
        let taken = async {
            loop {
                let released = self.0.released.notified();
                tokio::pin!(released);
                released.as_mut().enable();
                if let Ok(taken) = self.try_take(key) {
                    return taken;
                }
                released.await;
            }
        };
        let taken = tokio::time::timeout(timeout, taken).await;
        let taken =
            taken.map_err(|_| Status::unavailable("another call is storing this upload; send it again in a moment"))?;
        let usable = taken.filter(|upload| upload.bytes == bytes && upload.received >= offset);
        Ok(usable.map(|upload| PartialUpload {
            received: offset,
            ..upload
        }))
    }

    /// Takes an upload, if there is one.
    ///
    /// # Errors
    /// A call still receives it. That call is told.
    fn try_take(&self, key: &UploadKey) -> Result<Option<PartialUpload>, ()> {
        let mut entries = self.0.lock();
        if let Some(Entry::Active(active)) = entries.by_key.get(key) {
            active.taken_over.notify_one();
            return Err(());
        }
        match entries.by_key.remove(key) {
            Some(Entry::Kept { upload, .. }) => Ok(Some(upload)),
            _ => Ok(None),
        }
    }

    /// Removes a kept upload.
    pub(super) fn discard(&self, key: &UploadKey) {
        self.0.lock().remove(|other, _| other == key);
    }

    /// Removes the kept uploads of the sender of this one, to release what they reserve. Returns whether there were any.
    pub(super) fn discard_of_sender(&self, who: &Identity) -> bool {
        let sender = owner_key(who);
        self.0.lock().remove(|other, _| other.sender == sender) > 0
    }

    /// Removes all kept uploads, if that frees so many bytes of the disk. Returns whether there were any.
    pub(super) fn discard_to_free(&self, bytes: u64) -> bool {
        let mut entries = self.0.lock();
        entries.kept_bytes() >= bytes && entries.remove(|_, _| true) > 0
    }

    /// Begins to receive an upload, which is kept if the call breaks and `key` is set.
    pub(super) fn begin(&self, key: Option<UploadKey>, upload: PartialUpload) -> ReceivingUpload {
        let active = Arc::new(ActiveUpload {
            received: AtomicU64::new(upload.received),
            taken_over: Notify::new(),
        });
        // Of two calls that send the same blob at the same time, the first can be continued.
        let key = key.filter(|key| match self.0.lock().by_key.entry(key.clone()) {
            hash_map::Entry::Vacant(entry) => {
                entry.insert(Entry::Active(active.clone()));
                true
            }
            hash_map::Entry::Occupied(_) => false,
        });
        ReceivingUpload {
            uploads: self.clone(),
            key,
            active,
            upload: Some(upload),
        }
    }

    /// Keeps the upload of a call that ended, in the place of its [`Entry::Active`]: at no moment it looks as if nothing had arrived.
    fn keep(&self, key: UploadKey, upload: PartialUpload) {
        let mut entries = self.0.lock();
        entries.make_room(MAX_KEPT_PER_SENDER, |other| other.sender == key.sender);
        entries.make_room(MAX_KEPT, |_| true);
        let since = Instant::now();
        entries.by_key.insert(key, Entry::Kept { upload, since });
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        if !std::mem::replace(&mut entries.is_swept, true) {
            let uploads = Arc::downgrade(&self.0);
            runtime.spawn(async move {
                loop {
                    tokio::time::sleep(SWEEP_INTERVAL).await;
                    if !uploads.upgrade().is_some_and(|uploads| uploads.sweep(KEPT_FOR)) {
                        return;
                    }
                }
            });
        }
    }
}

/// An upload that a call receives. When it is dropped before it is complete, because the call ended, it is kept.
#[derive(Debug)]
pub(super) struct ReceivingUpload {
    uploads: UnfinishedUploads,
    /// `None`: it cannot be continued.
    key: Option<UploadKey>,
    active: Arc<ActiveUpload>,
    /// `None` once it is complete or discarded.
    upload: Option<PartialUpload>,
}

impl ReceivingUpload {
    /// Its temporary file.
    pub(super) fn path(&self) -> &Path {
        self.upload.as_ref().map_or(Path::new(""), |upload| &upload.file.0)
    }

    /// Opens the file behind the bytes that have arrived.
    pub(super) async fn open(&self) -> std::io::Result<tokio::fs::File> {
        let Some(upload) = &self.upload else {
            return Err(std::io::ErrorKind::NotFound.into());
        };
        let (file, position) = (upload.file.clone(), upload.received);
        let opened = tokio::task::spawn_blocking(move || open_at(&file.0, position)).await;
        Ok(tokio::fs::File::from_std(opened.map_err(std::io::Error::other)??))
    }

    /// How many bytes have arrived, with those of earlier calls.
    pub(super) fn received(&self) -> u64 {
        self.active.received.load(Ordering::Relaxed)
    }

    /// Counts bytes that are written to the file.
    pub(super) fn add(&mut self, bytes: u64) {
        if let Some(upload) = &mut self.upload {
            upload.received += bytes;
            self.active.received.store(upload.received, Ordering::Relaxed);
        }
    }

    /// Completes when another call continues this upload.
    pub(super) async fn taken_over(&self) {
        self.active.taken_over.notified().await;
    }

    /// Removes the file: the upload cannot be continued.
    pub(super) fn discard(&mut self) {
        self.upload = None;
    }

    /// The blob is stored: removes the file, and keeps the blob counted.
    pub(super) fn commit(mut self) {
        if let Some(upload) = self.upload.take() {
            upload.reservation.commit();
        }
    }
}

impl Drop for ReceivingUpload {
    fn drop(&mut self) {
        let Some(key) = self.key.take() else { return };
        match self.upload.take().filter(|upload| upload.received > 0) {
            Some(upload) => self.uploads.keep(key, upload),
            None => {
                self.uploads.0.lock().by_key.remove(&key);
            }
        }
        self.uploads.0.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::super::concurrent_call_limit::tests::who;
    use super::*;

    fn key(sender: &str, blob: &str) -> UploadKey {
        let key = UploadKey::new(&who(sender), "u1", ContentHash::of(blob.as_bytes()));
        key.unwrap().unwrap()
    }

    fn partial(folder: &Path, name: &str) -> PartialUpload {
        let path = folder.join(name);
        std::fs::write(&path, "abc").unwrap();
        PartialUpload::new(path, 10, UploadReservation::Unlimited)
    }

    /// An upload of ten bytes whose call breaks after three.
    fn break_off(uploads: &UnfinishedUploads, folder: &Path, key: &UploadKey, name: &str) {
        let mut receiving = uploads.begin(Some(key.clone()), partial(folder, name));
        receiving.add(3);
        assert_eq!(uploads.received(key), 3);
    }

    #[tokio::test]
    async fn a_broken_upload_is_continued_by_its_sender_alone() {
        let folder = tempfile::tempdir().unwrap();
        let uploads = UnfinishedUploads::default();
        let (of_ada, of_eve) = (key("ada", "a"), key("eve", "a"));
        break_off(&uploads, folder.path(), &of_ada, "1.part");
        assert_eq!((uploads.received(&of_ada), uploads.received(&of_eve)), (3, 0));
        assert!(uploads.take(&of_eve, 10, 3).await.unwrap().is_none());
        let upload = uploads.take(&of_ada, 10, 2).await.unwrap().unwrap();
        assert_eq!(upload.received, 2);
        // Nothing is left for another call, and a complete upload leaves no file.
        assert!(uploads.take(&of_ada, 10, 2).await.unwrap().is_none());
        let mut receiving = uploads.begin(Some(of_ada.clone()), upload);
        receiving.add(8);
        assert_eq!(receiving.received(), 10);
        receiving.commit();
        assert_eq!(uploads.received(&of_ada), 0);
        assert!(!folder.path().join("1.part").exists());
    }

    #[tokio::test]
    async fn more_bytes_than_arrived_or_another_size_are_not_continued() {
        let folder = tempfile::tempdir().unwrap();
        let uploads = UnfinishedUploads::default();
        for (bytes, offset) in [(10, 4), (11, 3)] {
            break_off(&uploads, folder.path(), &key("ada", "a"), "1.part");
            assert!(uploads.take(&key("ada", "a"), bytes, offset).await.unwrap().is_none());
            assert!(!folder.path().join("1.part").exists());
        }
        let id = "x".repeat(MAX_ID_BYTES + 1);
        assert!(UploadKey::new(&who("ada"), &id, ContentHash::of(b"")).is_err());
        assert!(UploadKey::new(&who("ada"), "", ContentHash::of(b"")).unwrap().is_none());
    }

    /// The connection of the first call is broken, but this side does not know it yet.
    #[tokio::test]
    async fn an_upload_is_taken_over_from_a_call_that_still_waits() {
        let folder = tempfile::tempdir().unwrap();
        let uploads = UnfinishedUploads::default();
        let of_ada = key("ada", "a");
        let mut stuck = uploads.begin(Some(of_ada.clone()), partial(folder.path(), "1.part"));
        stuck.add(3);
        let stuck = tokio::spawn(async move { stuck.taken_over().await });
        let upload = uploads.take(&of_ada, 10, 3).await.unwrap().unwrap();
        stuck.await.unwrap();
        // A second call with the same key cannot be continued, and does not disturb the first.
        let first = uploads.begin(Some(of_ada.clone()), upload);
        let mut second = uploads.begin(Some(of_ada.clone()), partial(folder.path(), "2.part"));
        second.add(1);
        drop(second);
        assert!(!folder.path().join("2.part").exists());
        assert_eq!(uploads.received(&of_ada), 3);
        drop(first);
        assert_eq!(uploads.received(&of_ada), 3);
    }

    /// Before, the sender was told that nothing had arrived, and sent the whole blob again.
    #[tokio::test]
    async fn an_upload_that_the_storage_is_storing_is_not_taken_and_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let uploads = UnfinishedUploads::default();
        let of_ada = key("ada", "a");
        let mut storing = uploads.begin(Some(of_ada.clone()), partial(folder.path(), "1.part"));
        storing.add(10);
        let refused = uploads.take_within(Duration::from_millis(10), &of_ada, 10, 10).await;
        assert_eq!(refused.unwrap_err().code(), tonic::Code::Unavailable);
        drop(storing);
        assert!(uploads.take(&of_ada, 10, 10).await.unwrap().is_some());
    }

    #[test]
    fn an_upload_whose_call_ends_has_arrived_at_every_moment() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..300 {
            let uploads = UnfinishedUploads::default();
            let of_ada = key("ada", "a");
            let mut receiving = uploads.begin(Some(of_ada.clone()), partial(folder.path(), &number.to_string()));
            receiving.add(3);
            let (begun, begin) = std::sync::mpsc::channel();
            let asking = std::thread::spawn({
                let (uploads, of_ada) = (uploads.clone(), of_ada.clone());
                move || {
                    begun.send(()).unwrap();
                    (0..2000).all(|_| uploads.received(&of_ada) == 3)
                }
            });
            begin.recv().unwrap();
            drop(receiving);
            assert!(asking.join().unwrap(), "round {number}");
        }
    }

    /// Before, the header of an upload larger than the disk removed what others had sent.
    #[tokio::test]
    async fn kept_uploads_make_place_only_for_an_upload_that_fits_then() {
        let folder = tempfile::tempdir().unwrap();
        let uploads = UnfinishedUploads::default();
        let senders = ["ada", "bob"].map(|sender| key(sender, "a"));
        for (number, key) in senders.iter().enumerate() {
            break_off(&uploads, folder.path(), key, &number.to_string());
        }
        assert!(!uploads.discard_to_free(7));
        assert!(senders.iter().all(|key| uploads.received(key) == 3));
        assert!(uploads.discard_to_free(6));
        assert!(senders.iter().all(|key| uploads.received(key) == 0));
    }

    #[tokio::test]
    async fn kept_uploads_are_few_and_expire() {
        let folder = tempfile::tempdir().unwrap();
        let uploads = UnfinishedUploads::default();
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        for number in 0..=MAX_KEPT_PER_SENDER {
            let name = number.to_string();
            break_off(&uploads, folder.path(), &key("ada", &name), &name);
        }
        assert_eq!(files(), MAX_KEPT_PER_SENDER);
        assert_eq!(uploads.received(&key("ada", "0")), 0, "the oldest is removed");
        break_off(&uploads, folder.path(), &key("eve", "0"), "eve");
        assert!(uploads.discard_of_sender(&who("ada")) && !uploads.discard_of_sender(&who("ada")));
        assert_eq!(files(), 1);
        // What was refused for its content is not kept.
        let mut refused = uploads.begin(Some(key("ada", "0")), partial(folder.path(), "refused"));
        refused.add(3);
        refused.discard();
        drop(refused);
        assert_eq!(files(), 1);
        assert!(uploads.0.sweep(KEPT_FOR), "one is left, which has not expired");
        assert!(!uploads.0.sweep(Duration::ZERO));
        assert_eq!(files(), 0);
        assert!(!uploads.discard_to_free(0));
    }
}
