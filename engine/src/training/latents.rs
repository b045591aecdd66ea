//! The latents of training images: encoded by the codec, cached in memory and on disk.

use crate::data::{Control, LatentCache, LatentKey, TrainingImage, load_control, load_pixels};
use crate::error::{EngineError, Result};
use crate::models::codec::Codec;
use crate::rng::generator_from_text;
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::path::PathBuf;

/// Latents are always cached in memory up to this number of elements (128 MiB), whatever the config says.
const MIN_CACHED_ELEMENTS: usize = 32 << 20;

/// Encodes images to latents and caches them. Caching does not change a latent: the codec's posterior is sampled with a
/// generator that is seeded with the latent's cache key.
pub struct LatentStore {
    cache: LatentCache,
    latent_space: String,
    memory: HashMap<PathBuf, Tensor>,
    /// The number of elements in `memory`.
    cached_elements: usize,
    /// Whether a latent could not be written to disk.
    unwritable: bool,
}

impl LatentStore {
    /// Creates an empty cache. `latent_space` is the tag of the latent space; `weights` identifies the codec's weights.
    #[must_use]
    pub fn new(weights: &str, latent_space: &str, codec: &dyn Codec) -> Self {
        let channels = codec.latent_channels().first().copied().unwrap_or(0);
        Self {
            cache: LatentCache::new(weights, channels, codec.pixels_per_latent()),
            latent_space: latent_space.to_owned(),
            memory: HashMap::new(),
            cached_elements: 0,
            unwritable: false,
        }
    }

    /// Whether the latent of an item, or of its control image, needs no pixels: it is in memory, or if `on_disk` in a file.
    #[must_use]
    pub fn has(&self, item: &TrainingImage, control: Option<&Control>, on_disk: bool) -> bool {
        let (key, content) = match control {
            Some(control) => (item.control_key(control, &self.latent_space), &control.content),
            None => (item.latent_key(&self.latent_space), &item.content),
        };
        let name = self.cache.path(&item.path, item.derived.as_deref(), &key, content);
        self.memory.contains_key(&name) || (on_disk && name.exists())
    }

    /// Returns the scaled latent [c, h, w] of an item, in float32 on the CPU. `pixels`: those of the image, [3, h, w], if they were read
    /// already.
    ///
    /// # Errors
    /// When the image cannot be decoded, or the disk is full.
    pub fn get(
        &mut self,
        item: &TrainingImage,
        pixels: Option<Tensor>,
        codec: &dyn Codec,
        in_memory: bool,
        on_disk: bool,
    ) -> Result<Tensor> {
        let image = Image {
            item,
            key: item.latent_key(&self.latent_space),
            content: &item.content,
            pixels: &|| pixels.clone().map_or_else(|| load_pixels(item), Ok),
        };
        self.get_image(&image, codec, in_memory, on_disk)
    }

    /// Returns the scaled latent [c, h, w] of an item's control image, in float32 on the CPU. It is cached beside the item's latent.
    /// `pixels`: as for [`Self::get`].
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn get_control(
        &mut self,
        (item, control): (&TrainingImage, &Control),
        pixels: Option<Tensor>,
        codec: &dyn Codec,
        in_memory: bool,
        on_disk: bool,
    ) -> Result<Tensor> {
        let image = Image {
            item,
            key: item.control_key(control, &self.latent_space),
            content: &control.content,
            pixels: &|| pixels.clone().map_or_else(|| load_control(item, control, &[]), Ok),
        };
        self.get_image(&image, codec, in_memory, on_disk)
    }

    /// Returns the scaled latent [c, h, w] of pixels [3, h, w] that differ each time, in float32 on the CPU. It is not cached. `draw`
    /// names what they were drawn for.
    ///
    /// # Errors
    /// When the codec fails.
    pub fn encode_drawn(&self, pixels: &Tensor, codec: &dyn Codec, draw: &str) -> Result<Tensor> {
        encode(pixels, codec, draw)
    }

    fn get_image(&mut self, image: &Image<'_>, codec: &dyn Codec, in_memory: bool, on_disk: bool) -> Result<Tensor> {
        let (path, derived) = (&image.item.path, image.item.derived.as_deref());
        let name = self.cache.path(path, derived, &image.key, image.content);
        if let Some(latent) = self.memory.get(&name) {
            return Ok(latent.clone());
        }
        let cached = if on_disk {
            self.cache.read(path, derived, &image.key, image.content)
        } else {
            None
        };
        let latent = match cached {
            Some(latent) => latent,
            None => {
                // The file name contains the hash of everything that the latent depends on.
                let file = name.file_name().unwrap_or_default().to_string_lossy();
                let latent = encode(&(image.pixels)()?, codec, &file)?;
                if on_disk {
                    self.write(image, &latent)?;
                }
                latent
            }
        };
        // Small data sets always stay in memory, which only saves time.
        if in_memory || self.unwritable || self.cached_elements < MIN_CACHED_ELEMENTS {
            self.cached_elements += latent.elem_count();
            self.memory.insert(name, latent.clone());
        }
        Ok(latent)
    }

    /// Writes a latent to the disk cache. A full disk is an error. If the data set's folder is not writable (another
    /// user's, a read-only disk), training continues and the latents stay in memory.
    fn write(&mut self, image: &Image<'_>, latent: &Tensor) -> Result<()> {
        let (path, derived) = (&image.item.path, image.item.derived.as_deref());
        match self.cache.write(path, derived, &image.key, image.content, latent) {
            Err(full @ EngineError::DiskFull { .. }) => Err(full),
            Err(error) => {
                if !self.unwritable {
                    tracing::warn!(%error, "latents cannot be cached on disk; they stay in memory");
                }
                self.unwritable = true;
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

/// An image to encode: a training image or its control image.
struct Image<'a> {
    item: &'a TrainingImage,
    key: LatentKey,
    /// SHA-256 of its file.
    content: &'a str,
    /// Loads its pixels, [3, h, w].
    pixels: &'a dyn Fn() -> Result<Tensor>,
}

/// Encodes pixels [3, h, w] to [c, h, w], float32 on the CPU. `name` seeds the codec's posterior.
fn encode(pixels: &Tensor, codec: &dyn Codec, name: &str) -> Result<Tensor> {
    let pixels = pixels.unsqueeze(0)?;
    let mut generator = generator_from_text(&format!("latent/{name}"));
    let mut noise = |shape: &[usize]| {
        let random = Tensor::from_vec(generator.randn(shape.iter().product()), shape, &Device::Cpu)?;
        Ok(random)
    };
    let latents = codec.encode(&pixels, &mut noise)?;
    let [latent] = latents.as_slice() else {
        return Err(EngineError::Unsupported(
            "training images have one latent tensor each".into(),
        ));
    };
    Ok(latent
        .squeeze(0)?
        .detach()
        .to_dtype(DType::F32)?
        .to_device(&Device::Cpu)?
        .contiguous()?)
}
