//! The sandbox rules for macOS, as the text of a `sandbox-exec` profile.
//!
//! Apple calls `sandbox-exec` deprecated but ships it with every version; nothing else confines a program that is not
//! a bundle.

use super::paths;
use super::rules::SandboxRules;
use std::fmt::Write as _;
use std::path::Path;

/// Paths that programs and the GPU's driver need, read-only.
const SYSTEM: &[&str] = &[
    "/System",
    "/Library/Apple",
    "/Library/Caches/com.apple.xbs",
    "/private/var/db/dyld",
    "/private/var/db/timezone",
    "/usr/lib",
    "/usr/share",
];

/// Builds the profile for an attempt that runs `program`.
///
/// # Errors
/// If a path cannot be written into a profile: it is not UTF-8, or contains control characters.
pub(crate) fn profile(rules: &SandboxRules, program: &Path) -> Result<String, String> {
    let mut text = String::from(
        "(version 1)\n(deny default)\n\
         ; What every program needs to start, in Apple's own words.\n\
         (import \"system.sb\")\n\
         ; No rule for the network and for other processes: refused by default.\n\
         (allow process-info* (target self))\n\
         (allow signal (target self))\n\
         (allow sysctl-read)\n\
         (allow file-read-metadata)\n\
         (allow file-map-executable (subpath \"/System\") (subpath \"/usr/lib\"))\n\
         ; Metal: the driver is a kernel service, its compiler another process.\n\
         (allow iokit-open)\n\
         (allow mach-lookup (global-name-prefix \"com.apple.MTLCompilerService\")\n\
         \x20 (global-name \"com.apple.cvmsServ\") (global-name \"com.apple.gpumemd.source\"))\n\
         (allow file-read* (literal \"/dev/null\") (literal \"/dev/zero\") (literal \"/dev/random\") (literal \"/dev/urandom\"))\n\
         (allow file-write-data (literal \"/dev/null\"))\n",
    );
    let program = quoted(program)?;
    let _ = writeln!(text, "(allow process-exec (literal {program}))");
    let _ = writeln!(text, "(allow file-read* (literal {program}))");
    let system = SYSTEM.iter().map(Path::new);
    let libraries = paths::readable_paths(rules.device);
    let read = system.chain(libraries.iter().map(AsRef::as_ref));
    for path in read.chain(rules.read.iter().map(AsRef::as_ref)) {
        let _ = writeln!(text, "(allow file-read* (subpath {}))", quoted(path)?);
    }
    if !rules.execute.is_empty() {
        text.push_str("(allow process-fork)\n");
    }
    let programs = (!rules.execute.is_empty())
        .then(paths::system_programs)
        .unwrap_or_default();
    for path in rules.execute.iter().chain(&programs) {
        let path = quoted(path)?;
        let _ = writeln!(
            text,
            "(allow file-read* file-map-executable process-exec (subpath {path}))"
        );
    }
    for path in &rules.write {
        let _ = writeln!(text, "(allow file-read* file-write* (subpath {}))", quoted(path)?);
    }
    // The last matching rule wins. The daemon reads these folders afterwards, so they may hold only regular files and
    // folders.
    text.push_str("(deny file-write-create (vnode-type SYMLINK) (vnode-type FIFO) (vnode-type SOCKET))\n");
    Ok(text)
}

/// A path as a string literal of the profile language.
fn quoted(path: &Path) -> Result<String, String> {
    let text = path.to_str().filter(|text| !text.contains(char::is_control));
    let text = text.ok_or_else(|| format!("{path:?} cannot be written into a sandbox profile: rename the folder"))?;
    Ok(format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::capability::DeviceKind;

    fn rules(read: &str) -> SandboxRules {
        SandboxRules {
            read: vec![read.into()],
            write: vec!["/data/attempts/a1/output".into()],
            execute: Vec::new(),
            device: DeviceKind::Metal,
        }
    }

    #[test]
    fn a_profile_denies_by_default_and_names_the_attempts_paths() {
        let text = profile(&rules("/data/cache/trees/ab"), Path::new("/usr/local/bin/aitk-worker")).unwrap();
        assert!(text.starts_with("(version 1)\n(deny default)\n"), "{text}");
        for line in [
            "(allow file-read* (subpath \"/data/cache/trees/ab\"))",
            "(allow file-read* file-write* (subpath \"/data/attempts/a1/output\"))",
            "(allow process-exec (literal \"/usr/local/bin/aitk-worker\"))",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("network") || !text.contains("(allow network"), "{text}");
        // Writing is allowed in the attempt's folder and to /dev/null.
        let writes = text
            .lines()
            .filter(|line| line.starts_with("(allow") && line.contains("file-write"));
        assert_eq!(writes.count(), 2, "{text}");
        let balance = |open: char| {
            text.lines()
                .filter(|line| !line.starts_with(';'))
                .flat_map(str::chars)
                .filter(|c| *c == open)
                .count()
        };
        assert_eq!(balance('('), balance(')'), "{text}");
    }

    #[test]
    fn only_an_attempt_with_an_extension_may_start_programs() {
        let mut rules = rules("/data/in");
        let text = profile(&rules, Path::new("/bin/x")).unwrap();
        assert!(!text.contains("process-fork"), "{text}");
        rules.execute.push("/opt/my_tool".into());
        let text = profile(&rules, Path::new("/bin/x")).unwrap();
        assert!(
            text.contains("(allow file-read* file-map-executable process-exec (subpath \"/opt/my_tool\"))"),
            "{text}"
        );
    }

    #[test]
    fn a_path_cannot_leave_its_quotes() {
        let hostile = "/data/a\")) (allow default) ((\"";
        let text = profile(&rules(hostile), Path::new("/bin/x")).unwrap();
        assert!(
            text.contains(r#"(subpath "/data/a\")) (allow default) ((\"")"#),
            "{text}"
        );
        let text = profile(&rules("/data/a\\"), Path::new("/bin/x")).unwrap();
        assert!(text.contains(r#"(subpath "/data/a\\")"#), "{text}");
        assert!(profile(&rules("/data/a\n(allow default)"), Path::new("/bin/x")).is_err());
    }
}
