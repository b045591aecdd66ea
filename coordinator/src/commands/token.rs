//! `token`: creates, lists and revokes tokens.

use super::console::{date, print_line};
use super::remote::{RemoteArgs, call_error};
use aitk_common::fsutil;
use aitk_proto::v1;
use anyhow::Context;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Subcommands of `token`.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token for a user or a worker. It is shown only once; the coordinator stores only its hash
    Create(CreateArgs),
    /// List tokens, without their secrets
    Ls(ListArgs),
    /// Revoke a token immediately
    Revoke(RevokeArgs),
}

/// Arguments of `token create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Name of the owner: 1 to 64 letters, digits, '-' or '_'. Jobs submitted with the token belong to this name.
    name: String,
    /// viewer: sees all jobs. submitter: submits, and sees their own jobs. operator: changes all jobs. admin: everything.
    /// worker: for aitk-worker.
    #[arg(long)]
    role: String,
    /// Days until the token expires; 0: never.
    #[arg(long, default_value_t = 365, value_name = "DAYS")]
    expires_days: u32,
    /// Write it to this new file (mode 0600) instead of showing it.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Arguments of `token ls`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Arguments of `token revoke`.
#[derive(Debug, Args)]
pub(crate) struct RevokeArgs {
    /// Its id, from `token ls`.
    id: String,
    #[command(flatten)]
    remote: RemoteArgs,
}

pub(super) async fn token(command: TokenCommand) -> anyhow::Result<()> {
    match command {
        TokenCommand::Create(args) => create(args).await,
        TokenCommand::Ls(args) => list(args).await,
        TokenCommand::Revoke(args) => {
            let mut clients = args.remote.connect().await?;
            let request = v1::RevokeTokenRequest { id: args.id };
            let token = clients
                .admin
                .revoke_token(request)
                .await
                .map_err(|status| call_error(&status))?;
            let token = token.into_inner();
            print_line(&format!("{} of {} ({}) is revoked", token.id, token.name, token.role))
        }
    }
}

async fn create(args: CreateArgs) -> anyhow::Result<()> {
    if let Some(path) = args.output.as_ref().filter(|path| path.exists()) {
        anyhow::bail!("{} exists already; choose a new file for the token", path.display());
    }
    let mut clients = args.remote.connect().await?;
    let days = DAY.saturating_mul(args.expires_days);
    let request = v1::CreateTokenRequest {
        name: args.name,
        role: args.role,
        expires_in_ms: (args.expires_days > 0).then(|| u64::try_from(days.as_millis()).unwrap_or(u64::MAX)),
    };
    let made = clients
        .admin
        .create_token(request)
        .await
        .map_err(|status| call_error(&status))?;
    let made = made.into_inner();
    let token = made.token.context("the coordinator made no token")?;
    // With the hash of the authority, the client needs no certificate file.
    let text = match made.ca_sha256.as_str() {
        "" => made.secret,
        ca => format!("{}.{ca}", made.secret),
    };
    eprintln!(
        "token {} for {}, role {}, {}",
        token.id,
        token.name,
        token.role,
        describe_expiry(&token)
    );
    if token.role != "worker" {
        eprintln!("the user stores it with: aitk login {}", args.remote.login_address());
    }
    match args.output {
        None => print_line(&text),
        Some(path) => {
            fsutil::write_private(&path, format!("{text}\n").as_bytes())?;
            print_line(&path.display().to_string())
        }
    }
}

fn describe_expiry(token: &v1::TokenInfo) -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis() as u64;
    match (token.revoked_ms, token.expires_ms) {
        (Some(time), _) => format!("revoked {}", date(time)),
        (None, Some(time)) if time <= now => format!("expired {}", date(time)),
        (None, Some(time)) => format!("until {}", date(time)),
        (None, None) => "without end".to_owned(),
    }
}

async fn list(args: ListArgs) -> anyhow::Result<()> {
    let mut clients = args.remote.connect().await?;
    let (mut tokens, mut page_token) = (Vec::new(), String::new());
    loop {
        let page_size = 0;
        let reply = clients
            .admin
            .list_tokens(v1::ListTokensRequest { page_token, page_size })
            .await;
        let reply = reply.map_err(|status| call_error(&status))?.into_inner();
        let is_last = reply.next_page_token.is_empty() || reply.tokens.is_empty();
        tokens.extend(reply.tokens);
        page_token = reply.next_page_token;
        if is_last {
            break;
        }
    }
    for token in tokens {
        if args.json {
            let value = serde_json::json!({
                "id": token.id, "name": token.name, "role": token.role, "created": date(token.created_ms),
                "created_by": token.created_by, "expires": token.expires_ms.map(date), "revoked": token.revoked_ms.map(date),
            });
            print_line(&value.to_string())?;
        } else {
            print_line(&format!(
                "{:<12} {:<20} {:<10} {}",
                token.id,
                token.name,
                token.role,
                describe_expiry(&token)
            ))?;
        }
    }
    Ok(())
}
