//! Streams the events of a job: first the stored ones, then live ones.

use super::shared::{Shared, wait_for_shutdown};
use super::status::store_status;
use aitk_common::control_plane::{EventBody, JobEvent};
use aitk_common::id::JobId;
use aitk_proto::v1;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tonic::Status;

/// Events read from the store at once.
const PAGE_SIZE: u32 = 50;
/// Events buffered per follower. A slow follower blocks only its own task.
pub(super) const WIRE_BUFFER: usize = 16;
/// A follower that reads nothing for this time is disconnected.
pub(super) const FOLLOWER_TIMEOUT: Duration = Duration::from_secs(60);

type Follower = mpsc::Sender<Result<v1::JobEvent, Status>>;

/// Sends an event. Returns whether the follower is still connected.
async fn send(follower: &Follower, event: JobEvent) -> bool {
    matches!(
        tokio::time::timeout(FOLLOWER_TIMEOUT, follower.send(Ok(event.into()))).await,
        Ok(Ok(()))
    )
}

/// Sends stored events, then live events, without gaps or repetitions. Ends when the job has ended.
pub(super) async fn stream_events(
    shared: &Shared,
    job: &JobId,
    mut cursor: u64,
    follow: bool,
    follower: &Follower,
) -> Result<(), Status> {
    let mut stopping = shared.stopping.clone();
    // Subscribe before reading: an event in between is then received twice and dropped by its cursor.
    let mut live = shared.scheduler.follow(job);
    let mut progress_sent = false;
    loop {
        loop {
            let page = shared
                .store
                .events(job, cursor, PAGE_SIZE)
                .await
                .map_err(|error| store_status(&error))?;
            let full_page = page.len() == PAGE_SIZE as usize;
            for event in page {
                cursor = event.cursor;
                if !send(follower, event).await {
                    return Ok(());
                }
            }
            if !full_page {
                break;
            }
        }
        // Progress is not stored: send the latest from the scheduler's state.
        let id = job.clone();
        let query = move |state: &aitk_scheduler::State, _| {
            state
                .job(&id)
                .map(|job| (job.state.is_ended(), job.cursor, job.progress))
        };
        let Some((ended, newest, progress)) = shared.scheduler.query(query).await? else {
            return Ok(());
        };
        if let Some(progress) = progress.filter(|_| !progress_sent && newest == cursor) {
            progress_sent = true;
            let event = JobEvent {
                cursor,
                time: shared.clock.now(),
                attempt: None,
                body: EventBody::Progress(progress),
            };
            if !send(follower, event).await {
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
                () = wait_for_shutdown(&mut stopping) => {
                    return Err(Status::unavailable("the coordinator shuts down; follow again from the last cursor"));
                }
            };
            let event = match event {
                Ok(event) => event,
                // The follower lagged behind the channel: continue from the store.
                Err(RecvError::Lagged(_)) => break,
                Err(RecvError::Closed) => {
                    live = shared.scheduler.follow(job);
                    break;
                }
            };
            let ephemeral = matches!(event.body, EventBody::Progress(_));
            if event.cursor < cursor + u64::from(!ephemeral) {
                continue;
            }
            if event.cursor > cursor + 1 {
                // A gap: the store has the missing events.
                break;
            }
            cursor = event.cursor;
            progress_sent |= ephemeral;
            let ended = matches!(&event.body, EventBody::State { state, .. } if state.is_ended());
            if !send(follower, (*event).clone()).await || ended {
                return Ok(());
            }
        }
    }
}
