//! What a step on image pairs (`datasets[].unconditional_path`) needs, by the job's JSON.

use super::json::text;
use crate::job::dataset::GuidanceType;
use serde_json::Value;

/// The losses of the data sets with paired images. A slider has losses of its own.
fn guidances(body: &Value) -> impl Iterator<Item = GuidanceType> {
    let sets = body.get("datasets").and_then(Value::as_array).into_iter().flatten();
    let paired = sets.filter(|set| text(set, "/unconditional_path").is_some());
    paired.map(|set| {
        let named = text(set, "/guidance_type").and_then(GuidanceType::from_name);
        named.unwrap_or(GuidanceType::Targeted)
    })
}

/// Whether the step of some data set trains the pairs of its images, too, so that it has two predictions for each image.
pub(super) fn trains_pairs(body: &Value) -> bool {
    guidances(body).any(GuidanceType::trains_pairs)
}

/// The work of the forward pass without the adapter that some losses of image pairs need, as a share of the work of a micro-batch. A forward
/// and a backward pass over the same images is three times as much.
pub(super) fn compared_work(body: &Value) -> f64 {
    match (guidances(body).any(GuidanceType::uses_base), trains_pairs(body)) {
        (false, _) => 0.0,
        (true, false) => 1.0 / 3.0,
        (true, true) => 1.0 / 6.0,
    }
}
