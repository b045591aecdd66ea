//! Attacks from inside: this test program, run once more, confines itself as an attempt does and tries what is forbidden.
//! Each trial is one call, and each must fail for lack of permission.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test; its confined process answers on standard output"
)]

use super::{Rules, enter, measure};
use aitk_common::capability::DeviceKind;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder of the confined process; nobody else has it.
const PLACE: &str = "AITK_TEST_CONFINED_IN";
/// The device that its rules are for.
const DEVICE: &str = "AITK_TEST_CONFINED_FOR";

/// What the confined process is told, and what it answers, one trial a line.
fn run_confined(place: &Path, device: &str) -> Vec<(String, String)> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sandbox::tests::plays_the_attempt", "--nocapture"])
        .env(PLACE, place)
        .env(DEVICE, device)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let lines = text.lines().filter_map(|line| line.strip_prefix("TRIAL "));
    let pairs = lines.filter_map(|line| line.split_once(" -> "));
    pairs
        .map(|(trial, result)| (trial.to_owned(), result.to_owned()))
        .collect()
}

fn tell<T>(trial: &str, result: io::Result<T>) {
    let result = match result {
        Ok(_) => "possible".to_owned(),
        // The second is what Landlock answers to a link out of a folder that may only be read, or not at all.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::CrossesDevices
            ) =>
        {
            "refused".to_owned()
        }
        Err(error) => format!("failed: {error}"),
    };
    println!("TRIAL {trial} -> {result}");
}

/// A place with inputs, the attempt's own folders, and things of others.
fn place() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for inner in ["input", "output", "tmp", "derived", "others"] {
        fs::create_dir(root.join(inner)).unwrap();
    }
    fs::write(root.join("input/a.txt"), "a caption").unwrap();
    fs::write(root.join("others/token"), "secret").unwrap();
    fs::write(root.join("resume"), "a checkpoint").unwrap();
    folder
}

#[test]
fn plays_the_attempt() {
    let Some(root) = std::env::var_os(PLACE).map(PathBuf::from) else {
        return;
    };
    let device = match std::env::var(DEVICE).unwrap().as_str() {
        "cuda" => DeviceKind::Cuda,
        _ => DeviceKind::Cpu,
    };
    let at = |name: &str| root.join(name);
    // Left by somebody who is not confined.
    let _listener = UnixListener::bind(at("others/socket")).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let parent = std::os::unix::process::parent_id();
    let rules = Rules {
        read: vec![at("input"), at("resume")],
        write: vec![at("output"), at("tmp"), at("derived")],
        device,
    };
    let confinement = enter(Some(&rules));
    println!("TRIAL confinement -> {confinement}");

    let append = |path: PathBuf| {
        File::options()
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(b"x"))
    };
    // What it is there for.
    tell("own: read an input", fs::read(at("input/a.txt")));
    tell("own: list an input", fs::read_dir(at("input")));
    tell("own: read the checkpoint", fs::read(at("resume")));
    tell("own: write", fs::write(at("output/a.png"), "x"));
    tell("own: make a folder", fs::create_dir_all(at("output/b/c")));
    tell(
        "own: rename between folders",
        fs::rename(at("output/a.png"), at("output/b/a.png")),
    );
    tell(
        "own: move out of tmp",
        fs::write(at("tmp/x"), "x").and_then(|()| fs::rename(at("tmp/x"), at("output/x"))),
    );
    tell("own: remove", fs::remove_file(at("output/x")));
    tell("own: derived", fs::write(at("derived/latent"), "x"));
    tell("own: memory peak", fs::write("/proc/self/clear_refs", "5"));
    tell("own: status", fs::read("/proc/self/status"));
    tell("own: memory", fs::read("/proc/meminfo"));
    tell(
        "own: random",
        File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut [0; 8])),
    );
    tell(
        "own: threads",
        std::thread::Builder::new().spawn(|| ()).map(|thread| thread.join()),
    );
    tell("own: libraries", fs::read_dir("/usr/lib"));

    // Files.
    tell("read another's file", fs::read(at("others/token")));
    tell("list a folder of others", fs::read_dir(at("others")));
    tell("read the users", fs::read("/etc/passwd"));
    tell("list the root folder", fs::read_dir("/"));
    tell(
        "read by way of its own entry",
        fs::read(Path::new("/proc/self/root").join(at("others/token").strip_prefix("/").unwrap())),
    );
    tell("read by way of dots", fs::read(at("input/../others/token")));
    tell(
        "read the daemon's environment",
        fs::read(format!("/proc/{parent}/environ")),
    );
    tell("read the daemon's command", fs::read(format!("/proc/{parent}/cmdline")));
    tell("list processes", fs::read_dir("/proc"));
    tell("change another's file", append(at("others/token")));
    tell("make a file elsewhere", File::create(at("others/new")));
    tell("change an input", append(at("input/a.txt")));
    tell("add to an input", File::create(at("input/_latent_cache")));
    tell("remove an input", fs::remove_file(at("input/a.txt")));
    tell(
        "truncate a checkpoint",
        File::options().write(true).truncate(true).open(at("resume")),
    );
    tell(
        "link another's file",
        fs::hard_link(at("others/token"), at("output/token")),
    );
    tell("symbolic link", symlink(at("others/token"), at("output/link")));
    tell(
        "pipe in its folder",
        nix::unistd::mkfifo(&at("output/fifo"), nix::sys::stat::Mode::S_IRWXU).map_err(io::Error::from),
    );
    tell("socket in its folder", UnixListener::bind(at("output/socket")));
    tell(
        "change a mode",
        fs::set_permissions(at("others/token"), fs::Permissions::from_mode(0o777)),
    );
    if device == DeviceKind::Cpu {
        let opened = File::open(at("input/a.txt"));
        tell(
            "change the mode of an input that is open",
            opened.and_then(|file| file.set_permissions(fs::Permissions::from_mode(0o600))),
        );
    }
    tell("change the kernel", fs::write("/proc/sys/vm/swappiness", "1"));

    // Network.
    tell("connect", TcpStream::connect(address));
    tell("listen", TcpListener::bind("127.0.0.1:0"));
    tell("datagrams", UdpSocket::bind("127.0.0.1:0"));
    tell("connect to a local socket", UnixStream::connect(at("others/socket")));

    // Other processes, and the system.
    let daemon = nix::unistd::Pid::from_raw(i32::try_from(parent).unwrap());
    tell(
        "start a program",
        Command::new("/bin/sh").args(["-c", "exit 0"]).spawn(),
    );
    tell(
        "signal the daemon",
        nix::sys::signal::kill(daemon, None).map_err(io::Error::from),
    );
    let priority = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE);
    tell("own: limits", priority.map_err(io::Error::from));
    tell(
        "enter another root",
        nix::unistd::chroot(&at("output")).map_err(io::Error::from),
    );
}

fn check(device: &str) {
    let place = place();
    let trials = run_confined(place.path(), device);
    let confinement = &trials.iter().find(|(trial, _)| trial == "confinement").unwrap().1;
    if !confinement.starts_with("files: Landlock") {
        return println!("skipped: this machine does not confine files: {confinement}");
    }
    let expected = |trial: &str| {
        if trial.starts_with("own: ") {
            "possible"
        } else {
            "refused"
        }
    };
    let wrong: Vec<_> = trials
        .iter()
        .filter(|(trial, result)| trial != "confinement" && result != expected(trial))
        .collect();
    assert!(wrong.is_empty(), "under {confinement}: {wrong:#?}");
    assert!(trials.len() > 40, "the process did not try everything: {trials:?}");
    assert_eq!(fs::read_to_string(place.path().join("others/token")).unwrap(), "secret");
    assert_eq!(
        fs::read_to_string(place.path().join("input/a.txt")).unwrap(),
        "a caption"
    );
    assert_eq!(fs::read_dir(place.path().join("input")).unwrap().count(), 1);
}

#[test]
fn an_attempt_reaches_its_own_files_and_nothing_else() {
    check("cpu");
}

#[test]
fn what_a_driver_needs_opens_nothing_else() {
    check("cuda");
}

#[test]
fn a_program_that_does_not_answer_counts_as_not_confined() {
    let found = measure(&["/bin/false".into()]);
    assert!(!found.holds() && found.files.by.contains("trial failed"), "{found}");
    // One that says more than it should is not believed either.
    assert!(!measure(&["/bin/echo".into()]).holds());
    assert!(!measure(&["/no/such/program".into()]).holds());
    assert!(!measure(&[]).holds());
}
