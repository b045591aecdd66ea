//! A layer with a DoRA, as `engine/src/adapters/dora`: the layer with the low-rank change and without its bias, whose outputs are
//! multiplied with the magnitude.

use super::layers::{Adapter, AdapterForm, Layer};
use super::meter::MetaTensor;
use super::tape::Walk;

/// Which of a layer's trained tensors the magnitude is.
const MAGNITUDE: u64 = 3;

impl Walk {
    pub(super) fn layer_with_magnitude(
        &self,
        layer: &Layer,
        adapter: Adapter,
        x: &MetaTensor,
        is_linear: bool,
    ) -> MetaTensor {
        self.norms(layer, adapter.rank, is_linear);
        let low_rank = Layer {
            bias: false,
            adapter: Some(Adapter {
                form: AdapterForm::LowRank,
                ..adapter
            }),
            ..layer.clone()
        };
        let product = self.layer(&low_rank, x, is_linear);
        let recording = self.is_recording();
        let has_kernel = self.backend.is_cpu() || (is_linear && self.backend.has_cuda_kernels());
        // In 16 bits the outputs are multiplied with the magnitude less 1, and that is added to them.
        let is_sum = !has_kernel && self.backend.width < 4.0;
        let scaled = (is_sum || (!has_kernel && layer.bias)).then(|| self.tensor(product.dims, false));
        let y = self.tensor(product.dims, recording);
        drop(scaled);
        if recording {
            let (outputs, magnitude) = (layer.outputs, layer.trained_id(MAGNITUDE));
            self.record_step(&y, move |walk, gradient| {
                let mut gradients = Vec::new();
                if product.tracked {
                    let scaled = is_sum.then(|| walk.tensor(product.dims, false));
                    gradients.push((product.id, walk.tensor(product.dims, false)));
                    drop(scaled);
                }
                let n = product.elements();
                let wide = (!walk.backend.is_cpu()).then(|| {
                    let operands = [walk.widened(n), walk.widened(n)];
                    let products = walk.floats(n);
                    drop(operands);
                    products
                });
                gradients.push((magnitude, walk.floats(outputs)));
                drop((wide, product, gradient));
                gradients
            });
        }
        y
    }

    /// The norms of the rows of the weight with its change.
    fn norms(&self, layer: &Layer, rank: f64, is_linear: bool) {
        if is_linear {
            let base = Layer {
                bias: false,
                adapter: None,
                ..layer.clone()
            };
            let rows = self.tensor([1.0, rank, layer.inputs, 1.0], false);
            let crossed = self.layer(&base, &rows, true);
            drop(rows);
            let others = [0; 4].map(|_| self.floats(layer.outputs * rank));
            drop((crossed, others));
            return;
        }
        let wide = self.widened(layer.elements());
        let change = [0; 2].map(|_| self.floats(layer.elements()));
        drop((wide, change));
    }
}
