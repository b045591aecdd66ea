//! A child must end when its daemon is killed by SIGKILL. The daemon is this test program, run again.

use crate::support::TIMEOUT;
use aitk_worker::runner::{DesiredState, Launch, PendingOutputs, Spawner, run};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The environment variable with the folder of the daemon process; only that process has it.
pub(crate) const DAEMON: &str = "AITK_TEST_DAEMON_IN";

/// Runs a real attempt process whose job never ends by itself: its specification is a pipe without a writer.
/// Does nothing unless the other test starts it.
#[test]
fn daemon_process() {
    let Some(folder) = std::env::var_os(DAEMON).map(PathBuf::from) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let launch = Launch {
            command: vec![env!("CARGO_BIN_EXE_aitk-worker").into()],
            spec: folder.join("spec.json"),
            work_dir: None,
            temp_dir: folder,
            grace: Duration::from_secs(60),
            progress_timeout: None,
            memory_limited: false,
            sandbox_profile: None,
            cuda_cache: None,
            control_groups: None,
            causes: Default::default(),
        };
        let (_desired, desired_rx) = tokio::sync::watch::channel(DesiredState::Run);
        let (events, mut event_receiver) = tokio::sync::mpsc::channel(16);
        let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
        let listen = async { while event_receiver.recv().await.is_some() {} };
        tokio::join!(run(&spawner, launch, desired_rx, events, PendingOutputs::new()), listen);
    });
}

#[test]
fn a_daemon_that_is_killed_leaves_no_child() {
    let folder = tempfile::tempdir().unwrap();
    let spec = folder.path().join("spec.json");
    nix::unistd::mkfifo(&spec, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let me = std::env::current_exe().unwrap();
    let mut daemon = Command::new(me)
        .args(["--exact", "orphan::daemon_process"])
        .env(DAEMON, folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let child = wait_for("the daemon started no child", || child_of(daemon.id()));
    // The pipe can be opened once the child reads its specification. Before that it has asked the kernel for SIGKILL at
    // the end of its daemon.
    let mut options = std::fs::File::options();
    options.write(true).custom_flags(nix::libc::O_NONBLOCK);
    let writer = wait_for("the child does not read its specification", || options.open(&spec).ok());
    assert!(is_alive(child), "the child ended too early");
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    // The child still waits for its specification, and does not watch its standard input yet: only that signal can end it.
    wait_for("the child outlives its daemon", || (!is_alive(child)).then_some(()));
    drop(writer);
}

/// Polls until there is a result.
fn wait_for<T>(problem: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "{problem}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The parent's id and the state of a process.
fn stat(pid: u32) -> Option<(u32, String)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.to_owned();
    Some((fields.next()?.parse().ok()?, state))
}

fn is_alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(_, state)| state != "Z" && state != "X")
}

/// A child of a process.
pub(crate) fn child_of(parent: u32) -> Option<u32> {
    let pids = std::fs::read_dir("/proc")
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.into_iter()
        .find(|&pid: &u32| stat(pid).is_some_and(|(of, _)| of == parent))
}
