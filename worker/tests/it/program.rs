//! The program: exit codes, messages, signals.

use crate::support::{self, TestCluster};
use aitk_common::attempt::Outcome;
use aitk_common::job;
use aitk_worker::runner::{self, DesiredState, Launch, PendingOutputs, Spawner};
use nix::sys::signal::Signal;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aitk-worker"));
    for name in [
        "AITK_TOKEN",
        "AITK_TOKEN_FILE",
        "AITK_SERVER",
        "AITK_LOG_LEVEL",
        "AITK_DEVICES",
        "AITK_CA_FILE",
        "AITK_WORKER_NAME",
    ] {
        command.env_remove(name);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a command to its end, with a time-out.
pub(crate) async fn run(command: &mut Command) -> Output {
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + support::TIMEOUT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("the program did not exit in time: {:?}", child.wait_with_output());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    child.wait_with_output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn probe_lists_the_devices() {
    let output = run(program().args(["probe", "--json"])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["schema_version"], 1);
    let devices = report["devices"].as_array().unwrap();
    assert_eq!(devices.last().unwrap()["device"]["kind"], "cpu");
    let output = run(program().arg("probe")).await;
    let probe_output = text(&output.stdout);
    assert!(
        probe_output.contains("GiB for a task") && probe_output.lines().all(|line| line.chars().count() <= 80),
        "{probe_output}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_exits_with_4_and_a_missing_device_with_1() {
    let cluster = TestCluster::start().await;
    let data = cluster.path("w");
    let output = run(program()
        .env("AITK_TOKEN", "0".repeat(64))
        .args(["--server", &cluster.url(), "--devices", "cpu", "--data-dir"])
        .arg(&data))
    .await;
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("token"), "{}", text(&output.stderr));

    let output = run(program()
        .env("AITK_TOKEN", &cluster.token)
        .args(["--devices", "cuda:7", "--data-dir"])
        .arg(&data))
    .await;
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("no device cuda:7"),
        "{}",
        text(&output.stderr)
    );
    let output = run(program().arg("--data-dir").arg(&data)).await;
    assert!(
        text(&output.stderr).contains("--token-file"),
        "{}",
        text(&output.stderr)
    );
    let output = run(program().arg("--no-such-flag")).await;
    assert_eq!(output.status.code(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn values_that_cannot_be_read_exit_with_2() {
    let data = tempfile::tempdir().unwrap();
    for wrong in [["--devices", "gpu"], ["--label", "room"], ["--hub-allow", "lab"]] {
        let output = run(program()
            .env("AITK_TOKEN", "0".repeat(64))
            .args(["--server", "http://127.0.0.1:1", "--data-dir"])
            .arg(data.path())
            .args(wrong))
        .await;
        let shown = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{shown}");
        assert!(shown.contains(wrong[0]) && shown.contains("expected"), "{shown}");
    }
    let variables = [
        ("AITK_LABELS", "zone=lab,room", "'room'"),
        ("AITK_JSON_LOG", "perhaps", "--json-log"),
    ];
    for (name, value, said) in variables {
        let output = run(program().env(name, value)).await;
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(said), "{}", text(&output.stderr));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_value_of_allow_extension_exits_with_2() {
    for wrong in ["py", "py=", "=x", "PY=x", "py=nope.py", "py=/usr"] {
        let output = run(program().args(["--allow-extension", wrong])).await;
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        let shown = text(&output.stderr);
        assert!(
            shown.contains(&format!("error: --allow-extension {wrong}: ")),
            "{shown}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_shuts_down_cleanly() {
    shuts_down_cleanly_after(Signal::SIGTERM).await;
}

/// A terminal that closes. Before, it ended the worker at once, and attempts saved nothing.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_shuts_down_cleanly() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    if ignored.ends_with(['1', '3', '5', '7', '9', 'b', 'd', 'f']) {
        // These tests run under `nohup`, and the worker ignores it too.
        return;
    }
    shuts_down_cleanly_after(Signal::SIGHUP).await;
}

async fn shuts_down_cleanly_after(signal: Signal) {
    let cluster = TestCluster::start().await;
    let mut daemon = program()
        .env("AITK_TOKEN", &cluster.token)
        .args([
            "--server",
            &cluster.url(),
            "--devices",
            "cpu",
            "--name",
            "basement",
            "--data-dir",
        ])
        .arg(cluster.path("w"))
        .spawn()
        .unwrap();
    let registered = async {
        loop {
            let request = aitk_proto::v1::ListWorkersRequest::default();
            let workers = cluster
                .clients()
                .await
                .jobs
                .list_workers(request)
                .await
                .unwrap()
                .into_inner()
                .workers;
            if workers
                .iter()
                .any(|worker| worker.name == "basement" && worker.connected)
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let registered = tokio::time::timeout(support::TIMEOUT, registered).await;
    let pid = nix::unistd::Pid::from_raw(i32::try_from(daemon.id()).unwrap());
    nix::sys::signal::kill(pid, signal).unwrap();
    let until = Instant::now() + support::TIMEOUT;
    let status = loop {
        if let Some(status) = daemon.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > until {
            daemon.kill().unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let stderr = text(&daemon.wait_with_output().unwrap().stderr);
    assert!(registered.is_ok(), "the worker did not register: {stderr}");
    assert_eq!(status.code(), Some(0), "{stderr}");
}

/// The attempt's main function up to the engine: it reports an unreadable specification on standard output.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_specification_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let spec = folder.path().join("spec.json");
    std::fs::write(&spec, "{}").unwrap();
    for path in [folder.path().join("absent"), spec] {
        let mut command = program();
        command.stdin(Stdio::piped()).args(["attempt", "--spec"]).arg(&path);
        let output = run(&mut command).await;
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        let last = text(&output.stdout);
        let event: serde_json::Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
        assert_eq!(
            (&event["event"], &event["outcome"]["cause"]),
            (&"finished".into(), &"internal".into())
        );
    }
}

/// An attempt at a submitted job with an unreadable model.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attempt_names_files_as_in_its_config() {
    let folder = tempfile::tempdir().unwrap();
    let staged = folder.path().join("cache/trees/ab12");
    std::fs::create_dir_all(staged.join("unet")).unwrap();
    // A known model with an unreadable component.
    std::fs::write(
        staged.join("model_index.json"),
        r#"{"_class_name": "StableDiffusionPipeline"}"#,
    )
    .unwrap();
    std::fs::write(staged.join("unet/config.json"), r#"{"cross_attention_dim": "wide"}"#).unwrap();
    let text = "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      \
                model: {name_or_path: ~/models/mine}\n      generate: {prompts: [a cat]}\n";
    let format = serde_json::from_value(serde_json::json!("yaml")).unwrap();
    let loaded = job::parse(text, format, None, &job::LoadOptions::default()).unwrap();
    let spec = serde_json::json!({
        "job_id": "00000000-0000-7000-8000-000000000001",
        "attempt_id": "00000000-0000-7000-8000-000000000002",
        "epoch": 1,
        "job": loaded.spec,
        "config_text": text,
        "config_format": "yaml",
        "inputs": {"~/models/mine": staged},
        "output_root": folder.path().join("output"),
        "resume_from": null,
        "device": {"kind": "cpu", "index": 0},
        "profile": "cpu_only",
        "seed": 7,
    });
    std::fs::write(folder.path().join("spec.json"), spec.to_string()).unwrap();
    let launch = Launch {
        command: vec![env!("CARGO_BIN_EXE_aitk-worker").into()],
        spec: folder.path().join("spec.json"),
        work_dir: Some(folder.path().to_owned()),
        temp_dir: folder.path().to_owned(),
        grace: Duration::from_secs(60),
        progress_timeout: None,
        memory_limited: false,
        sandbox_profile: None,
        cuda_cache: None,
        control_groups: None,
        causes: Default::default(),
    };
    let (_desired, desired_rx) = tokio::sync::watch::channel(DesiredState::Run);
    let (events, mut event_receiver) = tokio::sync::mpsc::channel(16);
    let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
    let listen = async { while event_receiver.recv().await.is_some() {} };
    let (outcome, ()) = tokio::join!(
        runner::run(&spawner, launch, desired_rx, events, PendingOutputs::new()),
        listen
    );
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(
        message.contains("~/models/mine/") && !message.contains("ab12"),
        "{message}"
    );
}
