//! Streams the events of a job: first the stored ones, then live ones.

use super::shared::{Shared, wait_for_shutdown};
use super::status::store_status;
use aitk_common::control_plane::{EventBody, JobEvent};
use aitk_common::id::JobId;
use aitk_proto::v1;
use futures::stream::{self, Stream, StreamExt};
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// Events read from the store at once.
const PAGE_SIZE: u32 = 50;
/// Events buffered per follower. A slow follower blocks only its own task.
pub(super) const WIRE_BUFFER: usize = 16;
/// A follower that reads nothing for this time is disconnected.
const FOLLOWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay before the store is read again for events that the scheduler has and the store does not.
const BEHIND_DELAY: Duration = Duration::from_millis(500);

type Follower = mpsc::Sender<v1::JobEvent>;
/// The events that a follower gets, and the error with which they end.
pub(super) type EventStream = Pin<Box<dyn Stream<Item = Result<v1::JobEvent, Status>> + Send>>;

/// Returns the stream of a follower. `end` is how [`stream_events`] ended: beside the channel, so that an error arrives although the
/// channel is full. Without it a follower would take the events that it has for all.
pub(super) fn event_stream(
    events: mpsc::Receiver<v1::JobEvent>,
    end: oneshot::Receiver<Result<(), Status>>,
) -> EventStream {
    let error = async move {
        let status = match end.await {
            Ok(Ok(())) => return None,
            Ok(Err(status)) => status,
            Err(_) => Status::unavailable("the stream of events ended early; follow again from the last cursor"),
        };
        Some(Err::<v1::JobEvent, Status>(status))
    };
    let events = ReceiverStream::new(events).map(Ok::<v1::JobEvent, Status>);
    Box::pin(events.chain(stream::once(error).filter_map(std::future::ready)))
}

/// Sends an event.
///
/// # Errors
/// When the follower has disconnected, or reads nothing for [`FOLLOWER_TIMEOUT`].
async fn send(follower: &Follower, event: JobEvent) -> Result<(), Status> {
    send_within(follower, event, FOLLOWER_TIMEOUT).await
}

async fn send_within(follower: &Follower, event: JobEvent, limit: Duration) -> Result<(), Status> {
    match tokio::time::timeout(limit, follower.send(event.into())).await {
        Ok(Ok(())) => Ok(()),
        // Nobody is there to get it.
        Ok(Err(_)) => Err(Status::cancelled("the follower has disconnected")),
        Err(_) => Err(Status::unavailable(format!(
            "no event was read for {} seconds; follow again from the last cursor",
            limit.as_secs()
        ))),
    }
}

fn shutdown_status() -> Status {
    Status::unavailable("the coordinator shuts down; follow again from the last cursor")
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
    let mut is_behind = false;
    loop {
        let before = cursor;
        loop {
            let page = shared
                .store
                .events(job, cursor, PAGE_SIZE)
                .await
                .map_err(|error| store_status(&error))?;
            let full_page = page.len() == PAGE_SIZE as usize;
            for event in page {
                cursor = event.cursor;
                send(follower, event).await?;
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
                time: shared.clock.wall_time(),
                attempt: None,
                body: EventBody::Progress(progress),
            };
            send(follower, event).await?;
        }
        if newest > cursor {
            // An event came in between. Twice in a row without one in the store: the database is full, and the scheduler is ahead of it.
            if std::mem::replace(&mut is_behind, cursor == before) && is_behind {
                tokio::select! {
                    () = tokio::time::sleep(BEHIND_DELAY) => {}
                    () = follower.closed() => return Ok(()),
                    () = wait_for_shutdown(&mut stopping) => return Err(shutdown_status()),
                }
            }
            continue;
        }
        is_behind = false;
        if ended || !follow {
            return Ok(());
        }
        loop {
            let event = tokio::select! {
                event = live.recv() => event,
                () = follower.closed() => return Ok(()),
                () = wait_for_shutdown(&mut stopping) => return Err(shutdown_status()),
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
            send(follower, (*event).clone()).await?;
            if ended {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::control_plane::UnixMillis;

    fn event(cursor: u64) -> JobEvent {
        JobEvent {
            cursor,
            time: UnixMillis(0),
            attempt: None,
            body: EventBody::Log {
                level: "info".to_owned(),
                message: "a line".to_owned(),
            },
        }
    }

    #[tokio::test]
    async fn a_follower_that_reads_nothing_for_long_gets_an_error_after_its_events() {
        let (follower, receiver) = mpsc::channel(1);
        let (end, ended) = oneshot::channel();
        let limit = Duration::from_millis(20);
        let sending = tokio::spawn(async move {
            let mut sent = Ok(());
            for cursor in 1..=2 {
                sent = sent.and(send_within(&follower, event(cursor), limit).await);
            }
            let _ = end.send(sent);
        });
        // The first event fills the channel, and nothing reads it in time.
        sending.await.unwrap();
        let received: Vec<_> = event_stream(receiver, ended).collect().await;
        assert_eq!(received.len(), 2, "{received:?}");
        assert_eq!(received[0].as_ref().unwrap().cursor, 1);
        let status = received[1].as_ref().unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unavailable);
    }

    #[tokio::test]
    async fn a_stream_ends_without_an_error_when_all_events_were_sent() {
        let (follower, receiver) = mpsc::channel(1);
        let (end, ended) = oneshot::channel();
        send(&follower, event(1)).await.unwrap();
        drop(follower);
        end.send(Ok(())).unwrap();
        let received: Vec<_> = event_stream(receiver, ended).collect().await;
        assert!(
            matches!(&received[..], [Ok(event)] if event.cursor == 1),
            "{received:?}"
        );
    }
}
