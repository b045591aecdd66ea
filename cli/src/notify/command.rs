//! Runs the user's own command when a job has ended.

use crate::output::Ui;
use crate::output::format::printable;
use aitk_common::control_plane::JobView;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

/// How long to wait for the command. It is not killed when it takes longer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the command with the job in its environment: `AITK_JOB_ID`, `AITK_JOB_NAME`, `AITK_JOB_STATE`,
/// `AITK_JOB_REASON`. The command is a program and its arguments, separated by spaces. It is not run by a shell, so a
/// job's name or reason is never executed. An error is only a warning.
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
        // Standard output belongs to the aitk command.
        .stdout(Stdio::null())
        .spawn();
    let failed = match child {
        Err(error) => Some(format!("cannot start: {error}")),
        Ok(mut child) => match tokio::time::timeout(TIMEOUT, child.wait()).await {
            Ok(Ok(status)) => (!status.success()).then(|| status.to_string()),
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!(
                "it still runs after {} s; aitk does not wait any longer",
                TIMEOUT.as_secs()
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
    use aitk_common::control_plane::JobState;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test]
    async fn the_command_runs_once_the_job_has_ended_and_without_a_shell() {
        let folder = tempfile::tempdir().unwrap();
        let (script, output) = (folder.path().join("tell"), folder.path().join("heard"));
        let text =
            "#!/bin/sh\nprintf '%s|%s|%s|%s' \"$AITK_JOB_ID\" \"$AITK_JOB_NAME\" \"$AITK_JOB_STATE\" \"$2\" > \"$1\"\n";
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        let command = format!("{} {} $(touch)", script.display(), output.display());
        let ui = Ui::silent();
        let notify = |command: &str| Notify {
            command: Some(command.to_owned()),
            webhook: None,
        };
        let ended = notify(&command);
        ended
            .job_ended(&ui, &job("j1", "a; touch x", JobState::Running, 0))
            .await;
        assert!(!output.exists(), "the job has not ended");
        ended
            .job_ended(&ui, &job("j1", "a; touch x", JobState::Failed, 0))
            .await;
        assert_eq!(
            std::fs::read_to_string(&output).unwrap(),
            "j1|a; touch x|failed|$(touch)"
        );
        // A command that does not exist is only a warning.
        let missing = notify("/does/not/exist");
        missing.job_ended(&ui, &job("j1", "a", JobState::Failed, 0)).await;
    }
}
