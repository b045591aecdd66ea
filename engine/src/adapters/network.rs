//! The trainable LoRA of a model: which layers it covers, how it begins, what it saves, what it takes back.

use super::file::LoraFile;
use super::keys::{Component, LayerIndex, saved_name};
use super::layer::{LoraHandle, LoraLayer, Shape};
use super::load::{facts, index_of, push};
use crate::error::{EngineError, Result};
use crate::nn::VisitLayers;
use crate::optim::Param;
use crate::rng::TorchGenerator;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What `network` says (section 7 of the config reference).
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank of linear layers and 1x1 convolutions.
    pub rank: usize,
    /// Their alpha.
    pub alpha: f64,
    /// Rank of larger convolutions; `None` leaves them alone.
    pub conv_rank: Option<usize>,
    /// Their alpha.
    pub conv_alpha: f64,
    /// Chance to drop an element between down and up.
    pub dropout: f64,
    /// Only layers whose name contains one of these. Empty: all.
    pub only_if_contains: Vec<String>,
    /// No layer whose name contains one of these. Wins over the other.
    pub ignore_if_contains: Vec<String>,
}

impl LoraConfig {
    /// Rank and alpha for the layer of this name and weight shape; `None` when it is not covered.
    fn covers(&self, component: Component, path: &str, dims: &[usize]) -> Option<(usize, f64)> {
        if component == Component::TextEncoder && !(path.contains("self_attn.") || path.contains("mlp.")) {
            return None;
        }
        let dotted = format!("{}.{path}", component.prefix());
        let flat = saved_name(component, path);
        if self.ignore_if_contains.iter().any(|s| dotted.contains(s.as_str())) {
            return None;
        }
        if !self.only_if_contains.is_empty()
            && !self
                .only_if_contains
                .iter()
                .any(|s| dotted.contains(s.as_str()) || flat.contains(s.as_str()))
        {
            return None;
        }
        if dims[2..].iter().any(|k| *k > 1) {
            self.conv_rank.map(|rank| (rank, self.conv_alpha))
        } else {
            Some((self.rank, self.alpha))
        }
    }
}

/// One covered layer.
#[derive(Debug)]
struct Entry {
    component: Component,
    path: String,
    layer: Arc<LoraLayer>,
}

/// What came of loading earlier weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadReport {
    /// Layers whose weights were taken.
    pub loaded: usize,
    /// Layers that the file does not have: they keep their initial values.
    pub missing: Vec<String>,
    /// Names in the file that fit nothing.
    pub unknown: Vec<String>,
    /// Layers whose rank differed: filled up or cut. The optimizer's state does not fit them.
    pub resized: usize,
}

/// The trainable LoRA of a model.
#[derive(Debug)]
pub struct LoraNetwork {
    entries: Vec<Entry>,
    index: LayerIndex,
    /// Strength and mode of all layers.
    pub handle: Arc<LoraHandle>,
}

impl LoraNetwork {
    /// Hooks a new layer into everything that the config covers. `down` is Kaiming-uniform with a = sqrt(5), that is
    /// uniform within 1/sqrt(fan in), drawn layer by layer in the order of `parts` and of their layers; `up` is zero.
    ///
    /// # Errors
    /// When nothing is covered or a rank is 0.
    pub fn attach(
        config: &LoraConfig,
        parts: &mut [(Component, &mut dyn VisitLayers)],
        generator: &mut TorchGenerator,
    ) -> Result<Self> {
        if config.rank == 0 || config.conv_rank == Some(0) {
            return Err(EngineError::bad_input(
                "a rank of 0 trains nothing; set `network.linear` to 1 or more",
            ));
        }
        let handle = LoraHandle::new(1.0);
        let index = index_of(parts)?;
        let mut entries = Vec::new();
        for (component, model) in parts.iter_mut() {
            model.visit_layers(&mut |path, layer| {
                let (shape, dims, device) = facts(&layer);
                let Some((rank, alpha)) = config.covers(*component, path, &dims) else {
                    return Ok(());
                };
                let fan_in: usize = dims[1..].iter().product();
                let bound = (1.0 / fan_in.max(1) as f64).sqrt() as f32;
                let down_dims = [&[rank], &dims[1..]].concat();
                let up_dims = [&[dims[0], rank][..], &vec![1; dims.len() - 2]].concat();
                let down = generator.uniform(rank * fan_in, -bound, bound);
                let lora = Arc::new(LoraLayer {
                    name: saved_name(*component, path),
                    down: Var::from_tensor(&Tensor::from_vec(down, down_dims, &device)?)?,
                    up: Var::from_tensor(&Tensor::zeros(up_dims, DType::F32, &device)?)?,
                    mid: None,
                    alpha,
                    dropout: config.dropout,
                    shape,
                    handle: handle.clone(),
                });
                entries.push(Entry {
                    component: *component,
                    path: path.to_owned(),
                    layer: lora.clone(),
                });
                push(layer, lora);
                Ok(())
            })?;
        }
        if entries.is_empty() {
            return Err(EngineError::bad_input(
                "no layer is left to train; look at `network_kwargs.only_if_contains` and `network_kwargs.ignore_if_contains`",
            ));
        }
        Ok(Self { entries, index, handle })
    }

    /// Number of covered layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.entries.len()
    }

    /// Whether the text encoder is among them.
    #[must_use]
    pub fn covers_text_encoder(&self) -> bool {
        self.entries.iter().any(|e| e.component == Component::TextEncoder)
    }

    /// What trains, in a fixed order: for each layer `<name>.lora_down.weight`, then `<name>.lora_up.weight`.
    #[must_use]
    pub fn params(&self) -> Vec<Param> {
        self.entries
            .iter()
            .flat_map(|e| {
                [("lora_down", &e.layer.down), ("lora_up", &e.layer.up)].map(|(part, var)| Param {
                    name: format!("{}.{part}.weight", e.layer.name),
                    var: var.clone(),
                })
            })
            .collect()
    }

    /// The tensors of a LoRA file (section 14.5): weights and alphas, in this dtype, on the CPU.
    ///
    /// # Errors
    /// When the device fails.
    pub fn tensors(&self, dtype: DType) -> Result<BTreeMap<String, Tensor>> {
        let mut out = BTreeMap::new();
        for e in &self.entries {
            let save = |v: &Var| v.as_detached_tensor().to_dtype(dtype)?.to_device(&Device::Cpu);
            out.insert(format!("{}.lora_down.weight", e.layer.name), save(&e.layer.down)?);
            out.insert(format!("{}.lora_up.weight", e.layer.name), save(&e.layer.up)?);
            out.insert(
                format!("{}.alpha", e.layer.name),
                Tensor::new(e.layer.alpha as f32, &Device::Cpu)?.to_dtype(dtype)?,
            );
        }
        Ok(out)
    }

    /// Takes the weights of a file, of whatever dialect. Of a lower rank, the rows that `down` has more keep their initial
    /// values and `up` gets zeros, so that the model stays as it was and all of it learns; a higher rank is cut. Another shape
    /// is an error.
    ///
    /// # Errors
    /// When a shape fits in no way, or nothing in the file fits.
    pub fn load(&self, file: &LoraFile) -> Result<LoadReport> {
        let (mut found, unknown) = file.resolve(&self.index);
        let mut report = LoadReport {
            unknown,
            ..LoadReport::default()
        };
        let mut updates: Vec<(&Var, Tensor)> = Vec::new();
        for e in &self.entries {
            let Some(tensors) = found.remove(&(e.component, e.path.clone())) else {
                report.missing.push(e.layer.name.clone());
                continue;
            };
            let rank = e.layer.rank();
            let mut resized = false;
            let wrong = |t: &Tensor, var: &Var| EngineError::WeightsFile {
                path: file.path.clone(),
                reason: format!(
                    "layer `{}`: the file has {:?}, the model needs {:?}",
                    e.layer.name,
                    t.dims(),
                    var.dims()
                ),
            };
            for (var, tensor, axis) in [(&e.layer.down, &tensors.down, 0), (&e.layer.up, &tensors.up, 1)] {
                let t = with_rank(tensor, axis, rank)?;
                resized |= t.dims() != tensor.dims();
                if t.elem_count() != var.elem_count() || t.dims()[..2] != var.dims()[..2] {
                    return Err(wrong(tensor, var));
                }
                let mut value = t.reshape(var.shape())?.to_device(var.device())?;
                let have = tensor.dim(axis)?;
                if axis == 0 && have < rank {
                    // Were both of them zero, no gradient would ever reach the rows that are new.
                    let fresh = var.narrow(0, have, rank - have)?.to_dtype(value.dtype())?;
                    value = Tensor::cat(&[&value.narrow(0, 0, have)?, &fresh], 0)?;
                }
                updates.push((var, value));
            }
            report.resized += usize::from(resized);
            report.loaded += 1;
        }
        if report.loaded == 0 {
            return Err(EngineError::WeightsFile {
                path: file.path.clone(),
                reason: "none of its layers is trained by this job: it belongs to another model or network".into(),
            });
        }
        report
            .unknown
            .extend(found.into_keys().map(|(c, path)| saved_name(c, &path)));
        for (var, value) in updates {
            var.set(&value.contiguous()?)?;
        }
        Ok(report)
    }

    /// Whether a layer is a convolution with a kernel above 1x1 (for reports).
    #[must_use]
    pub fn convolutions(&self) -> usize {
        let large =
            |e: &&Entry| matches!(e.layer.shape, Shape::Conv { .. }) && e.layer.down.dims()[2..].iter().any(|k| *k > 1);
        self.entries.iter().filter(large).count()
    }
}

/// Pads with zeros or cuts along the rank axis.
fn with_rank(t: &Tensor, axis: usize, rank: usize) -> Result<Tensor> {
    let have = t.dim(axis)?;
    Ok(match have.cmp(&rank) {
        std::cmp::Ordering::Equal => t.clone(),
        std::cmp::Ordering::Greater => t.narrow(axis, 0, rank)?.contiguous()?,
        std::cmp::Ordering::Less => t.pad_with_zeros(axis, 0, rank - have)?,
    })
}
