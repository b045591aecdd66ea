//! What models make and are trained on: images, clips, audio, tokens.

use crate::error::{EngineError, Result};
use image::RgbImage;

/// One item that a model makes or is trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum Media {
    /// An image.
    Image(RgbImage),
    /// The frames of a clip, all of one size.
    Clip {
        /// The frames in order.
        frames: Vec<RgbImage>,
        /// Frames per second.
        fps: f64,
    },
    /// Sound.
    Audio {
        /// One list of samples (-1 to 1) per channel, all of one length.
        channels: Vec<Vec<f32>>,
        /// Samples per second.
        sample_rate: u32,
    },
    /// Token ids of a language model.
    Tokens(Vec<u32>),
}

impl Media {
    /// The kind of media, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Image(_) => "image",
            Self::Clip { .. } => "clip",
            Self::Audio { .. } => "audio",
            Self::Tokens(_) => "tokens",
        }
    }

    /// The image.
    ///
    /// # Errors
    /// When it is something else.
    pub fn into_image(self) -> Result<RgbImage> {
        match self {
            Self::Image(image) => Ok(image),
            other => Err(EngineError::Unsupported(format!(
                "this process writes images, and the model made {}",
                other.kind()
            ))),
        }
    }
}

/// The size of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaSize {
    /// An image.
    Image {
        /// Pixels.
        width: usize,
        /// Pixels.
        height: usize,
    },
    /// A clip.
    Clip {
        /// Pixels.
        width: usize,
        /// Pixels.
        height: usize,
        /// Number of frames.
        frames: usize,
    },
    /// Sound.
    Audio {
        /// Samples per channel.
        samples: usize,
    },
    /// Token ids.
    Tokens {
        /// Number of ids.
        length: usize,
    },
}
