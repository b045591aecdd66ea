//! What a job's files of prompts say about its memory: the longest text to continue (`lm_generate`), and the largest images to generate
//! (`to_folder`).

use super::image_batches::ImageBatch;
use crate::fsutil::regular;
use crate::job::generate::prompt_lines;
use crate::job::limits::MAX_TEXT_FILE_BYTES;
use crate::job::values::TextSource;
use crate::job::{JobSpec, Process, ProcessKind};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The key of `generate` in which the planner finds it, next to those of the config.
pub(super) const LONGEST_PROMPT: &str = "longest_prompt";

/// Bytes of the longest line of a file of prompts. No prompt in it is longer, neither in a file of texts nor in JSONL. `None`: it cannot be read.
#[must_use]
pub fn longest_line(path: &Path) -> Option<u64> {
    let text = regular::read_text(path, MAX_TEXT_FILE_BYTES).ok()?;
    text.lines().map(|line| line.len() as u64).max()
}

/// The largest image of each process whose prompts are in a file. `local`: the path of a file on this machine, if it is here.
#[must_use]
pub fn largest_images_in_files(job: &JobSpec, local: impl Fn(&str) -> Option<PathBuf>) -> Vec<ImageBatch> {
    let of_process = |(index, process): (usize, &Process)| {
        let ProcessKind::Generate(process) = &process.kind else {
            return None;
        };
        let TextSource::File(file) = &process.generate.prompts else {
            return None;
        };
        let text = regular::read_text(&local(file)?, MAX_TEXT_FILE_BYTES).ok()?;
        let (width, height) = process.generate.largest_size(prompt_lines(&text))?;
        Some(ImageBatch {
            process: u32::try_from(index).ok()?,
            width,
            height,
            images: 1,
        })
    };
    job.process.iter().enumerate().filter_map(of_process).collect()
}

/// The job (`JobSpec` as JSON) with the bytes of the longest prompt in its files, for the planner.
#[must_use]
pub fn with_longest_prompt(mut job: Value, bytes: Option<u64>) -> Value {
    let processes = job.get_mut("process").and_then(Value::as_array_mut);
    for process in processes.into_iter().flatten() {
        if let (Some(generate), Some(bytes)) = (process.pointer_mut("/kind/lm_generate/generate"), bytes)
            && generate.is_object()
        {
            generate[LONGEST_PROMPT] = bytes.into();
        }
    }
    job
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_file_of_prompts_counts_as_its_longest_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("prompts.txt");
        assert_eq!(longest_line(&file), None);
        std::fs::write(&file, format!("ab\n{}\r\n\nc", "x".repeat(6000))).unwrap();
        assert_eq!(longest_line(&file), Some(6000));
        let job = |prompts: Value| json!({"process": [{"kind": {"lm_generate": {"generate": prompts}}}]});
        let named = json!({"prompts": "a.txt"});
        let seen = with_longest_prompt(job(named.clone()), Some(6000));
        assert_eq!(seen, job(json!({"prompts": "a.txt", "longest_prompt": 6000})));
        // Other jobs stay as they are.
        assert_eq!(with_longest_prompt(job(named.clone()), None), job(named));
        assert_eq!(
            with_longest_prompt(json!({"process": 3}), Some(1)),
            json!({"process": 3})
        );
    }
}
