//! Chooses the next token from logits: the logits processors of transformers' `generate`, in its order.

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0: the most probable token. Else logits are divided by it, and a token is drawn.
    pub temperature: f64,
    /// The most probable tokens that are drawn from; 0: all.
    pub top_k: usize,
    /// The most probable tokens with this sum of probabilities are drawn from; 1: all.
    pub top_p: f64,
    /// Tokens with at least this share of the largest probability are drawn from; 0: all.
    pub min_p: f64,
    /// Divides the positive logits of earlier tokens, and multiplies the negative ones; 1: none.
    pub repetition_penalty: f64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
        }
    }
}

impl SamplingParams {
    /// Whether tokens are drawn.
    #[must_use]
    pub fn draws(&self) -> bool {
        self.temperature > 0.0
    }

    /// The next token. `scores`: the logits of all tokens, which are changed. `earlier`: the ids of the text so far, each once or more
    /// often. `draw`: a random number from 0 to 1, exclusive, if tokens are drawn. `None` if no logit is a number.
    pub fn choose(
        &self,
        scores: &mut [f32],
        earlier: impl IntoIterator<Item = u32>,
        draw: impl FnOnce() -> f64,
    ) -> Option<u32> {
        if scores.iter().any(|score| score.is_nan()) {
            return None;
        }
        self.penalize(scores, earlier);
        if !self.draws() {
            // The first of the largest.
            let mut best = 0;
            for (id, score) in scores.iter().enumerate() {
                if *score > scores[best] {
                    best = id;
                }
            }
            return scores.get(best).filter(|score| score.is_finite()).map(|_| best as u32);
        }
        let probabilities = self.probabilities(scores)?;
        let total: f64 = probabilities.iter().map(|p| f64::from(*p)).sum();
        let (target, mut sum, mut chosen) = (draw() * total, 0.0, None);
        for (id, probability) in probabilities.iter().enumerate().filter(|(_, p)| **p > 0.0) {
            sum += f64::from(*probability);
            // Rounding may leave the sum below the target: then it is the last one.
            chosen = Some(id as u32);
            if sum > target {
                break;
            }
        }
        chosen
    }

    /// The repetition penalty.
    fn penalize(&self, scores: &mut [f32], earlier: impl IntoIterator<Item = u32>) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let penalty = self.repetition_penalty as f32;
        let mut ids: Vec<u32> = earlier.into_iter().collect();
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            if let Some(score) = scores.get_mut(id as usize) {
                *score = if *score < 0.0 {
                    *score * penalty
                } else {
                    *score / penalty
                };
            }
        }
    }

    /// The probabilities of all tokens after temperature, top-k, top-p and min-p. `None` if all logits are minus infinity.
    fn probabilities(&self, scores: &mut [f32]) -> Option<Vec<f32>> {
        if self.temperature != 1.0 {
            let temperature = self.temperature as f32;
            scores.iter_mut().for_each(|score| *score /= temperature);
        }
        self.keep_top_k(scores);
        self.keep_top_p(scores);
        if self.min_p > 0.0 {
            let probabilities = softmax(scores)?;
            let min = self.min_p as f32 * probabilities.iter().copied().fold(0.0, f32::max);
            for (score, probability) in scores.iter_mut().zip(&probabilities) {
                if *probability < min {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        softmax(scores)
    }

    /// Removes logits below the k-th largest; equal ones stay.
    fn keep_top_k(&self, scores: &mut [f32]) {
        if self.top_k == 0 || self.top_k >= scores.len() {
            return;
        }
        let mut sorted = scores.to_vec();
        let (_, min, _) = sorted.select_nth_unstable_by(self.top_k - 1, |a, b| b.total_cmp(a));
        let min = *min;
        scores
            .iter_mut()
            .filter(|score| **score < min)
            .for_each(|score| *score = f32::NEG_INFINITY);
    }

    /// Removes the least probable tokens, as many as have together at most 1 - top-p; the most probable one stays.
    fn keep_top_p(&self, scores: &mut [f32]) {
        if self.top_p >= 1.0 {
            return;
        }
        let mut ids: Vec<usize> = (0..scores.len()).filter(|id| scores[*id] > f32::NEG_INFINITY).collect();
        ids.sort_by(|a, b| scores[*a].total_cmp(&scores[*b]));
        let sorted: Vec<f32> = ids.iter().map(|id| scores[*id]).collect();
        let Some(probabilities) = softmax(&sorted) else { return };
        let removed = (1.0 - self.top_p) as f32;
        let (mut sum, last) = (0f32, ids.len().saturating_sub(1));
        for (id, probability) in ids.iter().zip(probabilities).take(last) {
            sum += probability;
            if sum <= removed {
                scores[*id] = f32::NEG_INFINITY;
            }
        }
    }
}

/// The softmax; `None` if all logits are minus infinity, or one is infinite.
fn softmax(scores: &[f32]) -> Option<Vec<f32>> {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !largest.is_finite() {
        return None;
    }
    let exponentials: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f64 = exponentials.iter().map(|e| f64::from(*e)).sum();
    Some(exponentials.into_iter().map(|e| (f64::from(e) / sum) as f32).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::testing::formula_weights::expected;
    use serde_json::Value;

    fn choice(options: &Value) -> SamplingParams {
        let number = |key: &str, default: f64| options.get(key).and_then(Value::as_f64).unwrap_or(default);
        SamplingParams {
            temperature: number("temperature", 1.0),
            top_k: number("top_k", 0.0) as usize,
            top_p: number("top_p", 1.0),
            min_p: number("min_p", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0),
        }
    }

    #[test]
    fn probabilities_are_those_of_transformers() {
        let fixture = &expected()["sampling"];
        let scores: Vec<f32> = serde_json::from_value(fixture["scores"].clone()).unwrap();
        let earlier: Vec<u32> = serde_json::from_value(fixture["earlier"].clone()).unwrap();
        let cases = fixture["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 8);
        for case in cases {
            let choice = choice(&case["options"]);
            let mut scores = scores.clone();
            choice.penalize(&mut scores, earlier.iter().copied());
            let found = choice.probabilities(&mut scores).unwrap();
            let expected: Vec<f32> = serde_json::from_value(case["probabilities"].clone()).unwrap();
            for (id, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(*found > 0.0, *expected > 0.0, "{}, token {id}", case["options"]);
                assert!((found - expected).abs() < 1e-6, "{}, token {id}", case["options"]);
            }
        }
    }

    #[test]
    fn tokens_are_drawn_by_their_probabilities() {
        let choice = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        let scores: Vec<f32> = [0.5f32, 0.0, 0.3, 0.2].iter().map(|p| p.ln()).collect();
        for (draw, expected) in [(0.0, 0), (0.49, 0), (0.51, 2), (0.79, 2), (0.81, 3), (0.999_999, 3)] {
            assert_eq!(
                choice.choose(&mut scores.clone(), [], || draw),
                Some(expected),
                "{draw}"
            );
        }
    }

    #[test]
    fn logits_that_are_no_numbers_give_no_token() {
        let greedy = SamplingParams::default();
        let drawn = SamplingParams {
            temperature: 0.7,
            ..greedy
        };
        for choice in [greedy, drawn] {
            assert_eq!(choice.choose(&mut [0.0, f32::NAN], [], || 0.5), None);
            assert_eq!(choice.choose(&mut [f32::NEG_INFINITY; 3], [], || 0.5), None);
            assert_eq!(choice.choose(&mut [], [], || 0.5), None);
            assert_eq!(choice.choose(&mut [f32::NEG_INFINITY, 1.0], [], || 0.5), Some(1));
        }
        // The first of equal ones.
        assert_eq!(greedy.choose(&mut [0.0, 2.0, 2.0], [], || 0.5), Some(1));
    }
}
