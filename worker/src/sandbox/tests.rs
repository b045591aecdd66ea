//! Attacks from inside the sandbox: this test program, run again, confines itself as an attempt does and tries
//! forbidden operations. Each trial is one call, and each must fail with a permission error.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test; its confined process answers on standard output"
)]

use super::{SandboxRules, apply, measure};
use aitk_common::capability::DeviceKind;
use nix::libc;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::Signal;
use nix::unistd::{ForkResult, Pid};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The environment variable with the folder of the confined process; only that process has it.
const FOLDER_VARIABLE: &str = "AITK_TEST_CONFINED_IN";
/// The environment variable with the device that its rules are for.
const DEVICE_VARIABLE: &str = "AITK_TEST_CONFINED_FOR";

/// Runs the confined process. Returns pairs of a trial and its result.
fn run_confined(folder: &Path, device: &str) -> Vec<(String, String)> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sandbox::tests::confined_process", "--nocapture"])
        .env(FOLDER_VARIABLE, folder)
        .env(DEVICE_VARIABLE, device)
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

fn print_result<T>(trial: &str, result: io::Result<T>) {
    let result = match result {
        Ok(_) => "possible".to_owned(),
        // The second is Landlock's error for a link out of a folder that is read-only or not accessible.
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

/// Makes a system call with these arguments, none of which is a valid pointer.
#[expect(unsafe_code, reason = "the libraries of this crate do not have these calls")]
fn system_call(number: libc::c_long, arguments: [libc::c_long; 3]) -> io::Result<()> {
    let [first, second, third] = arguments;
    // SAFETY: the kernel writes to no memory, because no argument is a valid pointer.
    match unsafe { libc::syscall(number, first, second, third) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Starts a process that ends at once.
#[expect(unsafe_code, reason = "the standard library only starts programs")]
fn start_process() -> io::Result<()> {
    // SAFETY: the new process makes one system call, which ends it.
    match unsafe { nix::unistd::fork() }? {
        // SAFETY: it ends the process.
        ForkResult::Child => unsafe { libc::_exit(0) },
        ForkResult::Parent { .. } => Ok(()),
    }
}

/// The socket that libcuda binds, to pass memory between CUDA's processes: `cuInit` fails if it cannot.
#[expect(unsafe_code, reason = "the standard library does not have sockets of this kind")]
fn bind_cuda_socket() -> io::Result<()> {
    let check = |result: libc::c_int| match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(result),
    };
    // SAFETY: the call has no pointers.
    let socket = check(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: all bytes zero is a value of this type.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).unwrap();
    // A name that begins with a zero is in no folder.
    let name = format!("aitk-test-cuda-uvmfd-{}", std::process::id());
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    let length = libc::socklen_t::try_from(length).unwrap();
    // SAFETY: the address lives until the call returns, and the length is within it.
    check(unsafe { libc::bind(socket, (&raw const address).cast(), length) })?;
    // SAFETY: the call has no pointers.
    check(unsafe { libc::listen(socket, 1) }).map(drop)
}

/// A file in memory, as libcuda makes one.
#[expect(unsafe_code, reason = "the libraries of this crate do not have this call")]
fn make_memory_file() -> io::Result<()> {
    // SAFETY: the name ends with a zero and lives as long as the program.
    match unsafe { libc::memfd_create(c"aitk-test".as_ptr(), libc::MFD_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Names a thread as libcuda does.
fn name_thread() -> io::Result<()> {
    let named = std::thread::spawn(|| fs::write(format!("/proc/self/task/{}/comm", nix::unistd::gettid()), "cuda"));
    named.join().unwrap()
}

/// Makes a folder with inputs, the attempt's own folders, and files of others.
fn make_folder() -> tempfile::TempDir {
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
fn confined_process() {
    let Some(root) = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from) else {
        return;
    };
    let device = match std::env::var(DEVICE_VARIABLE).unwrap().as_str() {
        "cuda" => DeviceKind::Cuda,
        _ => DeviceKind::Cpu,
    };
    let at = |name: &str| root.join(name);
    // Created before this process is confined.
    let _listener = UnixListener::bind(at("others/socket")).unwrap();
    let _receiver = UnixDatagram::bind(at("others/datagrams")).unwrap();
    let pipe = io::pipe().unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let parent = std::os::unix::process::parent_id();
    let rules = SandboxRules {
        read: vec![at("input"), at("resume")],
        write: vec![at("output"), at("tmp"), at("derived")],
        execute: Vec::new(),
        device,
    };
    let confinement = apply(Some(&rules));
    println!("TRIAL confinement -> {confinement}");

    let append = |path: PathBuf| {
        File::options()
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(b"x"))
    };
    // Operations that must work.
    print_result("own: read an input", fs::read(at("input/a.txt")));
    print_result("own: list an input", fs::read_dir(at("input")));
    print_result("own: read the checkpoint", fs::read(at("resume")));
    print_result("own: write", fs::write(at("output/a.png"), "x"));
    print_result("own: make a folder", fs::create_dir_all(at("output/b/c")));
    print_result(
        "own: rename between folders",
        fs::rename(at("output/a.png"), at("output/b/a.png")),
    );
    print_result(
        "own: move out of tmp",
        fs::write(at("tmp/x"), "x").and_then(|()| fs::rename(at("tmp/x"), at("output/x"))),
    );
    print_result("own: remove", fs::remove_file(at("output/x")));
    print_result("own: derived", fs::write(at("derived/latent"), "x"));
    print_result("own: memory peak", fs::write("/proc/self/clear_refs", "5"));
    print_result("own: status", fs::read("/proc/self/status"));
    print_result("own: memory", fs::read("/proc/meminfo"));
    print_result(
        "own: random",
        File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut [0; 8])),
    );
    print_result(
        "own: threads",
        std::thread::Builder::new().spawn(|| ()).map(|thread| thread.join()),
    );
    print_result("own: libraries", fs::read_dir("/usr/lib"));
    print_result("own: pair of sockets", UnixStream::pair());

    // Files.
    print_result("read another's file", fs::read(at("others/token")));
    print_result("list a folder of others", fs::read_dir(at("others")));
    print_result("read the users", fs::read("/etc/passwd"));
    print_result("list the root folder", fs::read_dir("/"));
    print_result(
        "read by way of its own entry",
        fs::read(Path::new("/proc/self/root").join(at("others/token").strip_prefix("/").unwrap())),
    );
    print_result("read by way of dots", fs::read(at("input/../others/token")));
    print_result(
        "read the daemon's environment",
        fs::read(format!("/proc/{parent}/environ")),
    );
    print_result("read the daemon's command", fs::read(format!("/proc/{parent}/cmdline")));
    print_result("list processes", fs::read_dir("/proc"));
    print_result("change another's file", append(at("others/token")));
    print_result("make a file elsewhere", File::create(at("others/new")));
    print_result("change an input", append(at("input/a.txt")));
    print_result("add to an input", File::create(at("input/_latent_cache")));
    print_result("remove an input", fs::remove_file(at("input/a.txt")));
    print_result(
        "truncate a checkpoint",
        File::options().write(true).truncate(true).open(at("resume")),
    );
    print_result(
        "link another's file",
        fs::hard_link(at("others/token"), at("output/token")),
    );
    print_result("symbolic link", symlink(at("others/token"), at("output/link")));
    print_result(
        "pipe in its folder",
        nix::unistd::mkfifo(&at("output/fifo"), nix::sys::stat::Mode::S_IRWXU).map_err(io::Error::from),
    );
    print_result("socket in its folder", UnixListener::bind(at("output/socket")));
    print_result(
        "change a mode",
        fs::set_permissions(at("others/token"), fs::Permissions::from_mode(0o777)),
    );
    if device == DeviceKind::Cpu {
        let opened = File::open(at("input/a.txt"));
        print_result(
            "change the mode of an input that is open",
            opened.and_then(|file| file.set_permissions(fs::Permissions::from_mode(0o600))),
        );
    }
    // Calls of newer kernels. The filter refuses them on older ones too.
    for (trial, number) in [
        ("set an attribute by path", 463),
        ("remove an attribute by path", 466),
        ("set attributes of a file by path", 469),
    ] {
        print_result(trial, system_call(number, [-1, 0, 0]));
    }
    let watch = Inotify::init(InitFlags::IN_CLOEXEC);
    let watch = watch.and_then(|watch| watch.add_watch(&at("others"), AddWatchFlags::IN_ALL_EVENTS));
    print_result("watch a folder of others", watch.map_err(io::Error::from));
    print_result("change the kernel", fs::write("/proc/sys/vm/swappiness", "1"));

    // Network.
    print_result("connect", TcpStream::connect(address));
    print_result("listen", TcpListener::bind("127.0.0.1:0"));
    print_result("datagrams", UdpSocket::bind("127.0.0.1:0"));
    print_result("connect to a local socket", UnixStream::connect(at("others/socket")));
    let pair = UnixDatagram::pair();
    let sent = pair.and_then(|(socket, _)| socket.send_to(b"x", at("others/datagrams")));
    print_result("send a datagram to a local socket", sent);

    // What CUDA's driver does when it starts. It fails if one of these is refused.
    if device == DeviceKind::Cuda {
        print_result("own: name a thread", name_thread());
        print_result("own: bind CUDA's socket", bind_cuda_socket());
        print_result("own: make a file in memory", make_memory_file());
        print_result("own: read which devices there are", fs::read("/proc/devices"));
    }

    // Other processes, and the system.
    let daemon = Pid::from_raw(i32::try_from(parent).unwrap());
    print_result("start a process", start_process());
    for (trial, number) in [
        ("share memory with others", libc::SYS_shmget),
        ("attach memory of others", libc::SYS_shmat),
        ("make a queue of messages", libc::SYS_msgget),
        ("make a semaphore", libc::SYS_semget),
        ("remove a queue of messages", libc::SYS_mq_unlink),
        ("change priorities", libc::SYS_setpriority),
    ] {
        print_result(trial, system_call(number, [-1, 0, 0]));
    }
    // A file that signals its owner.
    let (reader, _writer) = &pipe;
    let reader = libc::c_long::from(reader.as_raw_fd());
    for (trial, command) in [("set the owner of a file", 8), ("set the signal of a file", 10)] {
        // The owner 0 is nobody, and the signal 0 the usual one.
        print_result(trial, system_call(libc::SYS_fcntl, [reader, command, 0]));
    }
    print_result(
        "outlive the daemon",
        nix::sys::prctl::set_pdeathsig(Option::<Signal>::None).map_err(io::Error::from),
    );
    print_result(
        "leave its process group",
        nix::unistd::setpgid(Pid::this(), Pid::from_raw(0)).map_err(io::Error::from),
    );
    if device == DeviceKind::Cpu {
        let scheduling = system_call(
            libc::SYS_sched_setscheduler,
            [libc::c_long::from(daemon.as_raw()), 0, 0],
        );
        print_result("change the scheduling of the daemon", scheduling);
    }
    print_result(
        "start a program",
        Command::new("/bin/sh").args(["-c", "exit 0"]).spawn(),
    );
    print_result(
        "signal the daemon",
        nix::sys::signal::kill(daemon, None).map_err(io::Error::from),
    );
    let priority = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE);
    print_result("own: limits", priority.map_err(io::Error::from));
    print_result(
        "enter another root",
        nix::unistd::chroot(&at("output")).map_err(io::Error::from),
    );
}

fn check(device: &str) {
    let folder = make_folder();
    let trials = run_confined(folder.path(), device);
    let confinement = &trials.iter().find(|(trial, _)| trial == "confinement").unwrap().1;
    if !confinement.starts_with("files: Landlock") {
        return crate::skip::skip("landlock", confinement);
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
    assert_eq!(
        fs::read_to_string(folder.path().join("others/token")).unwrap(),
        "secret"
    );
    assert_eq!(
        fs::read_to_string(folder.path().join("input/a.txt")).unwrap(),
        "a caption"
    );
    assert_eq!(fs::read_dir(folder.path().join("input")).unwrap().count(), 1);
}

#[test]
fn an_attempt_reaches_its_own_files_and_nothing_else() {
    check("cpu");
}

#[test]
fn the_rules_for_cuda_allow_no_files_of_others() {
    check("cuda");
}

#[test]
fn a_program_that_does_not_answer_counts_as_not_confined() {
    let found = measure(&["/bin/false".into()]);
    assert!(
        !found.holds() && found.files.by.contains("test process failed"),
        "{found}"
    );
    // A program with invalid output is not trusted either.
    assert!(!measure(&["/bin/echo".into()]).holds());
    assert!(!measure(&["/no/such/program".into()]).holds());
    assert!(!measure(&[]).holds());
}
