//! A real S3 server over a folder (the `s3s-fs` crate) that injects faults on demand, see [`crate::faulty_server`].

use crate::faulty_server::{self, BoxError};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;

/// How the server is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The address to listen on. With port 0 any free port is taken, and a line of standard output, `listening on ADDRESS`, names it.
    pub address: SocketAddr,
    /// The file with the current fault; `None` for no faults.
    pub fault_file: Option<PathBuf>,
    /// The access keys with their secrets; empty to allow every request.
    pub keys: Vec<(String, String)>,
    /// The folder with one sub-folder per bucket.
    pub root: PathBuf,
}

/// Serves until the process ends.
///
/// # Errors
/// When the folder or the address cannot be used.
pub async fn serve(settings: Settings) -> anyhow::Result<()> {
    let files = FileSystem::new(&settings.root).map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let mut builder = S3ServiceBuilder::new(files);
    let open = settings.keys.is_empty();
    if !open {
        let mut keys = SimpleAuth::new();
        for (access, secret) in settings.keys {
            keys.register(access, secret.into());
        }
        builder.set_auth(keys);
    }
    let service = builder.build();
    let listener = TcpListener::bind(settings.address).await?;
    if settings.address.port() == 0 {
        writeln!(std::io::stdout(), "listening on {}", listener.local_addr()?)?;
    }
    let service: faulty_server::Service = Arc::new(move |mut request| {
        let service = service.clone();
        Box::pin(async move {
            if open {
                // Without keys a signature cannot be checked, so it is removed.
                request.headers_mut().remove(hyper::header::AUTHORIZATION);
            }
            let answer = service.call(request).await;
            answer.map_err(|error| BoxError::from(format!("{error:?}")))
        })
    });
    faulty_server::serve(listener, settings.fault_file, service).await
}
