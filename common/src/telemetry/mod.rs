//! What programs tell about themselves: logging, set up once per process, and the traces of jobs.
//!
//! Log lines go to standard error, because standard output belongs to the data that a command prints and to the
//! events of an attempt. `AITK_LOG_LEVEL` takes a level (`error`, `warn`, `info`, `debug`, `trace`) or a filter
//! such as `info,aitk_worker=debug`; without it the programs' own default holds.

pub mod context;
#[cfg(feature = "test-collector")]
pub mod test_collector;
#[cfg(feature = "traces")]
pub mod traces;

use std::io::{self, IsTerminal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// The environment variable with the level or filter.
pub const LEVEL_VARIABLE: &str = "AITK_LOG_LEVEL";
/// Libraries whose own news interests nobody who runs aitk.
const QUIET: &str = "hyper=warn,h2=warn,tonic=warn,sqlx=error,object_store=warn,reqwest=warn,rustls=warn,tower=warn";

/// Which program logs; it decides what is said by default and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A command a person waits for: warnings and errors, without time stamps.
    Command,
    /// A coordinator or a worker: `info`, with time stamps.
    Daemon,
    /// The child of an attempt, whose lines the worker puts into the job's log: `info`, without time stamps.
    Attempt,
}

/// How to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which program.
    pub kind: Kind,
    /// One JSON object per line instead of text.
    pub json: bool,
}

/// Starts logging. A second call changes nothing, so that an embedded coordinator or worker may call it too.
///
/// A level that cannot be understood is ignored with a warning: no program should fail to start for its log.
pub fn init(options: Options) {
    init_at(options, None);
}

/// [`init`] at a level or filter that a flag gave, which goes before the environment.
pub fn init_at(options: Options, level: Option<&str>) {
    let asked = level
        .map(str::to_owned)
        .or_else(|| std::env::var(LEVEL_VARIABLE).ok())
        .filter(|level| !level.trim().is_empty());
    let (filter, problem) = filter(asked.as_deref(), options.kind);
    let is_first = install(options, filter, io::stderr);
    if let (true, Some(problem)) = (is_first, problem) {
        tracing::warn!("{problem}");
    }
}

/// The filter, and what was wrong with the one that was asked for.
fn filter(asked: Option<&str>, kind: Kind) -> (EnvFilter, Option<String>) {
    let usual = match kind {
        Kind::Command => "warn",
        Kind::Daemon | Kind::Attempt => "info",
    };
    let Some(asked) = asked else {
        return (EnvFilter::new(format!("{usual},{QUIET}")), None);
    };
    match EnvFilter::try_new(format!("{QUIET},{asked}")) {
        Ok(filter) if is_known_level(asked) => (filter, None),
        _ => {
            let problem = format!(
                "{LEVEL_VARIABLE}={asked:?} is not understood; expected error, warn, info, debug, trace or target=level"
            );
            (EnvFilter::new(format!("{usual},{QUIET}")), Some(problem))
        }
    }
}

/// A bare word would be taken for a module's name: `AITK_LOG_LEVEL=verbose` must not silence everything.
fn is_known_level(asked: &str) -> bool {
    let levels = ["off", "error", "warn", "info", "debug", "trace"];
    asked
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
        // Else a line that stderr does not take, because its disk is full, ends whoever writes it.
        .log_internal_errors(false)
        .with_ansi(colours);
    match (options.json, options.kind) {
        // Of spans within spans the innermost says enough.
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
    fn a_level_that_is_none_is_reported_and_the_default_holds() {
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
    fn starting_twice_is_harmless() {
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
