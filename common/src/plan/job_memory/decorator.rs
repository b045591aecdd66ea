//! The tokens of a `decorator` section.

use super::{Job, WorkKind};
use crate::job::limits::MAX_DECORATOR_TOKENS;
use crate::plan::json::number;
use crate::plan::shapes::TransformerKind;
use crate::plan::walk::build::TrainedTensor;
use crate::plan::walk::{Conditions, Walk};
use serde_json::Value;

impl Job<'_> {
    /// The number of tokens that are trained; 0: the job trains no decorator.
    pub(super) fn decorator_tokens(&self) -> f64 {
        let decorator = self.body.get("decorator").filter(|decorator| !decorator.is_null());
        let is_flux = self.shapes.transformer.kind == TransformerKind::Flux;
        let tokens = |decorator: &Value| number(decorator, "/num_tokens").unwrap_or(4.0);
        match decorator.filter(|_| is_flux && self.kind == WorkKind::Training) {
            Some(decorator) => tokens(decorator).clamp(1.0, f64::from(MAX_DECORATOR_TOKENS)),
            None => 0.0,
        }
    }

    /// The trained tensor, if there is one.
    pub(super) fn decorator(&self) -> Option<TrainedTensor> {
        let (tokens, width) = (self.decorator_tokens(), f64::from(self.shapes.transformer.context));
        (tokens > 0.0).then_some(TrainedTensor {
            elements: tokens * width,
            factored: Some(tokens + width),
        })
    }

    /// The conditions with the tokens after the text, which are tracked.
    pub(super) fn with_decorator(&self, walk: &Walk, conditions: Conditions) -> Conditions {
        let [batch, _, features, _] = conditions.text.dims();
        match self.decorator_tokens() {
            0.0 => conditions,
            tokens => Conditions {
                text: walk.cat_tokens(&conditions.text, &walk.tensor([batch, tokens, features, 1.0], true)),
                ..conditions
            },
        }
    }
}
