//! What of a job's work is kept when an attempt stops, in words: by what was committed, not by what the attempt says.

use super::model::Job;

/// What the next attempt goes on from, and what is lost. `claimed` is the newest state that the attempt says it saved, which
/// only counts for a job in place; `at` is the step at which it ended.
pub(super) fn what_is_saved(job: &Job, claimed: Option<u64>, at: Option<u64>) -> String {
    if job.kind == "generate" {
        return "the images that are done are kept".into();
    }
    let committed = job.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    let saved = if job.local { claimed.max(committed) } else { committed };
    match (saved, at.unwrap_or(0)) {
        (Some(saved), at) if at > saved => format!("saved at step {saved}; {} lost", steps(at - saved, "since ")),
        (Some(saved), _) => format!("saved at step {saved}"),
        (None, 0) => "no state was saved".into(),
        (None, at) => format!(
            "no state was saved: {} lost, and it starts from the beginning",
            steps(at, "")
        ),
    }
}

fn steps(count: u64, since: &str) -> String {
    match count {
        1 => format!("1 step {since}is"),
        count => format!("{count} steps {since}are"),
    }
}
