//! Networks that make control images and masks of images (`datasets[].controls`).

mod birefnet;
mod depth;
mod depth_anything;
mod dinov2;
mod line;
mod mask;
mod matting;
mod opencv;
mod source_image;
mod teed;

pub use birefnet::BiRefNet;
pub use depth_anything::DepthAnything;
pub use matting::SapiensMatting;
pub use teed::Teed;

use crate::error::{EngineError, Result};
use crate::weights::Index;
use aitk_common::job::controls::ControlType;
use candle_core::Device;
use image::RgbImage;
use std::path::Path;

/// A network that makes control images of one type, and the device that it computes on.
#[derive(Clone, Debug)]
pub struct ControlGenerator {
    network: Network,
    device: Device,
}

#[derive(Clone, Debug)]
enum Network {
    Line(Box<Teed>),
    Depth(Box<DepthAnything>),
    Foreground(Box<BiRefNet>),
    Matting(Box<SapiensMatting>),
}

impl ControlGenerator {
    /// Reads the network of a type from a file, or from a folder with one (`depth`: with its `config.json`).
    ///
    /// # Errors
    /// When the file cannot be read, a tensor is missing or has another shape, it is of something else, or aitk has no network of this type.
    pub fn open(kind: ControlType, path: &Path, device: &Device) -> Result<Self> {
        Self::new(kind, path, &Index::open(path)?, device)
    }

    /// As [`Self::open`], without reading the weights: names and shapes are checked.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_layout(kind: ControlType, path: &Path) -> Result<Self> {
        Self::new(kind, path, &Index::open(path)?.shapes_only(), &Device::Cpu)
    }

    fn new(kind: ControlType, path: &Path, index: &Index, device: &Device) -> Result<Self> {
        let index = &index.renamed(|name, shape| Some((depth_anything::current_name(name), shape.to_vec())));
        let (first, name) = match kind {
            ControlType::Line => (teed::FIRST_TENSOR, "the network TEED"),
            ControlType::Depth => (depth_anything::FIRST_TENSOR, "a Depth Anything V2 of transformers"),
            ControlType::Mask => (birefnet::FIRST_TENSOR, "a BiRefNet"),
            ControlType::Sapiens2Mask => (matting::FIRST_TENSOR, "a Sapiens 2 with its matting head"),
            _ => {
                return Err(EngineError::Unsupported(format!(
                    "aitk has no network that makes control images of type `{kind}`"
                )));
            }
        };
        if !index.contains(first) {
            return Err(EngineError::WeightsFile {
                path: index.path().to_path_buf(),
                reason: format!(
                    "this does not make control images of type `{kind}`: expected {name}, which has a tensor `{first}`"
                ),
            });
        }
        let network = match kind {
            ControlType::Line => Network::Line(Box::new(Teed::new(index, device)?)),
            ControlType::Mask => Network::Foreground(Box::new(BiRefNet::new(index, device)?)),
            ControlType::Sapiens2Mask => Network::Matting(Box::new(SapiensMatting::new(index, device)?)),
            _ => {
                let folder = if path.is_dir() {
                    path
                } else {
                    path.parent().unwrap_or(Path::new("."))
                };
                let config = folder.join("config.json");
                Network::Depth(Box::new(DepthAnything::new(index, &config, device)?))
            }
        };
        Ok(Self {
            network,
            device: device.clone(),
        })
    }

    /// Makes the control image of an image file, in the size of the image; of one with more than a million pixels in a size of a million.
    ///
    /// # Errors
    /// When the image cannot be read, or the device has not enough memory.
    pub fn generate(&self, image: &Path) -> Result<RgbImage> {
        self.generate_of(&source_image::load(image)?)
    }

    fn generate_of(&self, image: &RgbImage) -> Result<RgbImage> {
        match &self.network {
            Network::Line(network) => line::generate(network, image, line::DETECT_SIDE, &self.device),
            Network::Depth(network) => depth::generate(network, image, &self.device),
            Network::Foreground(network) => {
                mask::generate_of_foreground(network, image, mask::FOREGROUND_SIDE, &self.device)
            }
            Network::Matting(network) => mask::generate_of_people(network, image, &self.device),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod mask_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
