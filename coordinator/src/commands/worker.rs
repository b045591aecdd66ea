//! `worker`: manages join tokens and certificates of workers.

use super::console::{date, print_line};
use super::remote::{RemoteArgs, call_error};
use aitk_common::fsutil;
use aitk_proto::v1;
use anyhow::bail;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Subcommands of `worker`.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Create a token with which one machine can join as a worker, once. It is shown only once
    JoinToken(JoinTokenArgs),
    /// Certificates of workers
    #[command(subcommand)]
    Certs(CertsCommand),
    /// Revoke a worker's certificates and unused join tokens immediately; its open session is closed
    Revoke(RevokeArgs),
}

/// Subcommands of `worker certs`.
#[derive(Debug, Subcommand)]
pub(crate) enum CertsCommand {
    /// List the workers that joined, each with its newest certificate
    Ls(LsArgs),
}

/// Arguments of `worker join-token`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  aitk-coordinator worker join-token
  aitk-coordinator worker join-token box-3 --expires-minutes 1440 -o box-3.join
On the machine: aitk-worker join https://HOST:7420 TOKEN")]
pub(crate) struct JoinTokenArgs {
    /// Name of the worker. Default: the name that the worker reports, usually that of its machine.
    name: Option<String>,
    /// Minutes until the unused token expires.
    #[arg(long, default_value_t = 60, value_name = "MINUTES")]
    expires_minutes: u32,
    /// Write it to this new file (mode 0600) instead of showing it.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Arguments of `worker certs ls`.
#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Arguments of `worker revoke`.
#[derive(Debug, Args)]
pub(crate) struct RevokeArgs {
    /// Its name, from `worker certs ls`.
    name: String,
    #[command(flatten)]
    remote: RemoteArgs,
}

pub(super) async fn worker(command: WorkerCommand) -> anyhow::Result<()> {
    match command {
        WorkerCommand::JoinToken(args) => join_token(args).await,
        WorkerCommand::Certs(CertsCommand::Ls(args)) => list(args).await,
        WorkerCommand::Revoke(args) => revoke(args).await,
    }
}

async fn join_token(args: JoinTokenArgs) -> anyhow::Result<()> {
    if let Some(path) = args.output.as_ref().filter(|path| path.exists()) {
        bail!("{} exists already; choose a new file for the token", path.display());
    }
    let mut clients = args.remote.connect().await?;
    let request = v1::CreateJoinTokenRequest {
        name: args.name.clone().unwrap_or_default(),
        expires_in_ms: u64::from(args.expires_minutes) * 60_000,
    };
    let made = clients.admin.create_join_token(request).await;
    let made = made.map_err(|status| call_error(&status))?.into_inner();
    eprintln!(
        "join token {} for {}, usable once, until {}; on that machine: aitk-worker join {} TOKEN",
        made.id,
        args.name.as_deref().unwrap_or("any worker"),
        date(made.expires_ms),
        args.remote.remote_address()
    );
    match args.output {
        None => print_line(&made.text),
        Some(path) => {
            fsutil::write_private(&path, format!("{}\n", made.text).as_bytes())?;
            print_line(&path.display().to_string())
        }
    }
}

fn state(certificate: &v1::WorkerCertificateInfo) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    match certificate.revoked_ms {
        Some(time) => format!("revoked {}", date(time)),
        None if certificate.expires_ms <= now => format!("expired {}", date(certificate.expires_ms)),
        None => format!("until {}", date(certificate.expires_ms)),
    }
}

async fn list(args: LsArgs) -> anyhow::Result<()> {
    let mut clients = args.remote.connect().await?;
    let (mut certificates, mut page_token) = (Vec::new(), String::new());
    loop {
        let page_size = 0;
        let request = v1::ListCertificatesRequest { page_token, page_size };
        let reply = clients.admin.list_certificates(request).await;
        let reply = reply.map_err(|status| call_error(&status))?.into_inner();
        let is_last = reply.next_page_token.is_empty() || reply.certificates.is_empty();
        certificates.extend(reply.certificates);
        page_token = reply.next_page_token;
        if is_last {
            break;
        }
    }
    for one in certificates {
        if args.json {
            let value = serde_json::json!({
                "id": one.id, "name": one.name, "worker": one.worker_id, "joined": date(one.joined_ms),
                "issued": date(one.issued_ms), "serial": one.serial, "expires": date(one.expires_ms),
                "revoked": one.revoked_ms.map(date),
            });
            print_line(&value.to_string())?;
        } else {
            print_line(&format!("{:<12} {:<20} {}", one.id, one.name, state(&one)))?;
        }
    }
    Ok(())
}

async fn revoke(args: RevokeArgs) -> anyhow::Result<()> {
    let mut clients = args.remote.connect().await?;
    let request = v1::RevokeWorkerRequest { name: args.name };
    let reply = clients.admin.revoke_worker(request).await;
    let reply = reply.map_err(|status| call_error(&status))?.into_inner();
    for one in &reply.certificates {
        print_line(&format!("the certificates of {} ({}) are revoked", one.name, one.id))?;
    }
    if reply.join_tokens > 0 {
        print_line(&format!("{} unused join tokens are revoked", reply.join_tokens))?;
    }
    Ok(())
}
