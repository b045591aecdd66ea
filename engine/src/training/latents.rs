//! Images as the U-Net sees them: encoded by the VAE, kept in memory or on disk.

use crate::data::{Item, LatentCache, LatentKey};
use crate::error::{EngineError, Result};
use crate::models::vae::AutoencoderKl;
use crate::rng::generator_of;
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::path::PathBuf;

/// Numbers that are kept in memory whatever the config says: 128 MiB.
const ALWAYS_HELD: usize = 32 << 20;

/// Where the latents of a run come from. Caching never changes them: the VAE's posterior is sampled with a generator
/// that is seeded by the latent's own key.
pub struct Latents {
    cache: LatentCache,
    space: String,
    memory: HashMap<PathBuf, Tensor>,
    /// Numbers in `memory`.
    held: usize,
    unwritable: bool,
    dtype: DType,
    device: Device,
}

impl Latents {
    /// An empty store. `space` is the tag of the latent space; `vae` tells this VAE's weights from others.
    #[must_use]
    pub fn new(vae: &str, space: &str, model: &AutoencoderKl, channels: usize, dtype: DType, device: &Device) -> Self {
        Self {
            cache: LatentCache::new(vae, channels, model.scale_factor()),
            space: space.to_owned(),
            memory: HashMap::new(),
            held: 0,
            unwritable: false,
            dtype,
            device: device.clone(),
        }
    }

    /// The scaled latent [c, h, w] of an item, in float32 on the CPU.
    ///
    /// # Errors
    /// When the image cannot be decoded or a cache cannot be written.
    pub fn get(&mut self, item: &Item, vae: &AutoencoderKl, in_memory: bool, on_disk: bool) -> Result<Tensor> {
        let key = item.latent_key(&self.space);
        let name = self
            .cache
            .path(&item.path, item.derived.as_deref(), &key, &item.content);
        if let Some(latent) = self.memory.get(&name) {
            return Ok(latent.clone());
        }
        let cached = if on_disk {
            self.cache
                .read(&item.path, item.derived.as_deref(), &key, &item.content)
        } else {
            None
        };
        let latent = match cached {
            Some(latent) => latent,
            None => {
                let latent = self.encode(item, vae, &name)?;
                if on_disk {
                    self.write(item, &key, &latent)?;
                }
                latent
            }
        };
        // Small sets stay in memory in any case: it changes nothing but the time that the VAE takes.
        if in_memory || self.unwritable || self.held < ALWAYS_HELD {
            self.held += latent.elem_count();
            self.memory.insert(name, latent.clone());
        }
        Ok(latent)
    }

    /// A data set that cannot be written (another user's, a read-only disk) is no reason to stop: its latents stay in
    /// memory. A full disk is one.
    fn write(&mut self, item: &Item, key: &LatentKey, latent: &Tensor) -> Result<()> {
        let derived = item.derived.as_deref();
        match self.cache.write(&item.path, derived, key, &item.content, latent) {
            Err(full @ EngineError::DiskFull { .. }) => Err(full),
            Err(error) => {
                if !self.unwritable {
                    tracing::warn!(%error, "latents cannot be kept on disk; they stay in memory");
                }
                self.unwritable = true;
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn encode(&self, item: &Item, vae: &AutoencoderKl, name: &std::path::Path) -> Result<Tensor> {
        let pixels = crate::data::load_pixels(item)?;
        let pixels = pixels.to_device(&self.device)?.to_dtype(self.dtype)?.unsqueeze(0)?;
        let posterior = vae.encode(&pixels)?;
        let mean = posterior.mean.clone();
        // The file's name holds the hash of everything that the latent depends on.
        let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let noise = generator_of(&format!("latent/{name}")).randn(mean.elem_count());
        let noise = Tensor::from_vec(noise, mean.shape(), &Device::Cpu)?
            .to_device(mean.device())?
            .to_dtype(mean.dtype())?;
        let latent = ((posterior.sample(&noise)? - vae.shift_factor)? * vae.scaling_factor)?;
        Ok(latent
            .squeeze(0)?
            .detach()
            .to_dtype(DType::F32)?
            .to_device(&Device::Cpu)?
            .contiguous()?)
    }
}
