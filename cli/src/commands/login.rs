//! `login`: saves a coordinator and a token for all commands of this user.

use crate::api::{Api, read_token};
use crate::args::LoginArgs;
use crate::context::{Context, env};
use crate::download::disk_failure;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Ui;
use crate::output::format::printable;
use crate::settings;
use aitk_common::fsutil;
use aitk_common::security::join;
use aitk_common::security::token::Token;
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use std::io::{BufRead, IsTerminal, Read};
use std::path::{Path, PathBuf};

/// The largest length of a token line.
const MAX_TOKEN_LENGTH: u64 = 4096;

pub(super) async fn login(context: &Context, args: LoginArgs) -> CommandResult {
    let ui = context.ui(true);
    let token = match &context.global.token_file {
        Some(path) => read_token(path)?,
        None => read_token_from_stdin(&ui, &args.server).await?,
    };
    let (secret, authority) = join::split(&token);
    if join::is_join_secret(secret) {
        return Err(
            Failure::usage("this is a join token: it is for a worker, not for a user")
                .hint(format!("on the worker: aitk-worker join {} TOKEN", args.server))
                .hint("for a user, on the coordinator: aitk-coordinator token create NAME --role submitter"),
        );
    }
    let ca_file = match context
        .global
        .ca_file
        .clone()
        .or_else(|| env("AITK_CA_FILE").map(PathBuf::from))
    {
        None => None,
        Some(path) => Some(std::path::absolute(&path).map_err(|error| Failure::file("find", &path, &error))?),
    };
    let api = Api::connect(&args.server, &token, ca_file.as_deref()).await;
    let api = api.map_err(|failure| match (authority, &ca_file) {
        (None, None) if args.server.starts_with("https:") => failure.hint(
            "this token does not name a certificate authority; `aitk-coordinator token create` creates one that does, if the \
             coordinator has an authority (`aitk-coordinator init`)",
        ),
        _ => failure,
    });
    let answer = match api {
        Ok(api) => api.info().await,
        Err(failure) => Err(failure),
    };
    let info = match answer {
        Ok(info) => info,
        Err(failure) => return Err(explain_tls_mismatch(&args.server, &token, failure).await),
    };

    let config = context.paths.user_config();
    let folder = fsutil::folder_of(&config).to_path_buf();
    let token_file = folder.join("token");
    fsutil::create_dir_all(&folder).map_err(|error| disk_failure(&error))?;
    fsutil::write_private(&token_file, format!("{token}\n").as_bytes()).map_err(|error| disk_failure(&error))?;
    let lines = [
        ("server", Some(args.server.clone())),
        ("token_file", Some(path_text(&token_file))),
        ("ca_file", ca_file.as_deref().map(path_text)),
    ];
    settings::save(&config, &lines)?;
    ui.data(&config.display().to_string())?;
    ui.notice(&format!(
        "commands now use the coordinator {} (aitk {})",
        args.server, info.version
    ));
    Ok(Exit::Ok)
}

/// Replaces the failure if the coordinator requires TLS and the address is `http://`.
async fn explain_tls_mismatch(server: &str, token: &str, failure: Failure) -> Failure {
    let Some(host) = server.trim().strip_prefix("http://") else {
        return failure;
    };
    let secure = format!("https://{host}");
    let speaks_tls = match Api::connect(&secure, token, None).await {
        Ok(_) => true,
        // The error is about a certificate, so the server uses TLS.
        Err(answer) => answer.message.to_lowercase().contains("certificate"),
    };
    if !speaks_tls {
        return failure;
    }
    Failure::new(
        failure.exit,
        format!("the coordinator at {host} requires TLS, but {server} is an address without TLS"),
    )
    .hint(format!("aitk login {secure}"))
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}

/// Reads the token from standard input, so that it is neither in the shell's history nor in the list of processes.
async fn read_token_from_stdin(ui: &Ui, server: &str) -> Result<String, Failure> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        ui.notice(&printable(&format!(
            "The token for {server}, from `aitk-coordinator token create` (it is not shown while you paste it):"
        )));
    }
    // In another thread, so that the terminal is restored after Ctrl-C.
    let options = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin()
            .lock()
            .take(MAX_TOKEN_LENGTH)
            .read_line(&mut line)
            .map(|_| line)
    });
    let read = {
        let _hidden = HiddenInput::begin();
        tokio::select! {
            read = options => read.map_err(std::io::Error::other).flatten(),
            _ = tokio::signal::ctrl_c() => return Err(Failure::new(Exit::Interrupted, "interrupted; nothing was changed")),
        }
    };
    let line = read.map_err(|error| Failure::failed(format!("cannot read the token from standard input: {error}")))?;
    let token = Token::parse(&line, "standard input").map_err(|error| {
        Failure::new(Exit::Unauthorised, error.to_string())
            .hint("paste it, or pipe it in, or name a file with --token-file FILE")
    })?;
    Ok(token.secret().to_owned())
}

/// Turns off the echo of standard input until it is dropped.
struct HiddenInput {
    before: Option<Termios>,
}

impl HiddenInput {
    /// Turns off the echo; does nothing without a terminal.
    fn begin() -> Self {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).ok();
        if let Some(before) = &before {
            let mut hidden = before.clone();
            hidden.local_flags.remove(LocalFlags::ECHO);
            // The line break is still echoed, so that the next message begins on a new line.
            hidden.local_flags.insert(LocalFlags::ECHONL);
            let _ = tcsetattr(&stdin, SetArg::TCSANOW, &hidden);
        }
        Self { before }
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, before);
        }
    }
}
