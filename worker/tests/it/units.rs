//! The service files keep worker and coordinator apart, and the images can be built.

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

#[test]
fn worker_and_coordinator_have_neither_user_nor_folder_in_common() {
    let (worker, coordinator) = (
        read_deploy_file("systemd/aitk-worker.service"),
        read_deploy_file("systemd/aitk-coordinator.service"),
    );
    let assert_separate = |one: &str, other_folder: &str| {
        assert_ne!(one, other_folder);
        assert!(
            !Path::new(one).starts_with(other_folder) && !Path::new(other_folder).starts_with(one),
            "{one} {other_folder}"
        );
    };
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
