//! Notifies the user that a job has ended, by running the user's command or by posting a message to the user's webhook.
//! The aitk command that follows the job does this, never a coordinator or a worker, so neither a config nor another
//! user decides what runs on this machine or what it connects to.

mod command;
mod message;

use crate::args::NotifyArgs;
use crate::context::env;
use crate::failure::Failure;
use crate::output::Ui;
use crate::output::format::printable;
use crate::paths::Paths;
use crate::settings::NotifyUrl;
use aitk_common::control_plane::JobView;
use aitk_common::webhook::{Webhook, WebhookError};

/// The user's notification settings.
#[derive(Clone, Debug, Default)]
pub struct Notify {
    command: Option<String>,
    webhook: Option<Webhook>,
}

impl Notify {
    /// Reads the settings from the flags, else the environment, else the settings file.
    ///
    /// # Errors
    /// When the address is not allowed as a webhook, or the settings file is wrong.
    pub fn new(args: &NotifyArgs, paths: &Paths) -> Result<Self, Failure> {
        let setting = NotifyUrl::resolve(args.notify_url.as_deref(), &env, paths)?;
        let webhook = setting.map(|setting| {
            Webhook::new(setting.url.expose(), setting.allow_private).map_err(|error| {
                let failure = Failure::usage(format!("{}: {error}", setting.origin));
                if setting.allow_private {
                    failure
                } else {
                    failure.hint(ALLOW_PRIVATE_HINT)
                }
            })
        });
        Ok(Self {
            command: args.notify_command.clone(),
            webhook: webhook.transpose()?,
        })
    }

    /// As [`Self::new`], for a command with a `--follow` flag.
    ///
    /// # Errors
    /// As [`Self::new`], and when a notification flag is given without `--follow`.
    pub fn if_followed(follow: bool, args: &NotifyArgs, paths: &Paths) -> Result<Self, Failure> {
        if follow {
            return Self::new(args, paths);
        }
        if args.notify_command.is_some() || args.notify_url.is_some() {
            return Err(Failure::usage("--notify-command and --notify-url need --follow")
                .hint("give --follow as well, or use the flags with `aitk watch JOB` or `aitk wait JOB` later"));
        }
        Ok(Self::default())
    }

    /// Whether a command or a webhook is set.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.command.is_some() || self.webhook.is_some()
    }

    /// Sends the notifications if the job has ended. An error is only a warning.
    pub async fn job_ended(&self, ui: &Ui, job: &JobView) {
        if !job.state.is_ended() {
            return;
        }
        if let Some(webhook) = &self.webhook
            && let Err(error) = webhook.post(&message::build(job)).await
        {
            ui.warn(&printable(&format!(
                "--notify-url: the notification was not sent: {error}"
            )));
            if matches!(error, WebhookError::Private { .. }) {
                ui.hint(ALLOW_PRIVATE_HINT);
            }
        }
        if let Some(command) = &self.command {
            command::run(ui, command, job).await;
        }
    }
}

/// The hint for addresses of the user's own network.
const ALLOW_PRIVATE_HINT: &str = "to allow http:// and addresses of your own network, set `notify_private: true` in the settings file, or AITK_NOTIFY_PRIVATE=1";
