//! Checkpoints that attempts saved and that are not with the coordinator yet.
//!
//! Most get there a moment later. When they do not, because the coordinator refuses this worker, because it is away for longer
//! than a shutdown may take, or because this daemon was killed, the newest of each attempt is kept in the data folder and
//! offered in the next session. The coordinator says which are wanted; the others were superseded, and are removed. What an
//! attempt made before such a checkpoint, and could not announce, goes with it ([`crate::unsent`]).

use crate::spec_file::SPEC_FILE;
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
/// Beginning of the names of what is being removed.
const GONE: &str = "gone-";

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
    /// Reads what is kept in `folder`, and takes over what a daemon left in the folders of its attempts. Also returns those of these
    /// folders whose checkpoint could not be taken over, on a full disk for example: the next start tries again.
    pub(crate) fn open(folder: PathBuf, attempts: &Path) -> Result<(Self, Vec<PathBuf>), FsError> {
        fsutil::create_dir_all(&folder)?;
        let kept = Self {
            folder,
            inner: Mutex::default(),
        };
        let mut begun = Vec::new();
        for entry in fs::read_dir(&kept.folder).into_iter().flatten().flatten() {
            let place = entry.path();
            let read = fs::read(place.join(NOTE)).ok();
            match read.and_then(|text| serde_json::from_slice::<Note>(&text).ok()) {
                Some(note) if kept.place(&note.held.attempt) == place => {
                    if place.join(CHECKPOINT).exists() {
                        kept.inner().kept.insert(note.held.attempt.clone(), note);
                    } else {
                        begun.push(place);
                    }
                }
                _ => remove(&place),
            }
        }
        let mut left = Vec::new();
        for entry in fs::read_dir(attempts).into_iter().flatten().flatten() {
            if let Some((note, from)) = left_behind(&entry.path())
                && !kept.take_over(note, &from)
            {
                left.push(entry.path());
            }
        }
        // What a daemon began to take over and nobody has any more.
        let inner = kept.inner();
        for place in begun {
            let has = |attempt: &AttemptId| kept.place(attempt) == place;
            let waits = |folder: &PathBuf| folder.file_name() == place.file_name();
            if !inner.kept.keys().any(has) && !left.iter().any(waits) {
                remove(&place);
            }
        }
        drop(inner);
        Ok((kept, left))
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
            self.remove_later(&note.held.attempt);
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

    /// The attempt has ended here. Its newest checkpoint is kept if the coordinator asked for it. Whether its folder may go: not
    /// where that failed.
    pub(crate) fn attempt_ended(&self, attempt: &AttemptId) -> bool {
        let mut inner = self.inner();
        let Some((note, from)) = inner.pending.remove(attempt) else {
            return true;
        };
        let wanted = inner.wanted.contains(attempt);
        drop(inner);
        !wanted || self.take_over(note, &from)
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

    /// Moves a checkpoint here, and what was made before it. Nothing is lost wherever that ends: whoever finds the note without a
    /// checkpoint goes on with it. Whether it is kept.
    fn take_over(&self, note: Note, from: &Path) -> bool {
        let place = self.place(&note.held.attempt);
        let moved = fsutil::create_dir_all(&place).and_then(|()| {
            let text = serde_json::to_vec(&note).unwrap_or_default();
            fsutil::write_private(&place.join(NOTE), &text)?;
            unsent::move_before(from, &place.join(UNSENT))?;
            let to = place.join(CHECKPOINT);
            fs::rename(from, &to).map_err(|error| FsError::new("keep", from, error))
        });
        if let Err(error) = moved {
            tracing::error!(%error, attempt = %note.held.attempt,
                "a checkpoint could not be kept; it stays where it is, and the next start of this worker tries again");
            return false;
        }
        tracing::info!(attempt = %note.held.attempt, step = note.step, folder = %place.display(),
            "a checkpoint that could not be sent is kept");
        let mut inner = self.inner();
        inner.kept.insert(note.held.attempt.clone(), note);
        while inner.kept.len() > MOST
            && let Some((oldest, _)) = inner.kept.pop_first()
        {
            self.remove_later(&oldest);
        }
        true
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
        self.remove_later(attempt);
    }

    /// Takes it away at once, and removes it beside what is going on: a checkpoint may have many gigabytes. What an end of this
    /// daemon leaves of it is removed at the next start, since it has no note.
    fn remove_later(&self, attempt: &AttemptId) {
        let (place, gone) = (self.place(attempt), self.folder.join(format!("{GONE}{attempt}")));
        remove(&gone);
        match fs::rename(&place, &gone) {
            Ok(()) => {
                std::thread::spawn(move || remove(&gone));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, place = %place.display(), "not removed"),
        }
    }
}

/// The newest complete checkpoint that was pinned in the folder of an attempt whose daemon was killed.
fn left_behind(folder: &Path) -> Option<(Note, PathBuf)> {
    let spec = fs::read(folder.join(SPEC_FILE)).ok()?;
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
        let (kept, _) = KeptCheckpoints::open(place.clone(), &attempts).unwrap();
        for (name, step) in [("a-1", 5), ("b-1", 6), ("c-1", 7)] {
            kept.made(&held(name), step, &checkpoint(&attempts.join(name), step));
        }
        assert!(kept.pending_bytes() > 0 && kept.offers().len() == 3);
        kept.settled(&AttemptId::new("c-1"), 7);
        let (a, b) = (AttemptId::new("a-1"), AttemptId::new("b-1"));
        assert_eq!(kept.answer(std::slice::from_ref(&a), &[a.clone(), b.clone()]), []);
        assert!(kept.attempt_ended(&a) && kept.attempt_ended(&b));
        assert_eq!(kept.ended_and_wanted(&a).unwrap().step, 5);
        assert_eq!(kept.ended_and_wanted(&b), None, "nobody wants it");
        assert_eq!(kept.pending_bytes(), 0);
        drop(kept);
        let (kept, _) = KeptCheckpoints::open(place, &attempts).unwrap();
        assert_eq!(kept.offers().len(), 1);
        assert_eq!(Checkpoint::open(&kept.checkpoint(&a)).unwrap().step(), 5);
        assert_eq!(kept.answer(std::slice::from_ref(&a), &[]).len(), 1);
        assert_eq!(kept.answer(&[], &[]), []);
        assert!(kept.is_empty() && !kept.checkpoint(&a).exists());
    }

    /// The folder of an attempt whose daemon was killed, with a checkpoint and a file that was made before it.
    fn left(attempts: &Path, attempt: &str) -> PathBuf {
        let folder = attempts.join(attempt);
        let spec = serde_json::json!({
            "job_id": "a", "attempt_id": attempt, "epoch": 1, "job": {}, "config_text": "", "config_format": "yaml", "inputs": {},
            "output_root": "/out", "resume_from": null, "device": {"kind": "cpu", "index": 0}, "profile": "cpu_only", "seed": 1,
        });
        let pins = folder.join("pins");
        fs::create_dir_all(&pins).unwrap();
        fs::write(folder.join("spec.json"), spec.to_string()).unwrap();
        unsent::note(&pins.join("1"), &Unsent::Removed("old".into())).unwrap();
        fs::rename(checkpoint(&folder.join("made"), 4), pins.join("2")).unwrap();
        folder
    }

    #[test]
    fn taking_over_that_was_cut_off_anywhere_loses_nothing() {
        let a = AttemptId::new("a-1");
        for cut in 0..4 {
            let folder = tempfile::tempdir().unwrap();
            let (attempts, place) = (folder.path().join("attempts"), folder.path().join("kept"));
            let from = left(&attempts, "a-1");
            let own = place.join("a-1");
            fs::create_dir_all(own.join(UNSENT)).unwrap();
            // What a daemon had done of it when it was killed.
            if cut >= 1 {
                let note = Note {
                    held: held("a-1"),
                    step: 4,
                    bytes: 9,
                };
                fs::write(own.join(NOTE), serde_json::to_vec(&note).unwrap()).unwrap();
            }
            if cut >= 2 {
                fs::rename(from.join("pins/1.json"), own.join(UNSENT).join("1.json")).unwrap();
            }
            if cut >= 3 {
                fs::rename(from.join("pins/2"), own.join(CHECKPOINT)).unwrap();
            }
            let (kept, left) = KeptCheckpoints::open(place.clone(), &attempts).unwrap();
            assert!(left.is_empty(), "{cut}");
            assert_eq!(kept.offers().len(), 1, "{cut}");
            assert_eq!(Checkpoint::open(&kept.checkpoint(&a)).unwrap().step(), 4, "{cut}");
            let unsent: Vec<_> = kept.unsent(&a).into_iter().map(|(_, unsent)| unsent).collect();
            assert_eq!(unsent, [Unsent::Removed("old".into())], "{cut}");
        }
    }

    #[test]
    fn what_cannot_be_taken_over_stays_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let (attempts, place) = (folder.path().join("attempts"), folder.path().join("kept"));
        let from = left(&attempts, "a-1");
        // Nothing can be made where a file lies.
        fs::create_dir(&place).unwrap();
        let (kept, _) = KeptCheckpoints::open(place.clone(), Path::new("/nowhere")).unwrap();
        let pin = from.join("pins/2");
        kept.made(&held("a-1"), 4, &pin);
        let a = AttemptId::new("a-1");
        kept.answer(std::slice::from_ref(&a), std::slice::from_ref(&a));
        fs::write(place.join("a-1"), "in the way").unwrap();
        assert!(!kept.attempt_ended(&a), "its folder must stay");
        assert!(Checkpoint::open(&pin).is_ok());
        drop(kept);
        fs::remove_file(place.join("a-1")).unwrap();
        let (kept, _) = KeptCheckpoints::open(place, &attempts).unwrap();
        assert_eq!(Checkpoint::open(&kept.checkpoint(&a)).unwrap().step(), 4);
    }
}
