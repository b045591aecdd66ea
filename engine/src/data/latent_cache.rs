//! The cache of latents on disk: `<stem>_<hash>.safetensors` in `_latent_cache`
//! next to each image, or in the folder that a worker provides for files computed from the data set.

use super::bucket::BucketPlan;
use super::cache_file;
use super::half::Half;
use crate::error::{EngineError, Result};
use crate::image_io;
use aitk_common::fsutil::regular;
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What a latent depends on, besides the image's content and the VAE.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentKey {
    /// The image's file name without its folder.
    pub filename: String,
    /// How it is scaled and cropped.
    pub plan: BucketPlan,
    /// Whether it is flipped left to right.
    pub flip_x: bool,
    /// Whether it is flipped upside down.
    pub flip_y: bool,
    /// `model.latent_space_version`, or else the architecture's tag.
    pub latent_space: String,
    /// The name of the statistics that its pixels are normalised by. `None`: they are from -1 to 1. ai-toolkit's keys do not have it.
    pub normalization: Option<&'static str>,
    /// Whether its normalised pixels are limited to -1 to 1. Such a latent is not cached on disk.
    pub is_clamped: bool,
    /// How a control image is loaded. `None`: it is the latent of a training image.
    pub control: Option<ControlKey>,
    /// The half of the file that is the image. `None`: all of it.
    pub half: Option<Half>,
}

/// What the latent of a control image depends on besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlKey {
    /// The colour behind its transparent pixels. `None`: transparency is dropped.
    pub background: Option<[u8; 3]>,
    /// Whether it is flipped, scaled and cropped like its image.
    pub full_size: bool,
}

impl LatentKey {
    /// All fields but content and VAE. `standardize_images`, `clamped`, `half` and those of a control image are ours only; the others
    /// are hashed by ai-toolkit too.
    fn fields(&self) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("filename".into(), self.filename.clone().into());
        map.insert("scale_to_width".into(), self.plan.scale_to.0.into());
        map.insert("scale_to_height".into(), self.plan.scale_to.1.into());
        map.insert("crop_x".into(), self.plan.crop.0.into());
        map.insert("crop_y".into(), self.plan.crop.1.into());
        map.insert("crop_width".into(), self.plan.bucket.0.into());
        map.insert("crop_height".into(), self.plan.bucket.1.into());
        map.insert("latent_space_version".into(), self.latent_space.clone().into());
        map.insert("latent_version".into(), 1.into());
        for (key, on) in [("flip_x", self.flip_x), ("flip_y", self.flip_y)] {
            if on {
                map.insert(key.into(), true.into());
            }
        }
        if let Some(name) = self.normalization {
            map.insert("standardize_images".into(), name.into());
        }
        if self.is_clamped {
            map.insert("clamped".into(), true.into());
        }
        if let Some(half) = self.half {
            let half = if half == Half::Left { "left" } else { "right" };
            map.insert("half".into(), half.into());
        }
        if let Some(control) = self.control {
            map.insert("control".into(), true.into());
            if let Some(background) = control.background {
                map.insert("control_transparent_color".into(), background.to_vec().into());
            }
            map.insert("full_size_control_images".into(), control.full_size.into());
        }
        map
    }

    /// The hash in the file names of ai-toolkit's caches.
    #[must_use]
    pub fn ai_toolkit_hash(&self) -> String {
        cache_file::hash(&self.fields())
    }

    /// The hash in the file names of aitk's caches. It includes the image's content and the VAE too, so that after an
    /// edit of the image, or with another VAE, no stale latent is used; ai-toolkit uses it.
    #[must_use]
    pub fn hash(&self, content: &str, vae: &str) -> String {
        cache_file::hash(&self.full_fields(content, vae))
    }

    fn full_fields(&self, content: &str, vae: &str) -> Map<String, Value> {
        let mut map = self.fields();
        map.insert("content_sha256".into(), content.into());
        map.insert("vae".into(), vae.into());
        map
    }
}

/// Reads and writes cached latents of one VAE.
#[derive(Clone, Debug)]
pub struct LatentCache {
    /// The fingerprint of the VAE's weights.
    vae: String,
    /// Latent channels.
    channels: usize,
    /// Pixels per latent element along each side.
    factor: u32,
}

impl LatentCache {
    /// A cache for the VAE with this fingerprint.
    #[must_use]
    pub fn new(vae: &str, channels: usize, factor: usize) -> Self {
        Self {
            vae: vae.to_owned(),
            channels,
            factor: (factor as u32).max(1),
        }
    }

    /// The path of an image's cached latent: in the folder `derived`, or else next to the image. `content`: SHA-256 of
    /// the image.
    #[must_use]
    pub fn path(&self, image: &Path, derived: Option<&Path>, key: &LatentKey, content: &str) -> PathBuf {
        Self::path_with_hash(image, derived, &key.hash(content, &self.vae))
    }

    fn path_with_hash(image: &Path, derived: Option<&Path>, hash: &str) -> PathBuf {
        let stem = image.file_stem().unwrap_or_default().to_string_lossy();
        let folder = match derived {
            Some(folder) => folder.to_owned(),
            None => image.parent().unwrap_or(Path::new(".")).join("_latent_cache"),
        };
        folder.join(format!("{stem}_{hash}.safetensors"))
    }

    /// Reads the cached latent [channels, h, w] in float32: aitk's, or else one that ai-toolkit wrote after the image
    /// was last changed. `None`: there is none, it is damaged, or it has another shape.
    #[must_use]
    pub fn read(&self, image: &Path, derived: Option<&Path>, key: &LatentKey, content: &str) -> Option<Tensor> {
        let ours = self.path(image, derived, key, content);
        if let Some(latent) = self.read_file(&ours, key, true) {
            return Some(latent);
        }
        // ai-toolkit never writes into a worker's folder.
        if derived.is_some() {
            return None;
        }
        let theirs = Self::path_with_hash(image, None, &key.ai_toolkit_hash());
        let modified = |p: &Path| {
            std::fs::metadata(p)
                .and_then(|m| m.modified())
                .unwrap_or(SystemTime::UNIX_EPOCH)
        };
        if modified(&theirs) < modified(image) {
            return None;
        }
        self.read_file(&theirs, key, false)
    }

    /// The shape of a latent, [channels, h, w].
    fn shape(&self, key: &LatentKey) -> [usize; 3] {
        let (w, h) = key.plan.bucket;
        [self.channels, (h / self.factor) as usize, (w / self.factor) as usize]
    }

    /// The most bytes of a file with such a latent: its numbers with up to 8 bytes each, the 8-bit pixels that ai-toolkit may store
    /// with them, and a header.
    fn max_bytes(&self, key: &LatentKey) -> u64 {
        let numbers = self.shape(key).into_iter().fold(8, usize::saturating_mul) as u64;
        let (w, h) = key.plan.bucket;
        let pixels = u64::from(w).saturating_mul(u64::from(h)).saturating_mul(4);
        numbers.saturating_add(pixels).saturating_add(1 << 20)
    }

    fn read_file(&self, path: &Path, key: &LatentKey, verify: bool) -> Option<Tensor> {
        let bytes = match regular::read(path, self.max_bytes(key)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a cached latent cannot be read; the image is encoded again");
                return None;
            }
        };
        if verify && !cache_file::is_intact(&bytes)? {
            tracing::warn!(path = %path.display(), "a cached latent is damaged; the image is encoded again");
            return None;
        }
        let latent = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)
            .ok()?
            .remove("latent")?;
        if latent.dims() != self.shape(key) || !latent.dtype().is_float() {
            return None;
        }
        latent.to_dtype(DType::F32).ok()
    }

    /// Writes a latent atomically. Several runs may write the same one at once.
    ///
    /// # Errors
    /// When the folder cannot be written or the disk is full.
    pub fn write(
        &self,
        image: &Path,
        derived: Option<&Path>,
        key: &LatentKey,
        content: &str,
        latent: &Tensor,
    ) -> Result<()> {
        let path = self.path(image, derived, key, content);
        let tensors = BTreeMap::from([("latent".to_owned(), latent.to_dtype(DType::F32)?.contiguous()?)]);
        cache_file::write(&path, &tensors, &key.full_fields(content, &self.vae))
    }
}

/// SHA-256 of a file, in hexadecimal.
pub(super) fn content_hash(path: &Path) -> Result<String> {
    let bytes = regular::read(path, image_io::MAX_FILE_BYTES).map_err(|e| EngineError::io(path, e))?;
    Ok(hex::encode(Sha256::digest(&bytes)))
}
