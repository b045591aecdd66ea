//! SIGKILL the daemon: its child must be gone too. The daemon is this test program, run once more.

use aitk_worker::runner::{Launch, Spawner, Wanted, run};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The folder of whoever plays the daemon; nobody else has it.
pub(crate) const DAEMON: &str = "AITK_TEST_DAEMON_IN";

/// Runs a real attempt process whose job never ends by itself: its specification is a pipe that nobody fills.
/// Only when the other test asks for it.
#[test]
fn plays_the_daemon() {
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
            groups: None,
        };
        let (_wanted, wishes) = tokio::sync::watch::channel(Wanted::Run);
        let (events, mut heard) = tokio::sync::mpsc::channel(16);
        let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
        let listen = async { while heard.recv().await.is_some() {} };
        tokio::join!(run(&spawner, launch, wishes, events), listen);
    });
}

#[test]
fn a_daemon_that_is_killed_leaves_no_child() {
    let folder = tempfile::tempdir().unwrap();
    nix::unistd::mkfifo(&folder.path().join("spec.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let me = std::env::current_exe().unwrap();
    let mut daemon = Command::new(me)
        .args(["--exact", "orphan::plays_the_daemon"])
        .env(DAEMON, folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    let child = loop {
        if let Some(child) = child_of(daemon.id()) {
            break child;
        }
        assert!(Instant::now() < until, "the daemon started no child");
        std::thread::sleep(Duration::from_millis(10));
    };
    // Until the child has bound itself to the daemon, the end of its standard input is what ends it, more slowly.
    std::thread::sleep(Duration::from_millis(300));
    assert!(alive(child), "the child ended too early");
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    while alive(child) {
        assert!(Instant::now() < until, "the child {child} outlives its daemon");
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

fn alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(_, state)| state != "Z" && state != "X")
}

pub(crate) fn child_of(parent: u32) -> Option<u32> {
    let pids = std::fs::read_dir("/proc")
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.into_iter()
        .find(|&pid: &u32| stat(pid).is_some_and(|(of, _)| of == parent))
}
