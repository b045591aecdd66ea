//! Telling the user that a job has ended: by a command of their own, and by a few words that are posted to an address of
//! their own. Both are done by the command that follows the job, never by a coordinator or a worker: no config and no other user
//! decides what runs on this machine or what it connects to.

mod command;
mod message;

use crate::args::NotifyArgs;
use crate::context::env;
use crate::failure::Failure;
use crate::output::Ui;
use crate::output::format::printable;
use crate::paths::Paths;
use crate::settings::NotifyUrl;
use aitk_common::control::JobView;
use aitk_common::webhook::{Webhook, WebhookError};

/// Who is told.
#[derive(Clone, Debug, Default)]
pub struct Notify {
    command: Option<String>,
    webhook: Option<Webhook>,
}

impl Notify {
    /// As the flags say, else the environment, else the user file.
    ///
    /// # Errors
    /// When the address is none that anything is posted to, or the user file is wrong.
    pub fn new(args: &NotifyArgs, paths: &Paths) -> Result<Self, Failure> {
        let found = NotifyUrl::resolve(args.notify_url.as_deref(), &env, paths)?;
        let webhook = found.map(|found| {
            Webhook::new(found.url.expose(), found.private).map_err(|error| {
                let failure = Failure::usage(format!("{}: {error}", found.origin));
                if found.private { failure } else { failure.hint(ALLOW) }
            })
        });
        Ok(Self {
            command: args.notify_command.clone(),
            webhook: webhook.transpose()?,
        })
    }

    /// As [`Self::new`] for a command that follows its job only when it is told to.
    ///
    /// # Errors
    /// As there, and when there are flags for something that does not happen.
    pub fn if_followed(follow: bool, args: &NotifyArgs, paths: &Paths) -> Result<Self, Failure> {
        if follow {
            return Self::new(args, paths);
        }
        if args.notify_command.is_some() || args.notify_url.is_some() {
            return Err(Failure::usage(
                "--notify-command and --notify-url are for a job that is followed: give --follow as well",
            )
            .hint("`aitk watch JOB` and `aitk wait JOB` take them, too, at any time"));
        }
        Ok(Self::default())
    }

    /// Whether anybody is told.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.command.is_some() || self.webhook.is_some()
    }

    /// Tells that the job has ended; of one that has not, nothing. That somebody could not be told is said, and changes nothing
    /// else.
    pub async fn job_ended(&self, ui: &Ui, job: &JobView) {
        if !job.state.is_ended() {
            return;
        }
        if let Some(webhook) = &self.webhook
            && let Err(error) = webhook.post(&message::of(job)).await
        {
            ui.warn(&printable(&format!("--notify-url: nobody was told: {error}")));
            if matches!(error, WebhookError::Private { .. }) {
                ui.hint(ALLOW);
            }
        }
        if let Some(command) = &self.command {
            command::run(ui, command, job).await;
        }
    }
}

/// What to do about an address of one's own network.
const ALLOW: &str =
    "http:// and addresses of your own network take `notify_private: true` in the user file, or AITK_NOTIFY_PRIVATE=1";
