//! Messages out of bytes: every field of every message, so that a field that comes new is no field that is forgotten.

use super::super::dice::Dice;
use aitk_proto::v1;
use std::collections::HashMap;

/// What can be drawn.
pub(super) trait Make: Sized {
    fn make(dice: &mut Dice<'_>) -> Self;
}

macro_rules! numbers {
    ($($number:ty => $draw:expr,)*) => {
        $(impl Make for $number {
            fn make(dice: &mut Dice<'_>) -> Self {
                let draw: fn(&mut Dice<'_>) -> Self = $draw;
                draw(dice)
            }
        })*
    };
}

numbers! {
    bool => |dice| dice.flag(),
    u8 => |dice| dice.byte(),
    u32 => |dice| dice.number() as u32,
    u64 => |dice| dice.number(),
    i64 => |dice| dice.number() as i64,
    f64 => |dice| dice.real(),
    // Only enums are of this kind; the largest has 6 values.
    i32 => |dice| if dice.one_in(32) { dice.number() as i32 } else { 1 + i32::from(dice.byte() % 6) },
}

impl Make for String {
    fn make(dice: &mut Dice<'_>) -> Self {
        const HASH: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        match dice.byte() % 24 {
            0 => Self::new(),
            1..4 => HASH.to_owned(),
            4..10 => dice.pick(&["j1", "a-1", "ada", "W_9"]).to_owned(),
            10..13 => dice.pick(&["yaml", "json", "jsonc"]).to_owned(),
            13..16 => dice
                .pick(&["out/a.png", "a b", "s3://bucket/x", "é", "admin", "worker"])
                .to_owned(),
            16 => dice.pick(&["../a", "a//b", "/a", "c:\\", "a\nb", "\0", "."]).to_owned(),
            17 => "x".repeat(usize::from(dice.byte()) * 20),
            18 => "\u{1}".repeat(usize::from(dice.byte())),
            19 => HASH.to_uppercase(),
            _ => dice.chars(),
        }
    }
}

impl<T: Make> Make for Option<T> {
    fn make(dice: &mut Dice<'_>) -> Self {
        (!dice.one_in(8)).then(|| T::make(dice))
    }
}

impl<T: Make> Make for Vec<T> {
    fn make(dice: &mut Dice<'_>) -> Self {
        let count = match dice.byte() {
            count @ 0..250 => usize::from(count % 4),
            // More than any list of short texts may have.
            count => usize::from(count) / 3,
        };
        (0..count).map(|_| T::make(dice)).collect()
    }
}

impl<T: Make> Make for HashMap<String, T> {
    fn make(dice: &mut Dice<'_>) -> Self {
        (0..dice.below(4))
            .map(|_| (String::make(dice), T::make(dice)))
            .collect()
    }
}

macro_rules! messages {
    ($($message:ident { $($field:ident)* })*) => {
        $(impl Make for v1::$message {
            #[allow(unused_variables, reason = "some messages have no fields")]
            fn make(dice: &mut Dice<'_>) -> Self {
                Self { $($field: Make::make(dice)),* }
            }
        })*
    };
}

macro_rules! choices {
    ($($module:ident::$name:ident { $($variant:ident)* })*) => {
        $(impl Make for v1::$module::$name {
            fn make(dice: &mut Dice<'_>) -> Self {
                let makers: &[fn(&mut Dice<'_>) -> Self] = &[$(|dice| Self::$variant(Make::make(dice))),*];
                makers[dice.below(makers.len())](dice)
            }
        })*
    };
}

choices! {
    outcome::Outcome { Completed Stopped Failed }
    attempt_event::Report { Phase Progress Metrics Log }
    worker_message::Message { Register Beat Event ArtifactReady ArtifactRemoved Commit Finished GoingAway }
    coordinator_message::Message { Welcome BeatReply Assign Stop Fence Answer GoingAway }
    job_event::Body { State Attempt Phase Progress Metrics Log Artifact ArtifactRemoved Checkpoint }
    put_blob_request::Part { Header Data }
    get_blob_reply::Part { Header Data }
}

impl Make for v1::outcome::Completed {
    fn make(_: &mut Dice<'_>) -> Self {
        Self {}
    }
}

impl Make for v1::outcome::Stopped {
    fn make(dice: &mut Dice<'_>) -> Self {
        Self {
            saved_step: Make::make(dice),
            at_step: Make::make(dice),
        }
    }
}

impl Make for v1::outcome::Failed {
    fn make(dice: &mut Dice<'_>) -> Self {
        Self {
            cause: Make::make(dice),
            message: Make::make(dice),
        }
    }
}

messages! {
    DeviceRef { kind index }
    Device { device name architecture memory_total memory_budget dtypes attention profile }
    Phase { name }
    Progress { done total seconds_per_step }
    Metrics { step values }
    LogLine { level message repository commit }
    Artifact { name kind sha256 bytes step index local_path }
    Outcome { outcome }
    HeldAttempt { attempt_id epoch }
    Register { protocol worker_id name version host devices labels running confinement offers }
    OfferedCheckpoint { attempt_id epoch step bytes }
    Confinement { files network syscalls limits }
    Protection { in_force by }
    Beat { running }
    AttemptEvent { attempt_id epoch seq time_ms report }
    ArtifactReady { attempt_id epoch artifact }
    ArtifactRemoved { attempt_id epoch name }
    CommitCheckpoint { attempt_id epoch manifest_sha256 step }
    Finished { attempt_id epoch outcome }
    WorkerGoingAway { reason }
    WorkerMessage { request_id message }
    Welcome { worker_id beat_interval_ms lease_ms storage_url keep wanted }
    EventCursor { attempt_id seq }
    BeatReply { events }
    Assign {
        job_id task_id attempt_id epoch job_json config_text config_format inputs local resume_manifest_sha256 device
        profile seed drawn traceparent owner
    }
    StopAttempt { attempt_id epoch save }
    Fence { attempt_id epoch reason }
    Answer { request_id verdict message }
    CoordinatorGoingAway { reason retry }
    CoordinatorMessage { message }
    InfoRequest {}
    InfoReply { version protocol started_ms storage workers_connected jobs_active }
    SubmitRequest { config_text config_format job_json inputs local idempotency_key owner anatomy images }
    ArrayMember { job_json twin }
    SubmitArrayRequest { shared name members at_most }
    Anatomy { denoiser text vae denoiser_stored text_stored vae_stored }
    StoredWeights { quantised bytes halves }
    SubmitReply { job_id name existed }
    GetJobRequest { job_id }
    Attempt {
        id epoch worker_id worker_name device profile state created_ms ended_ms message memory
    }
    Job {
        id name kind state reason priority local created_ms started_ms ended_ms progress phase checkpoint_step attempts
        failures retries config_text config_format owner paused yields array loss
    }
    Array { id index size at_most split waiting running completed failed stopped paused }
    ListJobsRequest { all limit members array_id page_size page_token owner name name_part states since_ms }
    ListJobsReply { jobs next_page_token total }
    StopJobRequest { job_id now }
    ResumeJobRequest { job_id }
    PauseJobRequest { job_id }
    SetPriorityRequest { job_id priority }
    ExplainRequest { job_id }
    DeviceForecast {
        worker_id worker_name device device_name budget fits ready profile memory seconds measured words
    }
    ForecastReply { summary devices }
    EventsRequest { job_id cursor follow }
    StateChanged { state reason paused }
    AttemptChanged { state worker_name device message }
    CheckpointCommitted { step manifest_sha256 }
    JobEvent { cursor time_ms attempt_id body }
    ArtifactsRequest { job_id page_token }
    ArtifactsReply { job_id artifacts next_page_token }
    ListWorkersRequest { page_token }
    WorkerDevice { device job_ids reserved faults quarantined quarantine_reason }
    Worker { id name version host connected leaving last_seen_ms devices labels drained confinement }
    DrainWorkerRequest { worker drain now }
    RemoveJobRequest { job_id }
    ForgetWorkerRequest { worker }
    ListWorkersReply { workers next_page_token }
    CreateTokenRequest { name role expires_in_ms }
    TokenInfo { id name role created_ms created_by expires_ms revoked_ms }
    CreateTokenReply { secret token ca_sha256 }
    ListTokensRequest { page_token page_size }
    ListTokensReply { tokens next_page_token }
    RevokeTokenRequest { id }
    ReadAuditRequest { after limit }
    AuditLine { seq time_ms who by from action object done detail }
    ReadAuditReply { lines }
    CollectGarbageRequest { dry_run }
    CollectGarbageReply { blobs needed removed removed_bytes jobs_forgotten }
    HasRequest { sha256 }
    HasReply { present }
    BlobHeader { sha256 bytes offset }
    PutBlobRequest { part }
    PutBlobReply { existed }
    GetBlobRequest { sha256 offset }
    GetBlobReply { part }
    CertificateRequest { public_key name signature }
    JoinRequest { request host worker_id }
    WorkerCertificate { certificate renew_in_ms ends_in_ms }
    JoinReply { name worker_id certificate ca_sha256 }
    RenewRequest { request }
    RenewReply { certificate }
    CreateJoinTokenRequest { name expires_in_ms }
    CreateJoinTokenReply { text id expires_ms }
    ListCertificatesRequest { page_token page_size }
    ListCertificatesReply { certificates next_page_token }
    WorkerCertificateInfo { id name worker_id joined_ms issued_ms serial expires_ms revoked_ms }
    RevokeWorkerRequest { name }
    RevokeWorkerReply { certificates join_tokens }
}
