//! The program against a fake coordinator with scripted answers.

use crate::support::{FakeCoordinator, FakeState, Home, code, err, job, log, out};
use aitk_proto::v1::{self, JobState};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use tonic::Status;

/// Runs the program against a fake coordinator.
async fn run_aitk(fake: &FakeCoordinator, args: &[&str]) -> Output {
    run_aitk_with_env(fake, args, &[]).await
}

async fn run_aitk_with_env(fake: &FakeCoordinator, args: &[&str], env: &[(&str, &str)]) -> Output {
    run_aitk_in(&Home::new(), fake, args, env).await
}

/// Runs the program in this home folder against a fake coordinator.
async fn run_aitk_in(home: &Home, fake: &FakeCoordinator, args: &[&str], env: &[(&str, &str)]) -> Output {
    let address = fake.serve().await;
    let mut command = home.aitk();
    command
        .args(args)
        .env("AITK_SERVER", format!("http://{address}"))
        .env("AITK_TOKEN", "t");
    command.envs(env.iter().copied());
    tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap()
}

/// Starts the program in this home folder against a fake coordinator. No hub answers.
async fn start_aitk(home: &Home, fake: &FakeCoordinator, args: &[&str], stderr: Stdio) -> Child {
    let address = fake.serve().await;
    Command::new(assert_cmd::cargo::cargo_bin("aitk"))
        .args(args)
        .env_clear()
        .env("HOME", home.path())
        .env("PATH", "/usr/bin:/bin")
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .env("AITK_SERVER", format!("http://{address}"))
        .env("AITK_TOKEN", "t")
        .current_dir(home.path())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .unwrap()
}

/// Waits until something has happened, while the program runs.
async fn wait_while_running(child: &mut Child, has_happened: impl Fn() -> bool) {
    while !has_happened() {
        assert_eq!(child.try_wait().unwrap(), None);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Sends the signal of Ctrl-C.
fn interrupt(child: &Child) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGINT).unwrap();
}

fn fake(jobs: Vec<v1::Job>) -> FakeCoordinator {
    let fake = FakeCoordinator::default();
    fake.0.lock().unwrap().jobs = jobs;
    fake
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_listed_for_people_scripts_and_programs() {
    let fake = fake(vec![
        job("j1-aaaaaaaaaaaa", "ada", JobState::Running),
        job("j2", "bob", JobState::Failed),
    ]);
    let plain = run_aitk(&fake, &["ps"]).await;
    assert_eq!(code(&plain), 0, "{}", err(&plain));
    assert!(
        out(&plain)
            .starts_with("ID\tNAME\tSTATE\tSTEP\tLOSS\tSPEED\tETA\tSINCE\tDETAIL\nj1-aaaaaaaaaaaa\tada\trunning\t"),
        "{}",
        out(&plain)
    );
    let table = run_aitk_with_env(&fake, &["ps"], &[("COLUMNS", "60")]).await;
    assert!(
        out(&table).lines().all(|line| line.chars().count() <= 60),
        "{}",
        out(&table)
    );
    assert_eq!(out(&run_aitk(&fake, &["ps", "-q"]).await), "j1-aaaaaaaaaaaa\nj2\n");
    let json: serde_json::Value = serde_json::from_str(&out(&run_aitk(&fake, &["ps", "--json"]).await)).unwrap();
    assert_eq!(json["schema_version"], 1);
    assert_eq!(json["jobs"][0]["state"], "running");
    assert_eq!(json["jobs"][0]["created"], "2023-11-14T22:13:20.000Z");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_the_coordinator_become_exit_codes() {
    for (status, exit) in [
        (Status::unauthenticated("the token is wrong"), 4),
        (
            Status::failed_precondition("protocol 2 is spoken here, not 1: update aitk"),
            6,
        ),
        (Status::internal("oops"), 1),
    ] {
        let fake = FakeCoordinator::default();
        fake.0.lock().unwrap().refuse = Some(status.clone());
        let output = run_aitk(&fake, &["ps"]).await;
        assert_eq!(code(&output), exit);
        assert!(
            err(&output).starts_with("error: ") && err(&output).contains(status.message()),
            "{}",
            err(&output)
        );
    }
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    assert_eq!(code(&run_aitk(&fake, &["logs", "nobody"]).await), 3);
    assert_eq!(code(&run_aitk(&fake, &["resume", "ada"]).await), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_followed_job_gives_its_exit_code() {
    for (state, exit) in [
        (JobState::Completed, 0),
        (JobState::Failed, 1),
        (JobState::Stopped, 143),
    ] {
        let fake = fake(vec![job("j1", "ada", state)]);
        for args in [&["watch", "j1"][..], &["logs", "-f", "j1"], &["wait", "j1"]] {
            assert_eq!(code(&run_aitk(&fake, args).await), exit, "{args:?} {state:?}");
        }
    }
    let both = fake(vec![
        job("j1", "ada", JobState::Completed),
        job("j2", "bob", JobState::Stopped),
    ]);
    let output = run_aitk(&both, &["wait", "-q", "ada", "bob", "j1"]).await;
    assert_eq!((code(&output), out(&output).as_str()), (143, "j1\nj2\n"));
    let running = fake(vec![job("j1", "ada", JobState::Running)]);
    assert_eq!(code(&run_aitk(&running, &["wait", "j1", "--timeout", "1s"]).await), 124);
}

/// Before, nothing was said about jobs that had ended already.
#[tokio::test(flavor = "multi_thread")]
async fn wait_says_of_each_job_what_it_is_when_its_time_has_passed() {
    let fake = fake(vec![
        job("j1", "ada", JobState::Completed),
        job("j2", "bob", JobState::Running),
        job("j3", "eve", JobState::Failed),
    ]);
    let all = ["wait", "j1", "j2", "j3", "--timeout", "1s"];
    let output = run_aitk(&fake, &all).await;
    assert_eq!(
        (code(&output), out(&output).as_str()),
        (
            124,
            "j1 ada completed\nj2 bob running\nj3 eve failed: because the test says so\n"
        )
    );
    assert!(
        err(&output).contains("and 1 of 3 jobs have not ended"),
        "{}",
        err(&output)
    );
    let output = run_aitk(&fake, &[&all[..], &["-q"]].concat()).await;
    assert_eq!((code(&output), out(&output).as_str()), (124, "j1\nj3\n"));
    let output = run_aitk(&fake, &[&all[..], &["--json"]].concat()).await;
    let printed: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    let states: Vec<_> = printed["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|job| &job["state"])
        .collect();
    assert_eq!(states, ["completed", "running", "failed"]);
    // A job that is gone is named beside the others.
    let output = run_aitk(&fake, &["wait", "j2", "--timeout", "1s"]).await;
    assert!(err(&output).contains("the job has not ended"), "{}", err(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_notification_does_not_change_the_exit_code() {
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    // The coordinator restarts right after it reported that the job has ended.
    fake.0.lock().unwrap().gets_to_answer = Some(1);
    let output = run_aitk(&fake, &["watch", "j1", "--notify-command", "true"]).await;
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert!(
        err(&output).contains("warning: the notification was not sent") && err(&output).contains("it restarts"),
        "{}",
        err(&output)
    );
}

/// A job without inputs. No hub answers.
const JOB: &str = "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      \
                   model: {name_or_path: org/model, arch: sd1}\n      generate: {prompts: [a]}\n";

#[tokio::test(flavor = "multi_thread")]
async fn the_id_of_a_job_is_shown_although_the_coordinator_fails_after_the_submission() {
    let fake = fake(Vec::new());
    let home = Home::new();
    home.write("job.yaml", JOB);
    let env = [("HF_ENDPOINT", "http://127.0.0.1:1")];
    let output = run_aitk_in(&home, &fake, &["submit", "job.yaml"], &env).await;
    assert_ne!(code(&output), 0);
    assert!(err(&output).contains("aitk watch j1"), "{}", err(&output));
}

/// Interrupts `aitk submit` when the coordinator has got a call that it does not answer. Returns what the command wrote to standard
/// error.
async fn interrupt_submit(fake: &FakeCoordinator, has_hung: impl Fn(&FakeState) -> bool) -> String {
    let home = Home::new();
    home.write("job.yaml", JOB);
    let mut child = start_aitk(&home, fake, &["submit", "job.yaml"], Stdio::piped()).await;
    wait_while_running(&mut child, || has_hung(&fake.0.lock().unwrap())).await;
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    // The call that hangs ends by itself after 30 seconds, with this error.
    assert!(!text.contains("did not answer within"), "{text}");
    assert_eq!(output.status.code(), Some(130), "{text}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_works_while_a_job_is_submitted() {
    let fake = fake(Vec::new());
    fake.0.lock().unwrap().hang_submits = true;
    interrupt_submit(&fake, |state| state.unanswered_submits > 0).await;
}

/// Before, Ctrl-C had no effect then.
#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_names_a_job_that_was_submitted() {
    let fake = fake(Vec::new());
    {
        let mut state = fake.0.lock().unwrap();
        // Calls of `Get` count after a job is followed.
        state.event_calls.push((0, true));
        (state.gets_to_answer, state.hang) = (Some(0), true);
    }
    let text = interrupt_submit(&fake, |state| state.unanswered_gets > 0).await;
    assert!(text.contains("aitk watch j1"), "{text}");
}

/// Writes a program that creates the file `begun`, takes this many seconds, and creates the file `ended`.
fn slow_command(home: &Home, seconds: u32) -> String {
    let text = format!("#!/bin/sh\ntouch begun\nsleep {seconds}\ntouch ended\n");
    let path = home.write("notify", &text);
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_works_while_a_notification_is_sent() {
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    let home = Home::new();
    let command = slow_command(&home, 60);
    let args = ["watch", "j1", "--notify-command", command.as_str()];
    let mut child = start_aitk(&home, &fake, &args, Stdio::null()).await;
    wait_while_running(&mut child, || home.path().join("begun").exists()).await;
    interrupt(&child);
    // The job has ended, and its exit code counts.
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!home.path().join("ended").exists(), "it waited for the notification");
}

/// Before, the job counted as one that had not ended in time.
#[tokio::test(flavor = "multi_thread")]
async fn the_time_limit_of_wait_is_not_for_the_notification() {
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    let home = Home::new();
    let command = slow_command(&home, 3);
    let args = ["wait", "j1", "--timeout", "1s", "--notify-command", command.as_str()];
    let output = run_aitk_in(&home, &fake, &args, &[]).await;
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert!(
        home.path().join("ended").exists(),
        "it did not wait for the notification"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_works_while_the_reason_for_waiting_is_fetched() {
    let fake = fake(vec![job("j1", "ada", JobState::Queued)]);
    {
        let mut state = fake.0.lock().unwrap();
        (state.gets_to_answer, state.hang) = (Some(0), true);
    }
    let home = Home::new();
    let mut child = start_aitk(&home, &fake, &["watch", "j1"], Stdio::null()).await;
    let lookups = || fake.0.lock().unwrap().unanswered_gets;
    wait_while_running(&mut child, || lookups() > 0).await;
    interrupt(&child);
    while child.try_wait().unwrap().is_none() {
        if lookups() > 1 {
            // A second lookup means that the signal was missed.
            child.kill().unwrap();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// An array and its only member.
fn array(state: JobState) -> Vec<v1::Job> {
    let part = |index| v1::Array {
        id: "a1".to_owned(),
        index,
        size: 1,
        ..v1::Array::default()
    };
    let mut jobs = vec![job("a1", "sweep", state), job("a1-0", "sweep-0", state)];
    jobs[0].array = Some(part(None));
    jobs[1].array = Some(part(Some(0)));
    jobs
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_states_of_the_members_of_an_array_are_shown() {
    let fake = fake(array(JobState::Running));
    // All end between the two calls of a poll.
    fake.0.lock().unwrap().jobs_after_list = Some(array(JobState::Completed));
    let output = run_aitk(&fake, &["watch", "a1"]).await;
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert!(out(&output).contains("[0] completed"), "{}", out(&output));
}

/// Before, the logs of the other members ended too. This coordinator lists the array itself as a member.
#[tokio::test(flavor = "multi_thread")]
async fn the_logs_of_an_array_go_on_when_a_member_is_removed() {
    let fake = fake(array(JobState::Running));
    {
        let mut state = fake.0.lock().unwrap();
        state.jobs_after_list = Some(array(JobState::Completed));
        let removed = || Some(Status::not_found("no job a1-0"));
        let scripts = [
            (vec![], removed()),
            (vec![log(1, "first")], None),
            (vec![], removed()),
            (vec![log(2, "second")], None),
        ];
        state.scripts = scripts.into();
    }
    let output = run_aitk(&fake, &["logs", "-f", "a1"]).await;
    assert_eq!(code(&output), 0, "{}", err(&output));
    let text = out(&output);
    assert!(text.contains("first") && text.contains("second"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_works_while_the_members_of_an_array_are_fetched() {
    let fake = fake(array(JobState::Running));
    fake.0.lock().unwrap().hang_lists = true;
    let home = Home::new();
    let mut child = start_aitk(&home, &fake, &["watch", "a1"], Stdio::null()).await;
    wait_while_running(&mut child, || fake.0.lock().unwrap().unanswered_lists > 0).await;
    interrupt(&child);
    for _ in 0..500 {
        if child.try_wait().unwrap().is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Does nothing if it has ended.
    let _ = child.kill();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_failed_on_a_lost_worker_is_125() {
    let mut lost = job("j1", "ada", JobState::Failed);
    lost.attempts.push(v1::Attempt {
        id: "a1".to_owned(),
        epoch: 1,
        worker_id: "w1".to_owned(),
        worker_name: "box".to_owned(),
        device: Some(v1::DeviceRef {
            kind: v1::DeviceKind::Cpu.into(),
            index: 0,
        }),
        profile: v1::MemoryProfile::CpuOnly.into(),
        state: v1::AttemptState::Lost.into(),
        created_ms: 1,
        ended_ms: Some(2),
        message: String::new(),
        ..v1::Attempt::default()
    });
    assert_eq!(code(&run_aitk(&fake(vec![lost]), &["wait", "j1"]).await), 125);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_stream_continues_where_it_stopped() {
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    {
        let mut state = fake.0.lock().unwrap();
        let broken = Some(Status::unavailable("connection reset"));
        state.scripts.push_back((vec![log(1, "one")], None));
        state.scripts.push_back((vec![log(2, "two"), log(3, "three")], broken));
        // Events that the server repeats are not shown twice.
        state.scripts.push_back((vec![log(3, "three"), log(4, "four")], None));
    }
    let output = run_aitk(&fake, &["logs", "-f", "j1"]).await;
    assert_eq!(
        (code(&output), out(&output).as_str()),
        (
            0,
            "2023-11-14T22:13:21Z  one\n2023-11-14T22:13:22Z  two\n2023-11-14T22:13:23Z  three\n2023-11-14T22:13:24Z  four\n"
        ),
        "{}",
        err(&output)
    );
    assert_eq!(fake.0.lock().unwrap().event_calls, [(0, false), (1, true), (3, true)]);
    assert!(err(&output).contains("reconnecting"), "{}", err(&output));
}

/// The coordinator ends the stream of a program that reads nothing for a minute: its output may be in a pager.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_so_far_continues_where_its_stream_broke_off() {
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    let broken = || Some(Status::unavailable("no event was read for 60 seconds"));
    {
        let mut state = fake.0.lock().unwrap();
        state.scripts.push_back((vec![log(1, "one"), log(2, "two")], broken()));
        state.scripts.push_back((vec![log(3, "three")], None));
    }
    let output = run_aitk(&fake, &["logs", "j1"]).await;
    assert_eq!(
        (code(&output), out(&output).as_str()),
        (
            0,
            "2023-11-14T22:13:21Z  one\n2023-11-14T22:13:22Z  two\n2023-11-14T22:13:23Z  three\n"
        ),
        "{}",
        err(&output)
    );
    assert_eq!(fake.0.lock().unwrap().event_calls, [(0, false), (2, false)]);
    // A stream without events is not opened again and again.
    fake.0.lock().unwrap().scripts.push_back((Vec::new(), broken()));
    let output = run_aitk(&fake, &["logs", "j1"]).await;
    assert!(err(&output).contains("no event was read"), "{}", err(&output));
    assert_ne!(code(&output), 0);
}

/// As a proxy may do with every stream.
#[tokio::test(flavor = "multi_thread")]
async fn one_warning_says_that_streams_are_closed_before_the_job_ends() {
    let fake = fake(vec![job("j1", "ada", JobState::Running)]);
    let state = fake.0.clone();
    tokio::spawn(async move {
        let calls = || state.lock().unwrap().event_calls.len();
        while calls() < 3 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        state.lock().unwrap().jobs = vec![job("j1", "ada", JobState::Completed)];
    });
    let output = run_aitk(&fake, &["watch", "j1"]).await;
    assert_eq!(code(&output), 0, "{}", err(&output));
    let said = err(&output);
    let warning = "warning: the event stream was closed before the job ended";
    assert_eq!(said.matches(warning).count(), 1, "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_can_be_limited_and_streams_are_json_lines() {
    let jobs = vec![job("j1", "ada", JobState::Completed)];
    let lines = || (1..=5).map(|i| log(i, &format!("line {i}"))).collect::<Vec<_>>();
    let add_script = |fake: &FakeCoordinator| fake.0.lock().unwrap().scripts.push_back((lines(), None));
    let fake = fake(jobs);
    add_script(&fake);
    assert_eq!(
        out(&run_aitk(&fake, &["logs", "j1", "--tail", "2"]).await),
        "2023-11-14T22:13:24Z  line 4\n2023-11-14T22:13:25Z  line 5\n"
    );
    add_script(&fake);
    assert_eq!(
        out(&run_aitk(&fake, &["logs", "j1", "--since", "2023-11-14T22:13:25Z"]).await),
        "2023-11-14T22:13:25Z  line 5\n"
    );
    add_script(&fake);
    let json = out(&run_aitk(&fake, &["watch", "j1", "--json"]).await);
    let first: serde_json::Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!(
        (json.lines().count(), &first["schema_version"], &first["cursor"]),
        (5, &1.into(), &1.into())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_events_do_not_change_the_cursor() {
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    let progress = v1::Progress {
        done: 3,
        total: 9,
        seconds_per_step: Some(0.5),
    };
    let event = v1::JobEvent {
        body: Some(v1::job_event::Body::Progress(progress)),
        ..log(1, "")
    };
    fake.0
        .lock()
        .unwrap()
        .scripts
        .push_back((vec![log(1, "one"), event, log(2, "two")], None));
    let json = out(&run_aitk(&fake, &["watch", "j1", "--json"]).await);
    let kinds: Vec<String> = json
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["event"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    assert_eq!(kinds, ["log", "progress", "log"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn artifacts_with_an_unsafe_name_are_not_downloaded() {
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    fake.0.lock().unwrap().artifacts.push(v1::Artifact {
        name: "../../evil".to_owned(),
        kind: "lora".to_owned(),
        sha256: "00".repeat(32),
        bytes: 3,
        ..v1::Artifact::default()
    });
    let output = run_aitk(&fake, &["artifacts", "get", "j1", "-o", "out"]).await;
    assert_eq!(code(&output), 1, "{}", err(&output));
    assert_eq!(
        code(&run_aitk(&FakeCoordinator::default(), &["artifacts", "get", "j1", "-o", "out"]).await),
        3
    );
}

fn worker(id: &str, name: &str, zone: &str, jobs: &[&str]) -> v1::Worker {
    v1::Worker {
        id: id.to_owned(),
        name: name.to_owned(),
        connected: true,
        labels: [("zone".to_owned(), zone.to_owned())].into(),
        devices: vec![v1::WorkerDevice {
            device: Some(v1::Device {
                device: Some(v1::DeviceRef {
                    kind: v1::DeviceKind::Cuda.into(),
                    index: 0,
                }),
                name: "NVIDIA RTX PRO 6000 Blackwell Workstation Edition".to_owned(),
                memory_total: 96 << 30,
                memory_budget: 95 << 30,
                profile: v1::MemoryProfile::FullGpu.into(),
                ..v1::Device::default()
            }),
            job_ids: jobs.iter().map(|job| (*job).to_owned()).collect(),
            ..v1::WorkerDevice::default()
        }],
        ..v1::Worker::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_filtered_by_name_state_and_label() {
    let fake = FakeCoordinator::default();
    let mut faulty = worker("w3", "the-box-in-the-attic", "attic", &[]);
    faulty.devices[0].quarantined = true;
    faulty.devices[0].quarantine_reason = "3 faults in a row, the last one: CUDA error 700".to_owned();
    fake.0.lock().unwrap().workers = vec![
        worker("w1", "box-a", "lab", &["j1aaaaaaaa"]),
        worker("w2", "box-b", "lab", &[]),
        faulty,
        v1::Worker {
            connected: false,
            ..worker("w4", "mac", "home", &[])
        },
    ];
    for (args, ids) in [
        (&[][..], "w1 w2 w3 w4"),
        (&["box*"], "w1 w2"),
        (&["w3", "mac"], "w3 w4"),
        (&["--state", "idle"], "w2"),
        (&["--state", "running", "--state", "away"], "w1 w4"),
        (&["--state", "quarantined"], "w3"),
        (&["--label", "zone=lab"], "w1 w2"),
        (&["--label", "zone", "box-?", "--state", "idle"], "w2"),
        (&["--label", "zone=lab", "--label", "gpu"], ""),
        (&["nobody"], ""),
    ] {
        let output = run_aitk(&fake, &[&["workers", "-q"], args].concat()).await;
        let found: Vec<String> = out(&output).lines().map(str::to_owned).collect();
        assert_eq!(
            (code(&output), found.join(" ").as_str()),
            (0, ids),
            "{args:?}: {}",
            err(&output)
        );
    }
    let none = run_aitk(&fake, &["workers", "nobody"]).await;
    assert!(err(&none).contains("no worker matches"), "{}", err(&none));
    assert_eq!(code(&run_aitk(&fake, &["workers", "--state", "asleep"]).await), 2);

    // In a narrow terminal the state and its reason are not cut.
    let table = run_aitk_with_env(&fake, &["workers"], &[("COLUMNS", "80")]).await;
    let lines: Vec<String> = out(&table).lines().map(str::to_owned).collect();
    assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
    assert!(lines[1].ends_with("full_gpu  running"), "{lines:#?}");
    assert_eq!(lines[2], "  runs j1aaaaaaa", "{lines:#?}");
    assert!(
        lines
            .iter()
            .any(|line| line == "  3 faults in a row, the last one: CUDA error 700"),
        "{lines:#?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn artifacts_are_filtered_by_name_and_kind() {
    let fake = fake(vec![job("j1", "ada", JobState::Completed)]);
    let artifact = |name: &str, kind: &str| v1::Artifact {
        name: name.to_owned(),
        kind: kind.to_owned(),
        sha256: "00".repeat(32),
        bytes: 3,
        ..v1::Artifact::default()
    };
    fake.0.lock().unwrap().artifacts = vec![
        artifact("ada/ada.safetensors", "lora"),
        artifact("ada/samples/1.png", "sample"),
        artifact("ada/samples/2.png", "sample"),
        artifact("ada/config.yaml", "config"),
    ];
    for (args, names) in [
        (&["*.png"][..], "ada/samples/1.png ada/samples/2.png"),
        (&["ada/samples", "--kind", "lora"], ""),
        (
            &["--kind", "lora", "--kind", "config"],
            "ada/ada.safetensors ada/config.yaml",
        ),
        (&["--kind", "sample", "1.*"], "ada/samples/1.png"),
    ] {
        let output = run_aitk(&fake, &[&["artifacts", "ls", "j1", "-q"], args].concat()).await;
        let found: Vec<String> = out(&output).lines().map(str::to_owned).collect();
        assert_eq!((code(&output), found.join(" ").as_str()), (0, names), "{args:?}");
    }
    let none = run_aitk(&fake, &["artifacts", "get", "j1", "--kind", "video"]).await;
    assert_eq!(code(&none), 3, "{}", err(&none));
    assert!(err(&none).contains("no file of kind video"), "{}", err(&none));
}
