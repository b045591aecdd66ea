//! The LoHa of a layer that is trained, and files of it.

use super::super::file_layer::FileLayer;
use super::super::trained_layer::{ChangeFactors, TrainedLayer, Values, limit_norm_of};
use super::file::LohaTensors;
use super::layer::{LohaLayer, Product};
use crate::nn::ChangeForm;
use candle_core::{Device, Result, Tensor, Var};

/// The name of the number that multiplies the change.
const SCALAR: &str = "scalar";

impl TrainedLayer for LohaLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<(&'static str, &Var)> {
        let mut params = named(&self.first, ["hada_w1_a", "hada_w1_b", "hada_t1"]);
        params.extend(named(&self.second, ["hada_w2_a", "hada_w2_b", "hada_t2"]));
        params.extend(self.scalar.iter().map(|scalar| (SCALAR, scalar)));
        params
    }

    /// The scalar is multiplied into `hada_w1_a`, as LyCORIS saves it.
    fn saved(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let mut tensors = Vec::new();
        for (suffix, var) in self.params() {
            let tensor = var.as_detached_tensor();
            match (suffix, &self.scalar) {
                (SCALAR, _) => {}
                ("hada_w1_a", Some(scalar)) => {
                    tensors.push((suffix, tensor.broadcast_mul(&scalar.as_detached_tensor())?));
                }
                _ => tensors.push((suffix, tensor)),
            }
        }
        tensors.push(("alpha", Tensor::new(self.alpha as f32, &Device::Cpu)?));
        Ok(tensors)
    }

    fn zeroed(&self) -> Option<Vec<&Var>> {
        Some(vec![self.scalar.as_ref().unwrap_or(&self.second.left)])
    }

    fn change_factors(&self, is_training: bool) -> Result<Option<ChangeFactors>> {
        Ok(Some(ChangeFactors {
            form: ChangeForm::Hadamard,
            factors: self.factors(is_training.then_some(""))?,
            scale: self.scale(),
        }))
    }

    /// As `LohaModule.apply_max_norm` of LyCORIS, which multiplies a number beside the matrices: the trained one, if there is one. Without one
    /// LyCORIS has one that is not trained; here the matrices are multiplied, for the same change.
    fn limit_norm(&self, max: f64) -> Result<()> {
        let product = |product: &Product| {
            let [left, right] = product.factors(false)?;
            left.flatten_from(1)?.matmul(&right.flatten_from(1)?)
        };
        let change = (product(&self.first)? * product(&self.second)?)?;
        let norm = (change.sqr()?.sum_all()?.sqrt()? * self.scale().abs())?;
        if let Some(scalar) = &self.scalar {
            return limit_norm_of(&[scalar], &(norm * scalar.as_detached_tensor().abs()?)?, max);
        }
        let matrices: Vec<&Var> = self.params().into_iter().map(|(_, var)| var).collect();
        limit_norm_of(&matrices, &norm, max)
    }

    /// The strength of the file is kept: where its scale is another one, `hada_w2_a` is multiplied.
    fn values(&self, file: &dyn FileLayer) -> std::result::Result<Values<'_>, String> {
        let Some(tensors) = file.as_any().downcast_ref::<LohaTensors>() else {
            return Err(format!(
                "the file has a {} of it, and this job trains a LoHa",
                file.kind()
            ));
        };
        let matrices = match &self.first.core {
            Some(_) => tensors.factors_with_cores()?,
            None => tensors.factors()?,
        };
        let ratio = tensors.scale() / self.scale();
        let mut values = Values::default();
        for ((suffix, var), matrix) in self.params().into_iter().zip(matrices) {
            if matrix.dims() != var.dims() {
                return Err(format!(
                    "the file's `{suffix}` is {:?}, that of this job {:?}: set `network.linear` and `network.conv` to the ranks of the file",
                    matrix.dims(),
                    var.dims()
                ));
            }
            let value = match suffix == "hada_w2_a" && ratio != 1.0 {
                true => &matrix * ratio,
                false => Ok(matrix),
            };
            let value = value.and_then(|value| value.to_device(var.device()));
            values.values.push((var, value.map_err(|error| error.to_string())?));
        }
        if let Some(scalar) = &self.scalar {
            let one = scalar.ones_like().map_err(|error| error.to_string())?;
            values.values.push((scalar, one));
        }
        Ok(values)
    }
}

/// The variables of a product, with these names of its factors and of its core.
fn named<'a>(product: &'a Product, [left, right, core]: [&'static str; 3]) -> Vec<(&'static str, &'a Var)> {
    let factors = [(left, &product.left), (right, &product.right)].into_iter();
    factors
        .chain(product.core.iter().map(|matrix| (core, matrix)))
        .collect()
}
