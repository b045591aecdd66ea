//! The networks that make control images (`datasets[].controls`), before anything else is loaded.

use super::{Job, Model, WorkKind};
use crate::job::controls::ControlType;
use crate::plan::device_factors::Phase;
use crate::plan::json::text;
use crate::plan::walk::build::WeightTotals;
use serde_json::Value;

/// The numbers of Depth Anything V2 Large: those of its published file.
const DEPTH_NUMBERS: f64 = 335.3e6;
/// The numbers that estimating a depth needs for each pixel that it is estimated at: 128 features of the head, before and after they are
/// enlarged, and 256 of the last stage at a third of the pixels.
const DEPTH_NUMBERS_PER_PIXEL: f64 = 128.0 * 2.0 + 256.0;
/// The pixels that a depth is estimated at: 518 on the shorter side, of an image that is twice as long as wide.
const DEPTH_PIXELS: f64 = 518.0 * 2.0 * 518.0;
/// The numbers that finding edges needs for each pixel: 24 channels of the fusion, before and after each of its two convolutions, with what its
/// activations compute.
const LINE_NUMBERS_PER_PIXEL: f64 = 24.0 * 7.0;
/// The pixels that edges are looked for at: 1024 on the shorter side.
const LINE_PIXELS: f64 = 1024.0 * 2.0 * 1024.0;

impl Job<'_> {
    /// Making control images. `None`: the job makes none. What files are missing is not known, so it counts for every job with a network.
    pub(super) fn making_controls(&self, model: &Model) -> Option<Phase> {
        if self.kind != WorkKind::Training {
            return None;
        }
        let sets = self.body.get("datasets").and_then(Value::as_array)?;
        let peak = sets.iter().filter_map(network_bytes).reduce(f64::max)?;
        let all = |weights: &WeightTotals| weights.resident + weights.quantised;
        Some(Phase {
            name: "making control images",
            held: 0.0,
            // The weights are counted in every phase, and are not loaded in this one.
            transient: peak - model.weights.iter().map(all).sum::<f64>(),
        })
    }
}

/// The bytes of the network that makes control images of a data set, in float32, while it works.
fn network_bytes(set: &Value) -> Option<f64> {
    let names = set.get("controls").and_then(Value::as_array)?;
    let mut types = names.iter().filter_map(|name| ControlType::from_name(name.as_str()?));
    let kind = types.find(|kind| kind.generator_key().is_some())?;
    text(set, &format!("/{}", kind.generator_key()?)).filter(|path| !path.is_empty())?;
    let numbers = match kind {
        ControlType::Depth => DEPTH_NUMBERS + DEPTH_NUMBERS_PER_PIXEL * DEPTH_PIXELS,
        _ => LINE_NUMBERS_PER_PIXEL * LINE_PIXELS,
    };
    Some(4.0 * numbers)
}

#[cfg(test)]
mod tests {
    use super::network_bytes;
    use serde_json::json;

    #[test]
    fn networks_count_where_the_config_names_one() {
        let gib = |set: serde_json::Value| {
            network_bytes(&set).map(|bytes| (bytes / f64::from(1 << 30) * 10.0).round() / 10.0)
        };
        assert_eq!(
            gib(json!({"controls": ["mask", "depth"], "depth_estimator": "a/b"})),
            Some(2.3)
        );
        assert_eq!(
            gib(json!({"controls": ["line"], "line_detector": "t.safetensors"})),
            Some(1.3)
        );
        for set in [
            json!({}),
            json!({"controls": ["pose"], "depth_estimator": "a/b"}),
            json!({"controls": ["depth"], "depth_estimator": ""}),
            json!({"controls": ["line"], "line_detector": null}),
        ] {
            assert_eq!(network_bytes(&set), None);
        }
    }
}
