//! Child processes that are killed when dropped, with their output in a file.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A process of the system under test. Dropping it kills it.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// The offset of its own part of the log. A restarted process appends to the same file.
    log_start: u64,
}

impl Process {
    /// Starts `command`. Its standard output and error go to `folder/<name>.log`.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start(name: &str, folder: &Path, command: &mut Command) -> Self {
        let log = folder.join(format!("{name}.log"));
        let out = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .expect("the log file opens");
        let log_start = out.metadata().map_or(0, |data| data.len());
        let err = out.try_clone().expect("the log file has a second handle");
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let child = child.unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        Self {
            name: name.to_owned(),
            child,
            log,
            log_start,
        }
    }

    /// The process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        send(self.child.id(), signal);
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Its exit code; `None` while it runs, or when a signal ended it.
    pub fn exit_code(&mut self) -> Option<i32> {
        self.child.try_wait().ok().flatten().and_then(|status| status.code())
    }

    /// Kills it (SIGKILL) and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Terminates it (SIGTERM), waits for its end, and returns the exit code.
    ///
    /// # Panics
    /// When it has not ended after `limit`.
    pub fn terminate(&mut self, limit: Duration) -> Option<i32> {
        self.signal(Signal::SIGTERM);
        self.wait(limit)
    }

    /// Waits for its end and returns the exit code.
    ///
    /// # Panics
    /// When it has not ended after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.code();
            }
            assert!(
                start.elapsed() < limit,
                "{} has not ended after {limit:?}\n{}",
                self.name,
                self.tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The ids of the running processes that this one started.
    #[must_use]
    pub fn children(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        // Any thread may be the parent, so all are read.
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let Ok(tasks) = tasks else {
            return read_ids(Path::new(&path));
        };
        tasks
            .flatten()
            .flat_map(|task| read_ids(&task.path().join("children")))
            .collect()
    }

    /// The whole log file, including that of earlier processes with the same name.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Follows its log from now on.
    #[must_use]
    pub fn tail_from_now(&self) -> LogTail {
        LogTail::new(&self.log, std::fs::metadata(&self.log).map_or(0, |data| data.len()))
    }

    /// Follows its own log from its start.
    #[must_use]
    pub fn log_from_start(&self) -> LogTail {
        LogTail::new(&self.log, self.log_start)
    }

    /// The last lines of its log, for messages.
    #[must_use]
    pub fn tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let start = lines.len().saturating_sub(40);
        format!("--- {} ---\n{}", self.name, lines[start..].join("\n"))
    }
}

/// Reads a growing log line by line.
#[derive(Debug)]
pub struct LogTail {
    path: PathBuf,
    offset: u64,
}

impl LogTail {
    /// Reads this file from this offset.
    #[must_use]
    pub fn new(path: &Path, offset: u64) -> Self {
        Self {
            path: path.to_path_buf(),
            offset,
        }
    }

    /// The complete lines that were added since the last call.
    pub fn lines(&mut self) -> Vec<String> {
        let mut added = Vec::new();
        let read = File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.offset))?;
            file.read_to_end(&mut added)
        });
        let whole = added.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        if read.is_err() || whole == 0 {
            return Vec::new();
        }
        self.offset += whole as u64;
        let text = String::from_utf8_lossy(&added[..whole]);
        text.lines().map(str::to_owned).collect()
    }
}

fn read_ids(path: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a signal to a process. Only for processes that the test or its processes started.
pub fn send(id: u32, signal: Signal) {
    if let Ok(id) = i32::try_from(id) {
        let _ = kill(Pid::from_raw(id), signal);
    }
}

/// The CPU time of a process in clock ticks; 0 if it does not exist.
#[must_use]
pub fn cpu_time(id: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    // Fields after the name, which may contain anything: the state is the first, user and system time the 12th and 13th.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum()
}

/// Whether a process with this id runs. A zombie does not.
#[must_use]
pub fn is_alive(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    state.is_some_and(|state| state != "Z" && state != "X")
}

/// A loopback address with a free port. The port is outside the range from which the system assigns ports, and each call returns
/// another one, so it stays free until the caller uses it.
///
/// # Panics
/// When the machine has no free port.
#[must_use]
pub fn free_address() -> SocketAddr {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    const FIRST: u32 = 10_000;
    const PORTS: u32 = 20_000;
    // Parallel test programs begin at different ports.
    let begin = std::process::id().wrapping_mul(7919);
    for _ in 0..PORTS {
        let number = begin.wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed)) % PORTS;
        let port = u16::try_from(FIRST + number).expect("the port is below 65536");
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)) {
            return listener.local_addr().expect("a listener has an address");
        }
    }
    panic!("no port is free")
}

/// Waits until a process listens on the address.
pub fn wait_for_port(address: SocketAddr, owner: &Process) {
    eventually(
        &format!("a listener on {address}"),
        Duration::from_secs(30),
        &[owner],
        || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok(),
    );
}

/// The running processes whose command line contains this text, except this one: ids and command lines.
#[must_use]
pub fn processes_with_argument(text: &str) -> Vec<(u32, String)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let id: u32 = entry.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            (id != std::process::id() && line.contains(text) && is_alive(id)).then_some((id, line))
        })
        .collect()
}

/// Calls `poll` until it returns a value. After `limit` it panics with `what` and the tails of the logs.
///
/// # Panics
/// After `limit`.
pub fn eventually<T>(what: &str, limit: Duration, logs: &[&Process], mut poll: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        if start.elapsed() > limit {
            let tails: Vec<String> = logs.iter().map(|process| process.tail()).collect();
            panic!("timed out after {limit:?} waiting for {what}\n{}", tails.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
