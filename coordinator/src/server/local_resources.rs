//! Data folder, token and storage URL of a coordinator.

use super::error::StartError;
use crate::config::Config;
use crate::data_folder;
use aitk_common::security::token::Token;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// Folder for blobs that are being uploaded.
pub(super) const TRANSIT: &str = "transit";

/// Data folder, token and storage URL of a coordinator, needed whether it leads or not.
#[derive(Clone)]
pub(crate) struct LocalResources {
    pub(crate) data_dir: PathBuf,
    pub(crate) token: Token,
    pub(super) token_file: Option<PathBuf>,
    pub(crate) storage_url: String,
    /// Lock of the data folder, held as long as any clone exists.
    _lock: Arc<File>,
}

impl std::fmt::Debug for LocalResources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalResources")
            .field("data_dir", &self.data_dir)
            .finish_non_exhaustive()
    }
}

impl LocalResources {
    /// Returns the folder of the object storage if it is on this machine.
    pub(super) fn storage_folder(&self) -> Option<PathBuf> {
        if self.storage_url.starts_with('/') {
            return Some(PathBuf::from(&self.storage_url));
        }
        let url = Url::parse(&self.storage_url)
            .ok()
            .filter(|url| url.scheme() == "file")?;
        url.to_file_path().ok()
    }

    /// Checks the config, locks the data folder, and reads or creates its contents.
    pub(crate) fn prepare(config: &Config) -> Result<Self, StartError> {
        if !config.bind.ip().to_canonical().is_loopback() && config.tls.is_none() && config.pki.is_none() {
            return Err(StartError::Plaintext { bind: config.bind });
        }
        if config.lease < Duration::from_millis(200) {
            return Err(StartError::Lease { lease: config.lease });
        }
        let data_dir = data_folder::create(&config.data_dir)?;
        let lock = data_folder::lock(&data_dir)?;
        // Here and not when it begins to lead: a standby coordinator may not lead for a long time.
        data_folder::recreate(&data_dir.join(TRANSIT))?;
        let (token, token_file) = match &config.token {
            Some(token) => (Token::parse(token, "the configuration")?, None),
            None => {
                let path = config.token_file.clone().unwrap_or_else(|| data_dir.join("token"));
                (Token::read_or_create(&path)?, Some(path))
            }
        };
        let storage_url = match &config.storage_url {
            Some(url) => url.clone(),
            None => data_folder::local_storage_url(&data_dir)?,
        };
        Ok(Self {
            data_dir,
            token,
            token_file,
            storage_url,
            _lock: Arc::new(lock),
        })
    }
}
