//! `doctor`: checks this machine, its settings and the connection to the coordinator.

use crate::api::Api;
use crate::args::DoctorArgs;
use crate::context::{Context, env};
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::format::{ago, gib, printable};
use crate::output::json::json_text;
use crate::output::{Column, Table, Ui};
use crate::paths::{display_path, free_space, nearest_existing};
use crate::settings::{Settings, TokenSource, UpState};
use crate::views::{device, timestamp};
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::confinement::Confinement;
use aitk_common::control_plane::{PROTOCOL_VERSION, ServerInfo};
use aitk_common::job::process::TrainerProcess;
use serde::Serialize;
use std::path::PathBuf;

/// Less free space than this is a problem: one SD 1.5 checkpoint with its samples and a data set needs about as much.
const MIN_FREE_DISK: u64 = 5 << 30;

/// A problem and its fix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Problem {
    what: String,
    fix: String,
}

/// Free space on the disk of one of aitk's folders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Disk {
    purpose: &'static str,
    path: PathBuf,
    free: Option<u64>,
    /// Device number, if it is known: folders with the same number are on the same disk.
    #[serde(skip)]
    filesystem: Option<u64>,
}

/// A setting for display; it never has the token itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct SettingReport {
    value: Option<String>,
    origin: Option<String>,
}

/// The defaults for a device.
#[derive(Debug, Serialize)]
struct Defaults {
    device: DeviceRef,
    memory_profile: &'static str,
    /// The dtype of all computations; `None`: the config's `dtype`.
    dtype: Option<&'static str>,
    batch_size: u32,
    gradient_checkpointing: bool,
    /// Measured rate of matrix products; 0: not measured.
    gflops: u64,
}

impl Defaults {
    fn of(found: &Device) -> Self {
        let train = TrainerProcess::default().train;
        Self {
            device: found.id,
            memory_profile: found.profile.name(),
            dtype: (found.id.kind == DeviceKind::Cpu).then_some("f32"),
            batch_size: train.batch_size,
            gradient_checkpointing: train.gradient_checkpointing,
            gflops: found.gflops,
        }
    }

    fn text(&self) -> String {
        let dtype = self.dtype.unwrap_or("the config's dtype");
        let checkpointing = if self.gradient_checkpointing { "on" } else { "off" };
        let rate = match self.gflops {
            0 => String::new(),
            rate => format!("; matrix products at {rate} GFLOP/s"),
        };
        format!(
            "computes in {dtype}; memory profile: the fastest that fits, starting with {}; batch size {}, gradient \
             checkpointing {checkpointing}{rate}",
            self.memory_profile, self.batch_size
        )
    }
}

/// The result of all checks.
#[derive(Debug, Default, Serialize)]
struct Report {
    ok: bool,
    version: &'static str,
    protocol: u32,
    embedded: bool,
    server: SettingReport,
    token: SettingReport,
    ca_file: SettingReport,
    coordinator: Option<ServerInfo>,
    devices: Vec<Device>,
    defaults: Vec<Defaults>,
    /// How attempts of other users' jobs are confined on this machine.
    confinement: Option<Confinement>,
    disks: Vec<Disk>,
    /// The results of `--thorough`.
    #[cfg(feature = "embedded")]
    thorough: Option<crate::thorough::ThoroughReport>,
    /// Notes that are not problems.
    notices: Vec<String>,
    problems: Vec<Problem>,
}

pub(super) async fn doctor(context: &Context, args: DoctorArgs) -> CommandResult {
    let ui = context.ui(args.json);
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        protocol: PROTOCOL_VERSION,
        embedded: cfg!(feature = "embedded"),
        ..Report::default()
    };
    let problems = &mut report.problems;
    match context.settings() {
        Ok(settings) => {
            report.server = setting_report(
                settings
                    .server
                    .as_ref()
                    .map(|s| (s.value.clone(), s.origin.to_string())),
            );
            report.token = setting_report(settings.token.as_ref().map(|token| {
                let value = match &token.value {
                    TokenSource::Value(_) => "(set)".to_owned(),
                    TokenSource::File(path) => path.display().to_string(),
                };
                (value, token.origin.to_string())
            }));
            report.ca_file = setting_report(
                settings
                    .ca_file
                    .as_ref()
                    .map(|s| (s.value.display().to_string(), s.origin.to_string())),
            );
            let _spinner = (!args.json && ui.has_bars()).then(|| ui.spinner("connecting to the coordinator"));
            report.coordinator = coordinator(context, &settings, problems).await;
        }
        Err(failure) => problems.push(Problem {
            what: failure.message,
            fix: failure.hints.join("; "),
        }),
    }
    {
        let _spinner = (!args.json && ui.has_bars()).then(|| ui.spinner("testing the devices"));
        report.devices = devices(problems, &mut report.notices).await;
        report.defaults = report.devices.iter().map(Defaults::of).collect();
        report.confinement = confinement().await;
    }
    #[cfg(not(feature = "embedded"))]
    if args.thorough {
        return Err(
            Failure::failed("this aitk was built as a small client, without `aitk doctor --thorough`")
                .hint("build it with the default features: cargo install --locked --path cli"),
        );
    }
    #[cfg(feature = "embedded")]
    if args.thorough {
        let devices = match &args.device {
            None => report.devices.clone(),
            Some(_) => crate::embedded::find_devices(args.device.as_deref()).await?,
        };
        let thorough = crate::thorough::check(&ui, &context.paths, &devices, &args).await?;
        problems.extend(thorough.problems().into_iter().map(|what| {
            Problem {
                what,
                fix:
                    "do not trust results of this device; report it with the output of `aitk doctor --thorough --json`"
                        .to_owned(),
            }
        }));
        report.thorough = Some(thorough);
    }
    report.disks = disks(context);
    check_disk_space(&report.disks, problems);
    report.ok = problems.is_empty();

    if let Some(path) = &args.report {
        let path = context.directory.join(path);
        let text = json_text(&report)?;
        std::fs::write(&path, text).map_err(|error| Failure::file("write the report to", &path, &error))?;
    }
    if args.json {
        ui.json(&report)?
    } else {
        show(&ui, &report)?
    }
    Ok(if report.ok { Exit::Ok } else { Exit::Failed })
}

fn setting_report(setting: Option<(String, String)>) -> SettingReport {
    let (value, origin) = setting.unzip();
    SettingReport { value, origin }
}

async fn coordinator(context: &Context, settings: &Settings, problems: &mut Vec<Problem>) -> Option<ServerInfo> {
    if settings.server.is_none() {
        if !cfg!(feature = "embedded") {
            let fix = "give --server URL, set AITK_SERVER, or write `server: URL` into ./aitk.yaml".to_owned();
            problems.push(Problem {
                what: "no coordinator is set, and this small client needs one".to_owned(),
                fix,
            });
        }
        return None;
    }
    let up_path = context.paths.up_state();
    if let Ok(Some(up)) = UpState::read(&up_path)
        && !is_running(up.pid)
    {
        let what = format!(
            "{} is the state file of an `aitk up` that no longer runs (process {})",
            up_path.display(),
            up.pid
        );
        problems.push(Problem {
            what,
            fix: format!("start `aitk up` again, or: rm {}", up_path.display()),
        });
    }
    let info_result = match Api::from_settings(settings).await {
        Ok(api) => api.info().await,
        Err(failure) => Err(failure),
    };
    match info_result {
        Ok(info) => {
            if info.workers_connected == 0 {
                let fix = "start one on each machine: aitk-worker --server URL --token-file FILE".to_owned();
                problems.push(Problem {
                    what: "the coordinator has no workers, so jobs wait".to_owned(),
                    fix,
                });
            }
            if info.version != env!("CARGO_PKG_VERSION") {
                tracing::info!(theirs = %info.version, "the coordinator is another version of aitk");
            }
            Some(info)
        }
        Err(failure) => {
            problems.push(Problem {
                what: failure.message,
                fix: failure.hints.join("; "),
            });
            None
        }
    }
}

/// Whether a process with this id exists, also of another user.
fn is_running(pid: u32) -> bool {
    let Ok(pid) = i32::try_from(pid) else { return false };
    !matches!(
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None),
        Err(nix::errno::Errno::ESRCH)
    )
}

#[cfg(feature = "embedded")]
async fn devices(problems: &mut Vec<Problem>, notices: &mut Vec<String>) -> Vec<Device> {
    match tokio::task::spawn_blocking(aitk_worker::probe::probe_devices).await {
        Ok(found) => {
            notices.extend(found.not_built_for);
            problems.extend(found.left_out.into_iter().map(|what| Problem {
                what,
                fix: "until it is fixed, jobs run on the devices above; --device selects one".to_owned(),
            }));
            found.devices
        }
        Err(error) => {
            problems.push(Problem {
                what: format!("looking for devices failed: {error}"),
                fix: "a driver may have failed: `aitk-worker probe` shows details; no job can run here".to_owned(),
            });
            Vec::new()
        }
    }
}

#[cfg(not(feature = "embedded"))]
#[allow(clippy::unused_async)]
async fn devices(_problems: &mut Vec<Problem>, _notices: &mut Vec<String>) -> Vec<Device> {
    Vec::new()
}

#[cfg(feature = "embedded")]
async fn confinement() -> Option<Confinement> {
    crate::embedded::measure_confinement().await
}

#[cfg(not(feature = "embedded"))]
#[allow(clippy::unused_async)]
async fn confinement() -> Option<Confinement> {
    None
}

fn disks(context: &Context) -> Vec<Disk> {
    let paths = &context.paths;
    [
        ("this folder", context.directory.clone()),
        ("data", paths.data.clone()),
        ("state", paths.state.clone()),
        ("cache", paths.cache.clone()),
        ("temporary", std::env::temp_dir()),
    ]
    .into_iter()
    .map(|(purpose, path)| {
        let (there, free) = (nearest_existing(&path), free_space(&path));
        let filesystem = std::fs::metadata(there)
            .ok()
            .map(|meta| std::os::unix::fs::MetadataExt::dev(&meta));
        Disk {
            purpose,
            path,
            free,
            filesystem,
        }
    })
    .collect()
}

fn check_disk_space(disks: &[Disk], problems: &mut Vec<Problem>) {
    let mut reported = Vec::new();
    for disk in disks {
        let is_reported = disk.filesystem.is_some() && reported.contains(&disk.filesystem);
        if disk.free.is_some_and(|free| free < MIN_FREE_DISK) && !is_reported {
            reported.push(disk.filesystem);
            problems.push(Problem {
                what: format!(
                    "only {} free on the disk of {}",
                    gib(disk.free.unwrap_or(0)),
                    disk.path.display()
                ),
                fix: "free some space, or move aitk's folders with XDG_DATA_HOME, XDG_STATE_HOME and XDG_CACHE_HOME"
                    .to_owned(),
            });
        }
    }
}

fn show(ui: &Ui, report: &Report) -> Result<(), crate::failure::Failure> {
    let kind = if report.embedded {
        "runs jobs here"
    } else {
        "small client"
    };
    ui.text(&format!(
        "aitk {}, protocol {}, {kind}",
        report.version, report.protocol
    ))?;
    ui.data("\nCoordinator")?;
    for (name, setting) in [
        ("server", &report.server),
        ("token", &report.token),
        ("ca", &report.ca_file),
    ] {
        match (&setting.value, &setting.origin) {
            (Some(value), Some(origin)) => {
                ui.text(&format!("  {name:<8}{}", printable(value)))?;
                ui.text(&format!("          from {}", printable(origin)))?;
            }
            _ if name == "server" => ui.text("  none set; `aitk up` starts one, `aitk run` needs none")?,
            _ => {}
        }
    }
    if let Some(info) = &report.coordinator {
        let since = ago(timestamp(info.started), jiff::Timestamp::now());
        ui.text(&format!(
            "  answers version {}, protocol {}, started {since}",
            printable(&info.version),
            info.protocol
        ))?;
        let (workers, jobs) = (info.workers_connected, info.jobs_active);
        ui.text(&format!(
            "  storage {}, workers {workers}, active jobs {jobs}",
            printable(&info.storage)
        ))?;
    }
    ui.data("\nDevices of this machine")?;
    if report.embedded {
        let mut table = Table::new(&[
            Column::fixed("DEVICE"),
            Column::text("NAME", 12),
            Column::number("BUDGET"),
            Column::number("MEMORY"),
            Column::fixed("PROFILE"),
            Column::text("DTYPES", 10),
            Column::fixed("ATTENTION"),
        ]);
        for found in &report.devices {
            table.row([
                device(found.id),
                format!("{} ({})", found.name, found.architecture),
                gib(found.memory_budget),
                gib(found.memory_total),
                found.profile.name().to_owned(),
                found.dtypes.join(" "),
                found.attention.join(" "),
            ]);
        }
        ui.table(&table)?;
        for defaults in &report.defaults {
            ui.text(&format!("  {}: {}", device(defaults.device), defaults.text()))?;
        }
    } else {
        ui.data("  not checked by the small client")?;
    }
    if let Some(confinement) = &report.confinement {
        ui.text("\nSandbox of attempts (jobs of `aitk submit`; `aitk run` works in your folders)")?;
        for (name, part) in confinement.parts() {
            ui.text(&format!("  {name:<10}{}", printable(&part.to_string())))?;
        }
    }
    ui.data("\nDisk space")?;
    for disk in &report.disks {
        let free = disk
            .free
            .map_or_else(|| "unknown".to_owned(), |free| format!("{} free", gib(free)));
        ui.text(&format!(
            "  {:<12}{free:>16}  {}",
            disk.purpose,
            display_path(&disk.path, &env)
        ))?;
    }
    #[cfg(feature = "embedded")]
    if let Some(thorough) = &report.thorough {
        thorough.show(ui)?;
    }
    if !report.notices.is_empty() {
        ui.data("\nNotices")?;
        for notice in &report.notices {
            ui.text(&format!("  {}", printable(notice)))?;
        }
    }
    if report.problems.is_empty() {
        return ui.data("\nNo problems found.");
    }
    ui.data("\nProblems")?;
    for (index, problem) in report.problems.iter().enumerate() {
        ui.text(&format!("  {}. {}", index + 1, printable(&problem.what)))?;
        if !problem.fix.is_empty() {
            ui.text(&format!("     fix: {}", printable(&problem.fix)))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_reported_once() {
        let disk = |purpose, free, filesystem| Disk {
            purpose,
            path: purpose.into(),
            free: Some(free),
            filesystem,
        };
        let mut problems = Vec::new();
        let one = Some(1);
        check_disk_space(
            &[
                disk("a", 1 << 30, one),
                disk("b", 1 << 30, one),
                disk("c", 9 << 30, Some(2)),
            ],
            &mut problems,
        );
        assert_eq!(problems.len(), 1);
        // Folders whose disks are not known may be on several.
        check_disk_space(&[disk("d", 1 << 30, None), disk("e", 1 << 30, None)], &mut problems);
        assert_eq!(problems.len(), 3);
        assert!(problems[0].what.contains("1.0 GiB free"), "{problems:?}");
    }

    #[test]
    fn running_processes_are_recognised() {
        assert!(is_running(std::process::id()));
        assert!(!is_running(u32::MAX));
        assert!(!is_running(i32::MAX as u32));
    }
}
