//! Helpers that the tests share.

use aitk_common::checkpoint::CheckpointWriter;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The environment variable with the role of a re-executed test binary.
pub(crate) const ROLE_VARIABLE: &str = "AITK_STORAGE_TEST_ROLE";
/// The environment variable with the folder to work in.
pub(crate) const FOLDER_VARIABLE: &str = "AITK_STORAGE_TEST_FOLDER";

/// A small reproducible random number generator.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 11) % end.max(1) as u64).unwrap()
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(256) as u8).collect()
    }
}

/// Saves a checkpoint of three files, one of them in a subfolder, with content that depends on the step.
pub(crate) fn save(parent: &Path, step: u64, bytes: usize) -> PathBuf {
    let mut random = Random::new(step + 1);
    let mut writer = CheckpointWriter::new(parent, step).unwrap().job("test");
    writer
        .add_bytes("adapter.safetensors", "adapter", &random.bytes(bytes))
        .unwrap();
    writer
        .add_bytes("optimizer.safetensors", "optimizer", &random.bytes(bytes * 2))
        .unwrap();
    writer
        .add_bytes("ema/weights.safetensors", "ema", &random.bytes(bytes / 2))
        .unwrap();
    writer
        .commit(serde_json::from_str(&format!(r#"{{"step":{step},"lr":1e-4}}"#)).unwrap())
        .unwrap()
}

/// The relative paths of all regular files below a folder, sorted.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![folder.to_owned()];
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(&next).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                left.push(entry.path());
            } else {
                found.push(entry.path().strip_prefix(folder).unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

/// A command that re-executes this test binary to run only `test` (`module::name`) in a role.
pub(crate) fn reexecute(test: &str, role: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
        .env(ROLE_VARIABLE, role)
        .env(FOLDER_VARIABLE, folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// The folder to work in, if this process was re-executed in this role.
pub(crate) fn folder_for_role(role: &str) -> Option<PathBuf> {
    let is_it = std::env::var(ROLE_VARIABLE).is_ok_and(|found| found == role);
    is_it.then(|| PathBuf::from(std::env::var_os(FOLDER_VARIABLE).unwrap()))
}
