//! The service files and the Dockerfile keep worker and coordinator apart, and the images can be built.

use std::path::Path;

fn read_deploy_file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The value of a line `NAME=VALUE` of a unit.
fn setting<'a>(unit: &'a str, name: &str) -> &'a str {
    let line = unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    line.unwrap_or_else(|| panic!("no {name} in {unit}"))
}

/// Two users or two folders, neither of which is inside of the other.
fn assert_separate(one: &str, other: &str) {
    assert_ne!(one, other);
    assert!(
        !Path::new(one).starts_with(other) && !Path::new(other).starts_with(one),
        "{one} {other}"
    );
}

#[test]
fn services_of_worker_and_coordinator_have_neither_user_nor_folder_in_common() {
    let (worker, coordinator) = (
        read_deploy_file("systemd/aitk-worker.service"),
        read_deploy_file("systemd/aitk-coordinator.service"),
    );
    assert_separate(setting(&worker, "User"), setting(&coordinator, "User"));
    let (worker_folder, coordinator_folder) = (
        setting(&worker, "ReadWritePaths"),
        setting(&coordinator, "ReadWritePaths"),
    );
    assert_separate(worker_folder, coordinator_folder);
    for (unit, own_folder, other_folder) in [
        (&worker, worker_folder, coordinator_folder),
        (&coordinator, coordinator_folder, worker_folder),
    ] {
        assert!(
            setting(unit, "ExecStart").ends_with(&format!("--data-dir {own_folder}")),
            "{unit}"
        );
        let hidden = setting(unit, "InaccessiblePaths");
        assert!(
            hidden.split_whitespace().any(|path| path == format!("-{other_folder}")),
            "{unit}"
        );
        assert_eq!(setting(unit, "NoNewPrivileges"), "yes");
        // Without it the system does not tell a program the addresses of its machine.
        assert!(
            setting(unit, "RestrictAddressFamilies").contains("AF_NETLINK"),
            "{unit}"
        );
    }
}

#[test]
fn the_workers_service_can_use_gpus_and_control_groups() {
    let worker = read_deploy_file("systemd/aitk-worker.service");
    // Settings that would hide GPUs from the worker, or prevent control groups for its attempts.
    for harmful in [
        "PrivateDevices=yes",
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "MemoryDenyWriteExecute=yes",
    ] {
        assert!(!worker.contains(harmful), "{harmful}");
    }
    assert!(setting(&worker, "Delegate").contains("memory"));
    // NoNewPrivileges keeps CUDA from making the cards' device files.
    let before_start = setting(&worker, "ExecStartPre");
    assert!(
        before_start.starts_with("-+") && before_start.contains("nvidia-modprobe"),
        "{before_start}"
    );
}

#[test]
fn images_of_worker_and_coordinator_have_neither_user_nor_folder_in_common() {
    let images = read_deploy_file("docker/Dockerfile");
    let mut users = Vec::new();
    for stage in images.split("\nFROM ").filter(|stage| stage.contains("\nUSER ")) {
        let name = stage.lines().next().unwrap().rsplit(' ').next().unwrap().to_owned();
        let value = |word: &str| {
            stage
                .lines()
                .find_map(|line| line.strip_prefix(word))
                .unwrap()
                .trim()
                .to_owned()
        };
        users.push((name, value("USER "), value("VOLUME ")));
    }
    let coordinators: Vec<_> = users.iter().filter(|(name, ..)| name == "coordinator").collect();
    let workers: Vec<_> = users.iter().filter(|(name, ..)| name.starts_with("worker")).collect();
    assert_eq!((coordinators.len(), workers.len()), (1, 2), "{users:?}");
    for worker in workers {
        assert_separate(&worker.1, &coordinators[0].1);
        assert_separate(&worker.2, &coordinators[0].2);
    }
}

#[test]
fn a_build_of_the_images_gets_every_crate_of_the_workspace() {
    let workspace = read_deploy_file("../Cargo.toml");
    let members = workspace
        .lines()
        .find_map(|line| line.strip_prefix("members = ["))
        .unwrap();
    let members = members
        .trim_end_matches(']')
        .split(',')
        .map(|name| name.trim().trim_matches('"'));
    let ignore_file = read_deploy_file("docker/Dockerfile.dockerignore");
    let read: Vec<&str> = ignore_file.lines().filter_map(|line| line.strip_prefix('!')).collect();
    for member in members {
        // A folder, one above it, or the files in it that cargo needs to know the crate.
        let manifest = format!("{member}/Cargo.toml");
        assert!(
            read.iter().any(|path| Path::new(&manifest).starts_with(path)),
            "{member}: {read:?}"
        );
    }
}

/// A worker whose options are wrong (exit code 2), or whose certificate is refused (4), is not started again every five seconds.
#[test]
fn services_do_not_restart_after_an_error_that_a_person_has_to_fix() {
    let worker = read_deploy_file("systemd/aitk-worker.service");
    let coordinator = read_deploy_file("systemd/aitk-coordinator.service");
    assert_eq!(setting(&worker, "RestartPreventExitStatus"), "2 4");
    assert_eq!(setting(&coordinator, "RestartPreventExitStatus"), "2");
    for unit in [&worker, &coordinator] {
        assert_eq!(setting(unit, "Restart"), "on-failure");
    }
}

/// The texts of the elements `string` of a property list, without its comments.
fn strings_of_plist(plist: &str) -> Vec<String> {
    let mut rest = plist;
    let mut elements = String::new();
    while let Some((before, comment)) = rest.split_once("<!--") {
        let (comment, after) = comment.split_once("-->").unwrap();
        assert!(!comment.contains("--"), "not valid XML: {comment}");
        elements.push_str(before);
        rest = after;
    }
    elements.push_str(rest);
    let strings = elements.split("<string>").skip(1);
    strings
        .map(|text| {
            let text = text.split_once("</string>").unwrap().0;
            for entity in text.split('&').skip(1) {
                assert!(
                    ["amp;", "lt;", "gt;"].iter().any(|known| entity.starts_with(known)),
                    "not valid XML: &{entity}"
                );
            }
            text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        })
        .collect()
}

/// The shell command of launchd's service, with a program in the worker's place.
#[cfg(unix)]
struct LaunchdService {
    home: tempfile::TempDir,
    command: String,
}

#[cfg(unix)]
impl LaunchdService {
    fn new() -> Self {
        let strings = strings_of_plist(&read_deploy_file("launchd/dev.aitk.worker.plist"));
        let [_, shell, flag, command, program] = strings.as_slice() else {
            panic!("{strings:?}");
        };
        assert_eq!((shell.as_str(), flag.as_str()), ("/bin/sh", "-c"));
        assert_eq!(program, "/usr/local/bin/aitk-worker");
        let home = tempfile::tempdir().unwrap();
        for folder in ["Library/Logs", ".config/aitk"] {
            std::fs::create_dir_all(home.path().join(folder)).unwrap();
        }
        std::fs::write(home.path().join(".config/aitk/worker.env"), "AITK_EXAMPLE=seven\n").unwrap();
        Self {
            home,
            command: command.clone(),
        }
    }

    fn start(&self, program: &str) -> std::process::Child {
        let path = self.home.path().join("program");
        std::fs::write(&path, format!("#!/bin/sh\n{program}\n")).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        std::process::Command::new("/bin/sh")
            .args(["-c", &self.command])
            .arg(&path)
            .env("HOME", self.home.path())
            .spawn()
            .unwrap()
    }
}

/// launchd starts a service again unless its exit code is 0.
#[cfg(unix)]
#[test]
fn launchds_service_ends_for_good_after_an_error_that_a_person_has_to_fix() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    let service = LaunchdService::new();
    for (code, expected) in [(0, 0), (1, 1), (2, 0), (4, 0), (6, 6)] {
        let ended = service
            .start(&format!("echo \"$AITK_EXAMPLE\"; exit {code}"))
            .wait()
            .unwrap();
        assert_eq!(ended.code(), Some(expected), "exit code {code}");
    }
    let log = std::fs::read_to_string(service.home.path().join("Library/Logs/aitk-worker.log")).unwrap();
    assert_eq!(log, "seven\n".repeat(5));

    // A signal reaches the worker, whose exit code counts.
    let text = "trap 'sleep 0.2; exit 6' TERM; sleep 0.2; touch \"$HOME/up\"; while :; do sleep 0.05; done";
    let mut running = service.start(text);
    while !service.home.path().join("up").exists() {
        assert_eq!(running.try_wait().unwrap(), None);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    kill(Pid::from_raw(i32::try_from(running.id()).unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(6));
}
