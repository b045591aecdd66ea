//! The tensors of a LoKr in a file.

use super::super::dropout::Dropout;
use super::super::file_layer::{FileLayer, RoleTensors, Site};
use super::super::keys::TensorRole;
use super::super::names::{NamedLayers, RowRanges};
use super::super::stored_matrix::{StoredMatrix, with_alpha};
use super::super::weight_adapter::WeightAdapter;
use super::layer::{Factor, LokrLayer};
use candle_core::{Result, Tensor, Var};
use std::any::Any;
use std::sync::Arc;

/// The tensors of one layer, float32 on the CPU.
#[derive(Clone, Debug)]
pub(in super::super) struct LokrTensors {
    first: StoredMatrix,
    second: StoredMatrix,
    alpha: Option<f64>,
    /// Multiplies the change (LyCORIS; of peft alpha / rank, if both matrices are whole); 1 if absent.
    scalar: f64,
    /// The ranges of rows of the product that the layer has, in its order; all if there are none.
    rows: Option<RowRanges>,
}

/// The form of a second matrix that is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SecondForm {
    Whole,
    LowRank,
    Tucker,
}

impl LokrTensors {
    /// Reads the tensors of a layer. `None`: they are not a LoKr.
    pub(in super::super) fn read(found: &RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
        use TensorRole::{LokrT2, LokrW1, LokrW1A, LokrW1B, LokrW2, LokrW2A, LokrW2B};
        let roles = [LokrW1, LokrW1A, LokrW1B, LokrW2, LokrW2A, LokrW2B, LokrT2];
        if !roles.iter().any(|role| found.tensors.contains_key(role)) {
            return None;
        }
        let stored = |name: &str, full, left, right, core| {
            let stored = match (found.get(full), found.get(left), found.get(right), core) {
                (Some(matrix), ..) => StoredMatrix::Full(matrix),
                (None, Some(left), Some(right), None) => StoredMatrix::LowRank(left, right),
                (None, Some(left), Some(right), Some(core)) => StoredMatrix::Tucker(core, left, right),
                _ => {
                    return Err(format!(
                        "it has neither `{name}` nor both `{name}_a` and `{name}_b`: the file is incomplete"
                    ));
                }
            };
            stored.check("LoKr").map(|()| stored)
        };
        let first = stored("lokr_w1", LokrW1, LokrW1A, LokrW1B, None);
        let second = stored("lokr_w2", LokrW2, LokrW2A, LokrW2B, found.get(LokrT2));
        let layer = first.and_then(|first| {
            if matches!(&first, StoredMatrix::Full(matrix) if matrix.elem_count() != matrix.dims()[0] * matrix.dims()[1]) {
                return Err("`lokr_w1` has more than two dimensions".to_owned());
            }
            let mut layer = Self {
                first,
                second: second?,
                alpha: found.alpha(),
                scalar: found.numbers.get(&TensorRole::Scalar).copied().unwrap_or(1.0),
                rows: None,
            };
            if let (None, Some([alpha, rank])) = (layer.alpha, found.peft) {
                match layer.rank() {
                    Some(_) => layer.alpha = Some(alpha),
                    None => layer.scalar *= alpha / rank,
                }
            }
            match (layer.rank(), layer.alpha) {
                (Some(0), _) => Err("its rank is 0".to_owned()),
                (Some(_), Some(alpha)) if !alpha.is_finite() => {
                    Err(format!("its alpha is {alpha}: the file is damaged"))
                }
                _ => Ok(layer),
            }
        });
        Some(layer.map(|layer| -> Arc<dyn FileLayer> { Arc::new(layer) }))
    }

    /// The rank of the matrix that is a product; `None`: both are whole.
    fn rank(&self) -> Option<usize> {
        self.second.rank().or(self.first.rank())
    }

    /// What the product of both matrices is multiplied with. Files of full matrices have an alpha that means nothing.
    pub(super) fn scale(&self) -> f64 {
        let of_alpha = match self.rank() {
            Some(rank) => self.alpha.map_or(1.0, |alpha| alpha / rank as f64),
            None => 1.0,
        };
        self.scalar * of_alpha
    }

    /// The sides of the first matrix: a and c.
    pub(super) fn first_sides(&self) -> [usize; 2] {
        self.first.sizes()
    }

    /// The first matrix [a, c].
    fn first(&self) -> Result<Tensor> {
        let [a, c] = self.first.sizes();
        self.first.dense()?.reshape((a, c))
    }

    /// The second matrix [b, d] with the kernel of a convolution.
    fn second(&self, kernel: &[usize]) -> std::result::Result<Tensor, String> {
        let second = self.second.dense().map_err(|error| error.to_string())?;
        let (b, taps) = (second.dims()[0], kernel.iter().product::<usize>().max(1));
        let width = second.elem_count() / b.max(1);
        if !width.is_multiple_of(taps) {
            let dims = second.dims();
            return Err(format!("`lokr_w2` {dims:?} does not fit a kernel of {kernel:?}"));
        }
        let dims = [&[b, width / taps], kernel].concat();
        second.reshape(dims).map_err(|error| error.to_string())
    }

    /// The matrices that a training starts from, in the order of its parameters: those of the first, whole or as its two factors, and those
    /// of the second in the given form.
    ///
    /// # Errors
    /// When the file does not have them.
    pub(super) fn matrices(
        &self,
        kernel: &[usize],
        splits_first: bool,
        second: SecondForm,
    ) -> std::result::Result<Vec<Tensor>, String> {
        if self.rows.is_some() {
            return Err("the file has one LoKr for several layers of this model, which cannot be trained".to_owned());
        }
        let mut matrices = match (&self.first, splits_first) {
            (_, false) => vec![self.first().map_err(|error| error.to_string())?],
            (StoredMatrix::LowRank(left, right), true) => vec![left.clone(), right.clone()],
            (_, true) => {
                return Err(
                    "the file's first matrix is not a product of `lokr_w1_a` and `lokr_w1_b`, which this job trains: set \
                     `network.network_kwargs.decompose_both: false`"
                        .to_owned(),
                );
            }
        };
        let of_second = match (&self.second, second) {
            (_, SecondForm::Whole) => vec![self.second(kernel)?],
            (StoredMatrix::LowRank(left, right), SecondForm::LowRank) => vec![left.clone(), right.clone()],
            (StoredMatrix::Tucker(core, left, right), SecondForm::Tucker) => {
                vec![left.clone(), right.clone(), core.clone()]
            }
            (StoredMatrix::Tucker(..), SecondForm::LowRank) => {
                return Err(
                    "the file has a third matrix (`lokr_t2`) of it, which this job does not train: set `network.network_kwargs.use_cp: true`"
                        .to_owned(),
                );
            }
            (_, SecondForm::LowRank) => {
                return Err(
                    "the file's second matrix is not a product of `lokr_w2_a` and `lokr_w2_b`, which this job trains: set \
                     `network.lokr_full_rank: true`"
                        .to_owned(),
                );
            }
            (_, SecondForm::Tucker) => {
                return Err(
                    "the file has no third matrix (`lokr_t2`) of it, which this job trains: set `network.network_kwargs.use_cp: false`"
                        .to_owned(),
                );
            }
        };
        matrices.extend(of_second);
        Ok(matrices)
    }
}

impl FileLayer for LokrTensors {
    fn kind(&self) -> &'static str {
        "LoKr"
    }

    fn outputs(&self) -> usize {
        self.first.sizes()[0] * self.second.sizes()[0]
    }

    fn inputs(&self) -> usize {
        self.first.sizes()[1] * self.second.sizes()[1]
    }

    fn lacks_alpha(&self) -> bool {
        self.alpha.is_none()
    }

    fn split(&self, named: &NamedLayers, _: &dyn Fn(f64) -> Option<f64>) -> Result<Vec<Arc<dyn FileLayer>>> {
        // 0 means the rank; that of two full matrices is infinite in float16.
        let alpha = self.alpha.filter(|alpha| *alpha != 0.0 && alpha.is_finite());
        let parts = named.rows_if_converted().into_iter().map(|rows| -> Arc<dyn FileLayer> {
            Arc::new(Self {
                alpha,
                rows,
                ..self.clone()
            })
        });
        Ok(parts.collect())
    }

    fn adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let dims = site.weight.dims();
        let kernel = &dims[2..];
        let failed = |error: candle_core::Error| error.to_string();
        let (first, second) = (self.first().map_err(failed)?, self.second(kernel)?);
        let (a, c) = first.dims2().map_err(failed)?;
        let (b, d) = (second.dims()[0], second.dims()[1]);
        let rows = self.rows.as_ref();
        let outputs = rows.map_or(a * b, |rows| rows.iter().map(|(_, count)| count).sum());
        if [outputs, c * d] != dims[..2] {
            return Err(format!(
                "the file's LoKr has {outputs} outputs and {} inputs, the layer has {} and {}",
                c * d,
                dims[0],
                dims[1]
            ));
        }
        let factor = |matrix: &Tensor| -> Result<Factor> {
            Ok(Factor::Full(Var::from_tensor(
                &matrix.to_device(site.weight.device())?,
            )?))
        };
        Ok(Arc::new(LokrLayer {
            name: site.name,
            first: factor(&first).map_err(failed)?,
            second: factor(&second).map_err(failed)?,
            kernel: kernel.to_vec(),
            alpha: self.alpha.unwrap_or(1.0),
            scale: self.scale(),
            rows: self.rows.clone(),
            scalar: None,
            dropout: Dropout::default(),
            handle: site.handle.clone(),
        }))
    }

    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
        let mut tensors = self.first.named(["lokr_w1", "lokr_w1_a", "lokr_w1_b", ""]);
        let second = ["lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"];
        tensors.extend(self.second.named(second));
        if self.scalar != 1.0 {
            for (suffix, tensor) in &mut tensors {
                if ["lokr_w1", "lokr_w1_a"].contains(suffix) {
                    *tensor = (&*tensor * self.scalar).map_err(|error| error.to_string())?;
                }
            }
        }
        with_alpha(tensors, self.alpha, self.rows.as_ref())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
