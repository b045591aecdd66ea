//! What a model is conditioned on besides latents and timestep: encoded prompts, pooled text, masks, sizes.

use crate::error::{EngineError, Result};
use candle_core::{DType, Device, Tensor};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The text of an item, one for each kind of text encoder.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prompt {
    /// The prompt.
    pub text: String,
    /// SDXL: another prompt for the second text encoder (`prompt_2` of diffusers). `None`: the same.
    pub text_2: Option<String>,
}

impl Prompt {
    /// A prompt for all text encoders.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            text_2: None,
        }
    }
}

/// Sizes of an image that some models are conditioned on (SDXL). In pixels; height before width, top before left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemSize {
    /// The size before it was scaled.
    pub original: (u32, u32),
    /// The top left corner of the crop, in the scaled image.
    pub crop: (u32, u32),
    /// The size after scaling and cropping.
    pub target: (u32, u32),
}

impl ItemSize {
    /// An image that was neither scaled nor cropped.
    #[must_use]
    pub fn whole(width: u32, height: u32) -> Self {
        Self {
            original: (height, width),
            crop: (0, 0),
            target: (height, width),
        }
    }
}

/// Named tensors, whose first dimension is the batch. A family chooses the names; `context` is the encoded text.
#[derive(Clone, Debug, Default)]
pub struct Conditioning {
    tensors: BTreeMap<Cow<'static, str>, Tensor>,
}

impl Conditioning {
    /// Adds or replaces a tensor.
    #[must_use]
    pub fn with(mut self, name: impl Into<Cow<'static, str>>, tensor: Tensor) -> Self {
        self.tensors.insert(name.into(), tensor);
        self
    }

    /// A tensor.
    ///
    /// # Errors
    /// When there is none of this name: the model and the conditioning belong to different families.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        let found = self.tensors.get(name);
        found.ok_or_else(|| EngineError::Internal(format!("the conditioning has no `{name}`")))
    }

    /// The numbers of a tensor that counts something in each item (u32).
    ///
    /// # Errors
    /// When there is none of this name, or it has no counts.
    pub fn counts(&self, name: &str) -> Result<Vec<usize>> {
        let counts: Vec<u32> = self.get(name)?.to_vec1()?;
        Ok(counts.into_iter().map(|count| count as usize).collect())
    }

    /// A tensor that there may be.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Removes a tensor.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.tensors.remove(name);
        self
    }

    /// All tensors with their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor))
    }

    /// The number of items.
    #[must_use]
    pub fn batch(&self) -> usize {
        let first = self.tensors.values().next();
        first.and_then(|tensor| tensor.dims().first().copied()).unwrap_or(0)
    }

    /// The bytes of all tensors.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.tensors.values().map(bytes).sum()
    }

    /// The items of several conditionings, one after another. All have the same names.
    ///
    /// # Errors
    /// When a name is missing, or shapes differ.
    pub fn cat(all: &[&Self]) -> Result<Self> {
        let Some(first) = all.first() else {
            return Ok(Self::default());
        };
        let mut tensors = BTreeMap::new();
        for name in first.tensors.keys() {
            let parts = all.iter().map(|one| one.get(name)).collect::<Result<Vec<_>>>()?;
            tensors.insert(name.clone(), Tensor::cat(&parts, 0)?);
        }
        Ok(Self { tensors })
    }

    /// `count` items from `start` on.
    ///
    /// # Errors
    /// When there are fewer items.
    pub fn narrow(&self, start: usize, count: usize) -> Result<Self> {
        self.map(|tensor| tensor.narrow(0, start, count))
    }

    /// The floating-point tensors in `dtype`, without their graphs.
    ///
    /// # Errors
    /// When the conversion fails.
    pub fn detached_as(&self, dtype: DType) -> Result<Self> {
        self.map(|tensor| match tensor.dtype().is_float() {
            true => Ok(tensor.to_dtype(dtype)?.detach()),
            false => Ok(tensor.detach()),
        })
    }

    /// The tensors without their graphs.
    #[must_use]
    pub fn detached(&self) -> Self {
        let detached = self
            .tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.detach()));
        Self {
            tensors: detached.collect(),
        }
    }

    /// The tensors on `device`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        self.map(|tensor| tensor.to_device(device))
    }

    fn map(&self, f: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (name, tensor) in &self.tensors {
            tensors.insert(name.clone(), f(tensor)?);
        }
        Ok(Self { tensors })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn items_are_joined_and_taken_apart() {
        let one = |value: f32| {
            let context = Tensor::full(value, (1, 2, 3), &Device::Cpu).unwrap();
            let pooled = Tensor::full(-value, (1, 4), &Device::Cpu).unwrap();
            Conditioning::default().with("context", context).with("pooled", pooled)
        };
        let both = Conditioning::cat(&[&one(1.0), &one(2.0)]).unwrap();
        assert_eq!(both.batch(), 2);
        assert_eq!(both.size_in_bytes(), 4 * 2 * (2 * 3 + 4));
        let second = both.narrow(1, 1).unwrap();
        assert_eq!(second.get("pooled").unwrap().to_vec2::<f32>().unwrap(), [[-2.0; 4]]);
        assert!(second.get("mask").is_err());
        let other =
            Conditioning::default().with("context", Tensor::zeros((1, 2, 3), DType::F32, &Device::Cpu).unwrap());
        assert!(Conditioning::cat(&[&both, &other]).is_err());
    }
}
