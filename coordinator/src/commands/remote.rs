//! How a command reaches the coordinator that runs.

use super::default_data_dir;
use aitk_common::security::token::Token;
use aitk_proto::client::{Clients, connect};
use anyhow::Context;
use clap::Args;
use std::path::PathBuf;
use tonic::Status;

/// Which coordinator, and with what right.
#[derive(Debug, Args)]
pub(crate) struct RemoteArgs {
    /// Address of the coordinator. Default: this machine.
    #[arg(
        long,
        env = "AITK_SERVER",
        default_value = "http://127.0.0.1:7420",
        value_name = "URL"
    )]
    server: String,
    /// File with an administrator's token. Default: $AITK_TOKEN, $AITK_TOKEN_FILE, or `token` in the data folder.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// PEM file with the certificate authority of the coordinator.
    #[arg(long, env = "AITK_CA_FILE", value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Data folder of the coordinator, where its token lies. Default: as for the coordinator itself.
    #[arg(long, env = "AITK_COORDINATOR_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

impl RemoteArgs {
    /// A connection.
    pub(crate) async fn connect(&self) -> anyhow::Result<Clients> {
        let token = match &self.token_file {
            Some(path) => Token::read(path)?,
            None => match Token::from_env(&|name| std::env::var(name).ok())? {
                Some(token) => token,
                None => {
                    let dir = self.data_dir.clone().map_or_else(default_data_dir, Ok)?;
                    Token::read(&dir.join("token"))
                        .context("no token was given, and there is none in the data folder")?
                }
            },
        };
        Ok(connect(&self.server, token.secret(), self.ca_file.as_deref()).await?)
    }
}

/// What the coordinator said, without the wrapping.
pub(crate) fn refused(status: &Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}
