//! Attention, as `kernels/src/nn/attention/tensors.rs`: a chunk of queries at a time.

use super::super::meter::MetaTensor;
use super::super::tape::Walk;

/// The most bytes of the scores of one chunk (`CHUNK_BYTES` there).
const CHUNK_BYTES: f64 = 67_108_864.0;

/// What attention computes besides `softmax(q k^T) v`.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::plan::walk) struct AttentionOptions {
    pub(in crate::plan::walk) heads: f64,
    /// Whether later keys are masked.
    pub(in crate::plan::walk) causal: bool,
    /// Whether scores are computed in float32.
    pub(in crate::plan::walk) upcast: bool,
    /// Whether a bias is added to the scores.
    pub(in crate::plan::walk) has_bias: bool,
}

/// The sizes of one call.
#[derive(Clone, Copy)]
struct Sizes {
    batch: f64,
    queries: f64,
    keys: f64,
    features: f64,
    /// Features of keys and values, which may have fewer heads.
    key_features: f64,
    options: AttentionOptions,
}

impl Sizes {
    fn new(q: &MetaTensor, k: &MetaTensor, options: AttentionOptions) -> Self {
        Self {
            batch: q.dims[0],
            queries: q.dims[1],
            keys: k.dims[1],
            features: q.dims[2],
            key_features: k.dims[2],
            options,
        }
    }

    /// The queries of each chunk.
    fn chunks(self) -> Vec<f64> {
        let bytes = 4.0 * self.batch * self.options.heads * self.keys;
        let length = (CHUNK_BYTES / bytes.max(1.0)).floor().clamp(1.0, self.queries.max(1.0));
        let whole = (self.queries / length).floor();
        // All whole chunks allocate the same: the first, and one while the results of all but the last are kept.
        let rest = self.queries - whole * length;
        let mut chunks = vec![length; whole.min(2.0) as usize];
        chunks.extend((rest > 0.0).then_some(rest));
        chunks
    }

    /// The queries that are not in [`Self::chunks`]: their results are kept, too.
    fn skipped(self) -> f64 {
        self.queries - self.chunks().iter().sum::<f64>()
    }
}

impl Walk {
    pub(in crate::plan::walk) fn attention_of_tensors(
        &self,
        q: &MetaTensor,
        k: &MetaTensor,
        v: &MetaTensor,
        options: AttentionOptions,
    ) -> MetaTensor {
        let tracked = self.is_recording() && (q.tracked || k.tracked || v.tracked);
        let s = Sizes::new(q, k, options);
        let operands = self.split_keys(s);
        let mut parts = vec![self.numbers(s.batch * s.skipped() * s.features)];
        let chunks = s.chunks();
        for count in chunks.iter().copied() {
            let query = self.scaled_queries(s, count);
            let scores = s.batch * options.heads * count * s.keys;
            let probabilities = self.probabilities(self.scores(s, count), scores);
            let result = s.batch * count * s.features;
            let product = self.product_of(scores, s.batch * s.keys * s.key_features, result);
            let merged = self.reordered(s, result);
            parts.push(merged.unwrap_or(product));
            drop((query, probabilities));
        }
        let y = match (chunks.as_slice(), parts.pop()) {
            ([_], Some(only)) => MetaTensor {
                tracked,
                ..self.view(&only, q.dims, true)
            },
            (_, last) => {
                parts.extend(last);
                self.tensor(q.dims, tracked)
            }
        };
        drop((parts, operands));
        if tracked {
            let saved = [q, k, v].map(Clone::clone);
            self.record_step(&y, move |walk, gradient| {
                let gradients = walk.attention_gradients(&saved, s);
                drop((saved, gradient));
                gradients
            });
        }
        y
    }

    /// A copy of numbers of the compute dtype in the order of the heads; `None` if there is one head.
    fn reordered(&self, s: Sizes, elements: f64) -> Option<MetaTensor> {
        (s.options.heads > 1.0).then(|| self.numbers(elements))
    }

    /// Keys and values by head.
    fn split_keys(&self, s: Sizes) -> [Option<MetaTensor>; 2] {
        let elements = s.batch * s.keys * s.key_features;
        let keys = self.reordered(s, elements);
        let wide = self.backend.is_half() && s.options.upcast;
        let wide = wide.then(|| self.floats(elements));
        let values = self.reordered(s, elements);
        [wide.or(keys), values]
    }

    /// The queries of a chunk by head, scaled.
    fn scaled_queries(&self, s: Sizes, count: f64) -> MetaTensor {
        let elements = s.batch * count * s.features;
        let by_head = self.reordered(s, elements);
        let scaled = match self.backend.is_half() && s.options.upcast {
            true => {
                let wide = self.floats(elements);
                let scaled = self.floats(elements);
                drop(wide);
                scaled
            }
            false => self.numbers(elements),
        };
        drop(by_head);
        scaled
    }

    /// The scores of a chunk: in float32, but for a kernel that computes the softmax of those in the compute dtype.
    fn scores(&self, s: Sizes, count: f64) -> MetaTensor {
        let scores = s.batch * s.options.heads * count * s.keys;
        let narrow = self.backend.is_half() && !s.options.upcast;
        let product = narrow.then(|| {
            let (q, k) = (s.batch * count * s.features, s.batch * s.keys * s.key_features);
            self.product_of(q, k, scores)
        });
        let product = match product {
            Some(product) if self.backend.has_cuda_kernels() && !s.options.causal && !s.options.has_bias => {
                return product;
            }
            product => product,
        };
        let wide = self.floats(scores);
        let biased = s.options.has_bias.then(|| self.floats(scores));
        let masked = s.options.causal.then(|| {
            let mask = self.causal_mask(count, s.keys);
            let masked = self.floats(scores);
            drop(mask);
            masked
        });
        let result = masked.or(biased).unwrap_or_else(|| wide.clone());
        drop((product, wide));
        result
    }

    /// The softmax of this many scores, in float32.
    fn wide_softmax(&self, scores: MetaTensor, count: f64) -> MetaTensor {
        let shifted = self.floats(count);
        let exponentials = self.floats(count);
        drop(shifted);
        let result = self.floats(count);
        drop((scores, exponentials));
        result
    }

    /// The softmax of this many scores, in the compute dtype.
    fn probabilities(&self, scores: MetaTensor, count: f64) -> MetaTensor {
        if self.backend.has_cuda_kernels() {
            let result = self.numbers(count);
            drop(scores);
            return result;
        }
        let wide = self.wide_softmax(scores, count);
        match self.backend.is_half() {
            true => {
                let narrow = self.numbers(count);
                drop(wide);
                narrow
            }
            false => wide,
        }
    }

    /// The mask of later keys: which they are, minus infinity, and zeros.
    fn causal_mask(&self, queries: f64, keys: f64) -> MetaTensor {
        let parts = [1.0, 1.0, 0.25].map(|part| self.floats(part * queries * keys));
        let mask = self.floats(queries * keys);
        drop(parts);
        mask
    }

    fn attention_gradients(&self, saved: &[MetaTensor; 3], s: Sizes) -> Vec<(u64, MetaTensor)> {
        let [needs_dq, needs_dk, needs_dv] = [0, 1, 2].map(|i: usize| saved[i].tracked);
        let operands = self.split_keys(s);
        let key_elements = s.batch * s.keys * s.key_features;
        let (mut dq, mut dk, mut dv) = (Vec::new(), None, None);
        if needs_dq {
            dq.push(self.numbers(s.batch * s.skipped() * s.features));
        }
        let chunks = s.chunks();
        for count in chunks.iter().copied() {
            let (rows, scores) = (s.batch * count * s.features, s.batch * s.options.heads * count * s.keys);
            let query = self.scaled_queries(s, count);
            let dy = self.reordered(s, rows);
            let needs_ds = needs_dq || needs_dk;
            let has_kernel = self.backend.has_cuda_kernels();
            let (probabilities, from_kernel) = match has_kernel && needs_ds {
                true => {
                    let computed = self.scores(s, count);
                    let dp = self.numbers(scores);
                    let probabilities = self.numbers(scores);
                    let ds = match s.options.upcast {
                        true => self.floats(scores),
                        false => self.numbers(scores),
                    };
                    drop(dp);
                    (probabilities, Some((computed, ds)))
                }
                false if has_kernel => (self.probabilities(self.scores(s, count), scores), None),
                false => (self.wide_softmax(self.scores(s, count), scores), None),
            };
            if needs_dv {
                let narrow = (self.backend.is_half() && !has_kernel).then(|| self.numbers(scores));
                let part = self.product_of(scores, rows, key_elements);
                drop(narrow);
                dv = Some(self.added(dv, part));
            }
            if !needs_ds {
                continue;
            }
            let ds = match from_kernel {
                Some((computed, ds)) => (ds, [Some(computed), Some(probabilities)]),
                None => self.score_gradient(probabilities, s, rows, key_elements, scores),
            };
            let in_scores = |a: f64, b: f64, result: f64| match s.options.upcast {
                true => self.floats(result),
                false => self.product_of(a, b, result),
            };
            if needs_dk {
                let part = in_scores(scores, rows, key_elements);
                dk = Some(self.added(dk, part));
            }
            if needs_dq {
                let product = in_scores(scores, key_elements, rows);
                let scaled = match s.options.upcast {
                    true => self.floats(rows),
                    false => self.numbers(rows),
                };
                drop(product);
                dq.push(self.reordered(s, rows).unwrap_or(scaled));
            }
            drop((query, dy, ds));
        }
        let mut gradients = Vec::new();
        if needs_dq {
            let whole = match (chunks.len(), dq.pop()) {
                (1, Some(only)) => self.view(&only, saved[0].dims, true),
                (_, last) => {
                    dq.extend(last);
                    self.tensor(saved[0].dims, false)
                }
            };
            gradients.push((saved[0].id, whole));
        }
        for (sum, x) in [(dk, &saved[1]), (dv, &saved[2])] {
            if let Some(sum) = sum {
                let merged = match s.options.heads > 1.0 {
                    true => self.floats(key_elements),
                    false => sum.clone(),
                };
                gradients.push((x.id, merged));
            }
        }
        drop((operands, dq));
        let narrow = gradients.into_iter().map(|(id, gradient)| {
            let dims = saved.iter().find(|x| x.id == id).map_or(gradient.dims, |x| x.dims);
            match id == saved[0].id {
                true => (id, gradient),
                false => (id, self.narrowed(gradient, dims, false)),
            }
        });
        narrow.collect()
    }

    /// The gradient of the scores of a chunk, and what else stays in memory until the next chunk.
    fn score_gradient(
        &self,
        probabilities: MetaTensor,
        s: Sizes,
        rows: f64,
        key_elements: f64,
        scores: f64,
    ) -> (MetaTensor, [Option<MetaTensor>; 2]) {
        let product = self.product_of(rows, key_elements, scores);
        let dp = self.narrow_or_wide(product, scores);
        drop(self.floats(scores));
        let difference = self.floats(scores);
        let wide = self.floats(scores);
        drop((difference, probabilities));
        let ds = match self.backend.is_half() && !s.options.upcast {
            true => {
                let narrow = self.numbers(scores);
                drop(wide);
                narrow
            }
            false => wide,
        };
        (ds, [Some(dp), None])
    }

    /// A product in float32: itself, or a copy.
    fn narrow_or_wide(&self, product: MetaTensor, elements: f64) -> MetaTensor {
        match self.backend.is_half() {
            true => {
                let wide = self.floats(elements);
                drop(product);
                wide
            }
            false => product,
        }
    }

    /// The sum of the parts so far and another one, in float32.
    fn added(&self, sum: Option<MetaTensor>, part: MetaTensor) -> MetaTensor {
        let elements = part.elements();
        let wide = self.narrow_or_wide(part, elements);
        match sum {
            None => wide,
            Some(sum) => {
                let total = self.floats(elements);
                drop((sum, wide));
                total
            }
        }
    }
}
