//! Starts the program of an extension, and reads its output through bounded channels.

use super::message::shorten;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

/// The longest line of a message, in bytes, with its line feed.
pub(super) const MAX_LINE_BYTES: u64 = 64 << 10;
/// Lines that wait to be handled. The program blocks while there are more.
const MAX_WAITING_LINES: usize = 64;
/// The longest line of standard error that is kept, in characters.
const MAX_ERROR_LINE: usize = 1_000;
/// How many lines of standard error an error message has.
const TAIL_LINES: usize = 5;
/// Where programs are searched for by name.
const SEARCH_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// Variables of the attempt's environment that the program gets: none but those that computing needs.
const KEPT_VARIABLES: &[&str] = &["LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_CACHE_PATH", "TZ"];
/// Prefixes of such variables.
const KEPT_PREFIXES: &[&str] = &["NVIDIA_", "OMP_", "MKL_"];

/// What the program wrote to standard output.
pub(super) enum Line {
    /// A complete line without its line feed.
    Complete(Vec<u8>),
    /// A line of more than [`MAX_LINE_BYTES`]. Nothing is read after it.
    TooLong,
}

/// A program that runs.
pub(super) struct Program {
    pub(super) child: Child,
    /// Its lines, in order.
    pub(super) lines: Receiver<Line>,
    /// Lines of its standard error; some are left out when there are too many.
    pub(super) errors: Receiver<String>,
    /// How many of those were left out.
    left_out: Arc<AtomicU64>,
    messages: SyncSender<Vec<u8>>,
    tail: Arc<Mutex<VecDeque<String>>>,
}

impl Program {
    /// Starts a program in a folder. `temporary`: its folder for temporary files, which is also its home.
    ///
    /// # Errors
    /// The error of the system.
    pub(super) fn start(program: &Path, folder: &Path, temporary: &Path) -> io::Result<Self> {
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs(kept_variables(std::env::vars_os()))
            .env("PATH", SEARCH_PATH)
            .env("HOME", temporary)
            .env("TMPDIR", temporary)
            .env("LANG", "C.UTF-8")
            // Python otherwise writes compiled files beside the program, where it may not write.
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        end_with_this_process(&mut command);
        let mut child = command.spawn()?;
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let left_out = Arc::new(AtomicU64::new(0));
        let (line_sender, lines) = sync_channel(MAX_WAITING_LINES);
        let (error_sender, errors) = sync_channel(MAX_WAITING_LINES);
        // One message of each kind at most.
        let (messages, waiting) = sync_channel(4);
        if let Some(pipe) = child.stdout.take() {
            start_thread(move || read_lines(pipe, &line_sender))?;
        }
        if let Some(pipe) = child.stderr.take() {
            let (tail, left_out) = (Arc::clone(&tail), Arc::clone(&left_out));
            start_thread(move || read_errors(pipe, &error_sender, &left_out, &tail))?;
        }
        if let Some(pipe) = child.stdin.take() {
            start_thread(move || write_messages(pipe, &waiting))?;
        }
        Ok(Self {
            child,
            lines,
            errors,
            left_out,
            messages,
            tail,
        })
    }

    /// Sends a message. A program that does not read its messages misses it.
    pub(super) fn send(&self, message: &impl serde::Serialize) {
        if let Ok(mut line) = serde_json::to_vec(message) {
            line.push(b'\n');
            let _ = self.messages.try_send(line);
        }
    }

    /// How many lines of its standard error were left out since the last call, because `errors` was full.
    pub(super) fn take_left_out(&self) -> u64 {
        self.left_out.swap(0, Ordering::Relaxed)
    }

    /// The last lines of its standard error, for the end of a sentence; empty if it wrote none.
    pub(super) fn error_tail(&self) -> String {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        match tail.is_empty() {
            true => String::new(),
            false => {
                let lines: Vec<&str> = tail.iter().map(String::as_str).collect();
                format!("; the end of its standard error: {}", lines.join(" | "))
            }
        }
    }
}

fn start_thread(body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("aitk-extension".to_owned());
    thread.spawn(body).map(drop)
}

/// The variables of `all` that the program gets.
fn kept_variables(
    all: impl IntoIterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
) -> Vec<(std::ffi::OsString, std::ffi::OsString)> {
    let is_kept =
        |name: &str| KEPT_VARIABLES.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    all.into_iter()
        .filter(|(name, _)| name.to_str().is_some_and(is_kept))
        .collect()
}

/// Asks the kernel to kill the program when this process ends, however it ends.
#[cfg(target_os = "linux")]
#[expect(
    unsafe_code,
    reason = "the standard library has no safe way to run code between fork and exec"
)]
fn end_with_this_process(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let end = || {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).map_err(io::Error::from)
    };
    // SAFETY: the closure makes one system call, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(end);
    }
}

#[cfg(not(target_os = "linux"))]
fn end_with_this_process(_command: &mut Command) {}

/// Reads lines until the pipe closes, a line is too long, or nobody wants them any more.
fn read_lines(pipe: ChildStdout, to: &SyncSender<Line>) {
    let mut pipe = BufReader::new(pipe);
    loop {
        let mut line = Vec::new();
        let read = (&mut pipe).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
        let next = match (read, line.pop()) {
            (Ok(_), Some(b'\n')) => Line::Complete(line),
            (Ok(bytes), Some(_)) if bytes as u64 == MAX_LINE_BYTES => Line::TooLong,
            // The end, or a line that the program did not finish.
            _ => return,
        };
        let is_last = matches!(next, Line::TooLong);
        if to.send(next).is_err() || is_last {
            return;
        }
    }
}

/// Reads standard error to its end, so that the program never blocks on it.
fn read_errors(pipe: ChildStderr, to: &SyncSender<String>, left_out: &AtomicU64, tail: &Mutex<VecDeque<String>>) {
    let mut pipe = BufReader::new(pipe);
    loop {
        let mut bytes = Vec::new();
        match (&mut pipe).take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let line = shorten(String::from_utf8_lossy(&bytes).trim_end(), MAX_ERROR_LINE);
        if line.is_empty() {
            continue;
        }
        {
            let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(line.clone());
        }
        match to.try_send(line) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => drop(left_out.fetch_add(1, Ordering::Relaxed)),
            Err(TrySendError::Disconnected(_)) => return,
        }
    }
}

/// Writes messages; the pipe closes when the sender is gone or the program no longer reads.
fn write_messages(mut pipe: ChildStdin, messages: &Receiver<Vec<u8>>) {
    while let Ok(message) = messages.recv() {
        if pipe.write_all(&message).and_then(|()| pipe.flush()).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_program_gets_no_other_variables() {
        let all = [
            "PATH",
            "HOME",
            "HF_TOKEN",
            "AITK_TOKEN",
            "OMP_NUM_THREADS",
            "LD_PRELOAD",
        ];
        let kept = kept_variables(all.map(|name| (name.into(), "1".into())));
        assert_eq!(kept, [("OMP_NUM_THREADS".into(), "1".into())]);
    }

    #[test]
    fn lines_of_the_program_are_read_and_a_line_that_is_too_long_ends_it() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("program");
        std::fs::write(
            &script,
            "#!/bin/sh\necho one\nread line\necho \"$line\"\necho oops >&2\nhead -c 70000 /dev/zero\n",
        )
        .unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut program = Program::start(&script, folder.path(), folder.path()).unwrap();
        program.send(&"stop");
        let lines: Vec<Line> = program.lines.iter().collect();
        let texts: Vec<_> = lines
            .iter()
            .map(|line| match line {
                Line::Complete(text) => String::from_utf8_lossy(text).into_owned(),
                Line::TooLong => "too long".to_owned(),
            })
            .collect();
        assert_eq!(texts, ["one", "\"stop\"", "too long"]);
        program.child.wait().unwrap();
        assert_eq!(program.errors.iter().collect::<Vec<_>>(), ["oops"]);
        assert_eq!(program.error_tail(), "; the end of its standard error: oops");
    }
}
