//! A layer whose adapter has Tucker's core, as `with_core` of `engine/src/adapters/stored_matrix.rs`: for each use, the core and a matrix
//! become the larger matrix that such an adapter has without a core.

use super::layers::{Adapter, AdapterForm, Layer};
use super::meter::MetaTensor;
use super::tape::Walk;

impl Walk {
    pub(super) fn layer_with_core(
        &self,
        layer: &Layer,
        adapter: Adapter,
        x: &MetaTensor,
        is_linear: bool,
    ) -> MetaTensor {
        let elements = match adapter.form {
            AdapterForm::Hadamard => 2.0 * adapter.rank * layer.fan_in(),
            AdapterForm::Kron(kron) => adapter.rank * kron.d * layer.kernel * layer.kernel,
            _ => adapter.rank * layer.fan_in(),
        };
        self.meter.multiply(elements * adapter.rank);
        // candle's graph keeps it with its axes in both orders.
        let built = [0; 2].map(|_| self.floats(elements));
        let plain = Layer {
            adapter: Some(Adapter { core: false, ..adapter }),
            ..layer.clone()
        };
        let y = self.layer(&plain, x, is_linear);
        if !self.is_recording() {
            return y;
        }
        let (id, output) = (y.id, self.view(&y, y.dims, true));
        self.record_step(&output, move |walk, gradient| {
            walk.meter.multiply(2.0 * elements * adapter.rank);
            drop(built);
            vec![(id, gradient)]
        });
        output
    }
}
