//! Any bytes as a safetensors file: either refused with an error, or every tensor in its header lies inside the file.

use super::scratch::with_file;
use super::unstructured::Unstructured;
use aitk_engine::weights::{Index, Weights};
use candle_core::{DType, Device};

/// The first byte selects whether the others are a file, a header (with a correct length in front), or decisions that build a
/// file.
pub fn run(data: &[u8]) {
    let Some((&first, bytes)) = data.split_first() else {
        return;
    };
    match first % 4 {
        0 => read(bytes),
        1 => read(&framed(bytes, &[0; 64])),
        _ => read(&build(&mut Unstructured::new(bytes))),
    }
}

fn read(file: &[u8]) {
    with_file("weights.safetensors", file, |path| match Index::open(path) {
        Err(error) => assert!(!error.to_string().is_empty(), "an empty error message"),
        Ok(index) => {
            let _ = index.metadata();
            let mut elements = 0_usize;
            for (name, shape) in index.tensors() {
                assert_eq!(index.shape(name), Some(shape));
                let count = shape.iter().try_fold(1_usize, |count, side| count.checked_mul(*side));
                elements = count
                    .and_then(|count| elements.checked_add(count))
                    .expect("the number of elements fits into usize");
            }
            // The smallest dtype has 4 bits.
            assert!(
                elements <= file.len().saturating_mul(2),
                "the tensors are larger than their file"
            );
            read_tensors(&index);
        }
    });
}

/// Every float tensor can be read, with the shape from the header.
fn read_tensors(index: &Index) {
    let weights = Weights::from_index(index.clone(), DType::F32, &Device::Cpu);
    for (name, shape) in index.tensors() {
        match weights.get(shape, name) {
            Err(error) => assert!(error.to_string().contains("is stored as"), "{name}: {error}"),
            Ok(tensor) => assert_eq!(tensor.dims(), shape),
        }
    }
}

/// A file with the header's length, the header and the data.
fn framed(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// A file whose tensors follow each other without gaps, with a few random errors.
fn build(input: &mut Unstructured<'_>) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut end = 0_u64;
    if input.one_in(4) {
        let value = serde_json::Value::String(input.chars());
        entries.push(format!(r#""__metadata__":{{"k":{value}}}"#));
    }
    for index in 0..input.below(5) {
        let (dtype, bits) = [
            ("F32", 32),
            ("F16", 16),
            ("BF16", 16),
            ("F64", 64),
            ("I64", 64),
            ("U8", 8),
            ("BOOL", 8),
            ("F8_E4M3", 8),
            ("F4", 4),
            ("NONE", 8),
        ][input.below(10)];
        let shape: Vec<u64> = (0..input.below(4)).map(|_| input.number()).collect();
        let bytes = shape
            .iter()
            .fold(bits, |product: u64, side| product.wrapping_mul(*side))
            / 8;
        let (mut from, mut to) = (end, end.wrapping_add(bytes));
        end = to;
        match input.byte() {
            250.. => from = input.number(),
            244..250 => to = input.number(),
            _ => {}
        }
        let name = match input.byte() % 8 {
            0 => serde_json::Value::String(input.chars()).to_string(),
            1 => "\"t0\"".into(),
            _ => format!("\"t{index}\""),
        };
        entries.push(format!(
            r#"{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{to}]}}"#
        ));
    }
    let mut header = format!("{{{}}}", entries.join(",")).into_bytes();
    header.extend(std::iter::repeat_n(b' ', input.below(9)));
    // The data is at most 4 KiB, so that files stay small.
    let length = usize::try_from(end).unwrap_or(0).min(4096);
    let mut file = framed(&header, &vec![0; length]);
    if input.one_in(16) {
        file.truncate(file.len() - input.below(file.len()));
    }
    file
}
