//! The tensors of a LoHa in a file.

use super::super::difference::DenseLayer;
use super::super::dropout::Dropout;
use super::super::file_layer::{FileLayer, RoleTensors, Site};
use super::super::keys::TensorRole;
use super::super::names::NamedLayers;
use super::super::stored_matrix::{StoredMatrix, with_alpha};
use super::super::weight_adapter::WeightAdapter;
use super::layer::{LohaLayer, Product};
use candle_core::{Result, Tensor, Var};
use std::any::Any;
use std::sync::Arc;

/// The tensors of one layer, float32 on the CPU.
#[derive(Clone, Debug)]
pub(in super::super) struct LohaTensors {
    first: StoredMatrix,
    second: StoredMatrix,
    alpha: Option<f64>,
    scalar: f64,
}

impl LohaTensors {
    /// Reads the tensors of a layer. `None`: they are not a LoHa.
    pub(in super::super) fn read(found: &RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
        use TensorRole::{HadaT1, HadaT2, HadaW1A, HadaW1B, HadaW2A, HadaW2B};
        let roles = [HadaW1A, HadaW1B, HadaW2A, HadaW2B, HadaT1, HadaT2];
        if !roles.iter().any(|role| found.tensors.contains_key(role)) {
            return None;
        }
        let stored = |name: &str, left, right, core| {
            let stored = match (found.get(left), found.get(right), found.get(core)) {
                (Some(left), Some(right), None) => StoredMatrix::LowRank(left, right),
                (Some(left), Some(right), Some(core)) => StoredMatrix::Tucker(core, left, right),
                _ => return Err(format!("it lacks `{name}_a` or `{name}_b`: the file is incomplete")),
            };
            stored.check("LoHa").map(|()| stored)
        };
        let first = stored("hada_w1", HadaW1A, HadaW1B, HadaT1);
        let layer = first.and_then(|first| {
            let second = stored("hada_w2", HadaW2A, HadaW2B, HadaT2)?;
            if first.sizes() != second.sizes() {
                let (first, second) = (first.sizes(), second.sizes());
                return Err(format!("its products {first:?} and {second:?} have different sizes"));
            }
            if first.rank() == Some(0) || second.rank() == Some(0) {
                return Err("its rank is 0".to_owned());
            }
            let alpha = found.alpha().or(found.peft.map(|[alpha, _]| alpha));
            if let Some(alpha) = alpha.filter(|alpha| !alpha.is_finite()) {
                return Err(format!("its alpha is {alpha}: the file is damaged"));
            }
            Ok(Self {
                first,
                second,
                alpha,
                scalar: found.numbers.get(&TensorRole::Scalar).copied().unwrap_or(1.0),
            })
        });
        Some(layer.map(|layer| -> Arc<dyn FileLayer> { Arc::new(layer) }))
    }

    /// What the product of both matrices is multiplied with.
    pub(super) fn scale(&self) -> f64 {
        let rank = self.first.rank().unwrap_or(1).max(1) as f64;
        self.scalar * self.alpha.map_or(1.0, |alpha| alpha / rank)
    }

    /// The whole change at strength 1, [out, in kh kw] or [out, in, kh, kw].
    fn change(&self) -> Result<Tensor> {
        (self.first.dense()? * self.second.dense()?)? * self.scale()
    }

    /// The matrices that a training starts from, in the order of its parameters.
    ///
    /// # Errors
    /// When the file does not have them.
    pub(super) fn factors(&self) -> std::result::Result<Vec<Tensor>, String> {
        match (&self.first, &self.second) {
            (StoredMatrix::LowRank(a, b), StoredMatrix::LowRank(c, d)) => Ok([a, b, c, d].map(Clone::clone).to_vec()),
            _ => Err(
                "the file has a LoHa with a third matrix (`hada_t1`) of it, which this job does not train: set \
                 `network.network_kwargs.use_cp: true`"
                    .to_owned(),
            ),
        }
    }

    /// The same of a LoHa with cores.
    ///
    /// # Errors
    /// As [`Self::factors`].
    pub(super) fn factors_with_cores(&self) -> std::result::Result<Vec<Tensor>, String> {
        match (&self.first, &self.second) {
            (StoredMatrix::Tucker(t1, a, b), StoredMatrix::Tucker(t2, c, d)) => {
                Ok([a, b, t1, c, d, t2].map(Clone::clone).to_vec())
            }
            _ => Err(
                "the file has no third matrix (`hada_t1`) of it, which this job trains: set `network.network_kwargs.use_cp: false`"
                    .to_owned(),
            ),
        }
    }
}

impl FileLayer for LohaTensors {
    fn kind(&self) -> &'static str {
        "LoHa"
    }

    fn outputs(&self) -> usize {
        self.first.sizes()[0]
    }

    fn inputs(&self) -> usize {
        self.first.sizes()[1]
    }

    fn lacks_alpha(&self) -> bool {
        self.alpha.is_none()
    }

    fn split(&self, named: &NamedLayers, _: &dyn Fn(f64) -> Option<f64>) -> Result<Vec<Arc<dyn FileLayer>>> {
        // 0 means the rank.
        let alpha = self.alpha.filter(|alpha| *alpha != 0.0);
        let parts = named
            .rows_if_converted()
            .into_iter()
            .map(|rows| -> Result<Arc<dyn FileLayer>> {
                let select = |matrix: &StoredMatrix| match &rows {
                    Some(rows) => matrix.select_rows(rows),
                    None => Ok(matrix.clone()),
                };
                Ok(Arc::new(Self {
                    first: select(&self.first)?,
                    second: select(&self.second)?,
                    alpha,
                    scalar: self.scalar,
                }))
            });
        parts.collect()
    }

    /// Kept as factors, which are small; the product of a Tucker decomposition is kept whole.
    fn adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let failed = |error: candle_core::Error| error.to_string();
        let dims = site.weight.dims();
        // The columns of a low-rank product include the kernel.
        let [rows, columns] = self.first.sizes();
        let factors = self.factors().ok();
        let expected = match &factors {
            Some(_) => dims[1..].iter().product(),
            None => dims[1],
        };
        if [rows, columns] != [dims[0], expected] {
            return Err(format!(
                "the file's LoHa is {:?}, the model needs {dims:?}",
                [rows, columns]
            ));
        }
        let Some(factors) = factors else {
            let change = self.change().map_err(failed)?;
            return DenseLayer::new(site, Some(&change), None)
                .map(|layer| -> Arc<dyn WeightAdapter> { Arc::new(layer) });
        };
        let rank = self.first.rank().unwrap_or(1);
        let mut variables = Vec::with_capacity(factors.len());
        for factor in factors {
            let factor = factor
                .to_device(site.weight.device())
                .and_then(|factor| Var::from_tensor(&factor));
            variables.push(factor.map_err(failed)?);
        }
        let [w1_a, w1_b, w2_a, w2_b] =
            <[Var; 4]>::try_from(variables).map_err(|_| "it does not have four factors".to_owned())?;
        Ok(Arc::new(LohaLayer {
            name: site.name,
            first: Product {
                left: w1_a,
                right: w1_b,
                core: None,
            },
            second: Product {
                left: w2_a,
                right: w2_b,
                core: None,
            },
            alpha: self.scale() * rank as f64,
            rank,
            dims: dims.to_vec(),
            scalar: None,
            dropout: Dropout::default(),
            handle: site.handle.clone(),
        }))
    }

    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
        let mut tensors = self.first.named(["", "hada_w1_a", "hada_w1_b", "hada_t1"]);
        tensors.extend(self.second.named(["", "hada_w2_a", "hada_w2_b", "hada_t2"]));
        if self.scalar != 1.0 {
            for (suffix, tensor) in &mut tensors {
                if *suffix == "hada_w1_a" {
                    *tensor = (&*tensor * self.scalar).map_err(|error| error.to_string())?;
                }
            }
        }
        with_alpha(tensors, self.alpha, None)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
