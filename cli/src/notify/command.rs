//! A command of the user's own that is run when a job has ended.

use crate::output::Ui;
use crate::output::format::printable;
use aitk_common::control::JobView;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

/// A command that takes longer goes on without us.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the command with the job in its environment: `AITK_JOB_ID`, `AITK_JOB_NAME`, `AITK_JOB_STATE`,
/// `AITK_JOB_REASON`. It is a program and its arguments with blanks between them; no shell reads it, so nothing in a
/// job's name or reason is ever a command. That it fails is said, and changes nothing else.
pub(super) async fn run(ui: &Ui, command: &str, job: &JobView) {
    let mut words = command.split_whitespace();
    let Some(program) = words.next() else { return };
    let child = Command::new(program)
        .args(words)
        .env("AITK_JOB_ID", job.id.as_str())
        .env("AITK_JOB_NAME", printable(&job.name))
        .env("AITK_JOB_STATE", job.state.name())
        .env("AITK_JOB_REASON", printable(&job.reason))
        .stdin(Stdio::null())
        // Standard output is the command's whose flag this is.
        .stdout(Stdio::null())
        .spawn();
    let failed = match child {
        Err(error) => Some(format!("cannot start: {error}")),
        Ok(mut child) => match tokio::time::timeout(PATIENCE, child.wait()).await {
            Ok(Ok(status)) => (!status.success()).then(|| status.to_string()),
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!(
                "it still runs after {} s; it is left to itself",
                PATIENCE.as_secs()
            )),
        },
    };
    if let Some(why) = failed {
        ui.warn(&printable(&format!("--notify-command {program}: {why}")));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Notify;
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control::JobState;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test]
    async fn the_command_hears_of_the_end_and_no_shell_reads_names() {
        let folder = tempfile::tempdir().unwrap();
        let (script, heard) = (folder.path().join("tell"), folder.path().join("heard"));
        let text =
            "#!/bin/sh\nprintf '%s|%s|%s|%s' \"$AITK_JOB_ID\" \"$AITK_JOB_NAME\" \"$AITK_JOB_STATE\" \"$2\" > \"$1\"\n";
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        let command = format!("{} {} $(touch)", script.display(), heard.display());
        let ui = Ui::silent();
        let notify = |command: &str| Notify {
            command: Some(command.to_owned()),
            webhook: None,
        };
        let ended = notify(&command);
        ended
            .job_ended(&ui, &job("j1", "a; touch x", JobState::Running, 0))
            .await;
        assert!(!heard.exists(), "it has not ended");
        ended
            .job_ended(&ui, &job("j1", "a; touch x", JobState::Failed, 0))
            .await;
        assert_eq!(
            std::fs::read_to_string(&heard).unwrap(),
            "j1|a; touch x|failed|$(touch)"
        );
        // One that is not there is no reason to fail.
        let missing = notify("/does/not/exist");
        missing.job_ended(&ui, &job("j1", "a", JobState::Failed, 0)).await;
    }
}
