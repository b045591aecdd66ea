//! Opens a store by its address.

use super::options::Options;
use crate::fsutil;
use crate::storage::StorageError;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use url::Url;

pub(super) struct OpenedStore {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) multipart: Option<Arc<dyn MultipartStore>>,
    pub(super) folder: Option<PathBuf>,
    pub(super) prefix: Key,
    pub(super) address: String,
}

/// The folder of all blobs, below the path of the address.
pub(super) const BLOBS_FOLDER: &str = "blobs";
const EXPECTED: &str = "expected file:///folder, s3://bucket, gs://bucket, az://container or an absolute path";
/// The time limit for establishing a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn open(address: &str, options: &Options) -> Result<OpenedStore, StorageError> {
    if Path::new(address).is_absolute() {
        return open_folder(Path::new(address), address);
    }
    let url = Url::parse(address).map_err(|error| refuse(address, &format!("{error}; {EXPECTED}")))?;
    let shown = without_credentials(&url);
    if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() || url.password().is_some() {
        return Err(refuse(
            &shown,
            "it must not have credentials, '?' or '#'; credentials come from the environment",
        ));
    }
    let bucket = || {
        url.host_str()
            .filter(|host| !host.is_empty())
            .ok_or_else(|| refuse(&shown, EXPECTED))
    };
    let prefix = || Key::from_url_path(url.path()).map_err(|error| refuse(&shown, &error.to_string()));
    let fail = |error: object_store::Error| refuse(&shown, &error.to_string());
    match url.scheme() {
        "file" => {
            let folder = url
                .to_file_path()
                .map_err(|()| refuse(&shown, "a file address has three slashes: file:///folder"))?;
            open_folder(&folder, &shown)
        }
        "memory" => Ok(cloud(InMemory::new(), prefix()?, shown)),
        "s3" => {
            use_ring();
            let store = s3(bucket()?, options, &shown)?.build().map_err(fail)?;
            Ok(cloud(store, prefix()?, shown))
        }
        "gs" => {
            use_ring();
            let store = google(bucket()?, options, &shown)?.build().map_err(fail)?;
            Ok(cloud(store, prefix()?, shown))
        }
        "az" => {
            use_ring();
            let store = azure(bucket()?, options, &shown)?.build().map_err(fail)?;
            Ok(cloud(store, prefix()?, shown))
        }
        other => Err(refuse(
            &shown,
            &format!("the scheme {other:?} is not known; {EXPECTED}"),
        )),
    }
}

fn cloud<S: ObjectStore + MultipartStore>(store: S, prefix: Key, address: String) -> OpenedStore {
    let store = Arc::new(store);
    OpenedStore {
        multipart: Some(Arc::clone(&store) as _),
        store,
        folder: None,
        prefix,
        address,
    }
}

fn open_folder(folder: &Path, shown: &str) -> Result<OpenedStore, StorageError> {
    fsutil::create_dir_all(folder)?;
    // Removes unfinished files of killed processes, which were never visible as blobs.
    for entry in fs::read_dir(folder.join(BLOBS_FOLDER)).into_iter().flatten().flatten() {
        if let Err(error) = fsutil::remove_abandoned(&entry.path(), Duration::ZERO) {
            tracing::warn!(%error, "could not remove unfinished files in the storage folder");
        }
    }
    let store = LocalFileSystem::new_with_prefix(folder).map_err(|error| refuse(shown, &error.to_string()))?;
    Ok(OpenedStore {
        store: Arc::new(store),
        multipart: None,
        folder: Some(folder.to_owned()),
        prefix: Key::default(),
        address: shown.to_owned(),
    })
}

fn s3(bucket: &str, options: &Options, shown: &str) -> Result<AmazonS3Builder, StorageError> {
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_retry(no_retry());
    for (key, value) in settings(options) {
        if let Ok(key) = key.parse::<AmazonS3ConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    let sources = [
        AmazonS3ConfigKey::AccessKeyId,
        AmazonS3ConfigKey::SkipSignature,
        AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
        AmazonS3ConfigKey::ContainerCredentialsFullUri,
        AmazonS3ConfigKey::WebIdentityTokenFile,
    ];
    if sources.iter().all(|source| builder.get_config_value(source).is_none()) {
        tracing::warn!("AWS_ACCESS_KEY_ID is not set; using the IAM role of this machine, which works only inside AWS");
    }
    let allow_http = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::S3Endpoint);
    let endpoint = endpoint.or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
    let allowed = builder.get_config_value(&allow_http);
    if needs_plain_http(endpoint, allowed, ["AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"], shown)? {
        builder = builder.with_config(allow_http, "true");
    }
    Ok(builder)
}

fn google(bucket: &str, options: &Options, shown: &str) -> Result<GoogleCloudStorageBuilder, StorageError> {
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(bucket)
        .with_retry(no_retry());
    for (key, value) in settings(options) {
        if let Ok(key) = key.parse::<GoogleConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    let allow_http = GoogleConfigKey::Client(ClientConfigKey::AllowHttp);
    let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    let allowed = builder.get_config_value(&allow_http);
    if needs_plain_http(endpoint, allowed, ["GOOGLE_BASE_URL", "GOOGLE_ALLOW_HTTP"], shown)? {
        builder = builder.with_config(allow_http, "true");
    }
    Ok(builder)
}

fn azure(container: &str, options: &Options, shown: &str) -> Result<MicrosoftAzureBuilder, StorageError> {
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(container)
        .with_retry(no_retry());
    for (key, value) in settings(options) {
        if let Ok(key) = key.parse::<AzureConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    let allow_http = AzureConfigKey::Client(ClientConfigKey::AllowHttp);
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    let allowed = builder.get_config_value(&allow_http);
    if needs_plain_http(endpoint, allowed, ["AZURE_STORAGE_ENDPOINT", "AZURE_ALLOW_HTTP"], shown)? {
        builder = builder.with_config(allow_http, "true");
    }
    Ok(builder)
}

/// Whether plain `http` must be enabled in the client, for an endpoint on this machine. For other machines the user must have
/// allowed it. `names` are the environment variables of the endpoint and of the permission.
fn needs_plain_http(
    endpoint: Option<String>,
    allowed: Option<String>,
    names: [&str; 2],
    shown: &str,
) -> Result<bool, StorageError> {
    let [endpoint_name, permission] = names;
    let Some(endpoint) = endpoint else { return Ok(false) };
    let parsed = Url::parse(&endpoint).map_err(|error| {
        // Not the value, which may have a password.
        refuse(
            shown,
            &format!("{endpoint_name} is no address: {error}; expected https://host:port"),
        )
    })?;
    if parsed.scheme() != "http" || allowed.is_some_and(|value| value == "true") {
        return Ok(false);
    }
    if !is_loopback(&parsed) {
        let message = format!(
            "{endpoint_name} is {}, which sends the data unencrypted; use https, or set {permission}=true if you trust \
             everybody on that network",
            without_credentials(&parsed)
        );
        return Err(refuse(shown, &message));
    }
    Ok(true)
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(url::Host::Domain(name)) => name == "localhost",
        Some(url::Host::Ipv4(address)) => address.is_loopback(),
        Some(url::Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// The timeouts of a single request and the caller's settings, which take precedence.
fn settings(options: &Options) -> Vec<(String, String)> {
    let timeout = options.transfer_timeout.max(options.quick_timeout);
    let connect = CONNECT_TIMEOUT.min(options.quick_timeout);
    let mut settings = vec![
        ("timeout".to_owned(), format!("{} ms", timeout.as_millis())),
        ("connect_timeout".to_owned(), format!("{} ms", connect.as_millis())),
    ];
    settings.extend(
        options
            .settings
            .iter()
            .map(|(key, value)| (key.to_ascii_lowercase(), value.clone())),
    );
    settings
}

/// Disables `object_store`'s retries; see [`super::retry`].
fn no_retry() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// Installs ring as the TLS provider. rustls is built without a default provider, and the first installation wins.
fn use_ring() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

fn without_credentials(url: &Url) -> String {
    let mut shown = url.clone();
    let _ = shown.set_username("");
    let _ = shown.set_password(None);
    shown.set_query(None);
    shown.set_fragment(None);
    shown.to_string()
}

fn refuse(address: &str, message: &str) -> StorageError {
    StorageError::Address {
        url: address.to_owned(),
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(settings: &[(&str, &str)]) -> Options {
        let settings = settings
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        Options {
            settings,
            ..Options::default()
        }
    }

    #[test]
    fn invalid_addresses_are_refused_without_showing_credentials() {
        for bad in [
            "",
            "blobs",
            "ftp://host/x",
            "s3://",
            "file://host/x",
            "s3://user:secret@bucket/x",
            "s3://bucket?secret=1",
        ] {
            let error = open(bad, &Options::default())
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default();
            assert!(
                error.contains("cannot be used") && !error.contains("secret@") && !error.contains("=1"),
                "{bad}: {error}"
            );
        }
    }

    #[test]
    fn plain_http_requires_loopback_or_permission() {
        let lan = ("aws_endpoint", "http://192.168.0.9:9000");
        assert!(open("s3://b", &with(&[lan])).is_err());
        for endpoint in ["http://me:secret@192.168.0.9:9000", "http://me:secret@[1"] {
            let error = open("s3://b", &with(&[("aws_endpoint", endpoint)]))
                .err()
                .unwrap()
                .to_string();
            assert!(
                error.contains("AWS_ENDPOINT_URL") && !error.contains("secret"),
                "{error}"
            );
        }
        assert!(open("s3://b", &with(&[lan, ("aws_allow_http", "true")])).is_ok());
        assert!(open("s3://b", &with(&[("aws_endpoint", "http://127.0.0.1:9000")])).is_ok());
        assert!(open("s3://b", &with(&[("aws_endpoint", "http://127.0.0.1.evil.example")])).is_err());
        let azure = |endpoint| {
            let account = ("azure_storage_account_name", "a");
            with(&[account, ("azure_storage_endpoint", endpoint)])
        };
        assert!(open("az://c", &azure("http://127.0.0.1:10000/a")).is_ok());
        let error = open("az://c", &azure("http://192.168.0.9:10000/a"))
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("AZURE_ALLOW_HTTP"), "{error}");
    }
}
