//! Attempts in the sandbox: real training and generation, hostile jobs, and machines without a sandbox.

use crate::program::{run, text};
use crate::support::{self, TestCluster, emit_finished, script};
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::confinement::{Confinement, Protection};
use aitk_common::control_plane::JobState;
use aitk_common::job;
use aitk_common::storage::snapshot;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_worker::runner::{self, DesiredState, Launch, PendingOutputs, Spawner};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The content of a file that is not an input; it must never appear in a log.
const SECRET: &str = "aitk_tok_canary-7f3a";

/// An attempt's folder as the daemon makes it, with the demo's model and data as read-only inputs, and beside it
/// files of others.
struct AttemptFolder {
    folder: tempfile::TempDir,
}

impl AttemptFolder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let attempt_folder = Self { folder };
        for inner in ["attempt/tmp", "attempt/output", "cache/derived", "others"] {
            std::fs::create_dir_all(attempt_folder.at(inner)).unwrap();
        }
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/demo");
        copy(&demo.join("base"), &attempt_folder.at("cache/base"));
        copy(&demo.join("dataset"), &attempt_folder.at("cache/dataset"));
        for tree in ["cache/base", "cache/dataset"] {
            snapshot::make_read_only(&attempt_folder.at(tree)).unwrap();
        }
        std::fs::write(attempt_folder.at("others/token"), SECRET).unwrap();
        std::fs::create_dir_all(attempt_folder.at("others/set")).unwrap();
        std::fs::write(attempt_folder.at("others/set/a.txt"), SECRET).unwrap();
        attempt_folder
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The specification that the daemon would write for a job with this config.
    fn spec(&self, config: &str) -> Value {
        let format = serde_json::from_value(json!("yaml")).unwrap();
        let loaded = job::parse(config, format, None, &job::LoadOptions::default()).unwrap();
        json!({
            "job_id": "00000000-0000-7000-8000-000000000001",
            "attempt_id": "00000000-0000-7000-8000-000000000002",
            "epoch": 1,
            "job": loaded.spec,
            "config_text": config,
            "config_format": "yaml",
            "inputs": {"my/base": self.at("cache/base"), "my/data": self.at("cache/dataset")},
            "output_root": self.at("attempt/output"),
            "resume_from": null,
            "device": {"kind": "cpu", "index": 0},
            "profile": "cpu_only",
            "seed": 7,
            "derived": {"my/data": self.at("cache/derived")},
            "largest_file": 1 << 30,
        })
    }

    /// Runs an attempt as the daemon does. Returns its outcome and its events.
    async fn run(&self, spec: &Value, command: &[PathBuf]) -> (Outcome, Vec<ChildEvent>) {
        serde_json::from_value::<AttemptSpec>(spec.clone()).unwrap();
        let file = self.at("attempt/spec.json");
        std::fs::write(&file, spec.to_string()).unwrap();
        let launch = Launch {
            command: command.iter().map(|part| part.as_os_str().to_owned()).collect(),
            spec: file,
            work_dir: Some(self.at("attempt")),
            temp_dir: self.at("attempt/tmp"),
            grace: Duration::from_secs(60),
            sandbox_profile: None,
            cuda_cache: None,
            control_groups: None,
            causes: Default::default(),
            progress_timeout: None,
            memory_limited: spec.get("most_memory").is_some(),
        };
        let (_desired, desired_rx) = tokio::sync::watch::channel(DesiredState::Run);
        let (events, mut event_receiver) = tokio::sync::mpsc::channel(16);
        let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
        let listen = async {
            let mut all = Vec::new();
            while let Some(event) = event_receiver.recv().await {
                all.push(event);
            }
            all
        };
        tokio::join!(
            runner::run(&spawner, launch, desired_rx, events, PendingOutputs::new()),
            listen
        )
    }

    /// All files outside of the attempt's own folders, with their content.
    fn other_files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut all = BTreeMap::new();
        for part in ["cache/base", "cache/dataset", "others"] {
            read_files(&self.at(part), &mut all);
        }
        all
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

fn read_files(folder: &Path, all: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        match entry.file_type().unwrap().is_dir() {
            true => read_files(&path, all),
            false => drop(all.insert(path.clone(), std::fs::read(&path).unwrap())),
        }
    }
}

fn worker_program() -> Vec<PathBuf> {
    vec![env!("CARGO_BIN_EXE_aitk-worker").into()]
}

fn logs(events: &[ChildEvent]) -> String {
    let lines = events.iter().filter_map(|event| match event {
        ChildEvent::Log { message, .. } => Some(message.as_str()),
        _ => None,
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn training(name: &str, data: &str) -> String {
    format!(
        "job: extension\nconfig:\n  name: {name}\n  process:\n    - type: sd_trainer\n      training_folder: output\n      \
         network: {{type: lora, linear: 4, linear_alpha: 4}}\n      save: {{save_every: 2}}\n      \
         datasets: [{{folder_path: {data}, caption_ext: txt, resolution: 64, cache_latents_to_disk: true}}]\n      \
         train: {{batch_size: 1, steps: 2, noise_scheduler: ddpm, optimizer: adamw, lr: 1e-3, dtype: float32}}\n      \
         model: {{name_or_path: my/base, arch: sd1}}\n      \
         sample: {{sampler: ddim, sample_every: 2, width: 64, height: 64, seed: 1, sample_steps: 2, samples: [{{prompt: a zorb}}]}}\n"
    )
}

fn kontext_training() -> &'static str {
    "job: extension\nconfig:\n  name: pairs\n  process:\n    - type: sd_trainer\n      training_folder: output\n      \
     network: {type: lora, linear: 4, linear_alpha: 4}\n      save: {save_every: 2}\n      \
     datasets: [{folder_path: my/data, control_path: my/controls, caption_ext: txt, resolution: 64, cache_latents_to_disk: true}]\n      \
     train: {batch_size: 1, steps: 2, noise_scheduler: flowmatch, optimizer: adamw, lr: 1e-3, dtype: float32}\n      \
     model: {name_or_path: my/flux, arch: flux_kontext}\n      \
     sample: {sampler: flowmatch, sample_every: 2, width: 64, height: 64, sample_steps: 2, samples: [{prompt: a zorb, ctrl_img: my/before.png}]}\n"
}

fn generation(prompts: &str) -> String {
    format!(
        "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      \
         model: {{name_or_path: my/base, arch: sd1}}\n      \
         generate: {{prompts: {prompts}, sampler: ddim, width: 64, height: 64, seed: 3, sample_steps: 2}}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn training_and_generation_work_in_the_sandbox_and_do_not_change_their_inputs() {
    let attempt_folder = AttemptFolder::new();
    let before = attempt_folder.other_files();
    for config in [training("zorb", "my/data"), generation("[a zorb]")] {
        let (outcome, events) = attempt_folder
            .run(&attempt_folder.spec(&config), &worker_program())
            .await;
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let lines = logs(&events);
        assert!(lines.contains("sandbox: files: "), "{lines}");
        assert!(!lines.contains("ermission denied"), "{lines}");
        let artifacts = events
            .iter()
            .filter(|event| matches!(event, ChildEvent::Artifact { .. }));
        assert!(artifacts.count() > 0, "{events:?}");
    }
    assert_eq!(attempt_folder.other_files(), before);
    let derived: Vec<_> = std::fs::read_dir(attempt_folder.at("cache/derived"))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let latents = derived
        .iter()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".safetensors"));
    assert!(latents.count() > 0, "{derived:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn control_images_are_read_in_the_sandbox_and_not_changed() {
    let attempt_folder = AttemptFolder::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    copy(&fixtures.join("tiny_flux"), &attempt_folder.at("others/flux"));
    let (data, controls) = (attempt_folder.at("cache/dataset"), attempt_folder.at("others/controls"));
    std::fs::create_dir(&controls).unwrap();
    for entry in std::fs::read_dir(data).unwrap().map(Result::unwrap) {
        if entry.path().extension().is_some_and(|suffix| suffix != "txt") {
            std::fs::copy(entry.path(), controls.join(entry.file_name())).unwrap();
        }
    }
    let first = std::fs::read_dir(&controls).unwrap().next().unwrap().unwrap().path();
    std::fs::copy(first, attempt_folder.at("others/before.png")).unwrap();
    let before = attempt_folder.other_files();
    let mut spec = attempt_folder.spec(kontext_training());
    for (name, path) in [
        ("my/flux", "others/flux"),
        ("my/controls", "others/controls"),
        ("my/before.png", "others/before.png"),
    ] {
        spec["inputs"][name] = json!(attempt_folder.at(path));
    }
    let (outcome, events) = attempt_folder.run(&spec, &worker_program()).await;
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    assert!(logs(&events).contains("sandbox: files: "), "{}", logs(&events));
    assert_eq!(attempt_folder.other_files(), before);

    // A folder that is not an input, and one that a link leads out of.
    let foreign = kontext_training().replace("my/controls", attempt_folder.at("others/set").to_str().unwrap());
    let mut foreign = attempt_folder.spec(&foreign);
    foreign["inputs"] = spec["inputs"].clone();
    let name = std::fs::read_dir(&controls)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .file_name();
    std::fs::remove_file(controls.join(&name)).unwrap();
    std::os::unix::fs::symlink(attempt_folder.at("others/token"), controls.join(&name)).unwrap();
    for (job, expected) in [
        (foreign, "is not an input of this job"),
        (spec, "is not a file of this data set"),
    ] {
        let (outcome, events) = attempt_folder.run(&job, &worker_program()).await;
        let Outcome::Failed { message, .. } = outcome else {
            panic!("{outcome:?}");
        };
        assert!(message.contains(expected), "{message}");
        assert!(!format!("{message}{}", logs(&events)).contains(SECRET));
    }
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn memory_is_limited_without_a_control_group_too() {
    let attempt_folder = AttemptFolder::new();
    let config = generation("[a zorb]").replace("width: 64, height: 64", "width: 1536, height: 1536");
    let mut spec = attempt_folder.spec(&config);
    // The small image needs less than 96 MiB, the large one more than 768 MiB.
    spec["most_memory"] = (256 << 20).into();
    let (outcome, events) = attempt_folder.run(&spec, &worker_program()).await;
    assert!(
        matches!(
            outcome,
            Outcome::Failed {
                cause: FailureCause::OutOfMemory,
                ..
            }
        ),
        "{outcome:?} {}",
        logs(&events)
    );
    spec["job"] = attempt_folder.spec(&generation("[a zorb]"))["job"].clone();
    let (outcome, events) = attempt_folder.run(&spec, &worker_program()).await;
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_reads_and_writes_only_its_own_folder() {
    let attempt_folder = AttemptFolder::new();
    let before = attempt_folder.other_files();
    let daemon = std::process::id();
    let environment = format!("/proc/{daemon}/environ");
    let outside = [
        attempt_folder.at("others/token"),
        attempt_folder.at("others/../others/token"),
        "/etc/passwd".into(),
        environment.into(),
    ];
    let users = std::fs::read_to_string("/etc/passwd").unwrap();
    let user = users.lines().next().unwrap().to_owned();
    let mut jobs: Vec<Value> = outside
        .iter()
        .map(|path| attempt_folder.spec(&generation(&path.display().to_string())))
        .collect();
    for folder in ["others/set", "others"] {
        jobs.push(attempt_folder.spec(&training("zorb", &attempt_folder.at(folder).display().to_string())));
    }
    for name in [
        attempt_folder.at("others/run").display().to_string(),
        "../../others/run".to_owned(),
    ] {
        // Set the name directly: the command line would refuse to send it.
        let mut spec = attempt_folder.spec(&training("zorb", "my/data"));
        *spec.pointer_mut("/job/name").unwrap() = json!(name);
        jobs.push(spec);
    }
    for spec in jobs {
        let (outcome, events) = attempt_folder.run(&spec, &worker_program()).await;
        let messages = format!("{outcome:?} {events:?}");
        assert!(!messages.contains(SECRET) && !messages.contains(&user), "{messages}");
        assert!(matches!(outcome, Outcome::Failed { .. }), "{messages}");
        assert_eq!(attempt_folder.other_files(), before, "{}", spec["job"]);
    }
}

/// The environment variable with the arguments for [`old_kernel_process`], one per line.
const OLD_KERNEL: &str = "AITK_TEST_OLD_KERNEL";

#[test]
fn old_kernel_process() {
    let Ok(arguments) = std::env::var(OLD_KERNEL) else {
        return;
    };
    use nix::libc::{ENOSYS, SYS_landlock_add_rule, SYS_landlock_create_ruleset, SYS_landlock_restrict_self};
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
    let calls = [
        SYS_landlock_add_rule,
        SYS_landlock_create_ruleset,
        SYS_landlock_restrict_self,
    ];
    let filter = SeccompFilter::new(
        calls.map(|call| (call, Vec::new())).into(),
        SeccompAction::Allow,
        SeccompAction::Errno(ENOSYS.unsigned_abs()),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    apply_filter(&BpfProgram::try_from(filter.unwrap()).unwrap()).unwrap();
    let error = Command::new(env!("CARGO_BIN_EXE_aitk-worker"))
        .args(arguments.lines())
        .env_remove(OLD_KERNEL)
        .exec();
    panic!("{error}");
}

/// Runs the program as on a kernel without Landlock: its calls fail as they do there.
fn on_an_old_kernel(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "sandboxed::old_kernel_process", "--nocapture"])
        .env(OLD_KERNEL, arguments.join("\n"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_requires_a_sandbox_does_not_start_without_one() {
    let cluster = TestCluster::start().await;
    let (data, url) = (cluster.path("w").display().to_string(), cluster.url());
    let mut command = on_an_old_kernel(&[
        "--require-sandbox",
        "--server",
        &url,
        "--devices",
        "cpu",
        "--data-dir",
        &data,
    ]);
    let output = run(command.env("AITK_TOKEN", &cluster.token)).await;
    let messages = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{messages}");
    assert!(
        messages.contains("--require-sandbox: attempts cannot be confined here")
            && messages.contains("has no Landlock"),
        "{messages}"
    );
    // The environment variable has the same effect.
    let mut command = on_an_old_kernel(&["--server", &url, "--devices", "cpu", "--data-dir", &data]);
    let output = run(command
        .env("AITK_TOKEN", &cluster.token)
        .env("AITK_REQUIRE_SANDBOX", "yes"))
    .await;
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_cannot_be_confined_reads_nothing() {
    let attempt_folder = AttemptFolder::new();
    let mut spec = attempt_folder.spec(&training("zorb", "my/data"));
    spec["require_sandbox"] = json!(true);
    std::fs::write(attempt_folder.at("attempt/spec.json"), spec.to_string()).unwrap();
    let file = attempt_folder.at("attempt/spec.json").display().to_string();
    let mut command = on_an_old_kernel(&["attempt", "--spec", &file]);
    // Closing standard input would end the process as well; keep it open.
    command.stdin(Stdio::piped());
    let output = run(&mut command).await;
    let messages = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{messages}");
    assert!(
        messages.contains("before it read anything")
            && messages.contains("has no Landlock")
            && !messages.contains("phase"),
        "{messages}"
    );
    // With a sandbox, the same attempt runs.
    let (outcome, events) = attempt_folder.run(&spec, &worker_program()).await;
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
}

async fn workers(cluster: &TestCluster) -> Vec<v1::Worker> {
    let request = v1::ListWorkersRequest::default();
    cluster
        .clients()
        .await
        .jobs
        .list_workers(request)
        .await
        .unwrap()
        .into_inner()
        .workers
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_reports_its_confinement() {
    let cluster = TestCluster::start().await;
    let mut config = cluster.config("w", "true");
    let mut confinement = Confinement::none("this kernel has no Landlock");
    confinement.network = Protection::enforced_by("seccomp");
    config.confinement = Some(confinement.clone());
    let worker = aitk_worker::start(config.clone()).await.unwrap();
    support::wait_until_connected(&worker).await;
    let reported = workers(&cluster).await.remove(0).confinement.unwrap();
    assert!(!reported.files.unwrap().in_force && reported.network.unwrap().in_force);
    worker.shutdown().await;
    // A partial sandbox is not enough.
    config.require_sandbox = true;
    let refused = aitk_worker::start(config).await.unwrap_err().to_string();
    assert!(refused.contains("this kernel has no Landlock"), "{refused}");
    // The program's own measurement on this machine.
    let measured = aitk_worker::sandbox::measure(&[env!("CARGO_BIN_EXE_aitk-worker").into()]);
    assert!(
        measured.files.in_force && measured.network.in_force && measured.syscalls.in_force,
        "{measured}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cached_tree_that_was_changed_is_fetched_again() {
    let cluster = TestCluster::start().await;
    let data = cluster.path("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("a.txt"), "a caption").unwrap();
    let store = RemoteBlobs::new(&cluster.clients().await);
    let scanned = snapshot::scan(&data, &mut |_| {}).unwrap();
    let id = snapshot::upload(&store, &scanned, &mut |_| {}).await.unwrap().id;
    let print_input = r#"where=$(sed -n 's/.*"my.data": "\(.*trees.*\)".*/\1/p' "$2"); echo "found $(cd "$where" && ls -A | tr '\n' ' ')$(cat "$where/a.txt")""#;
    let worker = cluster
        .worker("w", &script(&[print_input, "\n", &emit_finished("completed")]))
        .await;
    let tree = cluster.path("w").join("cache/trees").join(id.to_hex());
    let inputs = HashMap::from([("my.data".to_owned(), id.to_hex())]);
    let set_mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    let damages: [&dyn Fn(); 3] = [
        &|| {},
        // Left by a killed child of an earlier version.
        &|| {
            set_mode(&tree, 0o755);
            std::fs::create_dir(tree.join("_latent_cache")).unwrap();
            std::fs::write(tree.join("_latent_cache/.tmp-x"), "half").unwrap();
        },
        // Written by an attempt without a sandbox.
        &|| {
            set_mode(&tree.join("a.txt"), 0o644);
            std::fs::write(tree.join("a.txt"), "poisoned!").unwrap();
        },
    ];
    for (number, damage) in damages.iter().enumerate() {
        damage();
        let job = cluster.submit(inputs.clone(), false).await;
        cluster.wait_for_state(&job, JobState::Completed).await;
        let log = cluster.log(&job).await;
        assert!(
            log.iter().any(|line| line == "found a.txt a caption"),
            "{number}: {log:?}"
        );
        let warned = log
            .iter()
            .any(|line| line.contains("is not what was sent, and is fetched again"));
        assert_eq!(warned, number > 0, "{number}: {log:?}");
    }
    worker.shutdown().await;
}
