//! The types of adapters that are read from files.

use super::difference::read_difference;
use super::dora::read_decomposed;
use super::file_layer::Reader;
use super::loha::LohaTensors;
use super::lokr::LokrTensors;
use super::lora_file::read_lora;
use super::oft::read_oft;

/// Reads the tensors of a layer: the first that knows them.
pub(super) const READERS: [Reader; 6] = [
    read_difference,
    read_decomposed,
    read_lora,
    LokrTensors::read,
    LohaTensors::read,
    read_oft,
];
