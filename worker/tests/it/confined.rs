//! What the process of an attempt has, as the kernel tells it.

use crate::orphan::{DAEMON, child_of};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The value of a line of `/proc/PID/status`.
fn status<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(rest.strip_prefix(':')?.trim())
}

/// Soft and hard limit of a line of `/proc/PID/limits`.
fn limit<'a>(text: &'a str, name: &str) -> Option<(&'a str, &'a str)> {
    let mut words = text
        .lines()
        .find_map(|line| line.strip_prefix(name))?
        .split_whitespace();
    Some((words.next()?, words.next()?))
}

fn open_files(process: &Path) -> BTreeSet<String> {
    let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    files.filter_map(|file| file.file_name().into_string().ok()).collect()
}

#[test]
fn an_attempt_has_no_rights_secrets_or_files_that_it_does_not_need() {
    let folder = tempfile::tempdir().unwrap();
    // The job never begins: its specification is a pipe that nobody fills.
    nix::unistd::mkfifo(&folder.path().join("spec.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut daemon = Command::new("sh")
        // A careless shell leaves a file open for everything below it, and lets cores be written.
        .args([
            "-c",
            r#"ulimit -S -c unlimited; umask 022; exec 7</etc/passwd; exec "$0" "$@""#,
        ])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "orphan::plays_the_daemon"])
        .env(DAEMON, folder.path())
        .env("AITK_TOKEN", "token-of-the-daemon")
        .env("HF_TOKEN", "token-of-the-hub")
        .env("AWS_SECRET_ACCESS_KEY", "key-of-the-bucket")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let all = loop {
        let process = child_of(daemon.id()).map(|pid| Path::new("/proc").join(pid.to_string()));
        if let Some(process) = &process {
            let read = |name: &str| std::fs::read_to_string(process.join(name)).unwrap_or_default();
            let (state, limits) = (read("status"), read("limits"));
            let all = (
                status(&state, "Name").map(str::to_owned),
                status(&state, "NoNewPrivs").map(str::to_owned),
                status(&state, "Umask").map(str::to_owned),
                limit(&limits, "Max core file size").map(|(soft, hard)| format!("{soft} {hard}")),
                limit(&limits, "Max open files").map(|(soft, hard)| format!("{soft} {hard}")),
                open_files(process).into_iter().collect::<Vec<_>>().join(" "),
            );
            // The last thing that it does before it reads its specification.
            if all.2.as_deref() == Some("0077") && all.5 == "0 1 2" {
                break (all, read("environ"));
            }
        }
        assert!(
            Instant::now() < until,
            "the attempt's process is not as expected: {process:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    };
    let (has, environment) = all;
    let inherited = open_files(&Path::new("/proc").join(daemon.id().to_string()));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(
        inherited.contains("7"),
        "nothing was inherited to be closed: {inherited:?}"
    );
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(
        has,
        (
            text("aitk-worker"),
            text("1"),
            text("0077"),
            text("0 0"),
            text("4096 4096"),
            "0 1 2".to_owned()
        )
    );
    let temporary = format!("TMPDIR={}", folder.path().display());
    assert!(environment.split('\0').any(|line| line == temporary), "{environment:?}");
    for secret in ["token-of-the-daemon", "token-of-the-hub", "key-of-the-bucket"] {
        assert!(!environment.contains(secret), "{environment:?}");
    }
}
