//! Reads the images of the next micro-batch while a GPU computes this one, so that a step does not wait for disks and decoders, and the
//! next images while a GPU encodes the latents of these.
//!
//! A CPU computes with all of its cores: there images are read when they are needed, and take no memory before.

use crate::data::{Control, DatasetOptions, PreparedImage, TrainingImage, load_control, load_pixels};
use crate::device::portable::is_portable;
use crate::error::Result;
use crate::rng::TorchGenerator;
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use std::thread::{self, JoinHandle};

/// The step and the micro-batch, both from 0. While latents are cached: the data set and a group of its images.
pub(super) type BatchNumber = (u64, u64);

/// How an image is read that differs each time.
pub(super) struct Drawing {
    pub(super) options: DatasetOptions,
    pub(super) generator: TorchGenerator,
    /// Whether the image before its augmentations is needed, too.
    pub(super) unaugmented: bool,
}

/// What is read for one image of a batch.
pub(super) struct ImageRequest {
    pub(super) item: TrainingImage,
    /// `None`: the image is the same each time.
    pub(super) drawing: Option<Drawing>,
    /// Whether its own pixels are needed.
    pub(super) image: bool,
    /// Its control image, if the pixels of that are needed.
    pub(super) control: Option<Control>,
}

/// What was read for one image of a batch, on the CPU.
#[derive(Default)]
pub(super) struct LoadedImage {
    /// An image that differs each time.
    pub(super) drawn: Option<PreparedImage>,
    /// The pixels of an image that is the same each time, [3, h, w].
    pub(super) pixels: Option<Tensor>,
    /// The pixels of the image before its augmentations, [3, h, w].
    pub(super) unaugmented: Option<Tensor>,
    /// The pixels of its control image, which moved as the image did, [3, h, w].
    pub(super) control: Option<Tensor>,
}

impl ImageRequest {
    fn load(self) -> Result<LoadedImage> {
        let mut loaded = LoadedImage::default();
        if let Some(Drawing {
            options,
            generator,
            unaugmented,
        }) = self.drawing
        {
            loaded.drawn = Some(PreparedImage::load(&self.item, &options, &mut generator.clone())?);
            if unaugmented {
                let pixels = PreparedImage::load_unaugmented(&self.item, &options, &mut generator.clone())?;
                loaded.unaugmented = Some(pixels);
            }
        } else if self.image {
            loaded.pixels = Some(load_pixels(&self.item)?);
        }
        if let Some(control) = &self.control {
            let moves = loaded.drawn.as_ref().map_or(&[][..], |drawn| &drawn.moves);
            loaded.control = Some(load_control(&self.item, control, moves)?);
        }
        Ok(loaded)
    }
}

struct Pending {
    number: BatchNumber,
    thread: JoinHandle<Result<Vec<LoadedImage>>>,
}

/// The images of the next micro-batch, or of the next ones whose latents are cached, which a thread reads.
pub(super) struct ImagesAhead {
    is_enabled: bool,
    pending: Option<Pending>,
}

impl ImagesAhead {
    pub(super) fn new(is_enabled: bool) -> Self {
        Self {
            is_enabled,
            pending: None,
        }
    }

    /// Enabled if the device leaves the CPU free. Portable mode does what GPUs do.
    pub(super) fn for_device(device: &Device) -> Self {
        Self::new(!device.is_cpu() || is_portable())
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    /// Whether the images of a micro-batch are being read, or were.
    pub(super) fn is_started(&self, number: BatchNumber) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.number == number)
    }

    /// Begins to read the images of a micro-batch. If there is no thread to be had, they are read when they are needed.
    pub(super) fn start(&mut self, number: BatchNumber, requests: Vec<ImageRequest>) {
        if !self.is_enabled || self.is_started(number) || requests.iter().all(ImageRequest::is_empty) {
            return;
        }
        let read = move || requests.into_par_iter().map(ImageRequest::load).collect();
        let thread = thread::Builder::new().name("read images".into()).spawn(read);
        self.pending = thread.ok().map(|thread| Pending { number, thread });
    }

    /// What was read for a micro-batch, in the order of its images. `None`: nothing was.
    ///
    /// # Errors
    /// When one of its images could not be read.
    pub(super) fn take(&mut self, number: BatchNumber) -> Result<Option<Vec<LoadedImage>>> {
        let Some(pending) = self.pending.take_if(|pending| pending.number == number) else {
            return Ok(None);
        };
        match pending.thread.join() {
            Ok(loaded) => loaded.map(Some),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl ImageRequest {
    /// Reads what the latents of an image, and of its control image, are made of.
    pub(super) fn for_latents(item: &TrainingImage, image: bool, control: Option<&Control>) -> Self {
        Self {
            item: item.clone(),
            drawing: None,
            image,
            control: control.cloned(),
        }
    }

    fn is_empty(&self) -> bool {
        self.drawing.is_none() && !self.image && self.control.is_none()
    }
}
