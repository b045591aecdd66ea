//! Runs small programs as extensions, without a sandbox; `tests/tests` runs them inside one.

#![allow(clippy::unwrap_used)]

use super::super::run;
use crate::StopSignal;
use crate::events::EventSink;
use crate::testing::attempt;
use aitk_common::attempt::{ChildEvent, ExtensionProgram, FailureCause, Outcome};
use aitk_common::job::{Format, LoadOptions, parse};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

const HELLO: &str =
    r#"echo '{"type":"hello","version":1,"config_schema":{"properties":{"steps":{"type":"integer"}}}}'; read start"#;
const STEP: &str = r#"echo '{"type":"progress","step":3,"total":9,"loss":0.5}'"#;

/// Runs a shell script as the extension `test`. Returns the outcome and the events.
fn run_script(script: &str, config: &str, silence: Duration, stop: &StopSignal) -> (Outcome, Vec<ChildEvent>) {
    let folder = tempfile::tempdir().unwrap();
    let mut events = Vec::new();
    (
        run_in(folder.path(), script, config, silence, stop, &mut events),
        events,
    )
}

fn run_in(
    folder: &Path,
    script: &str,
    config: &str,
    silence: Duration,
    stop: &StopSignal,
    events: &mut dyn EventSink,
) -> Outcome {
    let program = folder.join("program");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let text = format!(
        "job: extension\nconfig:\n  name: a\n  training_folder: {}\n  process:\n    - type: extension:test\n      config: {config}\n",
        folder.join("out").display()
    );
    let job = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap();
    let mut spec = attempt(&job.spec, &text);
    spec.extension = Some(ExtensionProgram {
        name: "test".into(),
        program,
        silence,
    });
    run(&spec, events, stop)
}

const LONG: Duration = Duration::from_secs(600);

fn failure(script: &str, silence: Duration) -> (FailureCause, String) {
    match run_script(script, "{steps: 3}", silence, &StopSignal::new()).0 {
        Outcome::Failed { cause, message } => (cause, message),
        other => panic!("{script}: {other:?}"),
    }
}

#[test]
fn a_program_trains_and_its_messages_become_events() {
    let script = format!(
        r#"{HELLO}; echo "$start" > start.json; echo '{{"type":"log","level":"info","message":"hi"}}'; {STEP}
echo '{{"type":"artifact","path":"start.json"}}'; echo '{{"type":"progress","step":9,"total":9}}'; echo '{{"type":"done"}}'"#
    );
    let folder = tempfile::tempdir().unwrap();
    let mut events = Vec::new();
    let outcome = run_in(
        folder.path(),
        &script,
        "{steps: 3}",
        LONG,
        &StopSignal::new(),
        &mut events,
    );
    assert_eq!(outcome, Outcome::Completed, "{events:?}");
    let has = |wanted: &dyn Fn(&ChildEvent) -> bool| assert!(events.iter().any(wanted), "{events:?}");
    has(&|event| matches!(event, ChildEvent::Log { message, .. } if message == "hi"));
    has(&|event| matches!(event, ChildEvent::Progress { done: 9, total: 9, .. }));
    has(&|event| matches!(event, ChildEvent::Metrics { step: 3, values } if values["loss/loss"] == 0.5));
    has(&|event| matches!(event, ChildEvent::Artifact { name, .. } if name == "a/start.json"));
    let start = std::fs::read(folder.path().join("out/a/start.json")).unwrap();
    let start: serde_json::Value = serde_json::from_slice(&start).unwrap();
    assert_eq!(start["config"], serde_json::json!({"steps": 3}));
    assert_eq!((&start["device"], &start["seed"]), (&"cpu".into(), &7.into()));
}

#[test]
fn a_program_that_dies_hangs_or_lies_fails_with_a_message() {
    for (rest, cause, expected) in [
        (
            "kill -9 $$",
            FailureCause::Job,
            "was killed by signal 9 (SIGKILL) at step 3 of 9, before it sent `done`",
        ),
        (
            "echo oops >&2; exit 3",
            FailureCause::BadInput,
            "exited with code 3 at step 3 of 9, before it sent `done`; the end of its standard error: oops",
        ),
        ("exit 0", FailureCause::BadInput, "exited with code 0 at step 3 of 9"),
        (
            r#"echo '{"type":"progress","step":2,"total":9}'"#,
            FailureCause::BadInput,
            "progress went backwards",
        ),
        (
            r#"echo '{"type":"done"}'"#,
            FailureCause::BadInput,
            "`done` at step 3 of 9",
        ),
        (
            r#"echo '{"type":"artifact","path":"../x"}'"#,
            FailureCause::BadInput,
            "announced the file `../x`",
        ),
        (
            r#"ln -s /etc/passwd l; echo '{"type":"artifact","path":"l"}'"#,
            FailureCause::BadInput,
            "is a link",
        ),
        (
            r#"echo '{"type":"error","message":"no data"}'"#,
            FailureCause::BadInput,
            "failed: no data",
        ),
        (
            r#"echo '{"type":"progress","step":9,"total":9}'; echo '{"type":"done"}'; exit 4"#,
            FailureCause::BadInput,
            "sent `done`, but then exited with code 4",
        ),
        (r"printf '\377\n'", FailureCause::BadInput, "not UTF-8"),
        (
            "head -c 100000 /dev/zero",
            FailureCause::BadInput,
            "a line of more than 65536 bytes",
        ),
        (
            r#"yes '{"type":"log","level":"info","message":"x"}'"#,
            FailureCause::BadInput,
            "floods",
        ),
    ] {
        let (found, message) = failure(&format!("{HELLO}; {STEP}; {rest}"), LONG);
        assert!(
            message.starts_with("the extension `test` ") && message.contains(expected),
            "{rest}: {message}"
        );
        assert_eq!(found, cause, "{message}");
    }
    let second = Duration::from_secs(1);
    let (cause, message) = failure(&format!("{HELLO}; {STEP}; exec sleep 1000"), second);
    assert_eq!(cause, FailureCause::Job);
    assert_eq!(
        message,
        "the extension `test` hangs: it sent no message for 1 s at step 3 of 9"
    );
    let (_, message) = failure("exec sleep 1000", second);
    assert_eq!(
        message,
        "the extension `test` hangs: it did not send `hello` within 1 s"
    );
}

#[test]
fn log_lines_that_are_left_out_are_counted() {
    let script = format!("{HELLO}; yes line | head -n 50000 >&2; exit 3");
    let (_, events) = run_script(&script, "{}", LONG, &StopSignal::new());
    let logs = events.iter().filter_map(|event| match event {
        ChildEvent::Log { message, .. } => Some(message.as_str()),
        _ => None,
    });
    let (shown, others): (Vec<_>, Vec<_>) = logs.partition(|message| *message == "line");
    let left_out = others.iter().find_map(|message| {
        message.strip_suffix(" lines of the extension were left out of the log: it wrote too many")
    });
    let left_out: usize = left_out.unwrap().parse().unwrap();
    assert!(!shown.is_empty());
    assert_eq!(shown.len() + left_out, 50_000);
}

#[test]
fn a_config_that_the_program_does_not_accept_names_the_key() {
    let outcome = run_script(HELLO, "{steps: many}", LONG, &StopSignal::new()).0;
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(
        message,
        "the extension `test` does not accept its config: `config.steps` is \"many\"; expected a value of type integer"
    );
}

/// Tells the process to stop when it reports progress.
struct StopAtProgress(StopSignal);

impl EventSink for StopAtProgress {
    fn emit(&mut self, event: ChildEvent) {
        if matches!(event, ChildEvent::Progress { .. }) {
            self.0.stop();
        }
    }
}

#[test]
fn a_program_is_told_to_stop_and_may_end() {
    let folder = tempfile::tempdir().unwrap();
    let stop = StopSignal::new();
    let script = format!(r#"{HELLO}; {STEP}; read stop; echo "$stop" > stop.json"#);
    let outcome = run_in(
        folder.path(),
        &script,
        "{}",
        LONG,
        &stop,
        &mut StopAtProgress(stop.clone()),
    );
    assert!(matches!(outcome, Outcome::Stopped { .. }), "{outcome:?}");
    let message = std::fs::read_to_string(folder.path().join("out/a/stop.json")).unwrap();
    assert_eq!(message.trim(), r#"{"type":"stop"}"#);
}

/// The program takes the first message for `start`.
#[test]
fn a_program_that_is_stopped_before_its_hello_has_stopped() {
    let stop = StopSignal::new();
    stop.stop();
    let script = format!(r#"sleep 1; {HELLO}; case "$start" in *stop*) exit 1;; esac"#);
    let (outcome, _) = run_script(&script, "{}", LONG, &stop);
    assert!(matches!(outcome, Outcome::Stopped { .. }), "{outcome:?}");
}

#[test]
fn an_extension_that_the_owner_does_not_allow_is_refused() {
    let text = "job: extension\nconfig:\n  name: a\n  training_folder: out\n  process:\n    - type: extension:test\n";
    let job = parse(text, Format::Yaml, None, &LoadOptions::default()).unwrap();
    let outcome = run(&attempt(&job.spec, text), &mut Vec::new(), &StopSignal::new());
    let Outcome::Failed { cause, message } = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(cause, FailureCause::BadInput);
    assert!(message.contains("--allow-extension test="), "{message}");
}
