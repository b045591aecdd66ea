//! The runner with shell scripts as children: some behave, some misbehave, some crash.

use crate::support::{TIMEOUT, eventually};
use aitk_common::attempt::{ChildEvent, FailureCause, Outcome};
use aitk_common::requested_outputs::RequestedOutputs;
use aitk_worker::runner::{self, DesiredState, Launch, PendingOutputs, Spawner};
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// How long children that save may take: longer than the time-out of a test, so that a kill would fail it.
const LONG_GRACE: Duration = Duration::from_secs(3600);
/// How long children that ignore the signal may take.
const SHORT_GRACE: Duration = Duration::from_millis(300);

const DONE: &str = r#"echo '{"event":"finished","outcome":{"outcome":"completed"}}'"#;

struct Child {
    outcome: Outcome,
    events: Vec<ChildEvent>,
}

impl Child {
    fn logs(&self) -> Vec<&str> {
        let logs = self.events.iter().filter_map(|event| match event {
            ChildEvent::Log { message, .. } => Some(message.as_str()),
            _ => None,
        });
        logs.collect()
    }

    fn failure(&self) -> (FailureCause, &str) {
        match &self.outcome {
            Outcome::Failed { cause, message } => (*cause, message),
            other => panic!("{other:?}"),
        }
    }
}

fn launch(script: &str, folder: &Path) -> Launch {
    Launch {
        command: ["sh", "-c", script].map(OsString::from).to_vec(),
        spec: folder.join("spec.json"),
        work_dir: Some(folder.to_owned()),
        temp_dir: folder.to_owned(),
        grace: SHORT_GRACE,
        progress_timeout: None,
        memory_limited: false,
        sandbox_profile: None,
        cuda_cache: None,
        control_groups: None,
        causes: Default::default(),
    }
}

async fn run(script: &str) -> Child {
    run_with(script, None, |_| {}).await
}

/// Runs a script, and requests `state` when it prints `ready`.
async fn run_and_request(script: &str, state: DesiredState, grace: Duration) -> Child {
    run_with(script, Some(state), |launch| launch.grace = grace).await
}

/// Runs a script under a watchdog with a short limit.
async fn run_watched(script: &str, grace: Duration) -> Child {
    run_with(script, None, |launch| {
        launch.grace = grace;
        launch.progress_timeout = Some(Duration::from_millis(800));
    })
    .await
}

async fn run_with(script: &str, when_ready: Option<DesiredState>, change: impl FnOnce(&mut Launch)) -> Child {
    let folder = tempfile::tempdir().unwrap();
    let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
    let (desired, desired_rx) = watch::channel(DesiredState::Run);
    let (events, mut event_receiver) = mpsc::channel(4);
    let mut launch = launch(script, folder.path());
    change(&mut launch);
    let child = runner::run(&spawner, launch, desired_rx, events, PendingOutputs::new());
    let listen = async {
        let mut all = Vec::new();
        while let Some(event) = event_receiver.recv().await {
            if let (Some(state), ChildEvent::Log { message, .. }) = (when_ready, &event)
                && message == "ready"
            {
                desired.send_replace(state);
            }
            all.push(event);
        }
        all
    };
    let all = async { tokio::join!(child, listen) };
    let (outcome, events) = tokio::time::timeout(TIMEOUT, all).await.expect("the child hangs");
    Child { outcome, events }
}

#[tokio::test]
async fn events_arrive_in_order_and_the_last_one_is_the_outcome() {
    let script = format!(
        r#"echo '{{"event":"phase","name":"training"}}'; echo '{{"event":"progress","done":1,"total":2,"seconds_per_step":0.5}}'
        {DONE}; echo '{{"event":"phase","name":"too late"}}'"#
    );
    let child = run(&script).await;
    assert_eq!(child.outcome, Outcome::Completed);
    let expected = [
        ChildEvent::Phase {
            name: "training".into(),
        },
        ChildEvent::Progress {
            done: 1,
            total: 2,
            seconds_per_step: Some(0.5),
        },
    ];
    assert_eq!(child.events, expected);
}

#[tokio::test]
async fn invalid_lines_on_standard_output_become_bounded_log_lines() {
    let script =
        format!(r"printf 'hello\n\n{{broken\n\377\376\n'; head -c 3000000 /dev/zero | tr '\0' x; echo; {DONE}");
    let child = run(&script).await;
    assert_eq!(child.outcome, Outcome::Completed);
    let logs = child.logs();
    assert_eq!(logs[..2], ["hello", "{broken"]);
    assert_eq!(logs[2], "\u{fffd}\u{fffd}");
    assert!(
        logs[3].starts_with("a line of 3000000 bytes was left out") && logs[3].len() < 400,
        "{}",
        logs[3]
    );
    assert_eq!(logs.len(), 4);
}

#[tokio::test]
async fn the_child_gets_its_arguments_a_clean_environment_and_its_own_group() {
    let script = format!(r#"echo "$0 $1"; echo "job=$AITK_JOB_ID token=$AITK_TOKEN tmp=$TMPDIR cargo=$CARGO"; {DONE}"#);
    let child = run(&script).await;
    let logs = child.logs();
    assert_eq!(logs[0], "attempt --spec");
    assert!(
        logs[1].starts_with("job= token= tmp=/") && logs[1].ends_with("cargo="),
        "{}",
        logs[1]
    );
}

#[tokio::test]
async fn the_child_gets_requests_for_outputs_as_lines_on_its_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
    let (_desired, desired_rx) = watch::channel(DesiredState::Run);
    let (events, mut event_receiver) = mpsc::channel(4);
    let script = format!(r#"read -r line; echo "got $line"; read -r line; echo "got $line"; {DONE}"#);
    let outputs = PendingOutputs::new();
    // Before the child exists, and twice.
    outputs.request(RequestedOutputs::SAVE);
    outputs.request(RequestedOutputs::SAVE);
    let child = runner::run(
        &spawner,
        launch(&script, folder.path()),
        desired_rx,
        events,
        outputs.clone(),
    );
    let listen = async {
        let mut lines = Vec::new();
        while let Some(event) = event_receiver.recv().await {
            if let ChildEvent::Log { message, .. } = event {
                lines.push(message);
                outputs.request(RequestedOutputs::SAMPLES);
            }
        }
        lines
    };
    let all = async { tokio::join!(child, listen) };
    let (outcome, lines) = tokio::time::timeout(TIMEOUT, all).await.expect("the child hangs");
    assert_eq!(outcome, Outcome::Completed);
    assert_eq!(
        lines,
        [
            r#"got {"save":true,"samples":false}"#,
            r#"got {"save":false,"samples":true}"#
        ]
    );
}

#[tokio::test]
async fn the_message_of_a_crash_has_the_last_lines_of_standard_error() {
    let child = run("echo 'CUDA driver error: 700' >&2; exit 9").await;
    let (cause, message) = child.failure();
    assert_eq!(cause, FailureCause::Machine);
    assert!(
        message.contains("exit code 9") && message.contains("driver error: 700"),
        "{message}"
    );

    let child = run("kill -SEGV $$").await;
    assert!(child.failure().1.contains("SIGSEGV"), "{:?}", child.outcome);
    let child = run("echo 'memory allocation of 99 bytes failed' >&2; kill -ABRT $$").await;
    assert_eq!(child.failure().0, FailureCause::OutOfMemory);
    let child = run("true").await;
    assert_eq!(child.failure().0, FailureCause::Internal);
}

#[tokio::test]
async fn a_missing_program_is_a_failure_of_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
    let launch = Launch {
        command: vec!["/nowhere/aitk".into()],
        ..launch("", folder.path())
    };
    let (_desired, receiver) = watch::channel(DesiredState::Run);
    let outcome = runner::run(&spawner, launch, receiver, mpsc::channel(1).0, PendingOutputs::new()).await;
    assert!(
        matches!(&outcome, Outcome::Failed { cause: FailureCause::Machine, message } if message.contains("/nowhere/aitk"))
    );
}

#[tokio::test]
async fn a_child_that_is_asked_to_stop_may_save_first() {
    let script = r#"trap 'echo "{\"event\":\"finished\",\"outcome\":{\"outcome\":\"stopped\",\"saved_step\":7}}"; exit 3' TERM
        echo ready; while :; do sleep 0.05; done"#;
    let child = run_and_request(script, DesiredState::Stop, LONG_GRACE).await;
    // A killed child would have no saved step.
    let saved = Outcome::Stopped {
        saved_step: Some(7),
        at_step: None,
    };
    assert_eq!(child.outcome, saved);
}

#[tokio::test]
async fn a_child_that_does_not_stop_is_killed_with_all_its_processes() {
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("grandchild");
    let script = format!(
        "trap '' TERM; sleep 1000 & echo $! > {}; echo ready; while :; do sleep 0.05; done",
        note.display()
    );
    let child = run_and_request(&script, DesiredState::Stop, SHORT_GRACE).await;
    assert_eq!(child.outcome, Outcome::stopped());
    let grandchild = read_pid(&note);
    eventually("the grandchild was not killed", || {
        !is_running(grandchild) || is_zombie(grandchild)
    })
    .await;
}

fn read_pid(path: &Path) -> i32 {
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

fn is_running(pid: i32) -> bool {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None).is_ok()
}

/// In a container an orphan may stay as a zombie, if no process reaps it.
fn is_zombie(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

#[tokio::test]
async fn a_fenced_child_is_killed_without_a_grace_period() {
    let script = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let child = run_and_request(script, DesiredState::Kill, LONG_GRACE).await;
    assert_eq!(child.outcome, Outcome::stopped());
}

#[tokio::test]
async fn standard_input_stays_open_while_the_child_runs() {
    // `read` would return at once if standard input were closed. At the end the group is killed before the pipe is closed.
    let script = format!("exec 3<&0; (read line <&3; echo closed >&2) & sleep 0.3; {DONE}");
    let child = run(&script).await;
    assert_eq!(child.outcome, Outcome::Completed);
    assert!(child.logs().is_empty(), "{:?}", child.logs());
}

#[tokio::test]
async fn a_process_that_keeps_the_pipe_open_does_not_block_the_attempt() {
    let Ok(found) = std::process::Command::new("setsid").arg("--version").output() else {
        return crate::skip::skip("setsid", "there is no `setsid` command");
    };
    assert!(found.status.success());
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("pid");
    // It leaves the process group, and sleeps for longer than the time-out of the test.
    let script = format!(
        "setsid sh -c 'echo $$ > {0}; exec sleep 1000' & while [ ! -s {0} ]; do sleep 0.02; done; {DONE}",
        note.display()
    );
    let child = run(&script).await;
    assert_eq!(child.outcome, Outcome::Completed);
    let pid = read_pid(&note);
    assert!(is_running(pid), "the process that keeps the pipe open ended first");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
}

const STEP: &str = r#"echo '{"event":"progress","done":1,"total":9,"seconds_per_step":0.1}'"#;
const TRAINING: &str = r#"echo '{"event":"phase","name":"training"}'"#;

#[tokio::test]
async fn a_hung_child_causes_a_warning_and_is_killed() {
    // The child is stopped by SIGSTOP, as a debugger may do; it ignores SIGTERM and hangs again.
    let script = format!("trap '' TERM; {TRAINING}; {STEP}; {STEP}; while :; do kill -STOP $$; done");
    let child = run_watched(&script, SHORT_GRACE).await;
    let (cause, message) = child.failure();
    assert_eq!(cause, FailureCause::NoProgress);
    assert!(
        message.starts_with("no progress for ") && message.ends_with("it was killed"),
        "{message}"
    );
    let logs = child.logs();
    assert!(
        logs.iter()
            .any(|line| line.starts_with("no progress for ") && line.contains("it is ended and tried again")),
        "{logs:?}"
    );
    // The displayed phase changes, and the old rate is withdrawn.
    let has_event = |is_expected: fn(&ChildEvent) -> bool| child.events.iter().any(is_expected);
    assert!(has_event(
        |event| matches!(event, ChildEvent::Phase { name } if name.starts_with("no progress for "))
    ));
    assert!(has_event(|event| matches!(
        event,
        ChildEvent::Progress {
            done: 1,
            total: 9,
            seconds_per_step: None
        }
    )));
}

#[tokio::test]
async fn a_child_that_was_stopped_by_sigstop_may_save_before_it_exits() {
    let script = format!(
        "trap 'echo saved >&2; echo \"{{\\\"event\\\":\\\"finished\\\",\\\"outcome\\\":{{\\\"outcome\\\":\\\"stopped\\\"}}}}\"; exit 3' TERM\n{TRAINING}; {STEP}; {STEP}; kill -STOP $$; sleep 10"
    );
    let child = run_watched(&script, LONG_GRACE).await;
    let (cause, message) = child.failure();
    assert_eq!(cause, FailureCause::NoProgress);
    assert!(message.ends_with("it stopped when it was asked to"), "{message}");
    assert!(child.logs().contains(&"saved"), "{:?}", child.logs());
}
