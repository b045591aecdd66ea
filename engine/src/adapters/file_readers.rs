//! The types of adapters that are read from files.

use super::difference::read_difference;
use super::dora::read_decomposed;
use super::file_layer::{FileLayer, Reader, RoleTensors};
use super::keys::TensorRole;
use super::loha::LohaTensors;
use super::lokr::LokrTensors;
use super::lora::{read_lora, read_lora_embedding};
use super::oft::read_oft;
use super::whole_layer::read_whole;
use std::sync::Arc;

/// Each reads the tensors of a layer if it knows them.
const READERS: [Reader; 8] = [
    read_difference,
    read_decomposed,
    read_lora,
    read_lora_embedding,
    LokrTensors::read,
    LohaTensors::read,
    read_oft,
    read_whole,
];

/// Reads the tensors of a layer. `None`: they are of no type.
pub(super) fn read_layer(found: &RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
    let mut others = found.clone();
    // A magnitude belongs to another type.
    others.tensors.remove(&TensorRole::Magnitude);
    others.tensors.remove(&TensorRole::DoraScale);
    if READERS.iter().filter(|read| read(&others).is_some()).count() > 1 {
        return Some(Err(
            "it has tensors of several types of adapters, of which one alone can be used".to_owned(),
        ));
    }
    READERS.iter().find_map(|read| read(found))
}
