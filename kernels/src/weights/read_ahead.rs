//! Asks the operating system to read the next streamed weights from disk while this one is used.
//!
//! The bytes go into the page cache, so they take no memory of this process, and the system drops them where memory is
//! short. On a disk, reading overlaps with computing; bytes that are in the cache already cost one system call.

use super::file::TensorFile;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// How many bytes are read ahead.
const BYTES_AHEAD: usize = 128 << 20;

/// A weight's bytes in a file.
#[derive(Clone)]
pub(super) struct FileRange {
    pub(super) file: Arc<TensorFile>,
    pub(super) start: usize,
    pub(super) length: usize,
}

/// The streamed weights of a model, in the order in which its layers were made, which is nearly that of their use.
#[derive(Default)]
pub(super) struct ReadAhead {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ranges: Vec<FileRange>,
    /// The weight that was read last.
    last: Option<usize>,
}

impl std::fmt::Debug for ReadAhead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadAhead").finish_non_exhaustive()
    }
}

impl ReadAhead {
    /// Adds the next weight, and returns its index.
    pub(super) fn add(&self, range: FileRange) -> usize {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ranges.push(range);
        state.ranges.len() - 1
    }

    /// Tells that the weight `index` is read now: those that follow it in the direction of the pass, forwards or
    /// backwards, are read ahead.
    pub(super) fn reading(&self, index: usize) {
        let next: Vec<FileRange> = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let lengths: Vec<usize> = state.ranges.iter().map(|range| range.length).collect();
            let next = following(&lengths, state.last, index);
            state.last = Some(index);
            next.into_iter().map(|next| state.ranges[next].clone()).collect()
        };
        // A thread that is still busy with the weights before has enough to do.
        if let Some(sender) = reader_thread() {
            let _ = sender.try_send(next);
        }
    }
}

/// The weights to read ahead while `index` is used after `last`: up to [`BYTES_AHEAD`], at least one. The pass after a
/// forward pass begins at the first weight again.
fn following(lengths: &[usize], last: Option<usize>, index: usize) -> Vec<usize> {
    let count = lengths.len();
    let is_backward = last.is_some_and(|last| index < last && last - index < count / 2);
    let (mut next, mut bytes, mut at) = (Vec::new(), 0, index);
    while next.len() + 1 < count {
        at = if is_backward {
            match at.checked_sub(1) {
                Some(before) => before,
                None => break,
            }
        } else {
            (at + 1) % count
        };
        bytes += lengths[at];
        if !next.is_empty() && bytes > BYTES_AHEAD {
            break;
        }
        next.push(at);
    }
    next
}

/// The thread that asks the system: where its queue of reads is full, the call waits. `None` if it cannot be started.
fn reader_thread() -> Option<&'static SyncSender<Vec<FileRange>>> {
    static THREAD: OnceLock<Option<SyncSender<Vec<FileRange>>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (sender, receiver) = sync_channel::<Vec<FileRange>>(1);
        let run = move || {
            for range in receiver.into_iter().flatten() {
                range.file.read_ahead(range.start, range.length);
            }
        };
        let started = std::thread::Builder::new().name("read-ahead".to_owned()).spawn(run);
        started.is_ok().then_some(sender)
    });
    thread.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn weights_ahead_follow_the_direction_of_the_pass() {
        let lengths = [50 * MIB; 10];
        assert_eq!(following(&lengths, None, 0), [1, 2]);
        assert_eq!(following(&lengths, Some(3), 4), [5, 6]);
        assert_eq!(following(&lengths, Some(4), 4), [5, 6], "the same weight again");
        assert_eq!(following(&lengths, Some(8), 9), [0, 1], "the next pass");
        assert_eq!(following(&lengths, Some(9), 0), [1, 2], "the next pass has begun");
        assert_eq!(following(&lengths, Some(9), 8), [7, 6], "a backward pass");
        assert_eq!(following(&lengths, Some(1), 0), Vec::<usize>::new(), "its end");
        assert_eq!(following(&[200 * MIB; 3], Some(0), 1), [2], "at least one");
        assert_eq!(following(&[MIB], None, 0), Vec::<usize>::new());
        assert_eq!(following(&[MIB; 4], Some(0), 1), [2, 3, 0], "never itself");
    }
}
