//! The runner against children that behave, misbehave and crash: shell scripts.

use aitk_common::attempt::{ChildEvent, FailureCause, Outcome};
use aitk_worker::runner::{self, Launch, Spawner, Wanted};
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

const DONE: &str = r#"echo '{"event":"finished","outcome":{"outcome":"completed"}}'"#;

struct Child {
    outcome: Outcome,
    events: Vec<ChildEvent>,
    took: Duration,
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
        grace: Duration::from_millis(300),
        progress_timeout: None,
        memory_limited: false,
        sandbox_profile: None,
        cuda_cache: None,
        groups: None,
    }
}

async fn run_and(script: &str, wishes: &[(u64, Wanted)]) -> Child {
    run_watched(script, wishes, None).await
}

async fn run_watched(script: &str, wishes: &[(u64, Wanted)], progress_timeout: Option<Duration>) -> Child {
    let folder = tempfile::tempdir().unwrap();
    let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
    let (wanted, receiver) = watch::channel(Wanted::Run);
    let (events, mut heard) = mpsc::channel(4);
    let began = Instant::now();
    let launch = Launch {
        progress_timeout,
        ..launch(script, folder.path())
    };
    let child = runner::run(&spawner, launch, receiver, events);
    let listen = async {
        let mut all = Vec::new();
        while let Some(event) = heard.recv().await {
            all.push(event);
        }
        all
    };
    let wish = async {
        for (after, wish) in wishes {
            tokio::time::sleep(Duration::from_millis(*after)).await;
            wanted.send_replace(*wish);
        }
    };
    let all = async { tokio::join!(child, listen, wish) };
    let (outcome, events, ()) = tokio::time::timeout(Duration::from_secs(20), all)
        .await
        .expect("the child hangs");
    Child {
        outcome,
        events,
        took: began.elapsed(),
    }
}

async fn run(script: &str) -> Child {
    run_and(script, &[]).await
}

#[tokio::test]
async fn events_come_in_order_and_the_last_one_is_the_outcome() {
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
async fn garbage_on_standard_output_is_log_text_within_bounds() {
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
async fn a_crash_is_told_with_its_last_words() {
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
async fn a_program_that_is_not_there_is_a_failure_of_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
    let launch = Launch {
        command: vec!["/nowhere/aitk".into()],
        ..launch("", folder.path())
    };
    let (_wanted, receiver) = watch::channel(Wanted::Run);
    let outcome = runner::run(&spawner, launch, receiver, mpsc::channel(1).0).await;
    assert!(
        matches!(&outcome, Outcome::Failed { cause: FailureCause::Machine, message } if message.contains("/nowhere/aitk"))
    );
}

#[tokio::test]
async fn a_child_that_is_asked_to_stop_may_save_first() {
    let script = r#"trap 'echo "{\"event\":\"finished\",\"outcome\":{\"outcome\":\"stopped\"}}"; exit 3' TERM
        while :; do sleep 0.05; done"#;
    let child = run_and(script, &[(200, Wanted::Stop)]).await;
    assert_eq!(child.outcome, Outcome::stopped());
    assert!(child.took < Duration::from_secs(3), "{:?}", child.took);
}

#[tokio::test]
async fn a_child_that_does_not_stop_is_killed_with_all_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("grandchild");
    let script = format!(
        "trap '' TERM; sleep 100 & echo $! > {}; while :; do sleep 0.05; done",
        note.display()
    );
    let child = run_and(&script, &[(300, Wanted::Stop)]).await;
    assert_eq!(child.outcome, Outcome::stopped());
    assert!(child.took < Duration::from_secs(5), "{:?}", child.took);
    let grandchild: i32 = std::fs::read_to_string(note).unwrap().trim().parse().unwrap();
    let gone =
        || nix::sys::signal::kill(nix::unistd::Pid::from_raw(grandchild), None).is_err() || is_zombie(grandchild);
    let until = Instant::now() + Duration::from_secs(5);
    while !gone() {
        assert!(Instant::now() < until, "the grandchild lives");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// An orphan in a container may stay as a zombie when nobody reaps it.
fn is_zombie(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

#[tokio::test]
async fn a_fenced_child_ends_at_once() {
    let child = run_and("trap '' TERM; while :; do sleep 0.05; done", &[(100, Wanted::Kill)]).await;
    assert!(child.took < Duration::from_secs(3), "{:?}", child.took);
}

#[tokio::test]
async fn standard_input_is_open_while_the_daemon_wants_the_child() {
    // `read` would return at once if it were closed. At the end the group is killed before the pipe is closed.
    let script = format!("exec 3<&0; (read line <&3; echo closed >&2) & sleep 0.3; {DONE}");
    let child = run(&script).await;
    assert_eq!(child.outcome, Outcome::Completed);
    assert!(child.logs().is_empty(), "{:?}", child.logs());
}

#[tokio::test]
async fn something_that_keeps_the_pipe_open_does_not_hang_the_attempt() {
    let Ok(found) = std::process::Command::new("setsid").arg("--version").output() else {
        return;
    };
    assert!(found.status.success());
    let child = run(&format!("setsid sleep 4 & {DONE}")).await;
    assert_eq!(child.outcome, Outcome::Completed);
    assert!(child.took < Duration::from_millis(3900), "{:?}", child.took);
}

const STEP: &str = r#"echo '{"event":"progress","done":1,"total":9,"seconds_per_step":0.1}'"#;
const TRAINING: &str = r#"echo '{"event":"phase","name":"training"}'"#;

#[tokio::test]
async fn a_child_that_hangs_is_announced_ended_and_told_apart() {
    // Stopped by a signal, as somebody or a debugger may do it; it ignores that it is told to stop and hangs again.
    let script = format!("trap '' TERM; {TRAINING}; {STEP}; {STEP}; while :; do kill -STOP $$; done");
    let child = run_watched(&script, &[], Some(Duration::from_millis(800))).await;
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
    // What screens show: not the rate of before.
    let said = |wanted: fn(&ChildEvent) -> bool| child.events.iter().any(wanted);
    assert!(said(
        |event| matches!(event, ChildEvent::Phase { name } if name.starts_with("no progress for "))
    ));
    assert!(said(|event| matches!(
        event,
        ChildEvent::Progress {
            done: 1,
            total: 9,
            seconds_per_step: None
        }
    )));
}

#[tokio::test]
async fn a_child_that_was_stopped_by_a_signal_may_save_before_it_is_ended() {
    let script = format!(
        "trap 'echo saved >&2; echo \"{{\\\"event\\\":\\\"finished\\\",\\\"outcome\\\":{{\\\"outcome\\\":\\\"stopped\\\"}}}}\"; exit 3' TERM\n{TRAINING}; {STEP}; {STEP}; kill -STOP $$; sleep 10"
    );
    let child = run_watched(&script, &[], Some(Duration::from_millis(800))).await;
    let (cause, message) = child.failure();
    assert_eq!(cause, FailureCause::NoProgress);
    assert!(message.ends_with("it stopped when it was told to"), "{message}");
    assert!(child.logs().contains(&"saved"), "{:?}", child.logs());
}
