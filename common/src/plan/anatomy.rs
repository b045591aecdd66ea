//! What a model consists of, counted from the headers of its files. Weights are never read.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// A header larger than this belongs to no model that we know.
const HEADER_LIMIT: u64 = 64 << 20;

/// Parameters of the components of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Anatomy {
    /// UNet or transformer.
    pub denoiser: u64,
    /// All text encoders.
    pub text: u64,
    /// The VAE.
    pub vae: u64,
}

impl Anatomy {
    /// Counts what lies here: a folder as diffusers writes it, or a single safetensors file. `None` when it is
    /// neither, or has no denoiser.
    #[must_use]
    pub fn read(path: &Path) -> Option<Self> {
        let counted = if path.is_dir() {
            Self::of_folder(path)
        } else {
            Self::of_file(path).ok()?
        };
        (counted.denoiser > 0).then_some(counted)
    }

    fn of_folder(folder: &Path) -> Self {
        let part = |names: &[&str]| names.iter().map(|name| parameters_below(&folder.join(name))).sum();
        Self {
            denoiser: part(&["unet", "transformer"]),
            text: part(&["text_encoder", "text_encoder_2", "text_encoder_3"]),
            vae: part(&["vae"]),
        }
    }

    fn of_file(path: &Path) -> io::Result<Self> {
        let mut counted = Self::default();
        for (name, parameters) in tensors(path)? {
            // Names of the original checkpoints of Stable Diffusion; what has no such name is a bare transformer.
            let slot = if name.starts_with("first_stage_model.") || name.starts_with("vae.") {
                &mut counted.vae
            } else if ["cond_stage_model.", "conditioner.", "text_encoders."]
                .iter()
                .any(|prefix| name.starts_with(prefix))
            {
                &mut counted.text
            } else {
                &mut counted.denoiser
            };
            *slot = slot.saturating_add(parameters);
        }
        Ok(counted)
    }
}

/// Parameters in a component's folder: its shards together, or its largest file, since the others are the same in
/// another number format.
fn parameters_below(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    let (mut shards, mut largest) = (0_u64, 0_u64);
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".safetensors") {
            continue;
        }
        let count = tensors(&entry.path())
            .map(|tensors| tensors.iter().fold(0_u64, |sum, (_, n)| sum.saturating_add(*n)))
            .unwrap_or(0);
        if name.contains("-of-") {
            shards = shards.saturating_add(count);
        } else {
            largest = largest.max(count);
        }
    }
    shards.max(largest)
}

#[derive(Deserialize)]
struct Tensor {
    shape: Vec<u64>,
}

/// Names and sizes of the tensors of a safetensors file: 8 bytes with the header's length, then JSON.
fn tensors(path: &Path) -> io::Result<Vec<(String, u64)>> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()));
    let mut file = File::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT {
        return Err(bad("no safetensors header"));
    }
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header)?;
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|_| bad("no safetensors header"))?;
    Ok(header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .filter_map(|(name, value)| {
            let tensor: Tensor = serde_json::from_value(value).ok()?;
            let parameters = tensor.shape.iter().fold(1_u64, |product, n| product.saturating_mul(*n));
            Some((name, parameters))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, header: &str) {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn folders_and_single_files_are_counted_from_their_headers() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write(&at("m/unet/a-00001-of-00002.safetensors"), r#"{"w":{"shape":[10,10]}}"#);
        write(&at("m/unet/a-00002-of-00002.safetensors"), r#"{"v":{"shape":[5]}}"#);
        write(&at("m/text_encoder/model.safetensors"), r#"{"w":{"shape":[7]}}"#);
        write(&at("m/vae/d.safetensors"), r#"{"w":{"shape":[3]}}"#);
        write(&at("m/vae/d.fp16.safetensors"), r#"{"w":{"shape":[3]}}"#);
        let whole = Anatomy {
            denoiser: 105,
            text: 7,
            vae: 3,
        };
        assert_eq!(Anatomy::read(&at("m")), Some(whole));
        let single = r#"{"__metadata__":{"a":"b"},"model.diffusion_model.w":{"shape":[2,2]},"first_stage_model.w":{"shape":[6]},"cond_stage_model.w":{"shape":[]}}"#;
        write(&at("one.safetensors"), single);
        let counted = Anatomy {
            denoiser: 4,
            text: 1,
            vae: 6,
        };
        assert_eq!(Anatomy::read(&at("one.safetensors")), Some(counted));
    }

    #[test]
    fn what_is_no_model_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.safetensors");
        for bytes in [
            &b""[..],
            b"\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x02\0\0\0\0\0\0\0[]",
            b"\x05\0\0\0\0\0\0\0{",
        ] {
            std::fs::write(&file, bytes).unwrap();
            assert_eq!(Anatomy::read(&file), None, "{bytes:?}");
        }
        assert_eq!(Anatomy::read(&folder.path().join("nothing")), None);
        assert_eq!(Anatomy::read(folder.path()), None);
    }
}
