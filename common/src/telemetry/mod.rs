//! Logging, which is set up once per process, and traces of jobs.
//!
//! Log lines go to standard error, because commands print their data, and attempts their events, to standard output. `AITK_LOG_LEVEL` takes a level (`error`, `warn`, `info`, `debug`, `trace`) or a filter
//! such as `info,aitk_worker=debug`; if it is unset, each program uses its default.

pub mod context;
#[cfg(feature = "traces")]
pub mod traces;

use std::io::{self, IsTerminal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// The environment variable with the level or filter.
pub const LEVEL_VARIABLE: &str = "AITK_LOG_LEVEL";
/// Log levels of libraries, whose messages are rarely useful to users of aitk.
const LIBRARY_LEVELS: &str =
    "hyper=warn,h2=warn,tonic=warn,sqlx=error,object_store=warn,reqwest=warn,rustls=warn,tower=warn";

/// The kind of program, which decides the default level and format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An interactive command: warnings and errors, without time stamps.
    Command,
    /// A coordinator or a worker: `info`, with time stamps.
    Daemon,
    /// The child process of an attempt: `info`, without time stamps. The worker adds its lines to the job's log.
    Attempt,
}

/// Logging options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The kind of program.
    pub kind: Kind,
    /// One JSON object per line instead of text.
    pub json: bool,
}

/// Starts logging. A second call changes nothing, so that an embedded coordinator or worker may call it too.
///
/// An invalid level is ignored with a warning, so that it does not stop a program from starting.
pub fn init(options: Options) {
    init_at(options, None);
}

/// [`init`] with a level or filter from a flag, which takes precedence over the environment.
pub fn init_at(options: Options, level: Option<&str>) {
    let requested = level
        .map(str::to_owned)
        .or_else(|| std::env::var(LEVEL_VARIABLE).ok())
        .filter(|level| !level.trim().is_empty());
    let (filter, problem) = filter(requested.as_deref(), options.kind);
    let is_first = install(options, filter, io::stderr);
    if let (true, Some(problem)) = (is_first, problem) {
        tracing::warn!("{problem}");
    }
}

/// Returns the error message for a text that is neither a level nor a filter.
#[must_use]
pub fn level_problem(level: &str) -> Option<String> {
    filter(Some(level), Kind::Daemon).1
}

/// The log filter, and an error message if the requested one is invalid.
fn filter(requested: Option<&str>, kind: Kind) -> (EnvFilter, Option<String>) {
    let default = match kind {
        Kind::Command => "warn",
        Kind::Daemon | Kind::Attempt => "info",
    };
    let Some(requested) = requested else {
        return (EnvFilter::new(format!("{default},{LIBRARY_LEVELS}")), None);
    };
    match EnvFilter::try_new(format!("{LIBRARY_LEVELS},{requested}")) {
        Ok(filter) if is_known_level(requested) => (filter, None),
        _ => {
            let problem = format!(
                "{requested:?} (--log-level or {LEVEL_VARIABLE}) is not a log level; expected error, warn, info, debug, trace or target=level"
            );
            (EnvFilter::new(format!("{default},{LIBRARY_LEVELS}")), Some(problem))
        }
    }
}

/// Whether every bare word is a level. `EnvFilter` takes an unknown word for a module name, so that `AITK_LOG_LEVEL=verbose`
/// would disable all other messages.
fn is_known_level(requested: &str) -> bool {
    let levels = ["off", "error", "warn", "info", "debug", "trace"];
    requested
        .split(',')
        .map(str::trim)
        .all(|part| part.contains(['=', '[', ':']) || levels.contains(&part.to_ascii_lowercase().as_str()))
}

fn install<W>(options: Options, filter: EnvFilter, writer: W) -> bool
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        // Otherwise a failed write to stderr, as on a full disk, panics.
        .log_internal_errors(false)
        .with_ansi(colours);
    match (options.json, options.kind) {
        // The innermost of nested spans is enough.
        (true, _) => builder
            .json()
            .flatten_event(true)
            .with_span_list(false)
            .try_init()
            .is_ok(),
        (false, Kind::Daemon) => builder.try_init().is_ok(),
        (false, Kind::Command | Kind::Attempt) => builder.without_time().with_target(false).try_init().is_ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_level_is_reported_and_the_default_is_used() {
        for good in ["debug", "INFO", "warn,aitk_worker=debug", "aitk_common::storage=trace"] {
            assert!(filter(Some(good), Kind::Daemon).1.is_none(), "{good}");
        }
        for bad in ["verbose", "debug,loud", "a=b=c"] {
            let (filter, problem) = filter(Some(bad), Kind::Command);
            assert!(problem.is_some_and(|problem| problem.contains(bad)), "{bad}");
            assert!(filter.to_string().contains("warn"));
        }
        assert!(filter(None, Kind::Command).0.to_string().contains("warn"));
    }

    #[test]
    fn init_may_be_called_twice() {
        init(Options {
            kind: Kind::Attempt,
            json: false,
        });
        init(Options {
            kind: Kind::Daemon,
            json: true,
        });
    }
}
