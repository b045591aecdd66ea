//! What of the daemon's environment a child gets: what computing needs, and no credentials.

use std::ffi::{OsStr, OsString};

/// Taken over when set. Everything else is left out, so that a new secret cannot leak by being forgotten here.
const NAMES: &[&str] = &[
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

/// Families of names that configure arithmetic and devices.
const FAMILIES: &[&str] = &[
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "MTL_", "METAL_", "CANDLE_", "RAYON_", "OMP_", "MKL_", "VECLIB_",
];

/// Whether a child may see this variable.
fn passes(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let secret = ["TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"]
        .iter()
        .any(|word| name.contains(word));
    !secret && (NAMES.contains(&name) || FAMILIES.iter().any(|family| name.starts_with(family)))
}

/// The variables of `all` that a child gets.
pub(super) fn for_child(all: impl IntoIterator<Item = (OsString, OsString)>) -> Vec<(OsString, OsString)> {
    all.into_iter().filter(|(name, _)| passes(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_the_job_id_stay_behind() {
        let given = [
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
            "SSH_AUTH_SOCK",
            "OTEL_EXPORTER_OTLP_HEADERS",
        ];
        let kept = for_child(given.map(|name| (name.into(), "1".into())));
        let names: Vec<_> = kept.iter().map(|(name, _)| name.to_str().unwrap()).collect();
        assert_eq!(names, ["PATH", "CUDA_VISIBLE_DEVICES", "LC_ALL"]);
    }
}
