//! Where a process writes the one file that it makes.

use super::context::{Context, artifact_name, expand_home};
use crate::error::{EngineError, Result};
use aitk_common::fsutil;
use aitk_common::job::{JobSpec, ProcessKind};
use std::io::Write as _;
use std::path::PathBuf;

/// The file that a process writes, and the folder that its artifact's name begins in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResultFile {
    root: PathBuf,
    path: PathBuf,
}

impl ResultFile {
    /// The file of the process for which `is_own` is true, and its folder, which is created. An attempt with its own folder writes
    /// there, whatever folder the config names.
    ///
    /// # Errors
    /// When the folder cannot be created, or the path is one of a folder.
    pub(super) fn new(cx: &Context<'_>, is_own: impl Fn(&ProcessKind) -> bool) -> Result<Self> {
        let paths: Vec<Option<String>> = cx
            .job
            .process
            .iter()
            .map(|process| result_path(cx.job, &process.kind))
            .collect();
        let index = cx.job.process.iter().position(|process| is_own(&process.kind));
        let configured = index.and_then(|index| paths[index].clone());
        let (Some(index), Some(configured)) = (index, configured) else {
            return Err(EngineError::Internal("this process writes no file".into()));
        };
        let file = match &cx.spec.output_root {
            Some(root) => {
                let name = file_name(&configured);
                let is_taken = |path: &Option<String>| path.as_deref().is_some_and(|path| file_name(path) == name);
                let path = match paths[..index].iter().any(is_taken) {
                    true => root.join(format!("process_{index}")).join(name),
                    false => root.join(name),
                };
                Self {
                    root: root.clone(),
                    path,
                }
            }
            None => {
                let path = expand_home(&configured);
                Self {
                    root: fsutil::folder_of(&path).to_path_buf(),
                    path,
                }
            }
        };
        if file.path.is_dir() {
            return Err(EngineError::bad_input(format!(
                "{}: this is a folder, and the result is a file: give another path",
                file.path.display()
            )));
        }
        fsutil::create_dir_all(fsutil::folder_of(&file.path))?;
        Ok(file)
    }

    /// Its name as an artifact.
    pub(super) fn name(&self) -> String {
        artifact_name(&self.root, &self.path)
    }

    /// Writes the file and emits it. A reader of the path sees the earlier file or the whole new one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn write(&self, bytes: &[u8], cx: &mut Context<'_>) -> Result<()> {
        fsutil::write_atomic(&self.path, |out| out.write_all(bytes))?;
        cx.artifact("lora", &self.root, &self.path, None, None);
        Ok(())
    }
}

/// The path that the config gives to the file of a process; `None`: it writes no single file.
fn result_path(job: &JobSpec, process: &ProcessKind) -> Option<String> {
    match process {
        ProcessKind::Extract(process) => Some(process.result_path(&job.name, job.config.output_folder.as_deref())),
        ProcessKind::RescaleLora(process) => Some(process.output_path.clone()),
        _ => None,
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
