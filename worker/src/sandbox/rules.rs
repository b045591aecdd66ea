//! The files and devices that the process of an attempt may use.

use crate::runner::CUDA_CACHE;
use aitk_common::attempt::AttemptSpec;
use aitk_common::capability::DeviceKind;
use std::path::{Path, PathBuf};

/// The files and devices that an attempt may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SandboxRules {
    /// Files and folders that it may read.
    pub(crate) read: Vec<PathBuf>,
    /// Folders in which it may read, create and remove files.
    pub(crate) write: Vec<PathBuf>,
    /// The device that it computes on: drivers need files of their own.
    pub(crate) device: DeviceKind,
}

impl SandboxRules {
    /// Derives the rules for an attempt from what the daemon staged, never from the job. `None` for a local attempt,
    /// which works in its user's folders.
    pub(crate) fn for_attempt(spec: &AttemptSpec, temp_dir: &Path) -> Option<Self> {
        let output = spec.output_root.clone()?;
        let read = spec.inputs.values().chain(&spec.resume_from).cloned();
        let mut write = vec![output, temp_dir.to_owned()];
        write.extend(spec.derived.values().cloned());
        if spec.device.kind == DeviceKind::Cuda {
            write.extend(std::env::var_os(CUDA_CACHE).map(PathBuf::from));
        }
        Some(Self {
            read: read.collect(),
            write,
            device: spec.device.kind,
        })
    }
}
