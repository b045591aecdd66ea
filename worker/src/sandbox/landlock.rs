//! Restricts files, TCP, abstract sockets and signals with Landlock.

use super::{SandboxRules, paths};
use aitk_common::capability::DeviceKind;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope, make_bitflags,
};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The newest Landlock version that this code was written for. An older kernel enforces the rights that it knows.
const KNOWN_ABI: ABI = ABI::V7;

/// Confines this thread and the threads that it starts later. Returns what is in force.
///
/// # Errors
/// The reason why nothing is in force.
pub(super) fn restrict(rules: &SandboxRules) -> Result<String, String> {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN_ABI))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(KNOWN_ABI)))
        .and_then(|rules| rules.scope(Scope::from_all(KNOWN_ABI)))
        .and_then(Ruleset::create);
    let mut ruleset = ruleset.map_err(|error| format!("Landlock: {error}"))?;
    let (reads, writes) = (read_access(), writable());
    for (path, access) in [
        (paths::readable_paths(rules.device), reads),
        (paths::device_paths(rules.device), device_access()),
        (rules.read.clone(), reads),
        (rules.write.clone(), writes),
        (rules.execute.clone(), read_access() | AccessFs::Execute),
        (system_programs(rules), read_access() | AccessFs::Execute),
    ]
    .iter()
    .flat_map(|(paths, access)| paths.iter().map(move |path| (path, *access)))
    {
        ruleset = allow(ruleset, path, access)?;
    }
    // The process resets its memory peak by writing there.
    let proc_self_access = reads | AccessFs::WriteFile | AccessFs::Truncate;
    ruleset = allow(ruleset, Path::new("/proc/self"), proc_self_access)?;
    let is_root = nix::unistd::geteuid().is_root();
    if let Some(access) = proc_access_of_programs(rules.device, !rules.execute.is_empty(), is_root) {
        ruleset = allow(ruleset, Path::new("/proc"), access)?;
    }
    keep_proc_self_open();
    let status = ruleset.restrict_self().map_err(|error| format!("Landlock: {error}"))?;
    match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, LandlockStatus::NotEnabled) => {
            Err("Landlock is not enabled in this kernel (boot with lsm=landlock,…)".to_owned())
        }
        (RulesetStatus::NotEnforced, _) => Err("this kernel has no Landlock (Linux 5.13 or later has)".to_owned()),
        (_, LandlockStatus::Available { effective_abi, .. }) => Ok(format!("Landlock ABI {}", effective_abi as i32)),
        _ => Ok("Landlock".to_owned()),
    }
}

/// Adds a rule. A path that does not exist on this machine needs none.
fn allow(
    ruleset: landlock::RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<landlock::RulesetCreated, String> {
    let Ok(opened) = PathFd::new(path) else {
        return Ok(ruleset);
    };
    // The kernel rejects folder rights for a file.
    let access = match path.is_dir() {
        true => access,
        false => access & AccessFs::from_file(KNOWN_ABI),
    };
    ruleset
        .add_rule(PathBeneath::new(opened, access))
        .map_err(|error| format!("Landlock: {}: {error}", path.display()))
}

/// What a program that the attempt starts may do below `/proc`, which has a folder for it only later. CUDA's driver (570 and later) names its threads
/// in `/proc/PID/task/TID/comm`, and fails with error 304 (`cudaErrorOperatingSystem`) if it may not: NVIDIA/OpenShell issue 1486, nolabs-ai/nono
/// issue 924. Listing processes stays refused, and so do files that need the right to trace a process (its memory, environment, open files): Landlock
/// does not give that over processes outside. What can be written for other processes of the user is their `oom_score_adj` and the like. Nothing for
/// root, which could change the kernel's settings there.
///
/// Landlock cannot narrow this to the folders of the attempt's own processes. A rule belongs to a folder that exists when the rules are made, has no
/// patterns for file names, and rules added later only take rights away. The program could take away all but its own folder before it starts, but
/// its child processes (`accelerate launch`, `torchrun`, workers that load data) have those rules too, and CUDA would not start in them.
fn proc_access_of_programs(device: DeviceKind, starts_programs: bool, is_root: bool) -> Option<BitFlags<AccessFs>> {
    let is_granted = device == DeviceKind::Cuda && starts_programs && !is_root;
    is_granted.then(|| make_bitflags!(AccessFs::{ReadFile | WriteFile}))
}

/// Where the system's programs and libraries are, for an attempt that may start programs.
fn system_programs(rules: &SandboxRules) -> Vec<PathBuf> {
    match rules.execute.is_empty() {
        true => Vec::new(),
        false => paths::system_programs(),
    }
}

/// No execution: most attempts start no program.
fn read_access() -> BitFlags<AccessFs> {
    make_bitflags!(AccessFs::{ReadFile | ReadDir})
}

/// Regular files and folders only. No links, pipes, sockets and devices: the daemon reads these folders afterwards.
fn writable() -> BitFlags<AccessFs> {
    read_access()
        | make_bitflags!(AccessFs::{WriteFile | RemoveDir | RemoveFile | MakeDir | MakeReg | Refer | Truncate})
}

fn device_access() -> BitFlags<AccessFs> {
    make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | IoctlDev})
}

/// Keeps `/proc/self` open for the life of this process: the rule belongs to the inode in memory, which the kernel
/// may evict while nobody has it open, and create again without the rule.
fn keep_proc_self_open() {
    if let Ok(proc_self_access) = File::open("/proc/self") {
        std::mem::forget(proc_self_access);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_on_a_cuda_device_write_below_proc() {
        let granted = proc_access_of_programs(DeviceKind::Cuda, true, false).unwrap();
        assert!(granted.contains(AccessFs::WriteFile) && !granted.contains(AccessFs::ReadDir));
        for (device, starts_programs, is_root) in [
            (DeviceKind::Cuda, false, false),
            (DeviceKind::Cpu, true, false),
            (DeviceKind::Cuda, true, true),
        ] {
            assert_eq!(proc_access_of_programs(device, starts_programs, is_root), None);
        }
    }
}
