//! A real S3 server over a folder (the `s3s-fs` crate), with one switch that the fault tests need:
//! while the file given by `--fail-file` exists, every request is answered with status 500.

use clap::Parser;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use std::net::IpAddr;
use std::path::PathBuf;

#[derive(Parser)]
struct Options {
    /// Where to listen.
    #[arg(long)]
    host: IpAddr,
    #[arg(long)]
    port: u16,
    /// While this file exists, answer 500.
    #[arg(long)]
    fail_file: Option<PathBuf>,
    #[arg(long)]
    access_key: String,
    #[arg(long)]
    secret_key: String,
    /// The folder with one sub-folder per bucket.
    root: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let files = FileSystem::new(&options.root).map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let mut builder = S3ServiceBuilder::new(files);
    builder.set_auth(SimpleAuth::from_single(options.access_key, options.secret_key));
    let service = builder.build();
    let listener = tokio::net::TcpListener::bind((options.host, options.port)).await?;
    loop {
        let (socket, _) = listener.accept().await?;
        let service = service.clone();
        let fail_file = options.fail_file.clone();
        tokio::spawn(async move {
            let handler = service_fn(move |request: Request<Incoming>| {
                let service = service.clone();
                let failing = fail_file.as_ref().is_some_and(|file| file.exists());
                async move {
                    if failing {
                        let mut answer = Response::new(s3s::Body::from(String::from(
                            "<Error><Code>InternalError</Code></Error>",
                        )));
                        *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                        return Ok(answer);
                    }
                    hyper::service::Service::call(&service, request).await
                }
            });
            // A connection that its client cut off is not this server's concern.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), handler)
                .await;
        });
    }
}
