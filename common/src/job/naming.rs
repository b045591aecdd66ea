//! Names of the folders and files that a run writes. Pure functions.

use crate::fsutil::names;

/// Maximum bytes of a file name's suffix.
const MAX_SUFFIX_BYTES: usize = 32;

/// Maximum bytes of a job name; with a step and a suffix appended it must still be a valid file name.
const MAX_NAME_BYTES: usize = 200;

/// Checks that a job name is valid as the name of a folder and of files on every operating system.
///
/// Unicode is not normalised: every attempt writes into its own folder, so two names that differ only in composition do not
/// collide. Characters that normalisation would turn into a separator or a dot are refused.
///
/// # Errors
/// The reason, as a message.
pub fn check_name(name: &str) -> Result<(), String> {
    if name.trim().is_empty() {
        return Err("a name cannot be empty".into());
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(format!("a name can have at most {MAX_NAME_BYTES} bytes"));
    }
    let reason = if name.starts_with('.') {
        "it begins with a dot, as the names of aitk's own files in that folder do"
    } else {
        match names::check_part(name) {
            Ok(()) => return Ok(()),
            Err(bad) => bad.reason,
        }
    };
    Err(format!("`{}` cannot name a folder: {reason}", name.escape_debug()))
}

/// Checks that this is valid as the suffix of a file name, such as `.txt`, and adds no folder.
///
/// # Errors
/// The reason, as a message.
pub fn check_suffix(suffix: &str) -> Result<(), String> {
    // `x` is the stem.
    match names::check_part(&format!("x{suffix}")) {
        _ if suffix.len() > MAX_SUFFIX_BYTES => Err(format!("a suffix can have at most {MAX_SUFFIX_BYTES} bytes")),
        Ok(()) => Ok(()),
        Err(bad) => Err(format!(
            "`{}` cannot end the name of a file: {}",
            suffix.escape_debug(),
            bad.reason
        )),
    }
}

/// `_000000500`: the step in a file name.
fn step_suffix(step: u64) -> String {
    format!("_{step:09}")
}

/// File name of a LoRA, or of a whole model: `job_000000500.safetensors`, or `job.safetensors` for the final one.
#[must_use]
pub fn save_file(job: &str, step: Option<u64>) -> String {
    format!("{}.safetensors", save_folder(job, step))
}

/// Folder name of a whole model: `job_000000500`, or `job` for the final one.
#[must_use]
pub fn save_folder(job: &str, step: Option<u64>) -> String {
    format!("{job}{}", step.map_or_else(String::new, step_suffix))
}

/// The step in the name of a step save of this job, file or folder: `job_000000500.safetensors` -> 500.
#[must_use]
pub fn step_of(job: &str, file_name: &str) -> Option<u64> {
    let rest = file_name.strip_prefix(job)?.strip_prefix('_')?;
    let digits = rest.split('.').next()?;
    if digits.len() < 9 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}

/// File name of a sample: `1724085406830__000000500_0.jpg`.
#[must_use]
pub fn sample_file(unix_ms: u64, step: u64, index: usize, format: &str) -> String {
    format!("{unix_ms}{}", sample_tail(step, index, format))
}

/// The part of a sample's file name after the time: `__000000500_0.jpg`.
#[must_use]
pub fn sample_tail(step: u64, index: usize, format: &str) -> String {
    format!("_{}_{index}.{}", step_suffix(step), format.trim_start_matches('.'))
}

/// File name of an image of `to_folder`: `1724085406830_0.png`.
#[must_use]
pub fn generated_file(unix_ms: u64, count: u64, ext: &str) -> String {
    format!("{unix_ms}_{count}.{}", ext.trim_start_matches('.'))
}

/// Returns the step saves to delete under `max_step_saves_to_keep`: all of `steps` but the newest `keep`, oldest first.
/// `keep` 0 keeps all.
#[must_use]
pub fn saves_to_delete(steps: &[u64], keep: u64) -> Vec<u64> {
    let mut steps = steps.to_vec();
    steps.sort_unstable();
    steps.dedup();
    let keep = usize::try_from(keep).unwrap_or(usize::MAX);
    if keep == 0 || steps.len() <= keep {
        return Vec::new();
    }
    steps.truncate(steps.len() - keep);
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_match_ai_toolkit() {
        assert_eq!(save_file("cat", Some(500)), "cat_000000500.safetensors");
        assert_eq!(save_file("cat", None), "cat.safetensors");
        assert_eq!(save_folder("cat", Some(500)), "cat_000000500");
        assert_eq!(
            sample_file(1_724_085_406_830, 500, 0, "jpg"),
            "1724085406830__000000500_0.jpg"
        );
        assert_eq!(sample_tail(12, 3, ".png"), "__000000012_3.png");
        assert_eq!(generated_file(1_724_085_406_830, 3, "png"), "1724085406830_3.png");
    }

    #[test]
    fn step_of_reads_the_step_of_a_save() {
        assert_eq!(step_of("cat", "cat_000000500.safetensors"), Some(500));
        assert_eq!(step_of("cat", "cat_000000500"), Some(500));
        for other in [
            "cat.safetensors",
            "cat_500.safetensors",
            "cat_two_000000500.safetensors",
            "dog_000000500.pt",
        ] {
            assert_eq!(step_of("cat", other), None, "{other}");
        }
    }

    #[test]
    fn retention_keeps_the_newest_by_step() {
        assert_eq!(saves_to_delete(&[300, 100, 200, 400], 2), [100, 200]);
        assert_eq!(saves_to_delete(&[300, 100], 2), [0; 0]);
        assert_eq!(saves_to_delete(&[300, 100, 200], 0), [0; 0], "0 keeps all");
    }

    #[test]
    fn check_name_refuses_names_that_are_unsafe_as_folders() {
        for name in [
            "",
            " ",
            ".",
            "..",
            "a/b",
            "a\\b",
            "a\nb",
            "c:",
            "/etc/x",
            "../x",
            "a\0b",
            ".tmp-x",
            ".aitk",
            "a.",
            " a",
            "nul",
            "COM1.txt",
            "..\u{2215}x",
            "\u{ff0e}\u{ff0e}",
            "a\u{202e}b",
            "%2e%2e%2fx",
            &"x".repeat(201),
        ] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        for name in ["cat", "my lora v1.2", "猫", "e\u{301}", "\u{e9}"] {
            assert_eq!(check_name(name), Ok(()));
        }
    }

    #[test]
    fn check_suffix_refuses_path_separators() {
        for suffix in [
            "/../../etc/passwd",
            ".txt/x",
            "\0",
            ".\\x",
            &".x".repeat(20),
            ".txt:stream",
        ] {
            assert!(check_suffix(suffix).is_err(), "{suffix:?}");
        }
        for suffix in [".txt", "txt", "_caption.json", ""] {
            assert_eq!(check_suffix(suffix), Ok(()));
        }
    }
}
