//! `login`: remember a coordinator and a token for every command of this user.

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

/// Longer lines are no token.
const MAX_TOKEN_LENGTH: u64 = 4096;

pub(super) async fn login(context: &Context, args: LoginArgs) -> CommandResult {
    let ui = context.ui(true);
    let token = match &context.global.token_file {
        Some(path) => read_token(path)?,
        None => read_token_from_stdin(&ui, &args.server).await?,
    };
    let (secret, authority) = join::split(&token);
    if join::is_join_secret(secret) {
        return Err(Failure::usage("this is a join token: it lets a worker in, not a user")
            .hint(format!("on the worker: aitk-worker join {} TOKEN", args.server))
            .hint("for a user, on the coordinator: aitk-coordinator token create NAME --role submitter"));
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
            "this token names no authority; the administrator's `aitk-coordinator token create` makes one that does, where \
             there is a certificate authority (`aitk-coordinator init`)",
        ),
        _ => failure,
    });
    let read_token_from_stdin = match api {
        Ok(api) => api.info().await,
        Err(failure) => Err(failure),
    };
    let info = match read_token_from_stdin {
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
        "{} (aitk {}) is the coordinator of every command from now on",
        args.server, info.version
    ));
    Ok(Exit::Ok)
}

/// The failure; where a coordinator wants TLS at an address that was given without, that.
async fn explain_tls_mismatch(server: &str, token: &str, failure: Failure) -> Failure {
    let Some(host) = server.trim().strip_prefix("http://") else {
        return failure;
    };
    let secure = format!("https://{host}");
    let speaks_tls = match Api::connect(&secure, token, None).await {
        Ok(_) => true,
        // It showed a certificate: that is what TLS begins with.
        Err(answer) => answer.message.to_lowercase().contains("certificate"),
    };
    if !speaks_tls {
        return failure;
    }
    Failure::new(
        failure.exit,
        format!("the coordinator at {host} wants TLS, and {server} is an address without"),
    )
    .hint(format!("aitk login {secure}"))
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}

/// The token from standard input, so that it is neither in the shell's history nor in the list of processes.
async fn read_token_from_stdin(ui: &Ui, server: &str) -> Result<String, Failure> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        ui.notice(&printable(&format!(
            "The token for {server}, from `aitk-coordinator token create` (it is not shown while you paste it):"
        )));
    }
    // On a thread of its own, so that Ctrl-C finds the terminal as it was.
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

/// Standard input without echo, while this lives.
struct HiddenInput {
    before: Option<Termios>,
}

impl HiddenInput {
    /// Without a terminal it does nothing.
    fn begin() -> Self {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).ok();
        if let Some(before) = &before {
            let mut hidden = before.clone();
            hidden.local_flags.remove(LocalFlags::ECHO);
            // The line break is shown: the next line of ours begins at the left.
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
