//! The privileges and open files of an attempt's process, as the kernel reports them.

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
    let mut fields = text
        .lines()
        .find_map(|line| line.strip_prefix(name))?
        .split_whitespace();
    Some((fields.next()?, fields.next()?))
}

fn open_files(process: &Path) -> BTreeSet<String> {
    let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    files.filter_map(|file| file.file_name().into_string().ok()).collect()
}

#[test]
fn an_attempts_process_has_no_privileges_secrets_or_inherited_files() {
    let folder = tempfile::tempdir().unwrap();
    // The job never begins: its specification is a pipe without a writer.
    nix::unistd::mkfifo(&folder.path().join("spec.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut daemon = Command::new("sh")
        // The shell leaves a file open for its children, and allows core dumps.
        .args([
            "-c",
            r#"ulimit -S -c unlimited; umask 022; exec 7</etc/passwd; exec "$0" "$@""#,
        ])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "orphan::daemon_process"])
        .env(DAEMON, folder.path())
        .env("AITK_TOKEN", "token-of-the-daemon")
        .env("HF_TOKEN", "token-of-the-hub")
        .env("AWS_SECRET_ACCESS_KEY", "key-of-the-bucket")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
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
            // The process does this last before it reads its specification.
            if all.2.as_deref() == Some("0077") && all.5 == "0 1 2" {
                break (all, read("environ"));
            }
        }
        assert!(
            Instant::now() < deadline,
            "the attempt's process is not as expected: {process:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    };
    let (found, environment) = all;
    let inherited = open_files(&Path::new("/proc").join(daemon.id().to_string()));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(
        inherited.contains("7"),
        "the daemon has no inherited file for the attempt to close: {inherited:?}"
    );
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(
        found,
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
