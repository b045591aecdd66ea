//! Requests for outputs of a running training: `Save` and `Sample`.

use super::jobs::JobsApi;
use super::status::{refusal_status, store_status};
use crate::access::Identity;
use crate::store::{AuditLine, StoreError};
use aitk_common::id::JobId;
use aitk_common::job::JobSpec;
use aitk_common::requested_outputs::RequestedOutputs;
use aitk_proto::v1;
use aitk_scheduler::{Event, Refusal, Reply};
use tonic::{Response, Status};

impl JobsApi {
    /// Asks a running training of a user who may change it for outputs.
    pub(super) async fn request_outputs(
        &self,
        who: &Identity,
        text: String,
        outputs: RequestedOutputs,
    ) -> Result<Response<v1::Job>, Status> {
        let action = if outputs.samples { "job.sample" } else { "job.save" };
        let (id, mut line) = self.find_to_change(who, action, text).await?;
        if let Err(refusal) = self.check_requested_outputs(&id, outputs).await {
            (line.done, line.detail) = (false, AuditLine::quote(refusal.message()));
            self.0.access.record_audit(*line);
            return Err(refusal);
        }
        let event = |ticket| Event::OutputsRequested {
            ticket,
            job: id.to_string(),
            outputs,
        };
        match self.submit_event(line, event).await? {
            Reply::Job(view) => Ok(Response::new((*view).into())),
            Reply::Submitted(_) | Reply::Worker(_) => Err(Status::internal(
                "the scheduler sent a reply of the wrong kind; this is a bug of the coordinator",
            )),
        }
    }

    /// Checks that the config of a job has a training that can make these outputs. For an array the first member is checked.
    async fn check_requested_outputs(&self, id: &JobId, outputs: RequestedOutputs) -> Result<(), Status> {
        let wanted = id.clone();
        let query = move |state: &aitk_scheduler::State, _| state.members(&wanted).into_iter().next();
        let first = self.0.scheduler.query(query).await?;
        let first = first.ok_or_else(|| Status::not_found(format!("there is no job {id}")))?;
        let payload = match self.0.store.payload(&first).await {
            // The scheduler decides by the job's state; a job that cannot be read does not run.
            Err(StoreError::Unreadable { .. }) => return Ok(()),
            read => read.map_err(|error| store_status(&error))?,
        };
        let Some(payload) = payload else { return Ok(()) };
        let (json, bytes) = (payload.job_json.clone(), payload.job_json.len());
        let check = move || {
            // As above.
            Ok(serde_json::from_str::<JobSpec>(&json).map_or(Ok(()), |job| job.check_requested_outputs(outputs)))
        };
        let checked: Result<(), String> = self.run_parser(bytes, check).await?;
        checked.map_err(|why| {
            let text = format!("job {id} cannot {outputs} on request: {why}");
            refusal_status(&Refusal::Conflict(text))
        })
    }
}
