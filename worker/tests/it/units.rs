//! What is shipped to run worker and coordinator as services keeps them apart.

use std::path::Path;

fn shipped(name: &str) -> String {
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
        shipped("systemd/aitk-worker.service"),
        shipped("systemd/aitk-coordinator.service"),
    );
    let apart = |one: &str, other: &str| {
        assert_ne!(one, other);
        assert!(
            !Path::new(one).starts_with(other) && !Path::new(other).starts_with(one),
            "{one} {other}"
        );
    };
    apart(setting(&worker, "User"), setting(&coordinator, "User"));
    let (mine, others) = (
        setting(&worker, "ReadWritePaths"),
        setting(&coordinator, "ReadWritePaths"),
    );
    apart(mine, others);
    for (unit, own, other) in [(&worker, mine, others), (&coordinator, others, mine)] {
        assert!(
            setting(unit, "ExecStart").ends_with(&format!("--data-dir {own}")),
            "{unit}"
        );
        let hidden = setting(unit, "InaccessiblePaths");
        assert!(
            hidden.split_whitespace().any(|path| path == format!("-{other}")),
            "{unit}"
        );
        assert_eq!(setting(unit, "NoNewPrivileges"), "yes");
    }
    // What would hide GPUs from the worker, or keep it from making control groups for its attempts.
    for harmful in [
        "PrivateDevices=yes",
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "MemoryDenyWriteExecute=yes",
    ] {
        assert!(!worker.contains(harmful), "{harmful}");
    }
    assert!(setting(&worker, "Delegate").contains("memory"));

    let images = shipped("docker/Dockerfile");
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
        apart(&worker.1, &coordinators[0].1);
        apart(&worker.2, &coordinators[0].2);
    }
}
