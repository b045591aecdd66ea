//! Runs a child process of this program to its end.

use crate::failure::Failure;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

/// Runs a command and returns its standard output.
///
/// # Errors
/// When it cannot be started, fails (with the last line of its standard error), or does not end in time. Then it is killed.
pub(crate) async fn child_output(mut command: Command, limit: Option<Duration>) -> Result<String, Failure> {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let finished = match limit {
        None => command.output().await,
        Some(limit) => tokio::time::timeout(limit, command.output()).await.map_err(|_| {
            let seconds = limit.as_secs_f64();
            Failure::failed(format!("it did not end within {seconds:.0} s"))
        })?,
    };
    let output = finished.map_err(|error| Failure::failed(format!("cannot start the program again: {error}")))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::failed(
            last_error(&stderr).unwrap_or_else(|| output.status.to_string()),
        ));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The last line of the text that is an error, without `error: `; else its last line.
fn last_error(stderr: &str) -> Option<String> {
    let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines().rfind(|line| line.starts_with("error: "));
    let line = error.or_else(|| lines().next_back())?;
    Some(line.trim_start_matches("error: ").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_child_is_found_among_its_messages() {
        let text = "device cuda:0\nerror: the driver failed\nhint: update it\n";
        assert_eq!(last_error(text).unwrap(), "the driver failed");
        assert_eq!(last_error("one\ntwo\n\n").unwrap(), "two");
        assert_eq!(last_error(" \n"), None);
    }

    #[tokio::test]
    async fn a_child_that_hangs_is_ended() {
        let mut command = Command::new("sleep");
        command.arg("600");
        let failure = child_output(command, Some(Duration::from_millis(100)))
            .await
            .unwrap_err();
        assert!(failure.message.contains("did not end"), "{}", failure.message);
    }
}
