//! Checkpoints that attempts saved and that are not with the coordinator yet.
//!
//! Most get there a moment later. When they do not, because the coordinator refuses this worker, because it is away for longer
//! than a shutdown may take, or because this daemon was killed, the newest of each attempt is kept in the data folder and
//! offered in the next session. The coordinator says which are wanted; the others were superseded, and are removed. What an
//! attempt made before such a checkpoint, and could not announce, goes with it ([`crate::unsent`]).

use crate::unsent::{self, Unsent};
use aitk_common::attempt::AttemptSpec;
use aitk_common::checkpoint::Checkpoint;
use aitk_common::control::{HeldAttempt, OfferedCheckpoint};
use aitk_common::fsutil::{self, FsError};
use aitk_common::id::AttemptId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// More are not kept: the oldest goes.
const MOST: usize = 32;
const NOTE: &str = "kept.json";
const CHECKPOINT: &str = "checkpoint";
const UNSENT: &str = "unsent";

/// What is written beside a kept checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Note {
    held: HeldAttempt,
    step: u64,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Inner {
    /// Of running attempts: the newest that is not committed, and where it is pinned.
    pending: BTreeMap<AttemptId, (Note, PathBuf)>,
    /// In the folder.
    kept: BTreeMap<AttemptId, Note>,
    /// Those that the coordinator asked for.
    wanted: BTreeSet<AttemptId>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct KeptCheckpoints {
    folder: PathBuf,
    inner: Mutex<Inner>,
}

impl KeptCheckpoints {
    /// Reads what is kept in `folder`, and takes over what a daemon left in the folders of its attempts.
    pub(crate) fn open(folder: PathBuf, attempts: &Path) -> Result<Self, FsError> {
        fsutil::create_dir_all(&folder)?;
        let kept = Self {
            folder,
            inner: Mutex::default(),
        };
        for entry in fs::read_dir(&kept.folder).into_iter().flatten().flatten() {
            let read = fs::read(entry.path().join(NOTE)).ok();
            match read.and_then(|text| serde_json::from_slice::<Note>(&text).ok()) {
                Some(note) if kept.place(&note.held.attempt) == entry.path() => {
                    kept.inner().kept.insert(note.held.attempt.clone(), note);
                }
                _ => remove(&entry.path()),
            }
        }
        for entry in fs::read_dir(attempts).into_iter().flatten().flatten() {
            if let Some((note, from)) = left_behind(&entry.path()) {
                kept.take_over(note, &from);
            }
        }
        Ok(kept)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, attempt: &AttemptId) -> PathBuf {
        self.folder.join(attempt.as_str())
    }

    /// Where checkpoints are kept.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// An attempt made a checkpoint, which is pinned here until it is committed.
    pub(crate) fn made(&self, held: &HeldAttempt, step: u64, pinned: &Path) {
        let note = Note {
            held: held.clone(),
            step,
            bytes: size(pinned).saturating_add(unsent::bytes_before(pinned)),
        };
        let pending = (note, pinned.to_owned());
        self.inner().pending.insert(held.attempt.clone(), pending);
    }

    /// The coordinator has this checkpoint, or does not want it.
    pub(crate) fn settled(&self, attempt: &AttemptId, step: u64) {
        let mut inner = self.inner();
        if inner.pending.get(attempt).is_some_and(|(note, _)| note.step <= step) {
            inner.pending.remove(attempt);
        }
    }

    /// Bytes that wait to be sent.
    pub(crate) fn pending_bytes(&self) -> u64 {
        let inner = self.inner();
        inner.pending.values().map(|(note, _)| note.bytes).sum()
    }

    /// Whether something would be lost with this daemon.
    pub(crate) fn is_empty(&self) -> bool {
        let inner = self.inner();
        inner.pending.is_empty() && inner.kept.is_empty()
    }

    /// What the coordinator is told of when this worker registers.
    pub(crate) fn offers(&self) -> Vec<OfferedCheckpoint> {
        let inner = self.inner();
        let notes = inner.pending.values().map(|(note, _)| note).chain(inner.kept.values());
        notes
            .take(MOST)
            .map(|note| OfferedCheckpoint {
                held: note.held.clone(),
                step: note.step,
                bytes: note.bytes,
            })
            .collect()
    }

    /// What the coordinator asked for. Returns what is to be sent now; what was superseded is removed. `running`: attempts
    /// that still have their own folders.
    pub(crate) fn answer(&self, wanted: &[AttemptId], running: &[AttemptId]) -> Vec<OfferedCheckpoint> {
        let mut inner = self.inner();
        inner.wanted = wanted.iter().cloned().collect();
        let (to_send, superseded): (Vec<Note>, Vec<Note>) = inner
            .kept
            .values()
            .filter(|note| !running.contains(&note.held.attempt))
            .cloned()
            .partition(|note| wanted.contains(&note.held.attempt));
        for note in superseded {
            tracing::warn!(attempt = %note.held.attempt, step = note.step,
                "a checkpoint that was saved while the coordinator could not be reached was superseded; it is removed");
            inner.kept.remove(&note.held.attempt);
            remove(&self.place(&note.held.attempt));
        }
        to_send
            .into_iter()
            .map(|note| OfferedCheckpoint {
                held: note.held,
                step: note.step,
                bytes: note.bytes,
            })
            .collect()
    }

    /// The attempt has ended here, and its folder goes. Its newest checkpoint is kept if the coordinator asked for it.
    pub(crate) fn attempt_ended(&self, attempt: &AttemptId) {
        let mut inner = self.inner();
        let Some((note, from)) = inner.pending.remove(attempt) else {
            return;
        };
        if inner.wanted.contains(attempt) {
            drop(inner);
            self.take_over(note, &from);
        }
    }

    /// What is kept of an attempt that has ended, if the coordinator asked for it.
    pub(crate) fn ended_and_wanted(&self, attempt: &AttemptId) -> Option<OfferedCheckpoint> {
        let mut inner = self.inner();
        let note = inner.kept.get(attempt).cloned()?;
        inner.wanted.remove(attempt).then_some(OfferedCheckpoint {
            held: note.held,
            step: note.step,
            bytes: note.bytes,
        })
    }

    fn take_over(&self, note: Note, from: &Path) {
        let place = self.place(&note.held.attempt);
        let moved = fsutil::create_dir_all(&place).and_then(|()| {
            unsent::move_before(from, &place.join(UNSENT))?;
            let text = serde_json::to_vec(&note).unwrap_or_default();
            let to = place.join(CHECKPOINT);
            fs::rename(from, &to).map_err(|error| FsError::new("keep", from, error))?;
            fsutil::write_private(&place.join(NOTE), &text)
        });
        if let Err(error) = moved {
            tracing::error!(%error, attempt = %note.held.attempt, "a checkpoint could not be kept");
            remove(&place);
            return;
        }
        tracing::info!(attempt = %note.held.attempt, step = note.step, folder = %place.display(),
            "a checkpoint that could not be sent is kept");
        let mut inner = self.inner();
        inner.kept.insert(note.held.attempt.clone(), note);
        while inner.kept.len() > MOST
            && let Some((oldest, _)) = inner.kept.pop_first()
        {
            remove(&self.place(&oldest));
        }
    }

    /// Where a kept checkpoint lies.
    pub(crate) fn checkpoint(&self, attempt: &AttemptId) -> PathBuf {
        self.place(attempt).join(CHECKPOINT)
    }

    /// What was made before it and is still to be announced, in order, each with its file.
    pub(crate) fn unsent(&self, attempt: &AttemptId) -> Vec<(PathBuf, Unsent)> {
        let all = unsent::all(&self.place(attempt).join(UNSENT));
        all.into_iter().map(|(_, pin, unsent)| (pin, unsent)).collect()
    }

    /// It was sent, or is wanted no more.
    pub(crate) fn forget(&self, attempt: &AttemptId) {
        self.inner().kept.remove(attempt);
        remove(&self.place(attempt));
    }
}

/// The newest complete checkpoint that was pinned in the folder of an attempt whose daemon was killed.
fn left_behind(folder: &Path) -> Option<(Note, PathBuf)> {
    let spec = fs::read(folder.join("spec.json")).ok()?;
    let spec: AttemptSpec = serde_json::from_slice(&spec).ok()?;
    // In place: the run folder has it.
    spec.output_root.as_ref()?;
    let pins = fs::read_dir(folder.join("pins")).ok()?.flatten();
    let found = pins.filter_map(|pin| Some((Checkpoint::open(&pin.path()).ok()?.step(), pin.path())));
    let (step, path) = found.max_by_key(|(step, _)| *step)?;
    let held = HeldAttempt {
        attempt: spec.attempt_id,
        epoch: spec.epoch,
    };
    let bytes = size(&path).saturating_add(unsent::bytes_before(&path));
    Some((Note { held, step, bytes }, path))
}

/// Bytes of the files of a flat folder.
fn size(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files
        .filter_map(|file| file.metadata().ok())
        .map(|data| data.len())
        .sum()
}

fn remove(path: &Path) {
    if let Err(error) = fsutil::remove(path) {
        tracing::warn!(%error, "not removed");
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

    fn held(attempt: &str) -> HeldAttempt {
        HeldAttempt {
            attempt: AttemptId::new(attempt),
            epoch: Epoch(1),
        }
    }

    #[test]
    fn what_is_wanted_is_kept_over_a_restart_and_what_was_superseded_goes() {
        let folder = tempfile::tempdir().unwrap();
        let (attempts, place) = (folder.path().join("attempts"), folder.path().join("kept"));
        let kept = KeptCheckpoints::open(place.clone(), &attempts).unwrap();
        for (name, step) in [("a-1", 5), ("b-1", 6), ("c-1", 7)] {
            kept.made(&held(name), step, &checkpoint(&attempts.join(name), step));
        }
        assert!(kept.pending_bytes() > 0 && kept.offers().len() == 3);
        kept.settled(&AttemptId::new("c-1"), 7);
        let (a, b) = (AttemptId::new("a-1"), AttemptId::new("b-1"));
        assert_eq!(kept.answer(std::slice::from_ref(&a), &[a.clone(), b.clone()]), []);
        kept.attempt_ended(&a);
        kept.attempt_ended(&b);
        assert_eq!(kept.ended_and_wanted(&a).unwrap().step, 5);
        assert_eq!(kept.ended_and_wanted(&b), None, "nobody wants it");
        assert_eq!(kept.pending_bytes(), 0);
        drop(kept);
        let kept = KeptCheckpoints::open(place, &attempts).unwrap();
        assert_eq!(kept.offers().len(), 1);
        assert_eq!(Checkpoint::open(&kept.checkpoint(&a)).unwrap().step(), 5);
        assert_eq!(kept.answer(std::slice::from_ref(&a), &[]).len(), 1);
        assert_eq!(kept.answer(&[], &[]), []);
        assert!(kept.is_empty() && !kept.checkpoint(&a).exists());
    }
}
