//! The types of adapters that are read from files.

use super::difference::read_difference;
use super::file_layer::Reader;
use super::lokr::LokrTensors;
use super::lora_file::read_lora;

/// Reads the tensors of a layer: the first that knows them.
pub(super) const READERS: [Reader; 3] = [read_difference, read_lora, LokrTensors::read];
