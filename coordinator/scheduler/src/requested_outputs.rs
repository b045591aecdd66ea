//! Passes on what users ask running trainings for: a save, or samples.
//!
//! Nothing is stored: a request that is on its way when its attempt ends is lost.

use super::changes::Changes;
use super::event::{Effect, Refusal};
use super::model::{Job, Ticket};
use super::state::State;
use aitk_common::control_plane::{AttemptRef, JobState, ToWorker};
use aitk_common::id::JobId;
use aitk_common::requested_outputs::RequestedOutputs;

impl State {
    /// Asks the live attempt of a job for outputs; of an array, the attempts of all members that run.
    pub(super) fn request_outputs(
        &mut self,
        changes: &mut Changes,
        ticket: Ticket,
        text: &str,
        outputs: RequestedOutputs,
    ) {
        self.change(changes, ticket, text, |state, changes, id| {
            state.request_outputs_of(changes, id, outputs)
        });
    }

    fn request_outputs_of(
        &mut self,
        changes: &mut Changes,
        id: &JobId,
        outputs: RequestedOutputs,
    ) -> Result<(), Refusal> {
        let Some(job) = self.jobs.get(id) else {
            return Err(Refusal::NotFound(id.to_string()));
        };
        let attempt = match job.live_attempt() {
            Some(attempt) if job.state == JobState::Running && job.preemption.is_none() => attempt,
            _ => return Err(not_running(job, outputs)),
        };
        let refusal = |problem: String| {
            let text = format!(
                "job {id} cannot {outputs} now: it runs on {}, {problem}",
                attempt.worker_name
            );
            Err(Refusal::Conflict(text))
        };
        let worker = self.workers.get(&attempt.worker);
        let Some((worker, session)) = worker.and_then(|worker| Some((worker, worker.session?))) else {
            return refusal("which is not connected; `aitk workers` shows when it is, ask again then".to_owned());
        };
        if !worker.outputs_on_request {
            return refusal(format!(
                "whose aitk {} does not know such requests; install the coordinator's version there",
                worker.version
            ));
        }
        let held = AttemptRef {
            attempt: attempt.id.clone(),
            epoch: attempt.epoch,
        };
        changes.push(Effect::Send(session, ToWorker::RequestOutputs { held, outputs }));
        Ok(())
    }
}

/// Why a job that does not run, or that is about to leave its device, makes no outputs now.
fn not_running(job: &Job, outputs: RequestedOutputs) -> Refusal {
    let id = &job.id;
    let state = match job.state {
        JobState::Running => "about to leave its device",
        _ => job.status(),
    };
    let rest = match job.state {
        JobState::Queued if job.paused => format!("`aitk resume {id}` continues it"),
        JobState::Queued => format!("ask again when it runs; `aitk explain {id}` says what it waits for"),
        JobState::Running => format!("it {}; ask again when it runs again", job.reason),
        JobState::Stopping => format!("it {}", job.reason),
        JobState::Stopped | JobState::Failed => {
            format!("`aitk artifacts ls {id}` lists what it made, `aitk resume {id}` continues it")
        }
        JobState::Completed => format!("`aitk artifacts ls {id}` lists what it made"),
    };
    Refusal::Conflict(format!("job {id} cannot {outputs} now, because it is {state}: {rest}"))
}
