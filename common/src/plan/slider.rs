//! What the step of a slider needs, by the job's JSON.

use super::json::{number, text};
use serde_json::Value;

/// The kinds of sliders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SliderKind {
    /// `concept_slider`.
    Concept,
    /// `slider`.
    Prompts,
    /// `image_reference_slider_trainer`.
    Pairs,
    /// `ultimate_slider_trainer`.
    PairsAndPrompts,
}

impl SliderKind {
    /// That of a training process. `None`: it trains no slider.
    pub(super) fn of(body: &Value) -> Option<Self> {
        match text(body, "/type")? {
            "concept_slider" => Some(Self::Concept),
            "slider" => Some(Self::Prompts),
            "image_reference_slider_trainer" => Some(Self::Pairs),
            "ultimate_slider_trainer" => Some(Self::PairsAndPrompts),
            _ => None,
        }
    }

    /// Whether each step samples its noisy latents from noise.
    fn samples(self, body: &Value) -> bool {
        let datasets = body.get("datasets").and_then(Value::as_array);
        self == Self::Prompts && datasets.is_none_or(Vec::is_empty)
    }

    /// The work of a micro-batch, in passes forward and backward. A pass forward alone is a third of one.
    pub(super) fn work(self, body: &Value) -> f64 {
        let forward = 1.0 / 3.0;
        let full = body
            .pointer("/slider/batch_full_slide")
            .and_then(Value::as_bool)
            .unwrap_or(true);
        // Two parts for each direction. Parts with the same latents are one pass.
        let (parts, directions) = if full { (4.0, 2.0) } else { (1.0, 1.0) };
        // The positive, the negative and the neutral prompt without the adapter.
        let of_prompts = 3.0 * forward;
        match self {
            Self::Concept => {
                let anchors = f64::from(u8::from(text(body, "/slider/anchor_class").is_some()));
                2.0 + of_prompts + anchors * (2.0 + forward)
            }
            Self::Pairs => 2.0,
            Self::PairsAndPrompts => 2.0 + directions * (1.0 + of_prompts),
            Self::Prompts => {
                let anchors = body.pointer("/slider/anchors").and_then(Value::as_array);
                let anchors = f64::from(u8::from(anchors.is_some_and(|anchors| !anchors.is_empty())));
                if !self.samples(body) {
                    return directions + of_prompts + anchors * (directions + forward);
                }
                let steps = number(body, "/train/max_denoising_steps").unwrap_or(999.0);
                // Half of the steps on average, each with and without the prompt.
                parts * (1.0 + of_prompts + anchors * (1.0 + forward) + steps * forward)
            }
        }
    }
}

/// Width and height of the images that a slider trains on, as far as its section gives them, and whether each step samples them.
pub(super) fn slider_sizes(body: &Value) -> Option<(Vec<[f64; 2]>, bool)> {
    let kind = SliderKind::of(body)?;
    let list = |path: &str| body.pointer(path).and_then(Value::as_array).into_iter().flatten();
    if kind.samples(body) {
        let sizes =
            list("/slider/resolutions").filter_map(|size| Some([size.get(0)?.as_f64()?, size.get(1)?.as_f64()?]));
        return Some((sizes.collect(), true));
    }
    let sizes = list("/slider/datasets").map(|set| [number(set, "/size").unwrap_or(512.0); 2]);
    match kind {
        SliderKind::Pairs | SliderKind::PairsAndPrompts => Some((sizes.collect(), false)),
        _ => None,
    }
}
