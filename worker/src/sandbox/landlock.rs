//! Files, TCP, abstract sockets and signals: Landlock.

use super::{Rules, paths};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope, make_bitflags,
};
use std::fs::File;
use std::path::Path;

/// The newest version whose rights were looked at here. A kernel that knows less enforces what it knows.
const ABI_KNOWN: ABI = ABI::V7;

/// Confines this thread and those that it starts. Says what is in force.
///
/// # Errors
/// Why nothing is, in words.
pub(super) fn restrict(rules: &Rules) -> Result<String, String> {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI_KNOWN))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(ABI_KNOWN)))
        .and_then(|rules| rules.scope(Scope::from_all(ABI_KNOWN)))
        .and_then(Ruleset::create);
    let mut ruleset = ruleset.map_err(|error| format!("Landlock: {error}"))?;
    let (reads, changes) = (readable(), changeable());
    for (path, access) in [
        (paths::readable(rules.device), reads),
        (paths::devices(rules.device), devices()),
        (rules.read.clone(), reads),
        (rules.write.clone(), changes),
    ]
    .iter()
    .flat_map(|(paths, access)| paths.iter().map(move |path| (path, *access)))
    {
        ruleset = allow(ruleset, path, access)?;
    }
    // Its own memory peak is counted anew by writing there.
    let own = reads | AccessFs::WriteFile | AccessFs::Truncate;
    ruleset = allow(ruleset, Path::new("/proc/self"), own)?;
    pin_own_entry();
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

/// Adds a rule. What does not exist on this machine needs none.
fn allow(
    ruleset: landlock::RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<landlock::RulesetCreated, String> {
    let Ok(opened) = PathFd::new(path) else {
        return Ok(ruleset);
    };
    // The kernel refuses rights of folders for what is none.
    let access = match path.is_dir() {
        true => access,
        false => access & AccessFs::from_file(ABI_KNOWN),
    };
    ruleset
        .add_rule(PathBeneath::new(opened, access))
        .map_err(|error| format!("Landlock: {}: {error}", path.display()))
}

/// Not executing: an attempt starts no program.
fn readable() -> BitFlags<AccessFs> {
    make_bitflags!(AccessFs::{ReadFile | ReadDir})
}

/// Regular files and folders. No links, pipes, sockets and devices: the daemon reads what lies there afterwards.
fn changeable() -> BitFlags<AccessFs> {
    readable() | make_bitflags!(AccessFs::{WriteFile | RemoveDir | RemoveFile | MakeDir | MakeReg | Refer | Truncate})
}

fn devices() -> BitFlags<AccessFs> {
    make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | IoctlDev})
}

/// Keeps `/proc/self` open for as long as this process lives: a rule holds for the file system's entry as it is now, and an
/// entry that nobody has open may be forgotten, and made anew without the rule.
fn pin_own_entry() {
    if let Ok(own) = File::open("/proc/self") {
        std::mem::forget(own);
    }
}
