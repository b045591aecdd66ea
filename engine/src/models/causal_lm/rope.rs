//! Rotary position embeddings as transformers computes them (`modeling_rope_utils.py`), in float32.

use crate::models::config::MAX_SIZE;
use std::borrow::Cow;

/// transformers' defaults of `beta_fast` and `beta_slow`, and those of llama.cpp.
pub(super) const BETAS: [f64; 2] = [32.0, 1.0];

/// How the frequencies of a rotary embedding are scaled (`rope_type`).
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RopeScaling {
    /// `default`.
    None,
    /// `linear`: all are divided by a factor.
    Linear { factor: f64 },
    /// `llama3`: those of wavelengths beyond the original context are divided by a factor.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
    /// `yarn` (B. Peng and others, arXiv:2309.00071).
    Yarn {
        factor: f64,
        original: f64,
        /// `beta_fast`, `beta_slow`.
        betas: [f64; 2],
        /// Whether the bounds of the ramp are rounded to whole pairs.
        truncate: bool,
        attention_factor: f64,
    },
    /// `dynamic`: NTK scaling by the length of texts that are longer than the context.
    Dynamic { factor: f64 },
    /// `longrope` (Y. Ding and others, arXiv:2402.13753): divisors of texts up to the original context, and of longer ones.
    LongRope {
        short: Vec<f64>,
        long: Vec<f64>,
        original: f64,
        attention_factor: f64,
    },
}

/// The frequencies of texts that are longer than a limit.
#[derive(Clone, Debug, PartialEq)]
enum LongTexts {
    /// As those of other texts.
    Same,
    /// These, in texts of more tokens than the limit.
    Other { above: usize, frequencies: Vec<f32> },
    /// Those of a larger `theta`, which grows with the text.
    Dynamic { above: usize, factor: f64 },
}

/// A rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryPositions {
    pub(super) theta: f64,
    pub(super) scaling: RopeScaling,
    /// The angle per position of each pair of features, [head width / 2].
    frequencies: Vec<f32>,
    long_texts: LongTexts,
    /// What cosines and sines are multiplied by (`attention_factor`).
    scale: f32,
}

impl RotaryPositions {
    /// Without scaling.
    #[must_use]
    pub fn plain(theta: f64, head_width: usize) -> Self {
        Self {
            theta,
            scaling: RopeScaling::None,
            frequencies: plain_frequencies(theta, head_width).collect(),
            long_texts: LongTexts::Same,
            scale: 1.0,
        }
    }

    /// An embedding of heads with this width, in a model with this context.
    ///
    /// # Errors
    /// A sentence that names the number that is out of its limits.
    pub(super) fn new(
        theta: f64,
        scaling: RopeScaling,
        head_width: usize,
        max_positions: usize,
    ) -> Result<Self, String> {
        if !head_width.is_multiple_of(2) || head_width == 0 {
            return Err(format!(
                "a head of {head_width} features cannot be rotated: expected an even number"
            ));
        }
        if !theta.is_finite() || theta <= 0.0 {
            return Err(format!("`rope_theta` is {theta}: expected a positive number"));
        }
        let plain = plain_frequencies(theta, head_width);
        let (mut long_texts, mut scale) = (LongTexts::Same, 1.0);
        let frequencies: Vec<f32> = match &scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / *factor as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                let [factor, low, high, original] = [*factor, *low, *high, *original].map(|number| number as f32);
                plain
                    .map(|frequency| llama3(frequency, factor, [low, high], original))
                    .collect()
            }
            RopeScaling::Yarn {
                factor,
                original,
                betas,
                truncate,
                attention_factor,
            } => {
                scale = *attention_factor as f32;
                let ramp = YarnRamp::new(theta, head_width, *original, *betas, *truncate)?;
                let interpolated = |pair: usize, plain: f32| {
                    let share = ramp.share(pair);
                    1.0 / (*factor as f32 / plain) * (1.0 - share) + plain * share
                };
                plain
                    .enumerate()
                    .map(|(pair, plain)| interpolated(pair, plain))
                    .collect()
            }
            RopeScaling::Dynamic { factor } => {
                if head_width == 2 {
                    return Err("a rotary embedding `dynamic` needs heads of more than 2 features".into());
                }
                long_texts = LongTexts::Dynamic {
                    above: max_positions,
                    factor: *factor,
                };
                plain.collect()
            }
            RopeScaling::LongRope {
                short,
                long,
                original,
                attention_factor,
            } => {
                scale = *attention_factor as f32;
                let plain: Vec<f32> = plain.collect();
                for (key, factors) in [("short_factor", short), ("long_factor", long)] {
                    if factors.len() != plain.len() {
                        return Err(format!(
                            "`{key}` of the rotary embedding has {} numbers: expected {}, half as many as a head has features",
                            factors.len(),
                            plain.len()
                        ));
                    }
                }
                let divided = |factors: &[f64]| -> Vec<f32> {
                    let pairs = plain.iter().zip(factors);
                    pairs
                        .map(|(plain, factor)| 1.0 / (*factor as f32 * (1.0 / plain)))
                        .collect()
                };
                long_texts = LongTexts::Other {
                    above: *original as usize,
                    frequencies: divided(long),
                };
                divided(short)
            }
        };
        let all = Self {
            theta,
            scaling,
            frequencies,
            long_texts,
            scale,
        };
        all.checked()
    }

    /// The embedding with each frequency divided by a factor, [head width / 2]: `rope_freqs` of llama.cpp.
    ///
    /// # Errors
    /// When a frequency is negative or no number afterwards.
    pub(super) fn divided_by(mut self, factors: &[f32]) -> Result<Self, String> {
        let divide = |frequencies: &mut [f32]| {
            for (frequency, factor) in frequencies.iter_mut().zip(factors) {
                *frequency /= factor;
            }
        };
        divide(&mut self.frequencies);
        if let LongTexts::Other { frequencies, .. } = &mut self.long_texts {
            divide(frequencies);
        }
        self.checked()
    }

    /// Checks that all numbers can be computed with.
    fn checked(self) -> Result<Self, String> {
        let long = match &self.long_texts {
            LongTexts::Other { frequencies, .. } => frequencies.as_slice(),
            LongTexts::Same | LongTexts::Dynamic { .. } => &[],
        };
        let is_valid = |number: f32| number.is_finite() && number >= 0.0;
        match self.scale > 0.0 && is_valid(self.scale) && self.frequencies.iter().chain(long).all(|f| is_valid(*f)) {
            true => Ok(self),
            false => Err("the factors of the rotary embedding are not positive numbers".into()),
        }
    }

    /// The head's width.
    pub(super) fn width(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The angle per position of each pair of features of a head in a text of this many tokens, [head width / 2].
    #[must_use]
    pub fn frequencies(&self, tokens: usize) -> Cow<'_, [f32]> {
        match &self.long_texts {
            LongTexts::Other { above, frequencies } if tokens > *above => Cow::Borrowed(frequencies.as_slice()),
            LongTexts::Dynamic { above, factor } if tokens > *above => {
                let width = self.width();
                let (factor, exponent) = (*factor as f32, width as f64 / (width as f64 - 2.0));
                let stretched = factor * tokens as f32 / *above as f32 - (factor - 1.0);
                let theta = self.theta as f32 * stretched.powf(exponent as f32);
                Cow::Owned(plain_frequencies(f64::from(theta), width).collect())
            }
            _ => Cow::Borrowed(self.frequencies.as_slice()),
        }
    }

    /// The tokens of the longest text, in a model whose `max_position_embeddings` is this: of `yarn` and `dynamic`, which make the context
    /// longer, the factor times the original context.
    pub(super) fn context(&self, max_positions: usize) -> usize {
        let extended = match &self.scaling {
            RopeScaling::Yarn { factor, original, .. } => factor * original,
            RopeScaling::Dynamic { factor } => factor * max_positions as f64,
            _ => 0.0,
        };
        max_positions.max((extended as usize).min(MAX_SIZE))
    }

    /// What cosines and sines are multiplied by.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Whether the angles of a text depend on its length.
    #[must_use]
    pub fn depends_on_length(&self) -> bool {
        self.long_texts != LongTexts::Same
    }
}

/// The angle per position of each pair of features of a head without scaling, [head_width / 2].
pub(super) fn plain_frequencies(theta: f64, head_width: usize) -> impl Iterator<Item = f32> {
    (0..head_width / 2).map(move |pair| {
        let exponent = 2.0 * pair as f32 / head_width as f32;
        1.0 / (theta.powf(f64::from(exponent)) as f32)
    })
}

fn llama3(frequency: f32, factor: f32, [low, high]: [f32; 2], original: f32) -> f32 {
    let wavelength = 2.0 * std::f32::consts::PI / frequency;
    if wavelength < original / high {
        return frequency;
    }
    if wavelength > original / low {
        return frequency / factor;
    }
    let smooth = (original / wavelength - low) / (high - low);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}

/// `attention_factor` of `yarn`, where the config has none.
pub(super) fn yarn_attention_factor(factor: f64, mscale: f64) -> f64 {
    match factor <= 1.0 {
        true => 1.0,
        false => 0.1 * mscale * factor.ln() + 1.0,
    }
}

/// Which pairs of features `yarn` leaves as they are, and which it scales.
struct YarnRamp {
    low: f32,
    width: f32,
}

impl YarnRamp {
    fn new(theta: f64, head_width: usize, original: f64, betas: [f64; 2], truncate: bool) -> Result<Self, String> {
        let dim = head_width as f64;
        let pair =
            |rotations: f64| dim * (original / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
        let [mut low, mut high] = betas.map(pair);
        if !low.is_finite() || !high.is_finite() {
            return Err(format!("`rope_theta` is {theta}, with which `yarn` cannot be computed"));
        }
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        Ok(Self {
            low: low as f32,
            width: (high - low) as f32,
        })
    }

    /// The share of the frequency without scaling.
    fn share(&self, pair: usize) -> f32 {
        1.0 - ((pair as f32 - self.low) / self.width).clamp(0.0, 1.0)
    }
}
