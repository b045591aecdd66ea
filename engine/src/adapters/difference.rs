//! Layers of a file that are the whole difference of a weight (`.diff`), not two factors of it: extracted LoRAs keep a layer whole
//! where factors would be larger.

use super::file_layer::{FileLayer, RoleTensors};
use super::keys::TensorRole;
use super::tensors::LoraTensors;
use candle_core::{DType, Device, Result, Tensor};
use std::sync::Arc;

/// Reads a layer that is a whole difference, as a LoRA. `None`: it is none.
pub(super) fn read_difference(found: &RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
    let difference = found.get(TensorRole::Diff)?;
    let factors = match found.tensors.len() {
        1 => factors_of(&difference),
        _ => return Some(Err("it has a whole difference (`.diff`) and other tensors".into())),
    };
    Some(match factors {
        Ok(Some((down, up))) => Ok(Arc::new(LoraTensors {
            alpha: Some(down.dims()[0] as f64),
            down,
            up,
            mid: None,
            scalar: 1.0,
        })),
        Ok(None) => Err(format!(
            "its `.diff` {:?} is not the whole difference of a linear layer or a convolution",
            difference.dims()
        )),
        Err(error) => Err(error.to_string()),
    })
}

/// Two factors of a difference [out, in] or [out, in, kh, kw] whose product it is: itself and the identity. `None`: it is no weight
/// of a linear layer or a convolution.
fn factors_of(difference: &Tensor) -> Result<Option<(Tensor, Tensor)>> {
    let identity = |side: usize| Tensor::eye(side, DType::F32, &Device::Cpu);
    Ok(match *difference.dims() {
        [out, inputs] if out > inputs => Some((identity(inputs)?, difference.clone())),
        [out, _] => Some((difference.clone(), identity(out)?)),
        [out, _, _, _] => Some((difference.clone(), identity(out)?.reshape((out, out, 1, 1))?)),
        _ => None,
    })
}
