//! Notification arguments of the commands that follow a job.

use clap::Args;

/// How to notify the user that a job has ended.
#[derive(Args, Clone, Debug, Default)]
pub struct NotifyArgs {
    /// Run this command when a job has ended: a program and its arguments, with AITK_JOB_ID, AITK_JOB_NAME,
    /// AITK_JOB_STATE and AITK_JOB_REASON in the environment
    #[arg(long, value_name = "COMMAND")]
    pub notify_command: Option<String>,
    /// Post to this https address when a job has ended: its name, state and reason as JSON, with a line of text for
    /// chat services [env: AITK_NOTIFY_URL]
    #[arg(long, value_name = "URL")]
    pub notify_url: Option<String>,
}
