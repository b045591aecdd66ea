//! Messages on a pseudo-terminal, and in a pipe.

use crate::support::{FakeCoordinator, Home, err};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::Read;
use std::process::{Command, Stdio};

/// Arguments that give a message longer than a line: the server does not exist.
const ARGS: [&str; 5] = ["ps", "--server", "http://127.0.0.1:9", "--token-file", "token"];

fn home() -> Home {
    let home = Home::new();
    let path = home.write("token", "aitk_a_token_of_this_test_and_of_nobody");
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    home
}

/// Runs the program on a terminal with this width; returns its exit code and its standard error.
fn on_terminal(home: &Home, args: &[&str], columns: u16) -> (Option<i32>, String) {
    let size = Winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let terminal = openpty(Some(&size), None).unwrap();
    let mut child = Command::new(assert_cmd::cargo::cargo_bin("aitk"))
        .args(args)
        .env_clear()
        .env("HOME", home.path())
        .current_dir(home.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::from(terminal.slave))
        .spawn()
        .unwrap();
    // After the end of the program, reading gives an error on Linux and the end of the file elsewhere.
    let (mut reader, mut shown) = (std::fs::File::from(terminal.master), Vec::new());
    let mut piece = [0; 4096];
    while let Ok(read @ 1..) = reader.read(&mut piece) {
        shown.extend_from_slice(&piece[..read]);
    }
    (child.wait().unwrap().code(), String::from_utf8(shown).unwrap())
}

#[test]
fn messages_are_wrapped_on_a_terminal_and_not_in_a_pipe() {
    let home = home();
    let (exit, shown) = on_terminal(&home, &ARGS, 40);
    assert_eq!(exit, Some(5));
    let plain = shown
        .replace("\x1b[1;31m", "")
        .replace("\x1b[36m", "")
        .replace("\x1b[0m", "");
    let lines: Vec<&str> = plain.lines().collect();
    assert!(lines.len() > 3 && lines[0].starts_with("error: "), "{lines:#?}");
    for line in &lines {
        assert!(line.chars().count() <= 40 || !line.trim().contains(' '), "{lines:#?}");
    }

    let piped = home.aitk().args(ARGS).env("COLUMNS", "40").output().unwrap();
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words(&err(&piped)), words(&plain), "the same is said");
    assert!(
        err(&piped)
            .lines()
            .all(|line| line.starts_with("error: ") || line.starts_with("hint: ")),
        "{}",
        err(&piped)
    );
}

#[test]
fn a_command_to_copy_is_one_line_on_a_narrow_terminal() {
    let home = home();
    let path = "a_folder_with_a_name/that_is_long/job.yaml";
    let (exit, shown) = on_terminal(&home, &["init", path], 40);
    assert_eq!(exit, Some(0), "{shown}");
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines.contains(&format!("  aitk run {path}").as_str()), "{lines:#?}");
    assert!(lines.len() > 2, "what is not a command is broken: {lines:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn top_restores_the_terminal_after_a_sigterm() {
    let server = format!("http://{}", FakeCoordinator::default().serve().await);
    let shown = tokio::task::spawn_blocking(move || {
        let home = Home::new();
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let terminal = openpty(Some(&size), None).unwrap();
        let stdin = terminal.slave.try_clone().unwrap();
        let mut child = Command::new(assert_cmd::cargo::cargo_bin("aitk"))
            .arg("top")
            .env_clear()
            .env("HOME", home.path())
            .env("AITK_SERVER", server)
            .env("AITK_TOKEN", "t")
            .current_dir(home.path())
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::from(terminal.slave))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (mut reader, mut shown) = (std::fs::File::from(terminal.master), String::new());
        let (mut piece, mut is_signalled) = ([0; 4096], false);
        while let Ok(read @ 1..) = reader.read(&mut piece) {
            shown.push_str(&String::from_utf8_lossy(&piece[..read]));
            if shown.contains("\x1b[?1049h") && !std::mem::replace(&mut is_signalled, true) {
                kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
            }
        }
        assert_eq!(child.wait().unwrap().code(), Some(143), "{shown:?}");
        shown
    });
    let shown = shown.await.unwrap();
    assert!(shown.contains("\x1b[?1049l"), "the screen is left: {shown:?}");
}
