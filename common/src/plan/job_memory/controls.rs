//! The networks that make control images and masks (`datasets[].controls`), before anything else is loaded.

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

/// The numbers of BiRefNet with the backbone Swin-L: those of its published file.
const FOREGROUND_NUMBERS: f64 = 220.2e6;
/// The numbers that finding the foreground needs for each pixel, in the last stage of the decoder at a sixteenth of the pixels: 768 of the backbone's
/// features (those of smaller stages with them), 960 of the stage's input and its parts, for 49 places the four neighbours with their weights, and
/// the places and weights along both axes, and 256 results of the largest convolution with two copies; and four times the 8 that are taken from
/// the image at once.
const FOREGROUND_NUMBERS_PER_PIXEL: f64 =
    (768.0 + 960.0 + 49.0 * (4.0 * 2.0 + 8.0 + 8.0) + 256.0 * 3.0) / 16.0 + 4.0 * 8.0;
/// The pixels that the foreground is looked for at.
const FOREGROUND_PIXELS: f64 = 1024.0 * 1024.0;
/// The numbers of Sapiens 2 1B with its matting head: those of its published file.
const MATTING_NUMBERS: f64 = 1539.3e6;
/// The numbers that finding people needs for each pixel: 128 channels of the head before and after they are enlarged and after their norm, the 256
/// of the step before at a quarter of the pixels, and as many for what a convolution copies (measured on a CPU: 514).
const MATTING_NUMBERS_PER_PIXEL: f64 = 128.0 * 3.0 + 2.0 * 256.0 / 4.0;
/// The pixels that people are looked for at.
const MATTING_PIXELS: f64 = 1024.0 * 1024.0;

impl Job<'_> {
    /// Making control images and masks. `None`: the job makes none. What files are missing is not known, so it counts for every job with a network.
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

/// The bytes of the network that makes control images or masks of a data set, in float32, while it works; of two networks, of the larger.
fn network_bytes(set: &Value) -> Option<f64> {
    let names = set.get("controls").and_then(Value::as_array)?;
    let types = names.iter().filter_map(|name| ControlType::from_name(name.as_str()?));
    let numbers = types.filter_map(|kind| {
        text(set, &format!("/{}", kind.generator_key()?)).filter(|path| !path.is_empty())?;
        Some(match kind {
            ControlType::Depth => DEPTH_NUMBERS + DEPTH_NUMBERS_PER_PIXEL * DEPTH_PIXELS,
            ControlType::Mask => FOREGROUND_NUMBERS + FOREGROUND_NUMBERS_PER_PIXEL * FOREGROUND_PIXELS,
            ControlType::Sapiens2Mask => MATTING_NUMBERS + MATTING_NUMBERS_PER_PIXEL * MATTING_PIXELS,
            _ => LINE_NUMBERS_PER_PIXEL * LINE_PIXELS,
        })
    });
    Some(4.0 * numbers.reduce(f64::max)?)
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
        assert_eq!(
            gib(
                json!({"controls": ["sapiens2_mask", "line"], "line_detector": "t.safetensors", "matting_model": "a/b"})
            ),
            Some(7.7)
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
