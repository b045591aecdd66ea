//! Any bytes as a GGUF file: either refused with an error, or every tensor in its header lies inside the file and can be read, and
//! the planner counts the same number of elements.

use super::scratch::with_file;
use super::unstructured::Unstructured;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_engine::weights::{Index, Init, Weights};
use candle_core::{DType, Device};

/// ggml types, some of them invalid, with the elements and bytes of a block.
const GGML_TYPES: [(u32, u64, u64); 12] = [
    (0, 1, 4),
    (1, 1, 2),
    (2, 32, 18),
    (6, 32, 22),
    (8, 32, 34),
    (10, 256, 84),
    (11, 256, 110),
    (12, 256, 144),
    (14, 256, 210),
    (30, 1, 2),
    (20, 32, 18),
    (99, 1, 1),
];

/// The first byte selects whether the others are a file, a file without its magic and version, or decisions that build a file.
pub fn run(data: &[u8]) {
    let Some((&first, bytes)) = data.split_first() else {
        return;
    };
    match first % 4 {
        0 => read(bytes),
        1 => read(&[b"GGUF\x03\0\0\0", bytes, &[0; 64]].concat()),
        _ => read(&build(&mut Unstructured::new(bytes))),
    }
}

fn read(file: &[u8]) {
    with_file("weights.gguf", file, |path| {
        let counts = ParameterCounts::read(path);
        match Index::open(path) {
            Err(error) => assert!(!error.to_string().is_empty(), "an empty error message"),
            Ok(index) => {
                let _ = (index.metadata(), index.quantization_kinds());
                let elements = read_tensors(&index, file.len());
                if file.starts_with(b"GGUF") {
                    let total = |counts: ParameterCounts| {
                        counts.denoiser.saturating_add(counts.text).saturating_add(counts.vae)
                    };
                    let found = counts.map_or(0, total);
                    // The planner returns nothing for a file without a denoiser.
                    assert!(
                        counts.is_none() || found == elements,
                        "the planner counts {found} of {elements} elements"
                    );
                }
            }
        }
    });
}

/// Reads every tensor, by itself and as the weight of a layer, unless its type is unknown. Returns the total number of elements.
fn read_tensors(index: &Index, length: usize) -> u64 {
    let renamed = index.renamed(|name, shape| Some((format!("{name}.weight"), shape.to_vec())));
    let plain = Weights::from_index(index.clone(), DType::F32, &Device::Cpu);
    let layers = Weights::from_index(renamed, DType::F32, &Device::Cpu);
    let (mut total, mut readable) = (0_u64, 0);
    for (name, shape) in index.tensors() {
        let count = shape.iter().try_fold(1_usize, |count, side| count.checked_mul(*side));
        let count = count.expect("the number of elements fits into usize");
        total = total.saturating_add(count as u64);
        match plain.get(shape, name) {
            Err(error) => assert!(error.to_string().contains("is stored as"), "{name}: {error}"),
            Ok(tensor) => {
                readable += count;
                assert_eq!(tensor.dims(), shape);
                // An empty prefix is the root.
                if name.is_empty() {
                    continue;
                }
                let weight = layers
                    .pp(name)
                    .layer(shape, Init::Zeros)
                    .expect("a readable tensor can be a layer's weight");
                assert_eq!(weight.dims(), shape);
                assert_eq!(weight.dense().expect("a weight can be dequantised").dims(), shape);
            }
        }
    }
    // The smallest type uses 84 bytes for 256 elements.
    assert!(
        readable <= length.saturating_mul(4),
        "the tensors are larger than their file"
    );
    total
}

/// A file whose tensors follow each other without gaps, with a few random errors.
fn build(input: &mut Unstructured<'_>) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    let version = if input.one_in(16) { input.byte() } else { 3 };
    file.extend(u32::from(version).to_le_bytes());
    let (tensors, pairs) = (input.below(5) as u64, input.below(4) as u64);
    for count in [tensors, pairs] {
        let written = if input.one_in(32) { input.number() } else { count };
        file.extend(written.to_le_bytes());
    }
    for _ in 0..pairs {
        write_metadata(input, &mut file);
    }
    let mut offset = 0_u64;
    for index in 0..tensors {
        let name = match input.byte() % 8 {
            0 => input.chars(),
            1 => "t0".to_owned(),
            _ => format!("t{index}"),
        };
        write_string(&mut file, &name);
        let (ggml_type, block, bytes) = GGML_TYPES[input.below(GGML_TYPES.len())];
        let mut sides: Vec<u64> = (0..input.below(4)).map(|_| 1 + u64::from(input.byte() % 3)).collect();
        if let Some(first) = sides.first_mut() {
            *first *= block;
        }
        if input.one_in(8) {
            sides.push(input.number());
        }
        file.extend((sides.len() as u32).to_le_bytes());
        sides.iter().for_each(|side| file.extend(side.to_le_bytes()));
        file.extend(ggml_type.to_le_bytes());
        let written = if input.one_in(32) { input.number() } else { offset };
        file.extend(written.to_le_bytes());
        let count = sides.iter().fold(1, |all: u64, side| all.wrapping_mul(*side));
        offset = offset
            .wrapping_add((count / block).wrapping_mul(bytes))
            .wrapping_add(31)
            & !31;
    }
    // The data is at most 8 KiB, so that files stay small.
    let length = usize::try_from(offset).unwrap_or(0).min(8192);
    file.resize(file.len().next_multiple_of(32) + length, input.byte());
    if input.one_in(16) {
        file.truncate(file.len() - input.below(file.len()));
    }
    file
}

/// Appends a string.
fn write_string(file: &mut Vec<u8>, text: &str) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text.as_bytes());
}

/// Appends a metadata entry.
fn write_metadata(input: &mut Unstructured<'_>, file: &mut Vec<u8>) {
    let key = input.pick(&[
        "general.alignment",
        "comfy.gguf.orig_shape.t0",
        "comfy.gguf.orig_shape.t1",
        "x",
    ]);
    write_string(file, key);
    match input.byte() % 6 {
        0 => {
            file.extend(8_u32.to_le_bytes());
            write_string(file, "words");
        }
        1 => {
            file.extend(4_u32.to_le_bytes());
            let alignment = *[32, 64, 8, 0, 7].get(input.below(5)).unwrap_or(&32);
            file.extend(u32::to_le_bytes(alignment));
        }
        2 => {
            file.extend([9_u32, 8].map(u32::to_le_bytes).concat());
            file.extend(1_u64.to_le_bytes());
            write_string(file, "word");
        }
        3 => {
            let kind = u32::from(input.byte() % 16);
            file.extend(kind.to_le_bytes());
            file.extend(input.number().to_le_bytes());
        }
        _ => {
            file.extend([9_u32, 5].map(u32::to_le_bytes).concat());
            let sides = input.below(4);
            file.extend((sides as u64).to_le_bytes());
            (0..sides).for_each(|_| file.extend(u32::from(input.byte() % 65).to_le_bytes()));
        }
    }
}
