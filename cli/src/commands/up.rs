//! `up`: runs a coordinator and a worker on this machine until Ctrl-C.

use crate::args::UpArgs;
use crate::context::{Context, env};
use crate::download::disk_failure;
use crate::embedded::{
    EmbeddedCluster, SharedWorkerOptions, StopSignals, WorkerResources, find_devices, print_devices,
};
use crate::exit::Exit;
use crate::extensions::absolute_programs;
use crate::failure::{CommandResult, Failure, chain};
use crate::output::Ui;
use crate::output::format::{printable, shell_path};
use crate::paths::display_path;
use crate::settings::{Setting, UpState};
use aitk_common::fsutil;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Removes the state file on drop, or restores the one of an earlier `aitk up` that still runs.
struct StateFile {
    path: PathBuf,
    ours: UpState,
    before: Option<UpState>,
}

impl Drop for StateFile {
    fn drop(&mut self) {
        // An `aitk up` that was started later has replaced the file.
        if UpState::read(&self.path).ok().flatten().as_ref() != Some(&self.ours) {
            return;
        }
        let written = self.before.as_ref().filter(|before| is_running(before.pid));
        let written = written.is_some_and(|before| write_text(&self.path, before).is_ok());
        if !written {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Whether a process with this id exists.
fn is_running(pid: u32) -> bool {
    i32::try_from(pid).is_ok_and(|pid| pid > 0 && kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH))
}

pub(super) async fn up(context: &Context, args: UpArgs) -> CommandResult {
    let ui = context.ui(true);
    let allow_extensions = absolute_programs(&args.extensions.allow_extension, &context.directory)?;
    let mut signals = StopSignals::listen()?;
    let devices = if args.no_worker {
        Vec::new()
    } else {
        find_devices(args.device.as_deref()).await?
    };
    let data_dir = args.data_dir.clone().unwrap_or_else(|| context.paths.data.clone());
    let data_dir = context.directory.join(data_dir);
    fsutil::create_dir_all(&data_dir).map_err(|error| disk_failure(&error))?;

    let coordinator_dir = data_dir.join("coordinator");
    let token_file = coordinator_dir.join("token");
    let worker_dir = data_dir.join("worker");
    let mut config = aitk_coordinator::Config::new(&coordinator_dir);
    config.bind = args.bind;
    config.database = database(&args)?;
    config.storage_url.clone_from(&args.storage);
    config.tls = tls(&args);
    // A self-signed certificate is its own authority. For one of a public authority this is not needed, and does no
    // harm.
    let ca_file = args.tls_cert.clone().map(|path| context.directory.join(path));
    let worker = (!args.no_worker).then_some(worker_dir.as_path());
    let mut local = EmbeddedCluster::start(
        config,
        worker,
        None,
        args.worker_name.as_deref(),
        WorkerResources {
            devices: devices.clone(),
            allow_extensions,
        },
        ca_file.as_deref(),
        Some(SharedWorkerOptions {
            require_sandbox: args.require_sandbox,
            hub_allow: args
                .hub_allow
                .iter()
                .filter(|name| !name.trim().is_empty())
                .cloned()
                .collect(),
            largest_model: args.largest_model_gib.saturating_mul(1 << 30),
            hub_secrets: args.hub_secrets.clone(),
        }),
    )
    .await?;
    match local.wait_until_registered(&mut signals).await {
        Ok(None) => {}
        Ok(Some(exit)) => {
            let killed = shut_down(&ui, local, &mut signals).await;
            return Ok(if killed { Exit::Killed } else { exit_of_signal(exit) });
        }
        Err(failure) => {
            local.shutdown().await;
            return Err(failure);
        }
    }

    let server = local.api().server().to_owned();
    let state = UpState {
        server: server.clone(),
        token_file: token_file.clone(),
        ca_file,
        pid: std::process::id(),
        data_dir: data_dir.clone(),
        started: jiff::Timestamp::now().to_string(),
    };
    let state_file = write_state(&context.paths.up_state(), &state)?;

    ui.data(&format!("server      {server}"))?;
    ui.data(&format!("token file  {}", token_file.display()))?;
    ui.data(&format!("data        {}", display_path(&data_dir, &env)))?;
    print_devices(&ui, &devices);
    ui.notice("");
    for line in next_steps(&server, context.settings().ok().and_then(|settings| settings.server)) {
        ui.notice(&line);
    }
    if !args.bind.ip().is_loopback() {
        for line in worker_commands(&server, &token_file, state.ca_file.as_deref()) {
            ui.notice(&line);
        }
    }
    ui.notice("Ctrl-C stops; running jobs save first and resume at the next `aitk up`.");

    let ended = tokio::select! {
        exit = signals.next() => Ok(exit),
        failure = local.failed() => Err(failure),
    };
    drop(state_file);
    ui.notice(match &ended {
        Ok(_) => "saving and stopping; Ctrl-C again stops immediately",
        Err(_) => "saving and stopping because of an error; Ctrl-C stops immediately",
    });
    let killed = shut_down(&ui, local, &mut signals).await;
    let exit = ended?;
    if killed {
        return Ok(Exit::Killed);
    }
    ui.notice("stopped");
    Ok(exit_of_signal(exit))
}

/// Shuts coordinator and worker down, or stops waiting for them at the next Ctrl-C. Returns whether that came.
async fn shut_down(ui: &Ui, local: EmbeddedCluster, signals: &mut StopSignals) -> bool {
    tokio::select! {
        () = local.shutdown() => false,
        () = signals.wait_for_second() => {
            ui.warn("stopped without waiting; jobs resume from their last checkpoint at the next `aitk up`");
            true
        }
    }
}

/// The exit code after a signal: Ctrl-C is the normal way to stop.
fn exit_of_signal(exit: Exit) -> Exit {
    if exit == Exit::Interrupted { Exit::Ok } else { exit }
}

/// Returns the commands to try next. `usual` is the coordinator that commands use without `--server`.
fn next_steps(server: &str, usual: Option<Setting<String>>) -> Vec<String> {
    let elsewhere = usual.filter(|usual| usual.value.trim_end_matches('/') != server);
    let option = match &elsewhere {
        Some(_) => format!(" --server {server}"),
        None => String::new(),
    };
    let mut lines = Vec::new();
    if let Some(usual) = &elsewhere {
        lines.push(format!(
            "Without --server, commands use {}, from {}.",
            printable(&usual.value),
            printable(&usual.origin.to_string())
        ));
    }
    lines.push("Next, in another terminal:".to_owned());
    for (command, what) in [("submit CONFIG --follow", "run a job"), ("ps", "see all jobs")] {
        lines.push(match &elsewhere {
            Some(_) => format!("  aitk {command}{option}"),
            None => format!("  aitk {command:<27}{what}"),
        });
    }
    lines
}

/// Returns how to start a worker on another machine. `server` is the address of the coordinator on this machine; other machines can use it
/// if it has a name of the certificate.
fn worker_commands(server: &str, token_file: &Path, ca_file: Option<&Path>) -> [String; 2] {
    let (scheme, address) = server.split_once("://").unwrap_or(("https", server));
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    let is_address = host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    let host = match is_address || host == "localhost" {
        true => "THIS-HOST",
        false => host,
    };
    let mut command = format!("  aitk-worker --server {scheme}://{host}:{port}");
    command.push_str(&format!(" --token-file {}", shell_path(token_file)));
    let mut copies = "the token file".to_owned();
    if let Some(ca_file) = ca_file {
        command.push_str(&format!(" --ca-file {}", shell_path(ca_file)));
        copies.push_str(" and of the certificate");
    }
    [format!("On each other machine, with a copy of {copies}:"), command]
}

fn database(args: &UpArgs) -> Result<Option<aitk_coordinator::DatabaseUrl>, Failure> {
    let url = args.database.as_deref().map(str::parse).transpose();
    url.map_err(|error| Failure::usage(chain(&error)))
}

fn tls(args: &UpArgs) -> Option<aitk_coordinator::TlsFiles> {
    let (cert, key) = args.tls_cert.clone().zip(args.tls_key.clone())?;
    Some(aitk_coordinator::TlsFiles { cert, key })
}

fn write_state(path: &Path, state: &UpState) -> Result<StateFile, Failure> {
    fsutil::create_dir_all(fsutil::folder_of(path)).map_err(|error| disk_failure(&error))?;
    // A state file that cannot be read is replaced.
    let before = UpState::read(path).ok().flatten();
    write_text(path, state)?;
    Ok(StateFile {
        path: path.to_owned(),
        ours: state.clone(),
        before,
    })
}

fn write_text(path: &Path, state: &UpState) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(state).map_err(|error| Failure::failed(error.to_string()))?;
    fsutil::write_private(path, text.as_bytes()).map_err(|error| disk_failure(&error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Origin;

    #[test]
    fn the_next_commands_use_this_coordinator() {
        let here = "http://127.0.0.1:7431";
        let named = |value: &str| Setting {
            value: value.to_owned(),
            origin: Origin::User("/home/ada/.config/aitk/config.yaml".into()),
        };
        for usual in [None, Some(named("http://127.0.0.1:7431/"))] {
            let lines = next_steps(here, usual);
            assert_eq!(lines.len(), 3);
            assert!(lines.iter().all(|line| !line.contains("--server")), "{lines:?}");
        }
        let lines = next_steps(here, Some(named("https://gpu.lab:7420")));
        assert!(
            lines[0].contains("https://gpu.lab:7420, from settings file /home/ada"),
            "{lines:?}"
        );
        assert_eq!(lines[2], "  aitk submit CONFIG --follow --server http://127.0.0.1:7431");
    }

    #[test]
    fn workers_elsewhere_are_given_the_bound_port_and_the_certificate() {
        let (token, cert) = (Path::new("/data/token"), Path::new("/etc/my cert.pem"));
        let [copies, command] = worker_commands("https://127.0.0.1:39421", token, Some(cert));
        assert!(copies.contains("the token file and of the certificate"), "{copies}");
        assert_eq!(
            command.trim(),
            "aitk-worker --server https://THIS-HOST:39421 --token-file /data/token --ca-file '/etc/my cert.pem'"
        );
        for (server, host) in [
            ("https://localhost:1", "THIS-HOST:1 "),
            ("https://gpu.lab:7420", "gpu.lab:7420 "),
        ] {
            let [_, command] = worker_commands(server, token, None);
            assert!(command.contains(&format!("--server https://{host}")), "{command}");
        }
        let [_, command] = worker_commands("https://[::1]:7420", token, None);
        assert_eq!(
            command.trim(),
            "aitk-worker --server https://THIS-HOST:7420 --token-file /data/token"
        );
    }

    #[test]
    fn the_state_file_is_removed_or_restored_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/up.json");
        let state = UpState {
            server: "http://127.0.0.1:7420".to_owned(),
            token_file: "/t".into(),
            ca_file: None,
            pid: 1,
            data_dir: "/d".into(),
            started: "2026-01-01T00:00:00Z".to_owned(),
        };
        let file = write_state(&path, &state).unwrap();
        assert_eq!(UpState::read(&path).unwrap(), Some(state.clone()));
        drop(file);
        assert_eq!(UpState::read(&path).unwrap(), None);

        // Two at a time: the first one to end does not remove the other's file, and restores it if its own is there.
        let of = |server: &str, pid| UpState {
            server: server.to_owned(),
            pid,
            ..state.clone()
        };
        let (first, second) = (
            of("http://first:1", std::process::id()),
            of("http://second:1", std::process::id()),
        );
        let one = write_state(&path, &first).unwrap();
        let two = write_state(&path, &second).unwrap();
        drop(two);
        assert_eq!(UpState::read(&path).unwrap(), Some(first.clone()));
        let two = write_state(&path, &second).unwrap();
        drop(one);
        assert_eq!(UpState::read(&path).unwrap(), Some(second.clone()));
        drop(two);
        assert_eq!(UpState::read(&path).unwrap(), Some(first.clone()), "its process runs");
        // The file of a process that has ended is not restored.
        let gone = of("http://gone:1", u32::MAX);
        std::fs::write(&path, serde_json::to_string(&gone).unwrap()).unwrap();
        drop(write_state(&path, &second).unwrap());
        assert_eq!(UpState::read(&path).unwrap(), None);
    }
}
