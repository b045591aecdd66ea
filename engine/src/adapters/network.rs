//! The trainable LoRA of a model: its target layers, initialisation, saving and loading.

use super::file::LoraFile;
use super::layer::{LoraHandle, LoraLayer};
use super::load::{attach_adapter, index_layers, layer_info};
use super::names::{LayerIndex, flatten, saved_name, toolkit_name};
use crate::error::{EngineError, Result};
use crate::families::{LoraNames, Part, PartRole};
use crate::optim::Param;
use crate::rng::TorchGenerator;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The settings in `network`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank for linear layers and 1x1 convolutions.
    pub rank: usize,
    /// The alpha for linear layers and 1x1 convolutions.
    pub alpha: f64,
    /// The rank for larger convolutions; `None`: they get no LoRA.
    pub conv_rank: Option<usize>,
    /// The alpha for larger convolutions.
    pub conv_alpha: f64,
    /// The probability to drop an element between down and up.
    pub dropout: f64,
    /// Only layers whose name contains one of these strings are targets. Empty: all layers.
    pub only_if_contains: Vec<String>,
    /// Layers whose name contains one of these strings are no targets. Takes precedence over `only_if_contains`.
    pub ignore_if_contains: Vec<String>,
    /// Only layers in the repeated blocks of a transformer ([`Part::blocks`]) are targets.
    pub blocks_only: bool,
}

impl LoraConfig {
    /// The rank and alpha for a layer of a part with this path and weight shape; `None` if it is no target.
    fn rank_and_alpha(&self, part: Naming, path: &str, dims: &[usize]) -> Option<(usize, f64)> {
        if part.role == PartRole::TextEncoder && !(path.contains("self_attn.") || path.contains("mlp.")) {
            return None;
        }
        let is_in = |block: &&str| path.strip_prefix(*block).is_some_and(|rest| rest.starts_with('.'));
        if self.blocks_only && !part.blocks.is_empty() && !part.blocks.iter().any(is_in) {
            return None;
        }
        let mut dotted = vec![format!("{}.{path}", part.lora_prefix)];
        let saved = part.saved_name(path);
        dotted.extend(toolkit_name(&saved));
        let contain = |s: &String, names: &[String]| names.iter().any(|name| name.contains(s.as_str()));
        if self.ignore_if_contains.iter().any(|s| contain(s, &dotted)) {
            return None;
        }
        let flattened: Vec<String> = dotted.iter().chain([&saved]).map(|name| flatten(name)).collect();
        let selects = |s: &String| contain(s, &dotted) || contain(s, &flattened);
        if !self.only_if_contains.is_empty() && !self.only_if_contains.iter().any(selects) {
            return None;
        }
        let (rank, alpha) = if dims[2..].iter().any(|k| *k > 1) {
            (self.conv_rank?, self.conv_alpha)
        } else {
            (self.rank, self.alpha)
        };
        match part.names {
            LoraNames::Flattened => Some((rank, alpha)),
            // Their files have no alpha, so the scale is 1.
            LoraNames::Dotted => Some((rank, rank as f64)),
        }
    }
}

/// How the layers of a part are named.
#[derive(Clone, Copy)]
struct Naming {
    part: &'static str,
    role: PartRole,
    lora_prefix: &'static str,
    names: LoraNames,
    blocks: &'static [&'static str],
}

impl Naming {
    fn of(part: &Part<'_>) -> Self {
        Self {
            part: part.id,
            role: part.role,
            lora_prefix: part.lora_prefix,
            names: part.lora_names,
            blocks: part.blocks,
        }
    }

    fn saved_name(self, path: &str) -> String {
        saved_name(self.names, self.role, self.lora_prefix, path)
    }
}

/// A layer with a LoRA.
#[derive(Debug)]
struct TargetLayer {
    part: &'static str,
    role: PartRole,
    names: LoraNames,
    path: String,
    layer: Arc<LoraLayer>,
}

/// The result of loading weights from a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadReport {
    /// The number of layers whose weights were loaded.
    pub loaded: usize,
    /// Layers that the file lacks; they keep their initial values.
    pub missing: Vec<String>,
    /// Names in the file that match no layer.
    pub unknown: Vec<String>,
    /// The number of layers whose rank differed and was padded or cut. A saved optimizer state does not fit them.
    pub resized: usize,
}

/// The trainable LoRA of a model.
#[derive(Debug)]
pub struct LoraNetwork {
    targets: Vec<TargetLayer>,
    index: LayerIndex,
    /// The strength and the mode of all layers.
    pub handle: Arc<LoraHandle>,
}

impl LoraNetwork {
    /// Attaches a new LoRA layer to every target of the config. `down` is Kaiming-uniform with a = sqrt(5), that is
    /// uniform in ±1/sqrt(fan_in), drawn layer by layer in the order of `parts` and of their layers. `up` is zero.
    ///
    /// # Errors
    /// When there is no target layer, or a rank is 0.
    pub fn attach(config: &LoraConfig, parts: &mut [Part<'_>], generator: &mut TorchGenerator) -> Result<Self> {
        if config.rank == 0 || config.conv_rank == Some(0) {
            return Err(EngineError::bad_input(
                "a LoRA rank is 0, which trains nothing: set `network.linear`, and `network.conv` if it is there, to 1 or more",
            ));
        }
        let handle = LoraHandle::new(1.0);
        let index = index_layers(parts)?;
        let mut targets = Vec::new();
        for part in parts.iter_mut() {
            let naming = Naming::of(part);
            let Naming { role, names, .. } = naming;
            part.layers.visit_layers(&mut |path, layer| {
                let (dims, device) = layer_info(&layer);
                let Some((rank, alpha)) = config.rank_and_alpha(naming, path, &dims) else {
                    return Ok(());
                };
                let fan_in: usize = dims[1..].iter().product();
                let bound = (1.0 / fan_in.max(1) as f64).sqrt() as f32;
                let down_dims = [&[rank], &dims[1..]].concat();
                let up_dims = [&[dims[0], rank][..], &vec![1; dims.len() - 2]].concat();
                let down = generator.uniform(rank * fan_in, -bound, bound);
                let lora = Arc::new(LoraLayer {
                    name: naming.saved_name(path),
                    down: Var::from_tensor(&Tensor::from_vec(down, down_dims, &device)?)?,
                    up: Var::from_tensor(&Tensor::zeros(up_dims, DType::F32, &device)?)?,
                    mid: None,
                    alpha,
                    dropout: config.dropout,
                    handle: handle.clone(),
                });
                targets.push(TargetLayer {
                    part: naming.part,
                    role,
                    names,
                    path: path.to_owned(),
                    layer: lora.clone(),
                });
                attach_adapter(layer, lora);
                Ok(())
            })?;
        }
        if targets.is_empty() {
            return Err(EngineError::bad_input(
                "no layer is left to train; check `network_kwargs.only_if_contains` and `network_kwargs.ignore_if_contains`",
            ));
        }
        Ok(Self { targets, index, handle })
    }

    /// The number of layers with a LoRA.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.targets.len()
    }

    /// Whether a layer of a text encoder has a LoRA.
    #[must_use]
    pub fn covers_text_encoder(&self) -> bool {
        self.targets.iter().any(|e| e.role == PartRole::TextEncoder)
    }

    /// The trained parameters in a fixed order: for each layer `down`, then `up`, with the names that files have for them.
    #[must_use]
    pub fn params(&self) -> Vec<Param> {
        self.targets
            .iter()
            .flat_map(|e| {
                let [down, up] = e.names.matrices();
                [(down, &e.layer.down), (up, &e.layer.up)].map(|(matrix, var)| Param {
                    name: format!("{}.{matrix}", e.layer.name),
                    var: var.clone(),
                })
            })
            .collect()
    }

    /// The tensors of a LoRA file: weights and, where its names have them, alphas, in `dtype`, on the CPU.
    ///
    /// # Errors
    /// When the device fails.
    pub fn tensors(&self, dtype: DType) -> Result<BTreeMap<String, Tensor>> {
        let mut out = BTreeMap::new();
        for e in &self.targets {
            let to_cpu = |v: &Var| v.as_detached_tensor().to_dtype(dtype)?.to_device(&Device::Cpu);
            let [down, up] = e.names.matrices();
            out.insert(format!("{}.{down}", e.layer.name), to_cpu(&e.layer.down)?);
            out.insert(format!("{}.{up}", e.layer.name), to_cpu(&e.layer.up)?);
            if e.names == LoraNames::Flattened {
                out.insert(
                    format!("{}.alpha", e.layer.name),
                    Tensor::new(e.layer.alpha as f32, &Device::Cpu)?.to_dtype(dtype)?,
                );
            }
        }
        Ok(out)
    }

    /// Loads the weights of a file of any dialect. If the file has a lower rank, the additional rows of `down` keep
    /// their initial values and `up` is padded with zeros, so that the output is unchanged and all rows are trained. A
    /// higher rank is cut. Any other difference in shape is an error.
    ///
    /// # Errors
    /// When a shape does not match, or no layer of the file is a target.
    pub fn load(&self, file: &LoraFile) -> Result<LoadReport> {
        let (mut resolved, unknown) = file.resolve(&self.index)?;
        let mut report = LoadReport {
            unknown,
            ..LoadReport::default()
        };
        let mut updates: Vec<(&Var, Tensor)> = Vec::new();
        for e in &self.targets {
            let Some(mut tensors) = resolved.remove(&(e.part, e.path.clone())) else {
                report.missing.push(e.layer.name.clone());
                continue;
            };
            // The scale of these layers is 1 and saved nowhere, so that of another program's file goes into its weights.
            if e.names == LoraNames::Dotted {
                let file_rank = tensors.down.dims()[0] as f64;
                let scale = tensors.alpha.unwrap_or(file_rank) * tensors.scalar / file_rank;
                if scale != 1.0 {
                    tensors.up = (tensors.up * scale)?;
                }
            }
            let rank = e.layer.rank();
            let mut resized = false;
            let shape_error = |t: &Tensor, var: &Var| EngineError::WeightsFile {
                path: file.path.clone(),
                reason: format!(
                    "layer `{}`: the file has {:?}, the model needs {:?}{}",
                    e.layer.name,
                    t.dims(),
                    var.dims(),
                    file.origin()
                        .map_or_else(String::new, |origin| format!("; it was made for {origin}"))
                ),
            };
            for (var, tensor, axis) in [(&e.layer.down, &tensors.down, 0), (&e.layer.up, &tensors.up, 1)] {
                let t = pad_or_cut_rank(tensor, axis, rank)?;
                resized |= t.dims() != tensor.dims();
                if t.elem_count() != var.elem_count() || t.dims()[..2] != var.dims()[..2] {
                    return Err(shape_error(tensor, var));
                }
                let mut value = t.reshape(var.shape())?.to_device(var.device())?;
                let file_rank = tensor.dim(axis)?;
                if axis == 0 && file_rank < rank {
                    // If `down` and `up` were both zero, the new rows would never get a gradient.
                    let initial_rows = var.narrow(0, file_rank, rank - file_rank)?.to_dtype(value.dtype())?;
                    value = Tensor::cat(&[&value.narrow(0, 0, file_rank)?, &initial_rows], 0)?;
                }
                updates.push((var, value));
            }
            report.resized += usize::from(resized);
            report.loaded += 1;
        }
        if report.loaded == 0 {
            return Err(EngineError::WeightsFile {
                path: file.path.clone(),
                reason: format!(
                    "none of its layers is trained by this job: it was made for {}",
                    file.origin().unwrap_or_else(|| "another model or network".into())
                ),
            });
        }
        report
            .unknown
            .extend(resolved.into_keys().map(|(part, path)| format!("{part}.{path}")));
        for (var, value) in updates {
            var.set(&value.contiguous()?)?;
        }
        Ok(report)
    }

    /// The number of convolutions with a kernel above 1x1.
    #[must_use]
    pub fn convolutions(&self) -> usize {
        let has_large_kernel = |e: &&TargetLayer| e.layer.down.dims()[2..].iter().any(|side| *side > 1);
        self.targets.iter().filter(has_large_kernel).count()
    }
}

/// Pads with zeros, or cuts, along the rank axis.
fn pad_or_cut_rank(t: &Tensor, axis: usize, rank: usize) -> Result<Tensor> {
    let current = t.dim(axis)?;
    Ok(match current.cmp(&rank) {
        std::cmp::Ordering::Equal => t.clone(),
        std::cmp::Ordering::Greater => t.narrow(axis, 0, rank)?.contiguous()?,
        std::cmp::Ordering::Less => t.pad_with_zeros(axis, 0, rank - current)?,
    })
}
