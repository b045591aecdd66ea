//! The events of a job, as they are stored and as they happen.

use super::shared::{Shared, stopped};
use super::status::store_failed;
use aitk_common::control::{EventBody, JobEvent};
use aitk_common::id::JobId;
use aitk_proto::v1;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tonic::Status;

/// Events read from the store at a time.
const PAGE: u32 = 50;
/// Events between us and a follower's socket. A follower that reads slowly waits in its own task, nobody else does.
pub(super) const WIRE_BUFFER: usize = 16;
/// A follower that takes nothing for so long is gone.
pub(super) const FOLLOWER_TIMEOUT: Duration = Duration::from_secs(60);

type Follower = mpsc::Sender<Result<v1::JobEvent, Status>>;

/// Whether the follower is still there.
async fn tell(follower: &Follower, event: JobEvent) -> bool {
    matches!(
        tokio::time::timeout(FOLLOWER_TIMEOUT, follower.send(Ok(event.into()))).await,
        Ok(Ok(()))
    )
}

/// What is stored, then what happens, without a gap and without a repetition. Ends when the job has ended.
pub(super) async fn stream_events(
    shared: &Shared,
    job: &JobId,
    mut cursor: u64,
    follow: bool,
    follower: &Follower,
) -> Result<(), Status> {
    let mut stopping = shared.stopping.clone();
    // Listening before reading: what happens in between is then seen twice, and dropped by its cursor.
    let mut live = shared.core.follow(job);
    let mut told_progress = false;
    loop {
        loop {
            let page = shared
                .store
                .events(job, cursor, PAGE)
                .await
                .map_err(|error| store_failed(&error))?;
            let full_page = page.len() == PAGE as usize;
            for event in page {
                cursor = event.cursor;
                if !tell(follower, event).await {
                    return Ok(());
                }
            }
            if !full_page {
                break;
            }
        }
        // Progress is not stored: the last one is told from the state.
        let id = job.clone();
        let look = move |state: &aitk_scheduler::State, _| {
            state
                .job(&id)
                .map(|job| (job.state.is_ended(), job.cursor, job.progress))
        };
        let Some((ended, newest, progress)) = shared.core.query(look).await? else {
            return Ok(());
        };
        if let Some(progress) = progress.filter(|_| !told_progress && newest == cursor) {
            told_progress = true;
            let event = JobEvent {
                cursor,
                time: shared.clock.now(),
                attempt: None,
                body: EventBody::Progress(progress),
            };
            if !tell(follower, event).await {
                return Ok(());
            }
        }
        if newest > cursor {
            continue;
        }
        if ended || !follow {
            return Ok(());
        }
        loop {
            let event = tokio::select! {
                event = live.recv() => event,
                () = follower.closed() => return Ok(()),
                () = stopped(&mut stopping) => {
                    return Err(Status::unavailable("the coordinator shuts down; follow again from the last cursor"));
                }
            };
            let event = match event {
                Ok(event) => event,
                // Too slow for the channel: read on from the store.
                Err(RecvError::Lagged(_)) => break,
                Err(RecvError::Closed) => {
                    live = shared.core.follow(job);
                    break;
                }
            };
            let ephemeral = matches!(event.body, EventBody::Progress(_));
            if event.cursor < cursor + u64::from(!ephemeral) {
                continue;
            }
            if event.cursor > cursor + 1 {
                // A gap cannot be told; the store has what lies in it.
                break;
            }
            cursor = event.cursor;
            told_progress |= ephemeral;
            let ended = matches!(&event.body, EventBody::State { state, .. } if state.is_ended());
            if !tell(follower, (*event).clone()).await || ended {
                return Ok(());
            }
        }
    }
}
