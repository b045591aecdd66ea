//! Builds messages from bytes. Every field is listed, so a new field does not compile until it is added here.

use super::super::unstructured::Unstructured;
use aitk_proto::v1;
use std::collections::HashMap;

/// A type whose values can be built from bytes.
pub(super) trait Make: Sized {
    fn make(input: &mut Unstructured<'_>) -> Self;
}

macro_rules! numbers {
    ($($number:ty => $make:expr,)*) => {
        $(impl Make for $number {
            fn make(input: &mut Unstructured<'_>) -> Self {
                let make: fn(&mut Unstructured<'_>) -> Self = $make;
                make(input)
            }
        })*
    };
}

numbers! {
    bool => |input| input.flag(),
    u8 => |input| input.byte(),
    u32 => |input| input.number() as u32,
    u64 => |input| input.number(),
    i64 => |input| input.number() as i64,
    f64 => |input| input.real(),
    // Only enums are `i32`; the largest has 6 values.
    i32 => |input| if input.one_in(32) { input.number() as i32 } else { 1 + i32::from(input.byte() % 6) },
}

impl Make for String {
    fn make(input: &mut Unstructured<'_>) -> Self {
        const HASH: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        match input.byte() % 24 {
            0 => Self::new(),
            1..4 => HASH.to_owned(),
            4..10 => input.pick(&["j1", "a-1", "ada", "W_9"]).to_owned(),
            10..13 => input.pick(&["yaml", "json", "jsonc"]).to_owned(),
            13..16 => input
                .pick(&["out/a.png", "a b", "s3://bucket/x", "é", "admin", "worker"])
                .to_owned(),
            16 => input
                .pick(&["../a", "a//b", "/a", "c:\\", "a\nb", "\0", "."])
                .to_owned(),
            17 => "x".repeat(usize::from(input.byte()) * 20),
            18 => "\u{1}".repeat(usize::from(input.byte())),
            19 => HASH.to_uppercase(),
            _ => input.chars(),
        }
    }
}

impl<T: Make> Make for Option<T> {
    fn make(input: &mut Unstructured<'_>) -> Self {
        (!input.one_in(8)).then(|| T::make(input))
    }
}

impl<T: Make> Make for Vec<T> {
    fn make(input: &mut Unstructured<'_>) -> Self {
        let count = match input.byte() {
            count @ 0..250 => usize::from(count % 4),
            // More than the limit of every list of short texts.
            count => usize::from(count) / 3,
        };
        (0..count).map(|_| T::make(input)).collect()
    }
}

impl<T: Make> Make for HashMap<String, T> {
    fn make(input: &mut Unstructured<'_>) -> Self {
        (0..input.below(4))
            .map(|_| (String::make(input), T::make(input)))
            .collect()
    }
}

macro_rules! messages {
    ($($message:ident { $($field:ident)* })*) => {
        $(impl Make for v1::$message {
            #[allow(unused_variables, reason = "some messages have no fields")]
            fn make(input: &mut Unstructured<'_>) -> Self {
                Self { $($field: Make::make(input)),* }
            }
        })*
    };
}

macro_rules! choices {
    ($($module:ident::$name:ident { $($variant:ident)* })*) => {
        $(impl Make for v1::$module::$name {
            fn make(input: &mut Unstructured<'_>) -> Self {
                let makers: &[fn(&mut Unstructured<'_>) -> Self] = &[$(|input| Self::$variant(Make::make(input))),*];
                makers[input.below(makers.len())](input)
            }
        })*
    };
}

choices! {
    outcome::Outcome { Completed Stopped Failed }
    attempt_event::Report { Phase Progress Metrics Log }
    worker_message::Message { Register Beat Event ArtifactReady ArtifactRemoved Commit Finished GoingAway }
    coordinator_message::Message { Welcome BeatReply Assign Stop Fence Answer GoingAway RequestOutputs }
    job_event::Body { State Attempt Phase Progress Metrics Log Artifact ArtifactRemoved Checkpoint }
    put_blob_request::Part { Header Data }
    get_blob_reply::Part { Header Data }
}

impl Make for v1::outcome::Completed {
    fn make(_: &mut Unstructured<'_>) -> Self {
        Self {}
    }
}

impl Make for v1::outcome::Stopped {
    fn make(input: &mut Unstructured<'_>) -> Self {
        Self {
            saved_step: Make::make(input),
            at_step: Make::make(input),
        }
    }
}

impl Make for v1::outcome::Failed {
    fn make(input: &mut Unstructured<'_>) -> Self {
        Self {
            cause: Make::make(input),
            message: Make::make(input),
        }
    }
}

messages! {
    DeviceRef { kind index }
    Device { device name architecture memory_total memory_budget dtypes attention profile gflops }
    Phase { name }
    Progress { done total seconds_per_step }
    Metrics { step values }
    LogLine { level message repository commit }
    Artifact { name kind sha256 bytes step index local_path }
    Outcome { outcome }
    HeldAttempt { attempt_id epoch }
    Register { protocol worker_id name version host devices labels running confinement offers outputs_on_request }
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
    RequestOutputs { attempt_id epoch save samples }
    Fence { attempt_id epoch reason }
    Answer { request_id verdict message temporary }
    CoordinatorGoingAway { reason retry }
    CoordinatorMessage { message }
    InfoRequest {}
    InfoReply { version protocol started_ms storage workers_connected jobs_active }
    SubmitRequest { config_text config_format job_json inputs local idempotency_key owner anatomy images image_batches longest_prompt }
    ArrayMember { job_json twin }
    SubmitArrayRequest { shared name members at_most }
    ImageBatch { process width height images }
    Anatomy { denoiser text vae denoiser_stored text_stored vae_stored shapes decoder }
    ModelShapes { unet text vae transformer language }
    TransformerShapes {
        kind in_channels patch blocks single_blocks dual_blocks heads head_width context pooled guidance qk_norm positions
        approximator_layers approximator_width short_prompts
    }
    LanguageShapes { kind width heads kv_heads head_width intermediate layers vocabulary positions window learned_positions gated untied }
    UNetShapes {
        in_channels out_channels conv_in_kernel conv_out_kernel downsample_padding context linear_projection mid_block
        additional blocks upcast_attention
    }
    BlockShapes { channels layers heads transformer_layers down_attention up_attention }
    TextShapes { width intermediate layers heads vocabulary positions projection }
    VaeShapes { in_channels out_channels latent_channels layers channels mid_attention sample_size }
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
    SaveJobRequest { job_id }
    SampleJobRequest { job_id }
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
    HasRequest { sha256 upload }
    HasReply { present received }
    BlobHeader { sha256 bytes offset upload }
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
