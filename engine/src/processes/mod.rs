//! What a job runs.
