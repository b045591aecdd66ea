//! Names of folders and files that a run leaves behind. Pure functions.

/// Whether a job name can name a folder and files.
///
/// # Errors
/// Says why not.
pub fn check_name(name: &str) -> Result<(), String> {
    if name.trim().is_empty() {
        return Err("a name cannot be empty".into());
    }
    if name.len() > 200 {
        return Err("a name can have at most 200 bytes".into());
    }
    if name == "." || name == ".." || name.contains(['/', '\\', '\0', ':']) || name.chars().any(char::is_control) {
        return Err(format!(
            "`{}` cannot name a folder: it is `.` or `..`, or has `/`, `\\`, `:` or a control character",
            name.escape_debug()
        ));
    }
    Ok(())
}

/// `_000000500`: the part of a file name that says the step.
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

/// What follows the time in the name of a sample: `__000000500_0.jpg`.
#[must_use]
pub fn sample_tail(step: u64, index: usize, format: &str) -> String {
    format!("_{}_{index}.{}", step_suffix(step), format.trim_start_matches('.'))
}

/// File name of a picture of `to_folder`: `1724085406830_0.png`.
#[must_use]
pub fn generated_file(unix_ms: u64, count: u64, ext: &str) -> String {
    format!("{unix_ms}_{count}.{}", ext.trim_start_matches('.'))
}

/// Which step saves `max_step_saves_to_keep` removes: given the steps of one group, those beyond the newest
/// `keep`, oldest first. `keep` 0 keeps all.
#[must_use]
pub fn expired(steps: &[u64], keep: u64) -> Vec<u64> {
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
    fn names_are_those_of_ai_toolkit() {
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
    fn steps_are_read_back() {
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
        assert_eq!(expired(&[300, 100, 200, 400], 2), [100, 200]);
        assert_eq!(expired(&[300, 100], 2), [0; 0]);
        assert_eq!(expired(&[300, 100, 200], 0), [0; 0], "0 keeps all");
    }

    #[test]
    fn names_that_cannot_name_folders() {
        for name in ["", " ", ".", "..", "a/b", "a\\b", "a\nb", "c:", &"x".repeat(201)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        for name in ["cat", "my lora v1.2", "猫"] {
            assert_eq!(check_name(name), Ok(()));
        }
    }
}
