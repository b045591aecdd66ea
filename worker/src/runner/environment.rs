//! Selects the environment variables of the daemon that a child gets: those needed for computing, and no credentials.

use std::ffi::{OsStr, OsString};

/// Variables that a child gets. All others are left out, so that an unknown secret cannot leak.
const ALLOWED_NAMES: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "DYLD_FALLBACK_LIBRARY_PATH",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "AITK_LOG_LEVEL",
    "DEBUG_TOOLKIT",
    "MODELS_PATH",
    "SYSTEMROOT",
];

/// Prefixes of variables that configure arithmetic and devices.
const ALLOWED_PREFIXES: &[&str] = &[
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "MTL_", "METAL_", "CANDLE_", "RAYON_", "OMP_", "MKL_", "VECLIB_",
];

/// Returns whether a child gets this variable.
fn is_allowed(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let is_secret = ["TOKEN", "SECRET", "PASSWORD", "PASSPHRASE", "CREDENTIAL", "KEY", "AUTH"]
        .iter()
        .any(|word| name.contains(word));
    !is_secret && (ALLOWED_NAMES.contains(&name) || ALLOWED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
}

/// The variables of `all` that a child gets.
pub(super) fn for_child(all: impl IntoIterator<Item = (OsString, OsString)>) -> Vec<(OsString, OsString)> {
    all.into_iter().filter(|(name, _)| is_allowed(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_gets_no_secrets_and_no_job_id() {
        let variables = [
            "PATH",
            "CUDA_VISIBLE_DEVICES",
            "LC_ALL",
            "AITK_TOKEN",
            "AITK_TOKEN_FILE",
            "AITK_JOB_ID",
            "HF_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "CUDA_SECRET",
            "NVIDIA_API_KEY",
            "NVIDIA_AUTH",
            "SSH_AUTH_SOCK",
            "OTEL_EXPORTER_OTLP_HEADERS",
        ];
        let allowed = for_child(variables.map(|name| (name.into(), "1".into())));
        let names: Vec<_> = allowed.iter().map(|(name, _)| name.to_str().unwrap()).collect();
        assert_eq!(names, ["PATH", "CUDA_VISIBLE_DEVICES", "LC_ALL"]);
    }
}
