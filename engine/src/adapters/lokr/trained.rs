//! The LoKr of a layer that is trained, and files of it.

use super::super::file_layer::FileLayer;
use super::super::trained_layer::{ChangeFactors, TrainedLayer, Values, limit_norm_of, norm_of_product};
use super::layer::{Factor, LokrLayer};
use super::tensors::{LokrTensors, SecondForm};
use crate::nn::ChangeForm;
use candle_core::{Device, Result, Tensor, Var};

/// The name of the number that multiplies the change.
const SCALAR: &str = "scalar";

impl LokrLayer {
    /// Whether the file splits a side of the weight into the same factors in the other order.
    fn has_other_order(&self, file: &LokrTensors) -> Result<bool> {
        let (first, second) = (self.first.tensor(false)?, self.second(false)?);
        let ((a, c), [found_a, found_c]) = (first.dims2()?, file.first_sides());
        let (b, d) = (second.dim(0)?, second.dim(1)?);
        Ok((a != b && found_a == b) || (c != d && found_c == d))
    }
}

impl TrainedLayer for LokrLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        let mut params = self.first.named(["lokr_w1", "lokr_w1_a", "lokr_w1_b", ""]);
        params.extend(self.second.named(["lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"]));
        params.extend(self.scalar.iter().map(|scalar| (SCALAR, scalar)));
        params
    }

    /// Programs take 1 for the scale of two whole matrices, whatever the alpha is: another one is multiplied into the second. The scalar is
    /// multiplied into the first, as LyCORIS saves it.
    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let is_whole = matches!((&self.first, &self.second), (Factor::Full(_), Factor::Full(_)));
        let mut tensors = Vec::new();
        for (suffix, var) in self.params() {
            let tensor = var.as_detached_tensor();
            let tensor = match (suffix, &self.scalar) {
                (SCALAR, _) => continue,
                ("lokr_w1" | "lokr_w1_a", Some(scalar)) => tensor.broadcast_mul(&scalar.as_detached_tensor())?,
                ("lokr_w2", _) if is_whole && self.scale != 1.0 => (tensor * self.scale)?,
                _ => tensor,
            };
            tensors.push((suffix, tensor));
        }
        tensors.push(("alpha", Tensor::new(self.alpha as f32, &Device::Cpu)?));
        Ok(tensors)
    }

    fn zeroed(&self) -> Option<Vec<&Var>> {
        Some(vec![match (&self.scalar, &self.second) {
            (Some(scalar), _) => scalar,
            (None, Factor::Full(matrix)) => matrix,
            (None, Factor::LowRank(_, right) | Factor::Tucker(_, _, right)) => right,
        }])
    }

    fn change_factors(&self, is_training: bool) -> Result<Option<ChangeFactors>> {
        let second = self.second(is_training)?.flatten_from(1)?;
        Ok(Some(ChangeFactors {
            form: ChangeForm::Kronecker,
            factors: [self.first(is_training)?, second],
            scale: self.scale,
        }))
    }

    /// As `LokrModule.apply_max_norm` of LyCORIS: it multiplies the matrices, and a trained number does not count. The norm of a Kronecker
    /// product is the product of the norms.
    fn limit_norm(&self, max: f64) -> Result<()> {
        let norm = |factor: &Factor| match factor {
            Factor::Full(matrix) => matrix.as_detached_tensor().sqr()?.sum_all()?.sqrt(),
            Factor::LowRank(left, right) => norm_of_product(
                &left.as_detached_tensor().flatten_from(1)?,
                &right.as_detached_tensor().flatten_from(1)?,
            ),
            Factor::Tucker(..) => factor.tensor(false)?.sqr()?.sum_all()?.sqrt(),
        };
        let of_both = (norm(&self.first)? * norm(&self.second)?)?;
        let matrices = self.params().into_iter().filter(|(suffix, _)| *suffix != SCALAR);
        let matrices: Vec<&Var> = matrices.map(|(_, var)| var).collect();
        limit_norm_of(&matrices, &(of_both * self.scale.abs())?, max)
    }

    /// The strength of the file is kept: where its scale is another one, the second matrix is multiplied.
    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<LokrTensors>() else {
            return Err(format!(
                "the file has a {} of it, and this job trains a LoKr",
                file.kind()
            ));
        };
        let form = match &self.second {
            Factor::Full(_) => SecondForm::Whole,
            Factor::LowRank(..) => SecondForm::LowRank,
            Factor::Tucker(..) => SecondForm::Tucker,
        };
        let splits_first = matches!(self.first, Factor::LowRank(..));
        let matrices = tensors.matrices(&self.kernel, splits_first, form)?;
        let (ratio, params) = (tensors.scale() / self.scale, self.params());
        let last = matrices.len().saturating_sub(1);
        let mut values = Values::default();
        for (at, ((suffix, var), matrix)) in params.into_iter().zip(matrices).enumerate() {
            let (found, expected) = (matrix.dims(), var.dims());
            if matrix.elem_count() != var.elem_count() || found.first() != expected.first() {
                let keys = match self.has_other_order(tensors) {
                    Ok(true) => {
                        "the factors of the file are in another order, so set `network.network_kwargs.smaller_factor_first` and \
                         `unbalanced_factorization` (of a config of sd-scripts: in the YAML config that `aitk import` writes)"
                    }
                    _ => "set `network.lokr_factor`, `lokr_full_rank` and `linear`",
                };
                return Err(format!(
                    "the file's `{suffix}` is {found:?}, that of this job {expected:?}: {keys} as they were for the file"
                ));
            }
            let value = match at == last && ratio != 1.0 {
                true => &matrix * ratio,
                false => Ok(matrix),
            };
            let value = value.and_then(|value| value.reshape(var.shape())?.to_device(var.device()));
            values.values.push((var, value.map_err(|error| error.to_string())?));
        }
        if let Some(scalar) = &self.scalar {
            let one = scalar.ones_like().map_err(|error| error.to_string())?;
            values.values.push((scalar, one));
        }
        Ok(values)
    }
}
