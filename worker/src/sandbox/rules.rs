//! What the process of an attempt may reach.

use crate::runner::CUDA_CACHE;
use aitk_common::attempt::AttemptSpec;
use aitk_common::capability::DeviceKind;
use std::path::{Path, PathBuf};

/// What an attempt may reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Files and folders that it reads.
    pub(crate) read: Vec<PathBuf>,
    /// Folders in which it reads, makes and removes files.
    pub(crate) write: Vec<PathBuf>,
    /// What it computes on: drivers need files of their own.
    pub(crate) device: DeviceKind,
}

impl Rules {
    /// The rules of an attempt that is not local; none for a local one, which works in its user's own folders. They follow
    /// from what the daemon staged, and never from the job.
    pub(crate) fn of(spec: &AttemptSpec, temp_dir: &Path) -> Option<Self> {
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
