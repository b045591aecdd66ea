//! Weights that are quantised in their files, each stored as one or several tensors.
//!
//! | format | tensors besides `<layer>.weight` | a value is |
//! |---|---|---|
//! | float8 | none | its code |
//! | float8, scaled (ComfyUI, musubi-tuner) | `<layer>.scale_weight` (or `.weight_scale`): one for all, one per output, or several per output | its code times its scale |
//! | nf4, fp4 (bitsandbytes) | `.weight.absmax`, `.weight.quant_map`, `.weight.quant_state.bitsandbytes__nf4` (JSON); with double quantisation, absmax in 8 bits with `.nested_absmax`, `.nested_quant_map` and an offset | the value in the map times its block's absmax |
//! | int8 (bitsandbytes) | `<layer>.SCB` | its code times its row's scale / 127 |
//! | GGUF | none | as ggml dequantises its block |

use super::bytes::FloatFormat;
use super::entry::{Entry, FourBit, QuantState, StoredQuantization, TensorLocation};
use super::file::TensorFile;
use super::header::StorageType;
use crate::error::{EngineError, Result};
use crate::quant::{Code, Codes, Quantized};
use candle_core::{DType, Device};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The maximum length of the JSON `quant_state` of a 4-bit weight.
const MAX_STATE_LEN: usize = 1 << 16;
/// The last part of the name of ComfyUI's mark of a file with scaled float8 weights.
const MARK: &str = "scaled_fp8";
/// The suffixes of the `quant_state` tensors, and the quantisation types.
const STATE_SUFFIXES: [(&str, &str); 2] = [
    (".quant_state.bitsandbytes__nf4", "nf4"),
    (".quant_state.bitsandbytes__fp4", "fp4"),
];

impl StoredQuantization {
    /// The name in files and configs.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Float8 { .. } => "float8",
            Self::Int8 { .. } => "int8",
            Self::FourBit(weight) => weight.kind,
            Self::GgmlBlocks(_, name) => name,
        }
    }

    /// Whether the weight is one tensor, so that rows of it can be read.
    pub(super) fn is_self_contained(&self) -> bool {
        matches!(self, Self::GgmlBlocks(..) | Self::Float8 { scale: None, .. })
    }

    /// Reads the weight without dequantising it. `None` if it is a part of a stored one that cannot be made of whole blocks.
    pub(super) fn read_quantized(
        &self,
        files: &[Arc<TensorFile>],
        entry: &Entry,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Arc<Quantized>>> {
        let (file, name) = (&files[entry.location.file], &entry.location.name);
        let Some(elements) = entry.elements() else {
            return Ok(None);
        };
        let stored = entry.stored_shape();
        let count: usize = stored.iter().product();
        // A block that belongs to two parts cannot be split.
        let consists_of = |block: usize| {
            let is_edge = |element: usize| element.is_multiple_of(block.max(1)) || element == count;
            // An incomplete block can only be the last one.
            let is_last = |index: usize| index + 1 == elements.len();
            let mut ranges = elements.iter().enumerate();
            ranges.all(|(index, range)| {
                is_edge(range.start) && is_edge(range.end) && (is_last(index) || range.end.is_multiple_of(block.max(1)))
            })
        };
        let file_error = |error: candle_core::Error| file_error(file.path(), format!("tensor `{name}`: {error}"));
        let out_features = stored.first().copied().unwrap_or(1).max(1);
        let in_features = stored.iter().skip(1).product::<usize>().max(1);
        let (code, scales, per_scale) = match self {
            Self::GgmlBlocks(block, kind) => {
                if !consists_of(block.block_size()) {
                    return Ok(None);
                }
                let bytes = file.read_blocks(name, &elements, block.block_size(), block.type_size())?;
                let quantized = Quantized::from_blocks(kind, *block, &bytes, &entry.shape, dtype, device);
                return quantized.map(Some).map_err(file_error);
            }
            Self::Float8 { format, scale } => {
                let scales = match scale {
                    Some(scale) => scale.read_floats(files)?,
                    None => vec![1.0],
                };
                // One scale for all becomes one per output, so that a scale never covers more than a row.
                let scales = match scales.as_slice() {
                    [only] => vec![*only; out_features],
                    _ => scales,
                };
                let scales_per_output = (scales.len() / out_features).max(1);
                (
                    format.code().unwrap_or(Code::E4m3),
                    scales,
                    in_features / scales_per_output,
                )
            }
            Self::Int8 { scale } => {
                let scales = scale
                    .read_floats(files)?
                    .into_iter()
                    .map(|scale| scale / 127.0)
                    .collect();
                (Code::Signed, scales, in_features)
            }
            Self::FourBit(weight) => {
                let table = weight.map.read_floats(files)?;
                let table = table.try_into().unwrap_or([0.0; 16]);
                (Code::Four(table), weight.scales(files)?, weight.state.blocksize)
            }
        };
        if !consists_of(per_scale) || !consists_of(code.per_byte()) {
            return Ok(None);
        }
        let scales = match entry.view {
            None => scales,
            Some(_) => {
                let of_range = |range: &Range<usize>| {
                    let scales_of_range = range.start / per_scale.max(1)..range.end.div_ceil(per_scale.max(1));
                    scales.get(scales_of_range).unwrap_or_default().to_vec()
                };
                elements.iter().flat_map(of_range).collect()
            }
        };
        let codes = Codes {
            code,
            bytes: file.read_blocks(name, &elements, code.per_byte(), 1)?,
            scales,
            per_scale,
        };
        let quantized = Quantized::from_codes(self.name(), codes, &entry.shape, dtype, device);
        quantized.map(Some).map_err(file_error)
    }
}

impl FourBit {
    /// Reads the scale of each block.
    fn scales(&self, files: &[Arc<TensorFile>]) -> Result<Vec<f32>> {
        let Some((nested_absmax, nested_map)) = &self.nested else {
            return self.absmax.read_floats(files);
        };
        let (absmax, map) = (nested_absmax.read_floats(files)?, nested_map.read_floats(files)?);
        let nested_block_size = self.state.nested_blocksize.unwrap_or(256).max(1);
        let offset = self.state.nested_offset.unwrap_or_default() as f32;
        let codes = files[self.absmax.file].read_bytes(&self.absmax.name)?;
        let scale = |(at, code): (usize, &u8)| {
            let scale_of_block = absmax.get(at / nested_block_size).copied().unwrap_or_default();
            map.get(usize::from(*code)).copied().unwrap_or_default() * scale_of_block + offset
        };
        Ok(codes.iter().enumerate().map(scale).collect())
    }
}

impl TensorLocation {
    fn read_floats(&self, files: &[Arc<TensorFile>]) -> Result<Vec<f32>> {
        files[self.file].read_floats(&self.name)
    }
}

/// Marks the quantised weights in `entries`, and removes the entries of their scales and other auxiliary tensors.
pub(super) fn detect_quantization(files: &[Arc<TensorFile>], entries: &mut BTreeMap<String, Entry>) -> Result<()> {
    let names: Vec<String> = entries.keys().cloned().collect();
    for name in &names {
        let Some(entry) = entries.get(name) else {
            continue;
        };
        let quantization = match &entry.storage {
            StorageType::GgmlBlocks(block, kind) => StoredQuantization::GgmlBlocks(*block, kind),
            StorageType::Floats(format) if format.code().is_some() => detect_float8(files, entries, name, *format)?,
            StorageType::Int8 => match detect_int8(files, entries, name)? {
                Some(quantization) => quantization,
                None => continue,
            },
            StorageType::Bytes => {
                let state = STATE_SUFFIXES
                    .iter()
                    .find_map(|(ending, kind)| Some((name.strip_suffix(ending)?, *kind)));
                if let Some((weight, kind)) = state {
                    let (weight, state) = (weight.to_owned(), name.clone());
                    merge_four_bit(files, entries, &weight, &state, kind)?;
                }
                continue;
            }
            _ => continue,
        };
        if let Some(entry) = entries.get_mut(name) {
            entry.quantization = Some(quantization);
        }
    }
    // Markers of a format, and scales for 8-bit arithmetic: not used here.
    let is_marker = |name: &str| {
        [MARK, "scale_input", "input_scale", "comfy_quant", "weight_format"]
            .contains(&name.rsplit('.').next().unwrap_or(name))
    };
    entries.retain(|name, _| !is_marker(name));
    Ok(())
}

fn detect_float8(
    files: &[Arc<TensorFile>],
    entries: &mut BTreeMap<String, Entry>,
    name: &str,
    format: FloatFormat,
) -> Result<StoredQuantization> {
    let layer = name.strip_suffix(".weight");
    let scale_entry = layer.and_then(|layer| {
        let names = ["scale_weight", "weight_scale"].map(|scale| format!("{layer}.{scale}"));
        names.into_iter().find_map(|name| entries.remove(&name))
    });
    if let (Some(scale), Some(weight)) = (&scale_entry, entries.get(name)) {
        let count: usize = scale.shape.iter().product();
        let out_features = weight.shape.first().copied().unwrap_or(1);
        let in_features: usize = weight.shape.iter().skip(1).product();
        let scales_per_output = count.checked_div(out_features).unwrap_or(0);
        let by_row = scale.shape.first() == Some(&out_features)
            && scales_per_output > 0
            && count == scales_per_output * out_features;
        if count != 1 && !(by_row && in_features.is_multiple_of(scales_per_output)) {
            return Err(file_error(
                files[weight.location.file].path(),
                format!(
                    "tensor `{}` of shape {:?} is not a scale of `{name}` of shape {:?}: expected one number, one for each \
                     output, or some for each output",
                    scale.location.name, scale.shape, weight.shape
                ),
            ));
        }
    }
    Ok(StoredQuantization::Float8 {
        format,
        scale: scale_entry.map(|scale| scale.location),
    })
}

/// The names of embedding tables. They may be in float8, and have no scales.
const TABLES: [&str; 5] = [
    "shared.weight",
    "embed_tokens.weight",
    "token_embedding.weight",
    "position_embedding.weight",
    "relative_attention_bias.weight",
];

/// A float8 matrix without a scale among `entries`, and the name of a tensor that shows that the float8 weights of this part are scaled: a
/// scale of one of them, or a mark.
pub(super) fn lacking_scale<'a>(
    files: &'a [Arc<TensorFile>],
    entries: &'a BTreeMap<String, Entry>,
) -> Option<(&'a Entry, String)> {
    let scale_of = |entry: &Entry| match &entry.quantization {
        Some(StoredQuantization::Float8 { scale, .. }) => Some(scale.as_ref().map(|scale| scale.name.clone())),
        _ => None,
    };
    let is_table = |name: &str| TABLES.iter().any(|table| name.ends_with(table));
    let is_bare = |entry: &&Entry| {
        let name = &entry.location.name;
        scale_of(entry) == Some(None) && entry.stored_shape().len() == 2 && name.ends_with(".weight") && !is_table(name)
    };
    let mut bare = entries.values().filter(is_bare);
    let first = bare.clone().next()?;
    if let Some(scale) = entries.values().find_map(|entry| scale_of(entry).flatten()) {
        return Some((first, scale));
    }
    // ComfyUI's mark of the part or of the layer; a scale for each square of a matrix, which is not known here.
    bare.find_map(|entry| {
        let name = &entry.location.name;
        let layer = name.strip_suffix("weight").unwrap_or(name);
        let of_layer = [format!("{layer}comfy_quant"), format!("{name}_scale_inv")];
        let mut marks = files[entry.location.file].tensors().map(|(mark, _)| mark);
        let is_mark = |mark: &&String| {
            of_layer.contains(mark) || mark.strip_suffix(MARK).is_some_and(|prefix| name.starts_with(prefix))
        };
        Some((entry, marks.find(is_mark)?.clone()))
    })
}

fn detect_int8(
    files: &[Arc<TensorFile>],
    entries: &mut BTreeMap<String, Entry>,
    name: &str,
) -> Result<Option<StoredQuantization>> {
    let layer = name.strip_suffix(".weight");
    let Some(scale) = layer.and_then(|layer| entries.remove(&format!("{layer}.SCB"))) else {
        return Ok(None);
    };
    let out_features = entries
        .get(name)
        .and_then(|weight| weight.shape.first())
        .copied()
        .unwrap_or(1);
    if scale.shape.iter().product::<usize>() != out_features {
        return Err(file_error(
            files[scale.location.file].path(),
            format!(
                "tensor `{}` has shape {:?}: expected a scale for each of the {out_features} outputs of `{name}`",
                scale.location.name, scale.shape
            ),
        ));
    }
    Ok(Some(StoredQuantization::Int8 { scale: scale.location }))
}

/// Merges a 4-bit weight and its auxiliary tensors into one entry.
fn merge_four_bit(
    files: &[Arc<TensorFile>],
    entries: &mut BTreeMap<String, Entry>,
    name: &str,
    state_name: &str,
    kind: &'static str,
) -> Result<()> {
    let Some(state) = entries.remove(state_name) else {
        return Ok(());
    };
    let path = files[state.location.file].path();
    let state_error = |what: String| {
        file_error(
            path,
            format!("the {kind} weight `{name}` {what}: download or copy it again"),
        )
    };
    if state.shape.iter().product::<usize>() > MAX_STATE_LEN {
        return Err(state_error("has a quantisation state that is too long".into()));
    }
    let json = files[state.location.file].read_bytes(&state.location.name)?;
    let state: QuantState =
        serde_json::from_slice(&json).map_err(|e| state_error(format!("has an invalid quantisation state ({e})")))?;
    let mut take_tensor = |suffix: &str| {
        let name = format!("{name}.{suffix}");
        entries
            .remove(&name)
            .ok_or_else(|| state_error(format!("lacks `{name}`")))
    };
    let (absmax, map) = (take_tensor("absmax")?, take_tensor("quant_map")?);
    let nested = match state.nested_blocksize {
        Some(_) => Some((take_tensor("nested_absmax")?, take_tensor("nested_quant_map")?)),
        None => None,
    };
    let element_count = |entry: &Entry| entry.shape.iter().product::<usize>();
    let mut dims = state.shape.iter();
    let count = dims
        .try_fold(1_usize, |all, dim| all.checked_mul(*dim))
        .unwrap_or(usize::MAX);
    let Some(weight) = entries.get_mut(name) else {
        return Err(state_error("itself is missing".into()));
    };
    let blocks = count
        .checked_div(state.blocksize)
        .map(|blocks| blocks + usize::from(count % state.blocksize > 0));
    let is_float = |entry: &Entry| matches!(entry.storage, StorageType::Floats(_));
    let nested_fits = nested.as_ref().is_none_or(|(absmax, map)| {
        let nested_block_size = state.nested_blocksize.unwrap_or(256).max(1);
        is_float(absmax)
            && is_float(map)
            && element_count(map) == 256
            && Some(element_count(absmax)) == blocks.map(|n| n.div_ceil(nested_block_size))
    });
    let sizes_match = weight.storage == StorageType::Bytes
        && element_count(weight) == count.div_ceil(2)
        && state.blocksize.is_multiple_of(2)
        && Some(element_count(&absmax)) == blocks
        && (if nested.is_some() {
            absmax.storage == StorageType::Bytes
        } else {
            is_float(&absmax)
        })
        && is_float(&map)
        && element_count(&map) == 16
        && nested_fits;
    if !sizes_match {
        return Err(state_error(format!(
            "of shape {:?} in blocks of {} does not fit its {} bytes and {} scales",
            state.shape,
            state.blocksize,
            element_count(weight),
            element_count(&absmax)
        )));
    }
    weight.shape.clone_from(&state.shape);
    weight.quantization = Some(StoredQuantization::FourBit(Arc::new(FourBit {
        kind,
        state,
        absmax: absmax.location,
        map: map.location,
        nested: nested.map(|(absmax, map)| (absmax.location, map.location)),
    })));
    Ok(())
}

fn file_error(path: &Path, reason: String) -> EngineError {
    EngineError::WeightsFile {
        path: path.to_path_buf(),
        reason,
    }
}
