//! Helpers of all commands: the default data folder and output.

use anyhow::Context;
use std::path::PathBuf;

/// Returns the default data folder.
pub(crate) fn default_data_dir() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let base = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")));
    let base = base.context("there is no home folder; give --data-dir")?;
    Ok(base.join("aitk/coordinator"))
}

/// Prints one line to standard output.
pub(super) fn print_line(line: &str) -> anyhow::Result<()> {
    use std::io::Write;
    writeln!(std::io::stdout(), "{line}").context("cannot write the answer")
}

/// Formats a time as RFC 3339, in seconds.
pub(super) fn date(millis: u64) -> String {
    let time = i64::try_from(millis)
        .ok()
        .and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    time.map_or_else(
        || "?".to_owned(),
        |time| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    )
}
