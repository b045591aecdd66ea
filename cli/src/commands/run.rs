//! `run`: runs configs on this machine, as `python run.py` of ai-toolkit does, with an embedded coordinator and worker.

use super::logs::NOTIFICATION_STOPPED;
use crate::args::{PUSH_MESSAGE, RunArgs};
use crate::config::{self, ReadOptions};
use crate::context::Context;
use crate::embedded::{EmbeddedCluster, PrivateFolder, StopSignals, WorkerResources, find_devices, print_devices};
use crate::exit::Exit;
use crate::extensions::{absolute_programs, check_allowed};
use crate::failure::{CommandResult, Failure};
use crate::follow::{JobFollower, LogTarget, Renderer};
use crate::hub_push::Push;
use crate::notify::Notify;
use crate::output::format::gib;
use crate::output::{Format, Ui};
use crate::paths::Paths;
use crate::preflight;
use crate::submission_data::{job_json, longest_prompt, parameter_counts};
use crate::trace::SubmitSpan;
use crate::views::job_exit;
use aitk_common::capability::{Device, DeviceKind};
use aitk_common::control_plane::{Artifact, JobView, Submission};
use aitk_common::fsutil;
use aitk_common::job::change::Change;
use aitk_common::job::cluster::{ClusterConfig, Labels};
use aitk_common::job::values::OneOrMany;
use aitk_common::job::{JobSpec, LoadedJob, Process};
use aitk_common::plan::image_batches::ImageBatch;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::sd_scripts::Script;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// After this time a shutdown says what it waits for.
const SLOW_SHUTDOWN: Duration = Duration::from_secs(2);

/// Options for running configs.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Continue with the next config after a failure.
    pub recover: bool,
    /// Replaces `[name]`.
    pub name: Option<String>,
    /// Keys with another value than in the configs.
    pub changes: Vec<Change>,
    /// The script that configs of sd-scripts are for.
    pub script: Option<Script>,
    /// `cuda:1`, `cpu`; `None`: the best device.
    pub device: Option<String>,
    /// Programs that the configs may run as extensions: `NAME=PROGRAM`.
    pub allow_extensions: Vec<String>,
    /// Notifications to send when a config has ended.
    pub notify: Notify,
    /// Whether events are shown for people, or printed as lines of JSON.
    pub format: Format,
}

/// The result of one config.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// Its path as given on the command line.
    pub config: PathBuf,
    /// The job as it ended; `None` if it could not be submitted.
    pub job: Option<JobView>,
    /// The files that it wrote, with their local paths.
    pub artifacts: Vec<Artifact>,
    /// Its exit code.
    pub exit: Exit,
    /// The exit code of the signal that came while it ran. It may have completed all the same.
    pub signal: Option<Exit>,
}

/// The results of all configs.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// In order; without `recover` those after the first failure are missing, and so are those after a signal.
    pub results: Vec<RunResult>,
    /// 0 when all completed, else the code of the first that did not.
    pub exit: Exit,
}

pub(super) async fn run(context: &Context, args: RunArgs) -> CommandResult {
    let ui = context.ui(args.no_progress || args.json);
    let ui = match &args.log {
        Some(path) => ui.tee(path)?,
        None => ui,
    };
    let notify = Notify::new(&args.notify, &context.paths)?;
    let options = RunOptions {
        recover: args.recover,
        name: args.name,
        changes: config::parse_changes(&args.set)?,
        script: args.script,
        device: args.device,
        allow_extensions: absolute_programs(&args.extensions.allow_extension, &context.directory)?,
        notify,
        format: Format::from_flags(args.json, false),
    };
    let report = run_embedded(&ui, &context.paths, &context.directory, &args.configs, &options).await;
    match report {
        Ok(report) => Ok(report.exit),
        Err(failure) => {
            // Printed here, so that it is in the log file too.
            ui.failure(&failure);
            Err(Failure::new(failure.exit, ""))
        }
    }
}

/// Runs configs one after another, with their inputs in place, and returns the results.
///
/// All configs are read and checked before the first one starts. Ctrl-C saves and stops, a second one kills.
///
/// # Errors
/// When a config is wrong (unless `recover` is set), or coordinator and worker cannot start.
pub async fn run_embedded(
    ui: &Ui,
    paths: &Paths,
    directory: &Path,
    configs: &[PathBuf],
    options: &RunOptions,
) -> Result<RunReport, Failure> {
    let mut results = Vec::new();
    let mut ready = Vec::new();
    for path in configs {
        match Box::pin(read_and_check(ui, path, directory, options)).await {
            Ok((loaded, batches, pushes)) => ready.push((path.clone(), loaded, batches, pushes)),
            Err(failure) if options.recover => {
                ui.failure(&failure);
                results.push(RunResult {
                    config: path.clone(),
                    job: None,
                    artifacts: Vec::new(),
                    exit: failure.exit,
                    signal: None,
                });
            }
            Err(failure) => return Err(failure),
        }
    }
    if ready.is_empty() {
        return Ok(report(results));
    }

    let mut signals = StopSignals::listen()?;
    let devices = find_devices(options.device.as_deref()).await?;
    print_devices(ui, &devices);
    let folder = PrivateFolder::new(&paths.state.join("run"))?;
    let mut coordinator = aitk_coordinator::Config::new(folder.path().join("coordinator"));
    // The database is small and the results are written elsewhere, so no disk space has to be reserved.
    coordinator.disk_reserve = Some(0);
    coordinator.bind = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    // There is no other machine for a retry; the user sees the failure and runs the command again.
    coordinator.retries = 0;
    let worker_dir = folder.path().join("worker");
    // Models stay when the private folder goes. Some were fetched with the user's token, so that nobody else may read them.
    let hub_folder = paths.cache.join("hub");
    fsutil::create_private_dir(&hub_folder).map_err(|error| Failure::failed(error.to_string()))?;
    let mut local = EmbeddedCluster::start(
        coordinator,
        Some(&worker_dir),
        Some(hub_folder),
        None,
        WorkerResources {
            devices: devices.clone(),
            allow_extensions: options.allow_extensions.clone(),
        },
        None,
        None,
    )
    .await?;
    match local.wait_until_registered(&mut signals).await {
        Ok(None) => {}
        Ok(Some(exit)) => {
            for (path, ..) in ready {
                ui.warn(&format!("{} was not run", path.display()));
            }
            shut_down(ui, local, &mut signals).await;
            return Ok(RunReport { results, exit });
        }
        Err(failure) => {
            local.kill().await;
            return Err(failure);
        }
    }

    let several = configs.len() > 1;
    let mut ready = ready.into_iter();
    while let Some((path, mut loaded, batches, pushes)) = ready.next() {
        if several {
            ui.notice(&format!("--- {}", path.display()));
        }
        let resumes = loaded.spec.process.iter().any(resumes);
        let applied = apply_to_this_machine(ui, &mut loaded.spec.cluster, &devices);
        let result = match applied.and_then(|()| submission(&path, directory, loaded, batches)) {
            Ok(submission) => run_one(ui, &mut local, &path, submission, &mut signals, options.format).await,
            Err(failure) => Err(failure),
        };
        let result = match result {
            Ok(result) => {
                if result.signal == Some(result.exit) {
                    ui.notice(match resumes {
                        true => "stopped; run the same command again to resume",
                        false => "stopped; the same command starts from the beginning",
                    });
                }
                result
            }
            Err(failure) => {
                ui.failure(&failure);
                RunResult {
                    config: path,
                    job: None,
                    artifacts: Vec::new(),
                    exit: failure.exit,
                    signal: None,
                }
            }
        };
        let mut result = push_results(ui, result, pushes, directory, &mut signals).await;
        let exit = result.exit;
        // No notification after Ctrl-C.
        if let Some(job) = result.job.as_ref().filter(|_| exit != Exit::Interrupted) {
            tokio::select! {
                () = options.notify.job_ended(ui, job) => {}
                signal = signals.next() => {
                    ui.warn(NOTIFICATION_STOPPED);
                    result.signal = result.signal.or(Some(signal));
                }
            }
        }
        let last_exit = determine_last_exit(exit, result.signal, ready.len());
        results.push(result);
        if exit == Exit::Killed {
            local.kill().await;
            drop(folder);
            return Ok(RunReport { results, exit });
        }
        if let Some(exit) = last_exit {
            for (path, ..) in ready {
                ui.warn(&format!("{} was not run", path.display()));
            }
            shut_down(ui, local, &mut signals).await;
            return Ok(RunReport { results, exit });
        }
        if local.has_failed() {
            for (path, ..) in ready {
                ui.warn(&format!("{} was not run", path.display()));
            }
            break;
        }
        if exit != Exit::Ok && !options.recover {
            break;
        }
    }
    shut_down(ui, local, &mut signals).await;
    let report = report(results);
    if several {
        let failed: Vec<String> = report
            .results
            .iter()
            .filter(|result| result.exit != Exit::Ok)
            .map(|result| result.config.display().to_string())
            .collect();
        let completed = report.results.len() - failed.len();
        ui.notice(&format!("{completed} of {} configs completed", configs.len()));
        for name in failed {
            ui.warn(&format!("{name} did not complete"));
        }
    }
    Ok(report)
}

/// Reads a config and checks it before the first one starts. Returns it with its batches of images and its uploads.
async fn read_and_check(
    ui: &Ui,
    path: &Path,
    directory: &Path,
    options: &RunOptions,
) -> Result<(LoadedJob, Vec<ImageBatch>, Vec<Push>), Failure> {
    let read_options = ReadOptions {
        name: options.name.as_deref(),
        changes: &options.changes,
        script: options.script,
        ..ReadOptions::default()
    };
    let mut loaded = config::read(ui, path, directory, read_options)?;
    config::refuse_special_files(&loaded.spec, &loaded.spec.inputs(), directory)?;
    check_allowed(&loaded.spec, &options.allow_extensions)?;
    let checked = preflight::check_before_start(ui, &loaded, directory, true).await?;
    checked.complete_controls.leave_out_generators(&mut loaded.spec);
    let pushes = pushes(&loaded.spec, directory);
    // Before the training: a missing token would be noticed hours later.
    for push in &pushes {
        push.check(ui, directory).await.map_err(|failure| Failure {
            message: format!("{}: {}", path.display(), failure.message),
            ..failure
        })?;
    }
    Ok((loaded, checked.image_batches, pushes))
}

/// Whether a later run of the same config continues this process where it stopped: the others find what they did by the id of the job,
/// which is another one then.
fn resumes(process: &Process) -> bool {
    process.trainer().is_some() || process.lm_trainer().is_some()
}

/// The exit code with which no further config runs after one with this exit code, and this signal while it ran. `None`: the next of the
/// `remaining` ones runs, or its own code is that of the command.
fn determine_last_exit(exit: Exit, signal: Option<Exit>, remaining: usize) -> Option<Exit> {
    match (exit, signal) {
        (Exit::Interrupted | Exit::Terminated, _) => Some(exit),
        // The signal came when the job had nothing left to do but to save, or after its end.
        (_, Some(signal)) if remaining > 0 => Some(signal),
        _ => None,
    }
}

/// The uploads of the trainings with `save.push_to_hub`.
fn pushes(spec: &JobSpec, directory: &Path) -> Vec<Push> {
    let trainings = spec.process.iter().filter_map(|process| process.trainer());
    trainings
        .filter_map(|process| Push::of_training(process, &spec.name, directory))
        .collect()
}

/// Uploads the results of a config that completed. A failure is printed, and its exit code is that of the config; so is that of a signal,
/// which stops the uploads. One that came while the config ran does so too.
async fn push_results(
    ui: &Ui,
    mut result: RunResult,
    pushes: Vec<Push>,
    directory: &Path,
    signals: &mut StopSignals,
) -> RunResult {
    if result.exit != Exit::Ok {
        return result;
    }
    let received = result.signal;
    let mut pushes = pushes.into_iter();
    while let Some(push) = pushes.next() {
        let command = push.command();
        let upload = Box::pin(async {
            let plan = push.plan(ui, directory)?;
            plan.upload(ui, directory, PUSH_MESSAGE).await.map(drop)
        });
        let stop = async {
            match received {
                Some(signal) => signal,
                None => signals.next().await,
            }
        };
        let uploaded = tokio::select! {
            biased;
            signal = stop => {
                ui.warn("stopped: the training is complete, but its results are not all on Hugging Face");
                for command in std::iter::once(command).chain(pushes.map(|push| push.command())) {
                    ui.notice(&format!("to upload the rest:\n  {command}"));
                }
                result.exit = signal;
                return result;
            }
            uploaded = upload => uploaded,
        };
        if let Err(failure) = uploaded {
            ui.warn("the training is complete, but its results were not uploaded to Hugging Face");
            ui.failure(&failure);
            result.exit = failure.exit;
        }
    }
    result
}

/// Shuts down coordinator and worker; a further Ctrl-C stops waiting for them. A hangup does not, because a closed
/// terminal may be the reason why following the job failed, and the job then saves during the shutdown.
async fn shut_down(ui: &Ui, mut local: EmbeddedCluster, signals: &mut StopSignals) {
    let of_worker = || {
        let seconds = aitk_worker::SHUTDOWN_TIMEOUT.as_secs();
        ui.notice(&format!(
            "waiting for the worker: a job that still runs saves first, within {seconds} s; Ctrl-C stops immediately"
        ));
    };
    let of_coordinator = || ui.notice("waiting for the coordinator to close its database; Ctrl-C stops immediately");
    let ended = async {
        notice_if_slow(SLOW_SHUTDOWN, of_worker, local.shutdown_worker()).await;
        notice_if_slow(SLOW_SHUTDOWN, of_coordinator, local.shutdown()).await;
    };
    tokio::select! {
        () = ended => {}
        () = signals.wait_for_second() => {}
    }
}

/// Waits for `work`, and calls `notice` once if that takes longer than `delay`.
async fn notice_if_slow(delay: Duration, notice: impl FnOnce(), work: impl Future<Output = ()>) {
    tokio::pin!(work);
    tokio::select! {
        biased;
        () = &mut work => return,
        () = tokio::time::sleep(delay) => notice(),
    }
    work.await;
}

/// Adapts the `cluster` section to this machine. Requirements that this machine does not meet are errors, because the
/// job would wait forever.
fn apply_to_this_machine(ui: &Ui, cluster: &mut ClusterConfig, devices: &[Device]) -> Result<(), Failure> {
    cluster.labels = Labels::default();
    // `run` starts the job now, so it waits for no other job or time.
    cluster.after = OneOrMany(Vec::new());
    cluster.after_any = OneOrMany(Vec::new());
    cluster.after_failed = OneOrMany(Vec::new());
    cluster.not_before = None;
    let nothing_fits = |what: String| {
        Failure::new(Exit::NothingFits, what).hint("change `cluster` in the config, or submit it to a cluster that can")
    };
    let kinds: Vec<&Device> = devices
        .iter()
        .filter(|d| cluster.device.is_none_or(|kind| kind == d.id.kind))
        .collect();
    if let Some(kind) = cluster.device.filter(|_| kinds.is_empty()) {
        return Err(nothing_fits(format!(
            "the config needs a {} device, and no such device is used here",
            kind.name()
        )));
    }
    let max_budget = kinds.iter().map(|d| d.memory_budget).max().unwrap_or(0);
    if let Some(wanted) = cluster.memory_budget.filter(|wanted| wanted.0 > max_budget) {
        return Err(nothing_fits(format!(
            "the config needs {} of memory, and at most {} can be used here",
            gib(wanted.0),
            gib(max_budget)
        )));
    }
    let is_supported = |profile: MemoryProfile| {
        let on_cpu = |d: &&Device| d.id.kind == DeviceKind::Cpu;
        match profile {
            MemoryProfile::CpuOnly => kinds.iter().any(on_cpu),
            MemoryProfile::FullGpu => !kinds.iter().all(on_cpu),
            _ => true,
        }
    };
    if let Some(profile) = cluster.memory_profile.filter(|profile| !is_supported(*profile)) {
        ui.warn(&format!(
            "the memory profile {} does not suit the device used here; the device's own profile is used",
            profile.name()
        ));
        cluster.memory_profile = None;
    }
    Ok(())
}

fn report(results: Vec<RunResult>) -> RunReport {
    let exit = results
        .iter()
        .map(|result| result.exit)
        .find(|exit| *exit != Exit::Ok)
        .unwrap_or(Exit::Ok);
    RunReport { results, exit }
}

/// Builds the submission of a config. The structure of the model decides the memory profile; without it a tiny model
/// would be planned like the full-size model of its family.
fn submission(
    path: &Path,
    directory: &Path,
    loaded: LoadedJob,
    image_batches: Vec<ImageBatch>,
) -> Result<Submission, Failure> {
    Ok(Submission {
        image_batches,
        job_json: job_json(&loaded, path)?,
        parameter_counts: parameter_counts(&loaded, directory),
        config_text: loaded.text,
        config_format: loaded.format.name().to_owned(),
        inputs: BTreeMap::new(),
        local: true,
        idempotency_key: None,
        owner: None,
        images: None,
        longest_prompt: longest_prompt(&loaded.spec, directory),
    })
}

/// Runs one config. The exit code is the job's, or that of the signal that stopped it.
async fn run_one(
    ui: &Ui,
    local: &mut EmbeddedCluster,
    path: &Path,
    submission: Submission,
    signals: &mut StopSignals,
    format: Format,
) -> Result<RunResult, Failure> {
    let api = local.api().clone();
    let trace = SubmitSpan::start();
    let submitted = api.clone().with_trace(trace.context()).submit(submission).await?;
    trace.submitted(&submitted.job);
    let job = api.get(submitted.job.as_str()).await?;
    let mut renderer = Renderer::new(ui, &job, format, LogTarget::Stdout);
    let mut follower = JobFollower::new(&api, ui, job, 0);
    let mut signal = None;
    loop {
        tokio::select! {
            next = follower.next() => match next? {
                Some(event) => renderer.event(&event)?,
                None => break,
            },
            failure = local.failed() => {
                renderer.finish();
                return Err(failure);
            }
            which = signals.next() => {
                if signal.is_some() {
                    renderer.finish();
                    ui.warn("killed: work since the last checkpoint is lost");
                    return Ok(RunResult {
                        config: path.to_owned(),
                        job: Some(follower.job().clone()),
                        artifacts: Vec::new(),
                        exit: Exit::Killed,
                        signal: Some(which),
                    });
                }
                signal = Some(which);
                ui.notice("saving, then stopping; Ctrl-C again kills without saving");
                if let Err(failure) = api.stop(&submitted.job, false).await
                    && failure.exit != Exit::Conflict
                {
                    ui.failure(&failure);
                }
            }
        }
    }
    renderer.finish();
    let job = follower.job().clone();
    let artifacts = api.artifacts(&job.id).await?;
    let exit = match (signal, job_exit(&job)) {
        // The job ended before it could be stopped.
        (Some(_), Exit::Ok) | (None, _) => job_exit(&job),
        (Some(signal), _) => signal,
    };
    Ok(RunResult {
        config: path.to_owned(),
        job: Some(job),
        artifacts,
        exit,
        signal,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::capability::DeviceRef;
    use aitk_common::job::cluster::ByteCount;
    use aitk_common::job::{LoadOptions, parse};

    #[test]
    fn requirements_that_this_machine_does_not_meet_are_errors() {
        let cpu = Device {
            id: DeviceRef {
                kind: DeviceKind::Cpu,
                index: 0,
            },
            name: String::new(),
            architecture: String::new(),
            memory_total: 8 << 30,
            memory_budget: 6 << 30,
            dtypes: vec![],
            attention: vec![],
            profile: MemoryProfile::CpuOnly,
            gflops: 0,
        };
        let ui = Ui::silent();
        let apply = |cluster: &mut ClusterConfig| apply_to_this_machine(&ui, cluster, std::slice::from_ref(&cpu));
        let mut cluster = ClusterConfig {
            memory_profile: Some(MemoryProfile::FullGpu),
            ..ClusterConfig::default()
        };
        cluster.labels.0.insert("zone".to_owned(), "x".to_owned());
        apply(&mut cluster).unwrap();
        assert_eq!((cluster.memory_profile, cluster.labels.0.len()), (None, 0));
        let mut cuda = ClusterConfig {
            device: Some(DeviceKind::Cuda),
            ..ClusterConfig::default()
        };
        assert_eq!(apply(&mut cuda).unwrap_err().exit, Exit::NothingFits);
        let mut large = ClusterConfig {
            memory_budget: Some(ByteCount(7 << 30)),
            ..ClusterConfig::default()
        };
        assert!(apply(&mut large).unwrap_err().message.contains("7.0 GiB"));
    }

    #[test]
    fn no_config_starts_after_a_signal_also_when_the_job_completed() {
        assert_eq!(
            determine_last_exit(Exit::Ok, Some(Exit::Interrupted), 1),
            Some(Exit::Interrupted)
        );
        // It was the last one: all is done.
        assert_eq!(determine_last_exit(Exit::Ok, Some(Exit::Interrupted), 0), None);
        for stopped in [Exit::Interrupted, Exit::Terminated] {
            assert_eq!(determine_last_exit(stopped, Some(stopped), 1), Some(stopped));
        }
        // It came while the notification was sent that the job failed.
        assert_eq!(
            determine_last_exit(Exit::Failed, Some(Exit::Interrupted), 1),
            Some(Exit::Interrupted)
        );
        assert_eq!(determine_last_exit(Exit::Failed, Some(Exit::Interrupted), 0), None);
        for exit in [Exit::Ok, Exit::Failed] {
            assert_eq!(determine_last_exit(exit, None, 1), None);
        }
    }

    #[tokio::test]
    async fn a_slow_shutdown_says_what_it_waits_for() {
        let (say, said) = tokio::sync::oneshot::channel();
        // It ends only after the notice.
        let slow = async { said.await.unwrap() };
        notice_if_slow(Duration::ZERO, || say.send(()).unwrap(), slow).await;
        let ended = std::future::ready(());
        notice_if_slow(Duration::ZERO, || panic!("nothing was waited for"), ended).await;
    }

    #[test]
    fn trainings_alone_resume() {
        let of_job = |job: &str, process: &str| {
            let text = format!("job: {job}\nconfig:\n  name: a\n  process:\n  - {process}\n");
            let loaded = parse(&text, aitk_common::job::Format::Yaml, None, &LoadOptions::default()).unwrap();
            loaded.spec.process.iter().any(resumes)
        };
        assert!(of_job(
            "extension",
            "{type: sd_trainer, training_folder: out, network: {type: lora, linear: 4}, datasets: [{folder_path: data}], \
             model: {name_or_path: toy, arch: flux}}"
        ));
        assert!(!of_job(
            "generate",
            "{type: to_folder, output_folder: out, model: {name_or_path: toy, arch: sd1}, generate: {prompts: [a]}}"
        ));
    }

    #[test]
    fn only_a_local_model_is_inspected() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let header = r#"{"w":{"dtype":"F32","shape":[10,10],"data_offsets":[0,400]}}"#;
        let toy = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 400]].concat();
        std::fs::create_dir_all(at("toy/unet")).unwrap();
        std::fs::write(at("toy/unet/diffusion_pytorch_model.safetensors"), toy).unwrap();
        std::fs::write(at("broken.safetensors"), b"no weights").unwrap();
        let parameters = |model: &str| {
            let config = at("job.yaml");
            let text = format!(
                "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      \
                 model: {{name_or_path: {model}, arch: sd1}}\n      generate: {{prompts: [a]}}\n"
            );
            std::fs::write(&config, text).unwrap();
            let loaded = config::read(&Ui::silent(), &config, folder.path(), ReadOptions::default()).unwrap();
            let submission = submission(&config, folder.path(), loaded, Vec::new()).unwrap();
            submission.parameter_counts.map(|counts| counts.denoiser)
        };
        assert_eq!(parameters("toy"), Some(100));
        assert_eq!(parameters(&at("toy").display().to_string()), Some(100));
        for model in ["broken.safetensors", "nothing.safetensors", "some/repository"] {
            assert_eq!(parameters(model), None, "{model}");
        }
    }
}
