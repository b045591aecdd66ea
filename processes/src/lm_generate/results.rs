//! The completions of a process as JSONL. Finished ones are recorded in a file while it runs, so that another attempt in the same folder
//! does not generate them again.

use super::prompts::{Prompt, PromptText};
use crate::context::Context;
use crate::error::{EngineError, Result};
use crate::pipelines::text::Completion;
use aitk_common::fsutil::{self, regular};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// The most bytes of a line that is read again: those of the longest prompt, whose characters JSON may escape, and of its completion.
const MAX_LINE_BYTES: u64 = 8 * MAX_TEXT_FILE_BYTES;

/// A line of the results.
#[derive(Serialize)]
struct Line<'a> {
    index: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    suffix: Option<&'a str>,
    completion: &'a str,
    prompt_tokens: usize,
    tokens: usize,
    stop_reason: &'a str,
}

/// The results of a process.
pub(super) struct Results {
    folder: PathBuf,
    /// The file of finished ones.
    record: PathBuf,
    file: File,
    /// Lines by the number of the text.
    lines: BTreeMap<u64, String>,
}

impl Results {
    /// Opens the record of this job and process, which has this many texts, in `folder`; a damaged line is generated again.
    ///
    /// # Errors
    /// When the record cannot be read or written.
    pub(super) fn open(folder: &Path, cx: &Context<'_>, process: &impl Serialize, texts: u64) -> Result<Self> {
        let text = serde_json::to_vec(process).map_err(|e| EngineError::Internal(e.to_string()))?;
        let hash = hex::encode(Sha256::digest(&text));
        let record_folder = folder.join(".aitk");
        fsutil::create_dir_all(&record_folder)?;
        let name = format!("completions-{}-{}.jsonl", cx.spec.job_id.as_str(), &hash[..12]);
        let record = record_folder.join(name);
        let (file, lines) = open_record(&record, texts)?;
        Ok(Self {
            folder: folder.to_path_buf(),
            record,
            file,
            lines,
        })
    }

    /// Whether the text of this number is finished. One of another prompt is not: the file of prompts may have changed.
    pub(super) fn has(&self, number: u64, prompt: &Prompt) -> bool {
        let Some(line) = self.lines.get(&number) else {
            return false;
        };
        let line: Value = serde_json::from_str(line).unwrap_or_default();
        let is = |key: &str, text: &str| line.get(key).and_then(Value::as_str) == Some(text);
        let is_same = match &prompt.text {
            PromptText::Continue(text) => is("prompt", text),
            PromptText::Fim { prefix, suffix } => is("prefix", prefix) && is("suffix", suffix),
        };
        is_same && line.get("task_id").and_then(Value::as_str) == prompt.task_id.as_deref()
    }

    /// Records a completion.
    pub(super) fn add(
        &mut self,
        number: u64,
        prompt: &Prompt,
        prompt_tokens: usize,
        completion: &Completion,
    ) -> Result<()> {
        let (text, prefix, suffix) = match &prompt.text {
            PromptText::Continue(text) => (Some(text.as_str()), None, None),
            PromptText::Fim { prefix, suffix } => (None, Some(prefix.as_str()), Some(suffix.as_str())),
        };
        let line = Line {
            index: number,
            task_id: prompt.task_id.as_deref(),
            prompt: text,
            prefix,
            suffix,
            completion: &completion.text,
            prompt_tokens,
            tokens: completion.tokens.len(),
            stop_reason: completion.reason.name(),
        };
        let line = serde_json::to_string(&line).map_err(|e| EngineError::Internal(e.to_string()))?;
        write_line(&mut self.file, &line).map_err(|e| EngineError::io(&self.record, e))?;
        self.lines.insert(number, line);
        Ok(())
    }

    /// Writes all lines into a new file of the folder, and removes the record. Returns the path of the file.
    pub(super) fn publish(self) -> Result<PathBuf> {
        let path = unused_path(&self.folder);
        fsutil::write_atomic(&path, |out| {
            for line in self.lines.values() {
                out.write_all(line.as_bytes())?;
                out.write_all(b"\n")?;
            }
            Ok(())
        })?;
        let _ = std::fs::remove_file(&self.record);
        if let Some(folder) = self.record.parent() {
            // This fails if the folder has other files, which is intended.
            let _ = std::fs::remove_dir(folder);
        }
        Ok(path)
    }
}

/// `completions.jsonl`, or with a number if there is one from an earlier run.
fn unused_path(folder: &Path) -> PathBuf {
    let mut path = folder.join("completions.jsonl");
    let mut number = 2u64;
    while path.exists() {
        path = folder.join(format!("completions_{number}.jsonl"));
        number += 1;
    }
    path
}

fn write_line(file: &mut File, line: &str) -> std::io::Result<()> {
    file.write_all(format!("{line}\n").as_bytes())
}

/// Opens a record of this many texts to append lines to it. Returns its whole lines by their number.
fn open_record(record: &Path, texts: u64) -> Result<(File, BTreeMap<u64, String>)> {
    let lines = match regular::open(record) {
        Ok((file, _)) => read_lines(BufReader::new(file), texts).map_err(|error| EngineError::io(record, error))?,
        Err(error) if error.kind() == ErrorKind::NotFound => BTreeMap::new(),
        Err(error) => return Err(EngineError::io(record, error)),
    };
    // Written anew, because the last line may be incomplete.
    fsutil::write_atomic(record, |out| {
        for line in lines.values() {
            out.write_all(line.as_bytes())?;
            out.write_all(b"\n")?;
        }
        Ok(())
    })?;
    let file = File::options().append(true).open(record);
    Ok((file.map_err(|e| EngineError::io(record, e))?, lines))
}

/// The lines of a record of this many texts by their number, without those that are damaged, of other texts or too long. A full
/// disk cuts the last one anywhere, also within a character.
fn read_lines(mut record: impl BufRead, texts: u64) -> std::io::Result<BTreeMap<u64, String>> {
    let parse = |line: &[u8]| {
        let line = std::str::from_utf8(line).ok()?;
        let value: Value = serde_json::from_str(line).ok()?;
        let is_whole = value.get("stop_reason").is_some_and(Value::is_string);
        let number = value.get("index")?.as_u64()?;
        (is_whole && number < texts).then(|| (number, line.to_owned()))
    };
    let mut lines = BTreeMap::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        if record.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line)? == 0 {
            return Ok(lines);
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        } else if line.len() as u64 == MAX_LINE_BYTES {
            record.skip_until(b'\n')?;
            continue;
        }
        lines.extend(parse(&line));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_of_a_record_survive_a_full_disk() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record.jsonl");
        let line = |index: u64| format!(r#"{{"index":{index},"completion":"你好","stop_reason":"length"}}"#);
        let (mut file, lines) = open_record(&record, 3).unwrap();
        assert!(lines.is_empty());
        for index in [0, 1] {
            write_line(&mut file, &line(index)).unwrap();
        }
        // The next line ends within its first character that is not ASCII.
        let cut = line(2);
        let cut = &cut.as_bytes()[..cut.find('你').unwrap() + 1];
        file.write_all(cut).unwrap();
        drop(file);

        let (mut file, lines) = open_record(&record, 3).unwrap();
        assert_eq!(lines, BTreeMap::from([(0, line(0)), (1, line(1))]));
        write_line(&mut file, &line(2)).unwrap();
        // A text that the job does not have.
        write_line(&mut file, &line(3)).unwrap();
        let (_, lines) = open_record(&record, 3).unwrap();
        assert_eq!(lines.len(), 3);
        let text = std::fs::read_to_string(&record).unwrap();
        assert_eq!(text, format!("{}\n{}\n{}\n", line(0), line(1), line(2)));
    }

    #[test]
    fn a_record_that_cannot_be_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record.jsonl");
        std::fs::create_dir(&record).unwrap();
        assert!(open_record(&record, 1).is_err());
        assert!(record.is_dir());
        // A device never ends.
        #[cfg(unix)]
        {
            let link = dir.path().join("link");
            std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
            assert!(open_record(&link, 1).is_err());
        }
    }
}
