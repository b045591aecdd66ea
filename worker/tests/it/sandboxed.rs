//! Attempts in their sandbox: real training and generation inside it, crafted jobs against it, machines without it.

use crate::program::{run, text};
use crate::support::{self, Lab, finished, script};
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::confinement::{Confinement, Protection};
use aitk_common::control::JobState;
use aitk_common::job;
use aitk_common::storage::snapshot;
use aitk_proto::remote_blobs::RemoteBlobs;
use aitk_proto::v1;
use aitk_worker::runner::{self, Launch, Spawner, Wanted};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// What must never be seen in a log: the content of a file that is no input.
const SECRET: &str = "aitk_tok_canary-7f3a";

/// An attempt's folder as the daemon makes it, with the demo's model and data as inputs that cannot be changed, and beside it
/// what belongs to others.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let place = Self { folder };
        for inner in ["attempt/tmp", "attempt/output", "cache/derived", "others"] {
            std::fs::create_dir_all(place.at(inner)).unwrap();
        }
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/demo");
        copy(&demo.join("base"), &place.at("cache/base"));
        copy(&demo.join("dataset"), &place.at("cache/dataset"));
        for tree in ["cache/base", "cache/dataset"] {
            snapshot::make_read_only(&place.at(tree)).unwrap();
        }
        std::fs::write(place.at("others/token"), SECRET).unwrap();
        std::fs::create_dir_all(place.at("others/set")).unwrap();
        std::fs::write(place.at("others/set/a.txt"), SECRET).unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A specification as the daemon writes it, of a job in the words of a config.
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

    /// Runs an attempt as the daemon does. Returns how it ended, and all that it said.
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
            groups: None,
            progress_timeout: None,
            memory_limited: spec.get("most_memory").is_some(),
        };
        let (_wanted, wishes) = tokio::sync::watch::channel(Wanted::Run);
        let (events, mut heard) = tokio::sync::mpsc::channel(16);
        let spawner = Spawner::start(tokio::runtime::Handle::current()).unwrap();
        let listen = async {
            let mut all = Vec::new();
            while let Some(event) = heard.recv().await {
                all.push(event);
            }
            all
        };
        tokio::join!(runner::run(&spawner, launch, wishes, events), listen)
    }

    /// Everything that lies here outside of the attempt's own folders, with its content.
    fn others(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut all = BTreeMap::new();
        for part in ["cache/base", "cache/dataset", "others"] {
            list(&self.at(part), &mut all);
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

fn list(folder: &Path, all: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        match entry.file_type().unwrap().is_dir() {
            true => list(&path, all),
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

fn generation(prompts: &str) -> String {
    format!(
        "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      \
         model: {{name_or_path: my/base, arch: sd1}}\n      \
         generate: {{prompts: {prompts}, sampler: ddim, width: 64, height: 64, seed: 3, sample_steps: 2}}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn training_and_generation_work_in_the_sandbox_and_leave_their_inputs_alone() {
    let place = Place::new();
    let before = place.others();
    for config in [training("zorb", "my/data"), generation("[a zorb]")] {
        let (outcome, events) = place.run(&place.spec(&config), &worker_program()).await;
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        let lines = logs(&events);
        assert!(lines.contains("sandbox: files: "), "{lines}");
        assert!(!lines.contains("ermission denied"), "{lines}");
        let made = events
            .iter()
            .filter(|event| matches!(event, ChildEvent::Artifact { .. }));
        assert!(made.count() > 0, "{events:?}");
    }
    assert_eq!(place.others(), before);
    let derived: Vec<_> = std::fs::read_dir(place.at("cache/derived"))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let latents = derived
        .iter()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".safetensors"));
    assert!(latents.count() > 0, "{derived:?}");
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn without_a_control_group_memory_has_a_limit_all_the_same() {
    let place = Place::new();
    let config = generation("[a zorb]").replace("width: 64, height: 64", "width: 1536, height: 1536");
    let mut spec = place.spec(&config);
    // The small image needs less than 96 MiB, the large one more than 768 MiB.
    spec["most_memory"] = (256 << 20).into();
    let (outcome, events) = place.run(&spec, &worker_program()).await;
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
    spec["job"] = place.spec(&generation("[a zorb]"))["job"].clone();
    let (outcome, events) = place.run(&spec, &worker_program()).await;
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_reads_and_writes_nothing_outside_its_own_folder() {
    let place = Place::new();
    let before = place.others();
    let daemon = std::process::id();
    let environment = format!("/proc/{daemon}/environ");
    let outside = [
        place.at("others/token"),
        place.at("others/../others/token"),
        "/etc/passwd".into(),
        environment.into(),
    ];
    let users = std::fs::read_to_string("/etc/passwd").unwrap();
    let user = users.lines().next().unwrap().to_owned();
    let mut jobs: Vec<Value> = outside
        .iter()
        .map(|path| place.spec(&generation(&path.display().to_string())))
        .collect();
    for folder in ["others/set", "others"] {
        jobs.push(place.spec(&training("zorb", &place.at(folder).display().to_string())));
    }
    for name in [
        place.at("others/run").display().to_string(),
        "../../others/run".to_owned(),
    ] {
        // As `job_json` can say it, whatever the command line would have sent.
        let mut spec = place.spec(&training("zorb", "my/data"));
        *spec.pointer_mut("/job/name").unwrap() = json!(name);
        jobs.push(spec);
    }
    for spec in jobs {
        let (outcome, events) = place.run(&spec, &worker_program()).await;
        let said = format!("{outcome:?} {events:?}");
        assert!(!said.contains(SECRET) && !said.contains(&user), "{said}");
        assert!(matches!(outcome, Outcome::Failed { .. }), "{said}");
        assert_eq!(place.others(), before, "{}", spec["job"]);
    }
}

/// What the process of [`plays_an_old_kernel`] becomes, one argument a line; nobody else has it.
const OLD_KERNEL: &str = "AITK_TEST_OLD_KERNEL";

#[test]
fn plays_an_old_kernel() {
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

/// The program on a kernel without Landlock: one that answers its calls as such a kernel does.
fn on_an_old_kernel(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "sandboxed::plays_an_old_kernel", "--nocapture"])
        .env(OLD_KERNEL, arguments.join("\n"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_demands_a_sandbox_does_not_start_without_one() {
    let lab = Lab::start().await;
    let (data, url) = (lab.path("w").display().to_string(), lab.url());
    let mut command = on_an_old_kernel(&[
        "--require-sandbox",
        "--server",
        &url,
        "--devices",
        "cpu",
        "--data-dir",
        &data,
    ]);
    let output = run(command.env("AITK_TOKEN", &lab.token)).await;
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("--require-sandbox: attempts cannot be confined here") && said.contains("has no Landlock"),
        "{said}"
    );
    // The environment says the same.
    let mut command = on_an_old_kernel(&["--server", &url, "--devices", "cpu", "--data-dir", &data]);
    let output = run(command.env("AITK_TOKEN", &lab.token).env("AITK_REQUIRE_SANDBOX", "yes")).await;
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_cannot_be_confined_reads_nothing() {
    let place = Place::new();
    let mut spec = place.spec(&training("zorb", "my/data"));
    spec["require_sandbox"] = json!(true);
    std::fs::write(place.at("attempt/spec.json"), spec.to_string()).unwrap();
    let file = place.at("attempt/spec.json").display().to_string();
    let mut command = on_an_old_kernel(&["attempt", "--spec", &file]);
    // The end of standard input would end it, too; it must not come to that.
    command.stdin(Stdio::piped());
    let output = run(&mut command).await;
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("before it read anything") && said.contains("has no Landlock") && !said.contains("phase"),
        "{said}"
    );
    // Where there is one, the same attempt runs.
    let (outcome, events) = place.run(&spec, &worker_program()).await;
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
}

async fn workers(lab: &Lab) -> Vec<v1::Worker> {
    let request = v1::ListWorkersRequest::default();
    lab.clients()
        .await
        .jobs
        .list_workers(request)
        .await
        .unwrap()
        .into_inner()
        .workers
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_says_how_it_confines() {
    let lab = Lab::start().await;
    let mut config = lab.config("w", "true");
    let mut found = Confinement::none("this kernel has no Landlock");
    found.network = Protection::by("seccomp");
    config.confinement = Some(found.clone());
    let worker = aitk_worker::start(config.clone()).await.unwrap();
    support::connected(&worker).await;
    let told = workers(&lab).await.remove(0).confinement.unwrap();
    assert!(!told.files.unwrap().in_force && told.network.unwrap().in_force);
    worker.shutdown().await;
    // Half a sandbox is none.
    config.require_sandbox = true;
    let refused = aitk_worker::start(config).await.unwrap_err().to_string();
    assert!(refused.contains("this kernel has no Landlock"), "{refused}");
    // And what the program itself measures here.
    let measured = aitk_worker::sandbox::measure(&[env!("CARGO_BIN_EXE_aitk-worker").into()]);
    assert!(
        measured.files.in_force && measured.network.in_force && measured.syscalls.in_force,
        "{measured}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cached_tree_that_was_changed_is_fetched_again() {
    let lab = Lab::start().await;
    let data = lab.path("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("a.txt"), "a caption").unwrap();
    let store = RemoteBlobs::new(&lab.clients().await);
    let scanned = snapshot::scan(&data, &mut |_| {}).unwrap();
    let id = snapshot::upload(&store, &scanned, &mut |_| {}).await.unwrap().id;
    let look = r#"where=$(sed -n 's/.*"my.data": "\(.*trees.*\)".*/\1/p' "$2"); echo "found $(cd "$where" && ls -A | tr '\n' ' ')$(cat "$where/a.txt")""#;
    let worker = lab.worker("w", &script(&[look, "\n", &finished("completed")])).await;
    let tree = lab.path("w").join("cache/trees").join(id.to_hex());
    let inputs = HashMap::from([("my.data".to_owned(), id.to_hex())]);
    let writable = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    let damages: [&dyn Fn(); 3] = [
        &|| {},
        // What a killed child of an earlier version left.
        &|| {
            writable(&tree, 0o755);
            std::fs::create_dir(tree.join("_latent_cache")).unwrap();
            std::fs::write(tree.join("_latent_cache/.tmp-x"), "half").unwrap();
        },
        // What an attempt without a sandbox wrote over another's.
        &|| {
            writable(&tree.join("a.txt"), 0o644);
            std::fs::write(tree.join("a.txt"), "poisoned!").unwrap();
        },
    ];
    for (number, damage) in damages.iter().enumerate() {
        damage();
        let job = lab.submit(inputs.clone(), false).await;
        lab.until_state(&job, JobState::Completed).await;
        let log = lab.log(&job).await;
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
