//! Checkpoints that attempts saved and that the coordinator has not committed yet.
//!
//! Most are committed a moment later. If not, because the coordinator refuses this worker, because it is unreachable
//! for longer than a shutdown may take, or because this daemon was killed, the newest checkpoint of each attempt is
//! stored in the data folder and offered in the next session. The coordinator answers which ones it wants; the others
//! are superseded and removed. Results that were made before such a checkpoint and are not announced yet are stored
//! with it ([`crate::announcement`]).

use crate::announcement::{self, PendingAnnouncement};
use crate::spec_file::SPEC_FILE;
use aitk_common::attempt::AttemptSpec;
use aitk_common::checkpoint::Checkpoint;
use aitk_common::control_plane::{AttemptRef, OfferedCheckpoint};
use aitk_common::fsutil::{self, FsError};
use aitk_common::id::AttemptId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The most checkpoints that are stored; beyond that the oldest is removed.
const MAX_STORED: usize = 32;
// This name, and that of the folder `kept`, are those of the first version, so that old data folders open.
const RECORD_FILE: &str = "kept.json";
const CHECKPOINT_FOLDER: &str = "checkpoint";
const ANNOUNCEMENTS_FOLDER: &str = "unsent";
/// Prefix of the names of folders that are being removed.
const TRASH_PREFIX: &str = "gone-";

/// The record that is stored beside a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct CheckpointRecord {
    held: AttemptRef,
    step: u64,
    bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    /// The newest uncommitted checkpoint of each running attempt, and where it is pinned.
    pending: BTreeMap<AttemptId, (CheckpointRecord, PathBuf)>,
    /// Checkpoints that are stored in the folder.
    stored: BTreeMap<AttemptId, CheckpointRecord>,
    /// Attempts whose checkpoints the coordinator asked for.
    requested: BTreeSet<AttemptId>,
}

/// The store of uncommitted checkpoints; see the module's documentation.
#[derive(Debug)]
pub(crate) struct UncommittedCheckpoints {
    folder: PathBuf,
    state: Mutex<State>,
}

impl UncommittedCheckpoints {
    /// Opens the store in `folder`, and moves checkpoints into it that a killed daemon left in the folders of its
    /// attempts. Also returns those attempt folders whose checkpoint could not be moved, for example on a full disk:
    /// the next start tries again.
    pub(crate) fn open(folder: PathBuf, attempts: &Path) -> Result<(Self, Vec<PathBuf>), FsError> {
        fsutil::create_private_dir(&folder)?;
        let store = Self {
            folder,
            state: Mutex::default(),
        };
        let mut unfinished = Vec::new();
        for entry in fs::read_dir(&store.folder).into_iter().flatten().flatten() {
            let attempt_folder = entry.path();
            let read = fs::read(attempt_folder.join(RECORD_FILE)).ok();
            match read.and_then(|text| serde_json::from_slice::<CheckpointRecord>(&text).ok()) {
                Some(record) if store.attempt_folder(&record.held.attempt) == attempt_folder => {
                    if attempt_folder.join(CHECKPOINT_FOLDER).exists() {
                        store.state().stored.insert(record.held.attempt.clone(), record);
                    } else {
                        unfinished.push(attempt_folder);
                    }
                }
                _ => remove(&attempt_folder),
            }
        }
        let mut unmoved = Vec::new();
        for entry in fs::read_dir(attempts).into_iter().flatten().flatten() {
            if let Some((record, from)) = find_orphaned_checkpoint(&entry.path())
                && !store.take_over(record, &from)
            {
                unmoved.push(entry.path());
            }
        }
        // Remove folders whose move an earlier daemon began and that have no checkpoint.
        let state = store.state();
        for attempt_folder in unfinished {
            let is_stored = |attempt: &AttemptId| store.attempt_folder(attempt) == attempt_folder;
            let is_unmoved = |folder: &PathBuf| folder.file_name() == attempt_folder.file_name();
            if !state.stored.keys().any(is_stored) && !unmoved.iter().any(is_unmoved) {
                remove(&attempt_folder);
            }
        }
        drop(state);
        Ok((store, unmoved))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attempt_folder(&self, attempt: &AttemptId) -> PathBuf {
        self.folder.join(attempt.as_str())
    }

    /// The folder of the stored checkpoints.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Records a new checkpoint of a running attempt, which stays pinned until it is committed.
    pub(crate) fn add_pending(&self, held: &AttemptRef, step: u64, pinned: &Path) {
        let record = CheckpointRecord {
            held: held.clone(),
            step,
            bytes: size(pinned).saturating_add(announcement::pending_bytes_before(pinned)),
        };
        let pending = (record, pinned.to_owned());
        self.state().pending.insert(held.attempt.clone(), pending);
    }

    /// Removes a checkpoint of a running attempt: the coordinator has it, or does not want it.
    pub(crate) fn remove_pending(&self, attempt: &AttemptId, step: u64) {
        let mut state = self.state();
        if state
            .pending
            .get(attempt)
            .is_some_and(|(record, _)| record.step <= step)
        {
            state.pending.remove(attempt);
        }
    }

    /// Size of the checkpoints of running attempts that are not committed yet, in bytes.
    pub(crate) fn pending_bytes(&self) -> u64 {
        let state = self.state();
        state.pending.values().map(|(record, _)| record.bytes).sum()
    }

    /// Returns whether no checkpoint would be lost with this daemon.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state();
        state.pending.is_empty() && state.stored.is_empty()
    }

    /// The checkpoints to offer when this worker registers.
    pub(crate) fn offers(&self) -> Vec<OfferedCheckpoint> {
        let state = self.state();
        let records = state
            .pending
            .values()
            .map(|(record, _)| record)
            .chain(state.stored.values());
        records
            .take(MAX_STORED)
            .map(|record| OfferedCheckpoint {
                held: record.held.clone(),
                step: record.step,
                bytes: record.bytes,
            })
            .collect()
    }

    /// Applies the coordinator's answer to the offers: returns the checkpoints to send now, and removes superseded
    /// ones. `running` are attempts that still have their own folders.
    pub(crate) fn apply_answer(&self, requested: &[AttemptId], running: &[AttemptId]) -> Vec<OfferedCheckpoint> {
        let mut state = self.state();
        state.requested = requested.iter().cloned().collect();
        let (to_send, superseded): (Vec<CheckpointRecord>, Vec<CheckpointRecord>) = state
            .stored
            .values()
            .filter(|record| !running.contains(&record.held.attempt))
            .cloned()
            .partition(|record| requested.contains(&record.held.attempt));
        for record in superseded {
            tracing::warn!(attempt = %record.held.attempt, step = record.step,
                "a checkpoint that was saved while the coordinator could not be reached was superseded; it is removed");
            state.stored.remove(&record.held.attempt);
            self.remove_in_background(&record.held.attempt);
        }
        to_send
            .into_iter()
            .map(|record| OfferedCheckpoint {
                held: record.held,
                step: record.step,
                bytes: record.bytes,
            })
            .collect()
    }

    /// Ends an attempt on this worker. Its newest checkpoint is stored if the coordinator asked for it. Returns
    /// whether the attempt's folder may be removed: `false` if storing failed.
    pub(crate) fn finish_attempt(&self, attempt: &AttemptId) -> bool {
        let mut state = self.state();
        let Some((record, from)) = state.pending.remove(attempt) else {
            return true;
        };
        let requested = state.requested.contains(attempt);
        drop(state);
        !requested || self.take_over(record, &from)
    }

    /// Takes the stored checkpoint of an ended attempt, if the coordinator asked for it.
    pub(crate) fn take_requested(&self, attempt: &AttemptId) -> Option<OfferedCheckpoint> {
        let mut state = self.state();
        let record = state.stored.get(attempt).cloned()?;
        state.requested.remove(attempt).then_some(OfferedCheckpoint {
            held: record.held,
            step: record.step,
            bytes: record.bytes,
        })
    }

    /// Moves a checkpoint into the store, after the results made before it. If the move is interrupted, the next
    /// start finds the record without a checkpoint and continues. Returns whether the checkpoint is stored.
    fn take_over(&self, record: CheckpointRecord, from: &Path) -> bool {
        let attempt_folder = self.attempt_folder(&record.held.attempt);
        let moved = fsutil::create_dir_all(&attempt_folder).and_then(|()| {
            let text = serde_json::to_vec(&record).unwrap_or_default();
            fsutil::write_private(&attempt_folder.join(RECORD_FILE), &text)?;
            announcement::move_before(from, &attempt_folder.join(ANNOUNCEMENTS_FOLDER))?;
            let to = attempt_folder.join(CHECKPOINT_FOLDER);
            fs::rename(from, &to).map_err(|error| FsError::new("keep", from, error))
        });
        if let Err(error) = moved {
            tracing::error!(%error, attempt = %record.held.attempt,
                "a checkpoint could not be stored; it stays where it is, and the next start of this worker tries again");
            return false;
        }
        tracing::info!(attempt = %record.held.attempt, step = record.step, folder = %attempt_folder.display(),
            "a checkpoint that could not be sent is kept");
        let mut state = self.state();
        state.stored.insert(record.held.attempt.clone(), record);
        while state.stored.len() > MAX_STORED {
            // Names of attempts begin with random ids of jobs.
            let by_age = state.stored.keys().min_by_key(|attempt| self.stored_at(attempt));
            let Some(oldest) = by_age.cloned() else { break };
            state.stored.remove(&oldest);
            self.remove_in_background(&oldest);
        }
        true
    }

    /// When a checkpoint was stored.
    fn stored_at(&self, attempt: &AttemptId) -> Option<SystemTime> {
        let record = fs::metadata(self.attempt_folder(attempt).join(RECORD_FILE));
        record.and_then(|data| data.modified()).ok()
    }

    /// The path of a stored checkpoint.
    pub(crate) fn checkpoint_path(&self, attempt: &AttemptId) -> PathBuf {
        self.attempt_folder(attempt).join(CHECKPOINT_FOLDER)
    }

    /// The announcements that precede a stored checkpoint, in order, each with its file.
    pub(crate) fn announcements(&self, attempt: &AttemptId) -> Vec<(PathBuf, PendingAnnouncement)> {
        let all = announcement::read_all(&self.attempt_folder(attempt).join(ANNOUNCEMENTS_FOLDER));
        all.into_iter()
            .map(|(_, pin, announcement)| (pin, announcement))
            .collect()
    }

    /// Removes a stored checkpoint: it was sent, or is no longer wanted.
    pub(crate) fn discard(&self, attempt: &AttemptId) {
        self.state().stored.remove(attempt);
        self.remove_in_background(attempt);
    }

    /// Renames the folder of a checkpoint and removes it in a thread: it may have many gigabytes. If this daemon ends
    /// first, the next start removes the rest, because it has no record.
    fn remove_in_background(&self, attempt: &AttemptId) {
        let (attempt_folder, trash) = (
            self.attempt_folder(attempt),
            self.folder.join(format!("{TRASH_PREFIX}{attempt}")),
        );
        remove(&trash);
        match fs::rename(&attempt_folder, &trash) {
            Ok(()) => {
                std::thread::spawn(move || remove(&trash));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(%error, folder = %attempt_folder.display(), "a stored checkpoint was not removed")
            }
        }
    }
}

/// Finds the newest complete checkpoint that is pinned in the folder of an attempt whose daemon was killed.
fn find_orphaned_checkpoint(folder: &Path) -> Option<(CheckpointRecord, PathBuf)> {
    let spec = fs::read(folder.join(SPEC_FILE)).ok()?;
    let spec: AttemptSpec = serde_json::from_slice(&spec).ok()?;
    // A job that ran in place has its checkpoints in the run folder.
    spec.output_root.as_ref()?;
    let pins = fs::read_dir(folder.join("pins")).ok()?.flatten();
    let found = pins.filter_map(|pin| Some((Checkpoint::open(&pin.path()).ok()?.step(), pin.path())));
    let (step, path) = found.max_by_key(|(step, _)| *step)?;
    let held = AttemptRef {
        attempt: spec.attempt_id,
        epoch: spec.epoch,
    };
    let bytes = size(&path).saturating_add(announcement::pending_bytes_before(&path));
    Some((CheckpointRecord { held, step, bytes }, path))
}

/// Size of the files in a flat folder, in bytes.
fn size(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files
        .filter_map(|file| file.metadata().ok())
        .map(|data| data.len())
        .sum()
}

fn remove(path: &Path) {
    if let Err(error) = fsutil::remove(path) {
        tracing::warn!(%error, "a stored checkpoint was not removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::checkpoint::CheckpointWriter;
    use aitk_common::id::Epoch;

    fn checkpoint(parent: &Path, step: u64) -> PathBuf {
        fs::create_dir_all(parent).unwrap();
        let mut writer = CheckpointWriter::new(parent, step).unwrap();
        writer.add_bytes("state.json", "state", b"state").unwrap();
        writer.commit(serde_json::Map::new()).unwrap()
    }

    fn held(attempt: &str) -> AttemptRef {
        AttemptRef {
            attempt: AttemptId::new(attempt),
            epoch: Epoch(1),
        }
    }

    #[test]
    fn wanted_checkpoints_survive_a_restart_and_superseded_ones_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (attempts, stored_folder) = (folder.path().join("attempts"), folder.path().join("kept"));
        let (store, _) = UncommittedCheckpoints::open(stored_folder.clone(), &attempts).unwrap();
        for (name, step) in [("a-1", 5), ("b-1", 6), ("c-1", 7)] {
            store.add_pending(&held(name), step, &checkpoint(&attempts.join(name), step));
        }
        assert!(store.pending_bytes() > 0 && store.offers().len() == 3);
        store.remove_pending(&AttemptId::new("c-1"), 7);
        let (a, b) = (AttemptId::new("a-1"), AttemptId::new("b-1"));
        assert_eq!(
            store.apply_answer(std::slice::from_ref(&a), &[a.clone(), b.clone()]),
            []
        );
        assert!(store.finish_attempt(&a) && store.finish_attempt(&b));
        assert_eq!(store.take_requested(&a).unwrap().step, 5);
        assert_eq!(store.take_requested(&b), None, "nobody wants it");
        assert_eq!(store.pending_bytes(), 0);
        drop(store);
        let (store, _) = UncommittedCheckpoints::open(stored_folder, &attempts).unwrap();
        assert_eq!(store.offers().len(), 1);
        assert_eq!(Checkpoint::open(&store.checkpoint_path(&a)).unwrap().step(), 5);
        assert_eq!(store.apply_answer(std::slice::from_ref(&a), &[]).len(), 1);
        assert_eq!(store.apply_answer(&[], &[]), []);
        assert!(store.is_empty() && !store.checkpoint_path(&a).exists());
    }

    #[test]
    fn of_too_many_checkpoints_the_oldest_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (attempts, stored_folder) = (folder.path().join("attempts"), folder.path().join("kept"));
        let (store, _) = UncommittedCheckpoints::open(stored_folder.clone(), &attempts).unwrap();
        let take_over = |name: &str| {
            let from = checkpoint(&attempts.join(name), 1);
            let record = CheckpointRecord {
                held: held(name),
                step: 1,
                bytes: 5,
            };
            assert!(store.take_over(record, &from), "{name}");
        };
        take_over("z-1");
        let record = stored_folder.join("z-1").join(RECORD_FILE);
        let record = fs::File::options().write(true).open(record).unwrap();
        record.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        for number in 0..MAX_STORED {
            take_over(&format!("a-{number:02}"));
        }
        let offers = store.offers();
        assert_eq!(offers.len(), MAX_STORED);
        assert!(offers.iter().all(|offer| offer.held.attempt.as_str() != "z-1"));
    }

    /// Makes the folder of an attempt whose daemon was killed, with a checkpoint and a removal that precedes it.
    fn orphaned_attempt(attempts: &Path, attempt: &str) -> PathBuf {
        let folder = attempts.join(attempt);
        let spec = serde_json::json!({
            "job_id": "a", "attempt_id": attempt, "epoch": 1, "job": {}, "config_text": "", "config_format": "yaml", "inputs": {},
            "output_root": "/out", "resume_from": null, "device": {"kind": "cpu", "index": 0}, "profile": "cpu_only", "seed": 1,
        });
        let pins = folder.join("pins");
        fs::create_dir_all(&pins).unwrap();
        fs::write(folder.join("spec.json"), spec.to_string()).unwrap();
        announcement::write(&pins.join("1"), &PendingAnnouncement::Removed("old".into())).unwrap();
        fs::rename(checkpoint(&folder.join("made"), 4), pins.join("2")).unwrap();
        folder
    }

    #[test]
    fn an_interrupted_move_loses_nothing() {
        let a = AttemptId::new("a-1");
        for cut in 0..4 {
            let folder = tempfile::tempdir().unwrap();
            let (attempts, stored_folder) = (folder.path().join("attempts"), folder.path().join("kept"));
            let from = orphaned_attempt(&attempts, "a-1");
            let attempt_folder = stored_folder.join("a-1");
            fs::create_dir_all(attempt_folder.join(ANNOUNCEMENTS_FOLDER)).unwrap();
            // The steps that a daemon had completed when it was killed.
            if cut >= 1 {
                let record = CheckpointRecord {
                    held: held("a-1"),
                    step: 4,
                    bytes: 9,
                };
                fs::write(attempt_folder.join(RECORD_FILE), serde_json::to_vec(&record).unwrap()).unwrap();
            }
            if cut >= 2 {
                fs::rename(
                    from.join("pins/1.json"),
                    attempt_folder.join(ANNOUNCEMENTS_FOLDER).join("1.json"),
                )
                .unwrap();
            }
            if cut >= 3 {
                fs::rename(from.join("pins/2"), attempt_folder.join(CHECKPOINT_FOLDER)).unwrap();
            }
            let (store, unmoved) = UncommittedCheckpoints::open(stored_folder.clone(), &attempts).unwrap();
            assert!(unmoved.is_empty(), "{cut}");
            assert_eq!(store.offers().len(), 1, "{cut}");
            assert_eq!(Checkpoint::open(&store.checkpoint_path(&a)).unwrap().step(), 4, "{cut}");
            let announcement: Vec<_> = store
                .announcements(&a)
                .into_iter()
                .map(|(_, announcement)| announcement)
                .collect();
            assert_eq!(announcement, [PendingAnnouncement::Removed("old".into())], "{cut}");
        }
    }

    #[test]
    fn a_checkpoint_that_cannot_be_stored_stays_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let (attempts, stored_folder) = (folder.path().join("attempts"), folder.path().join("kept"));
        let from = orphaned_attempt(&attempts, "a-1");
        // A folder cannot be made where a file is.
        fs::create_dir(&stored_folder).unwrap();
        let (store, _) = UncommittedCheckpoints::open(stored_folder.clone(), Path::new("/nowhere")).unwrap();
        let pin = from.join("pins/2");
        store.add_pending(&held("a-1"), 4, &pin);
        let a = AttemptId::new("a-1");
        store.apply_answer(std::slice::from_ref(&a), std::slice::from_ref(&a));
        fs::write(stored_folder.join("a-1"), "in the way").unwrap();
        assert!(!store.finish_attempt(&a), "its folder must stay");
        assert!(Checkpoint::open(&pin).is_ok());
        drop(store);
        fs::remove_file(stored_folder.join("a-1")).unwrap();
        let (store, _) = UncommittedCheckpoints::open(stored_folder, &attempts).unwrap();
        assert_eq!(Checkpoint::open(&store.checkpoint_path(&a)).unwrap().step(), 4);
    }
}
