//! All exit codes that need no coordinator, and their messages.

use crate::support::{Home, code, err, out};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

#[test]
fn help_and_version_succeed_and_name_every_code() {
    let home = Home::new();
    let help = home.aitk().arg("--help").output().unwrap();
    assert_eq!(code(&help), 0);
    for line in [
        "124  the time of",
        "130  Ctrl-C",
        "141  the reader",
        "143  the followed job",
    ] {
        assert!(out(&help).contains(line), "{line}");
    }
    let version = home.aitk().arg("--version").output().unwrap();
    assert_eq!(
        (code(&version), out(&version).trim()),
        (0, concat!("aitk ", env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn a_wrong_command_line_is_2() {
    let home = Home::new();
    for args in [
        &["sbmit"][..],
        &["ps", "--nope"],
        &["wait"],
        &["wait", "j", "--timeout", "soon"],
        &[],
    ] {
        let output = home.aitk().args(args).output().unwrap();
        assert_eq!(code(&output), 2, "{args:?}: {}", err(&output));
    }
    let typo = home.aitk().arg("sbmit").output().unwrap();
    assert!(err(&typo).contains("submit"), "{}", err(&typo));
    let nowhere = home.aitk().arg("ps").output().unwrap();
    assert_eq!(code(&nowhere), 2);
    assert!(
        err(&nowhere).starts_with("error: no coordinator is set\nhint: "),
        "{}",
        err(&nowhere)
    );
}

#[test]
fn an_unsafe_or_missing_token_is_4() {
    let home = Home::new();
    let output = home
        .aitk()
        .args(["ps", "--server", "http://127.0.0.1:1"])
        .output()
        .unwrap();
    assert_eq!(code(&output), 4, "{}", err(&output));
    let token = home.write("token", "secret");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = home
        .aitk()
        .args(["ps", "--server", "http://127.0.0.1:1", "--token-file", "token"])
        .output()
        .unwrap();
    assert_eq!(code(&output), 4);
    assert!(
        err(&output).contains("chmod 600") && !err(&output).contains("secret"),
        "{}",
        err(&output)
    );
}

#[test]
fn an_unreachable_coordinator_is_5_and_a_bad_address_is_2() {
    let home = Home::new();
    let run_aitk = |server: &str| {
        home.aitk()
            .args(["ps", "--server", server])
            .env("AITK_TOKEN", "t")
            .output()
            .unwrap()
    };
    let output = run_aitk("http://127.0.0.1:1");
    assert_eq!(code(&output), 5, "{}", err(&output));
    assert!(err(&output).contains("flag --server"), "{}", err(&output));
    assert_eq!(
        code(&run_aitk("http://gpu.example:7420")),
        2,
        "a token must not be sent without TLS"
    );
    assert_eq!(code(&run_aitk("ftp://x")), 2);
}

#[test]
fn an_existing_file_is_6() {
    let home = Home::new();
    let first = home.aitk().arg("init").output().unwrap();
    assert_eq!((code(&first), out(&first).as_str()), (0, "./job.yaml\n"));
    let again = home.aitk().arg("init").output().unwrap();
    assert_eq!(code(&again), 6);
    assert!(err(&again).contains("--force"), "{}", err(&again));
    assert_eq!(code(&home.aitk().args(["init", "--force"]).output().unwrap()), 0);
}

#[test]
fn a_closed_pipe_is_silent() {
    let home = Home::new();
    for args in [&["completions", "zsh"][..], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("aitk"));
        command
            .args(args)
            .env_clear()
            .env("HOME", home.path())
            .stdout(writer)
            .stderr(Stdio::piped());
        let output = command.output().unwrap();
        assert_eq!((code(&output), err(&output).as_str()), (141, ""), "{args:?}");
    }
}

#[test]
fn completions_have_all_commands() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish"] {
        let output = home.aitk().args(["completions", shell]).output().unwrap();
        assert_eq!(code(&output), 0);
        let text = out(&output);
        assert!(text.contains("artifacts") && text.contains("ca-file"), "{shell}");
        // Only aitk itself starts an attempt.
        assert!(
            !text.contains("aitk,attempt") && !text.contains("Run one attempt"),
            "{shell}"
        );
    }
}

#[test]
fn no_color_disables_colours() {
    let home = Home::new();
    let output = home.aitk().arg("ps").env("NO_COLOR", "1").output().unwrap();
    assert!(!err(&output).contains('\x1b'));
}

#[test]
fn errors_in_settings_files_have_the_line() {
    let home = Home::new();
    home.write("aitk.yaml", "server: http://127.0.0.1:1\ntokenfile: x\n");
    let output = home.aitk().arg("ps").output().unwrap();
    assert_eq!(code(&output), 1);
    assert!(
        err(&output).contains("aitk.yaml:2: 'tokenfile' is not a setting"),
        "{}",
        err(&output)
    );
}
