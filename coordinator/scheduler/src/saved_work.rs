//! Describes which part of a job's work is saved when an attempt stops. Counts what was committed, not what the attempt claims.

use super::model::Job;

/// From which step the next attempt resumes, and how many steps are lost. `claimed` is the newest step that the attempt says
/// it saved, which only counts for a job in place; `at` is the step at which the attempt ended.
pub(super) fn saved_work_message(job: &Job, claimed: Option<u64>, at: Option<u64>) -> String {
    if job.kind == "generate" {
        return "finished images are kept".into();
    }
    let committed = job.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    let saved = if job.local { claimed.max(committed) } else { committed };
    match (saved, at.unwrap_or(0)) {
        (Some(saved), at) if at > saved => format!("saved at step {saved}; {} lost", steps_text(at - saved, "since ")),
        (Some(saved), _) => format!("saved at step {saved}"),
        (None, 0) => "no state was saved".into(),
        (None, at) => format!(
            "no state was saved: {} lost, and it starts from the beginning",
            steps_text(at, "")
        ),
    }
}

fn steps_text(count: u64, since: &str) -> String {
    match count {
        1 => format!("1 step {since}is"),
        count => format!("{count} steps {since}are"),
    }
}
