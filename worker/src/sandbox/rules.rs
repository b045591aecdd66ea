//! The files and devices that the process of an attempt may use.

use crate::runner::CUDA_CACHE;
use aitk_common::attempt::{AttemptSpec, ExtensionProgram};
use aitk_common::capability::DeviceKind;
use aitk_common::job::{JobSpec, Process};
use aitk_processes::expand_home;
use std::path::{Path, PathBuf};

/// The files and devices that an attempt may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SandboxRules {
    /// Files and folders that it may read.
    pub(crate) read: Vec<PathBuf>,
    /// Folders in which it may read, create and remove files.
    pub(crate) write: Vec<PathBuf>,
    /// Folders whose programs may be started; empty: no program may be. Only an attempt with an extension has one.
    pub(crate) execute: Vec<PathBuf>,
    /// The device that it computes on: drivers need files of their own.
    pub(crate) device: DeviceKind,
}

impl SandboxRules {
    /// Derives the rules for an attempt from what the daemon staged, never from the job. `None` for a local attempt,
    /// which works in its user's folders, unless it runs an extension: then only the folders that its job names count.
    pub(crate) fn for_attempt(spec: &AttemptSpec, temp_dir: &Path) -> Option<Self> {
        let cuda_cache = std::env::var_os(CUDA_CACHE).map(PathBuf::from);
        Self::with_cuda_cache(spec, temp_dir, cuda_cache)
    }

    fn with_cuda_cache(spec: &AttemptSpec, temp_dir: &Path, cuda_cache: Option<PathBuf>) -> Option<Self> {
        let mut read: Vec<PathBuf> = spec.inputs.values().chain(&spec.resume_from).cloned().collect();
        let mut write = vec![temp_dir.to_owned()];
        match &spec.output_root {
            Some(output) => write.push(output.clone()),
            None => {
                spec.extension.as_ref()?;
                let folders = ExtensionFolders::of_local_job(&spec.job)?;
                read.extend(folders.inputs);
                write.push(folders.output);
            }
        }
        // An extension computes nothing that other jobs of its user read or run.
        if spec.extension.is_none() {
            write.extend(spec.derived.values().cloned());
            write.extend(cuda_cache.filter(|_| spec.device.kind == DeviceKind::Cuda));
        }
        let folder = spec.extension.as_ref().and_then(ExtensionProgram::folder);
        Some(Self {
            read,
            write,
            execute: folder.map(Path::to_owned).into_iter().collect(),
            device: spec.device.kind,
        })
    }
}

/// The folders of the extension of a job that runs in place.
struct ExtensionFolders {
    inputs: Vec<PathBuf>,
    output: PathBuf,
}

impl ExtensionFolders {
    /// Reads the folders from the job, and creates the output folder: a rule needs a folder that exists. `None` for a job that
    /// cannot be read, which then reads no input either.
    fn of_local_job(job: &serde_json::Value) -> Option<Self> {
        let job: JobSpec = serde_json::from_value(job.clone()).ok()?;
        let process = job.process.iter().find_map(Process::extension)?;
        let root = process
            .training_folder
            .as_deref()
            .map_or_else(|| "output".into(), expand_home);
        let output = root.join(process.name.as_deref().unwrap_or(&job.name));
        // The process reports it when the folder cannot be made.
        let _ = std::fs::create_dir_all(&output);
        Some(Self {
            inputs: process.inputs.0.values().map(|path| expand_home(path)).collect(),
            output,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_extension_writes_no_cache_that_other_jobs_of_its_user_read() {
        let mut spec: AttemptSpec = serde_json::from_value(json!({
            "job_id": "j1",
            "attempt_id": "j1-1",
            "epoch": 1,
            "job": {},
            "config_text": "",
            "config_format": "yaml",
            "inputs": {"data": "/cache/trees/ab"},
            "output_root": "/attempt/output",
            "resume_from": null,
            "device": {"kind": "cuda", "index": 0},
            "profile": "full_gpu",
            "seed": 7,
            "derived": {"data": "/cache/derived/ab"},
        }))
        .unwrap();
        let written = |spec: &AttemptSpec| {
            let rules =
                SandboxRules::with_cuda_cache(spec, Path::new("/attempt/tmp"), Some("/cache/derived/cuda".into()));
            rules.unwrap().write
        };
        let own = ["/attempt/tmp", "/attempt/output"].map(PathBuf::from);
        let caches = ["/cache/derived/ab", "/cache/derived/cuda"].map(PathBuf::from);
        assert_eq!(written(&spec), [own.clone(), caches].concat());
        spec.extension = Some(ExtensionProgram {
            name: "tool".to_owned(),
            program: "/opt/tool/tool".into(),
            silence: std::time::Duration::from_secs(1),
        });
        assert_eq!(written(&spec), own);
    }
}
