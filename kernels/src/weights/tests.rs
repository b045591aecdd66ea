use super::*;
use crate::error::EngineError as E;
use std::collections::HashMap;

fn write(path: &Path, tensors: &[(&str, &[usize], DType)]) {
    let tensors: HashMap<String, Tensor> = tensors
        .iter()
        .map(|(name, shape, dtype)| {
            let count = shape.iter().product::<usize>();
            let values = Tensor::arange(0f32, count as f32, &Device::Cpu)
                .unwrap()
                .affine(0.125, -0.5)
                .unwrap();
            (
                (*name).to_owned(),
                values.reshape(*shape).unwrap().to_dtype(*dtype).unwrap(),
            )
        })
        .collect();
    candle_core::safetensors::save(&tensors, path).unwrap();
}

fn open(path: &Path) -> Result<Weights> {
    Weights::open(path, DType::F32, &Device::Cpu)
}

#[test]
fn all_tensors_of_a_checkpoint_are_read_in_their_dtypes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("optimizer.safetensors");
    let numbers = Tensor::arange(0f32, 600.0, &Device::Cpu).unwrap();
    let numbers = numbers.affine(0.125, 3.0).unwrap().reshape((20, 30)).unwrap();
    let mut tensors = std::collections::BTreeMap::from([
        ("step".to_owned(), Tensor::new(7i64, &Device::Cpu).unwrap()),
        ("d".to_owned(), Tensor::new(&[0.1f64, 2.0], &Device::Cpu).unwrap()),
    ]);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::U8, DType::U32] {
        tensors.insert(format!("{dtype:?}"), numbers.to_dtype(dtype).unwrap());
    }
    let mut out = Vec::new();
    write_tensors(&mut out, &tensors, &std::collections::BTreeMap::new()).unwrap();
    std::fs::write(&file, &out).unwrap();
    let read = read_tensors(&file).unwrap();
    assert!(read.keys().eq(tensors.keys()));
    for (name, tensor) in &tensors {
        let found = &read[name];
        assert_eq!((found.dtype(), found.dims()), (tensor.dtype(), tensor.dims()), "{name}");
        let values = |tensor: &Tensor| {
            let flat = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
            flat.to_vec1::<f64>().unwrap()
        };
        assert_eq!(values(found), values(tensor), "{name}");
    }
    std::fs::write(&file, &out[..out.len() - 1]).unwrap();
    let error = read_tensors(&file).unwrap_err().to_string();
    assert!(error.contains("optimizer.safetensors"), "{error}");
}

#[test]
fn every_float_dtype_reads_as_f32() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.safetensors");
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        write(&file, &[("block.0.weight", &[3, 5], dtype)]);
        let weight = open(&file).unwrap().pp("block").pp(0).get((3, 5), "weight").unwrap();
        assert_eq!(weight.dtype(), DType::F32);
        let values = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(
            values.iter().enumerate().all(|(i, v)| *v == i as f32 * 0.125 - 0.5),
            "{dtype:?} {values:?}"
        );
    }
    // More than one chunk of the conversion.
    write(&file, &[("w", &[10_000], DType::F16)]);
    let long = open(&file).unwrap().get(10_000, "w").unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(long[9_999], half::f16::from_f32(9_999.0 * 0.125 - 0.5).to_f32());
    let half = Weights::open(&file, DType::F16, &Device::Cpu)
        .unwrap()
        .get(10_000, "w")
        .unwrap();
    assert_eq!(half.dtype(), DType::F16);
}

#[test]
fn long_tensors_are_read_in_chunks_and_a_truncated_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.safetensors");
    const COUNT: usize = (5 << 20) / 8 + 3;
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        write(&file, &[("v", &[3], dtype), ("w", &[COUNT], dtype)]);
        let weights = open(&file).unwrap();
        let got = weights.get(COUNT, "w").unwrap().to_vec1::<f32>().unwrap();
        let stored = Tensor::from_vec(got.clone(), COUNT, &Device::Cpu).unwrap();
        let stored = stored.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
        assert!(
            stored.to_vec1::<f32>().unwrap() == got,
            "{dtype:?}: more digits than were stored"
        );
        let is_close = |(i, v): (usize, &f32)| (v - (i as f32 * 0.125 - 0.5)).abs() <= v.abs() / 128.0;
        assert!(got.iter().enumerate().all(is_close), "{dtype:?}");
        let other = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
        let converted = Weights::open(&file, other, &Device::Cpu).unwrap();
        assert_eq!(converted.get(COUNT, "w").unwrap().dtype(), other);

        let length = std::fs::metadata(&file).unwrap().len();
        let handle = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        handle.set_len(length - 1).unwrap();
        let error = weights.get(COUNT, "w").unwrap_err().to_string();
        assert!(error.contains("became shorter"), "{dtype:?}: {error}");
    }
}

#[test]
fn integers_of_8_bits_without_scales_are_found_without_reading_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.safetensors");
    let save = |values: Vec<u8>| {
        let tensor = Tensor::new(values, &Device::Cpu).unwrap();
        candle_core::safetensors::save(&HashMap::from([("block.weight", tensor)]), &file).unwrap();
        Index::open(&file).unwrap()
    };
    let index = save(vec![1, 2, 3]);
    let found = index.read("block.weight", DType::F32, &Device::Cpu).map(drop);
    for found in [found, index.check_types()] {
        let error = found.unwrap_err().to_string();
        assert!(error.contains("tensor `block.weight` is stored as U8"), "{error}");
    }
    index.shapes_only().check_types().unwrap();
    // A whole number, such as the alpha of a LoRA.
    let number = save(vec![8]).read("block.weight", DType::F32, &Device::Cpu).unwrap();
    assert_eq!(number.to_vec1::<f32>().unwrap(), [8.0]);
}

#[test]
fn a_missing_tensor_or_wrong_shape_is_named_in_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.safetensors");
    write(&file, &[("block.weight", &[3, 5], DType::F32)]);
    let weights = open(&file).unwrap().pp("block");
    match weights.get((3, 5), "weights").unwrap_err() {
        E::MissingTensor { name, nearest, .. } => {
            assert_eq!(
                (name.as_str(), nearest.as_deref()),
                ("block.weights", Some("block.weight"))
            );
        }
        other => panic!("{other}"),
    }
    let error = weights.get((5, 3), "weight").unwrap_err();
    assert!(matches!(&error, E::ShapeMismatch { expected, found, .. } if *expected == [5, 3] && *found == [3, 5]));
    assert!(error.to_string().contains("a.safetensors"));
    assert_eq!(error.cause(), aitk_common::attempt::FailureCause::BadInput);
}

#[test]
fn weights_files_in_a_folder_are_found_as_in_diffusers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let value = |name: &str| open(path).and_then(|w| w.get(2, name));
    assert!(open(path).unwrap_err().to_string().contains("no weights found"));

    std::fs::write(path.join("diffusion_pytorch_model.bin"), "x").unwrap();
    assert!(matches!(open(path).unwrap_err(), E::Pickle { .. }));

    write(
        &path.join("diffusion_pytorch_model.non_ema.safetensors"),
        &[("non_ema", &[2], DType::F16)],
    );
    write(
        &path.join("diffusion_pytorch_model.fp16.safetensors"),
        &[("fp16", &[2], DType::F16)],
    );
    value("fp16").unwrap();

    let index = path.join("diffusion_pytorch_model.safetensors.index.json");
    let shards = [
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model-00002-of-00002.safetensors",
    ];
    std::fs::write(
        &index,
        serde_json::json!({"weight_map": {"a": shards[0], "b": shards[1]}}).to_string(),
    )
    .unwrap();
    write(&path.join(shards[0]), &[("a", &[2], DType::F32)]);
    assert!(open(path).unwrap_err().to_string().contains("00002-of-00002"));
    write(&path.join(shards[1]), &[("b", &[2], DType::F32)]);
    value("a").unwrap();
    value("b").unwrap();
    let listed = serde_json::json!({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}});
    std::fs::write(&index, listed.to_string()).unwrap();
    let message = open(path).unwrap_err().to_string();
    assert!(
        message.contains("index.json") && message.contains("lists the tensor `c`, which no shard has"),
        "{message}"
    );
    std::fs::rename(path.join(shards[1]), path.join("away")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path.join(shards[1])).unwrap();
    let message = open(path).unwrap_err().to_string();
    assert!(message.contains("is a socket, not a file"), "{message}");
    std::fs::write(&index, r#"{"weight_map": {"a": "../../secret.safetensors"}}"#).unwrap();
    assert!(
        open(path)
            .unwrap_err()
            .to_string()
            .contains("not the name of a file in the same folder")
    );

    write(
        &path.join("diffusion_pytorch_model.safetensors"),
        &[("full", &[2], DType::F32)],
    );
    value("full").unwrap();
}

#[test]
fn files_that_are_not_safetensors_give_specific_errors() {
    let folder = tempfile::tempdir().unwrap();
    let error_for = |bytes: &[u8]| {
        let file = folder.path().join("model.safetensors");
        std::fs::write(&file, bytes).unwrap();
        open(&file).unwrap_err().to_string()
    };
    assert!(error_for(b"").contains("empty"));
    assert!(error_for(b"abc").contains("cut off"));
    assert!(error_for(b"PK\x03\x04 archive/data.pkl").contains("pickle"));
    assert!(error_for(b"\x80\x02}q\x00.").contains("pickle"));
    assert!(error_for(b"version https://git-lfs.github.com/spec/v1\noid").contains("git lfs pull"));
    assert!(error_for(b"<!DOCTYPE html><html>").contains("web page"));
    assert!(error_for(&[0xff; 64]).contains("not a safetensors file"));
    assert!(error_for(b"{\"a\": 1, \"b\": 2} is JSON").contains("not a safetensors file"));
    let garbage = [&16u64.to_le_bytes()[..], b"{ not JSON !!!!}"].concat();
    assert!(error_for(&garbage).contains("not a valid safetensors file"));
    // Found by the fuzzer: no elements, but the product of the other dimensions overflows.
    let header = format!(
        r#"{{"a":{{"dtype":"F32","shape":[0,{0},{0}],"data_offsets":[0,0]}}}}"#,
        1_u64 << 40
    );
    let overflowing = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    assert!(
        error_for(&overflowing).contains("impossible shape"),
        "{}",
        error_for(&overflowing)
    );
}

#[test]
fn a_file_truncated_at_any_byte_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.safetensors");
    write(&whole, &[("a", &[7], DType::F32), ("b", &[3, 3], DType::F16)]);
    let bytes = std::fs::read(&whole).unwrap();
    let cut = folder.path().join("cut.safetensors");
    for length in 0..bytes.len() {
        std::fs::write(&cut, &bytes[..length]).unwrap();
        let error = open(&cut).map(|_| ()).unwrap_err();
        assert!(matches!(error, E::WeightsFile { .. }), "{length}: {error}");
    }
}

#[test]
fn random_weights_depend_only_on_seed_and_name() {
    let draw = |seed: u64, names: &[&str]| {
        let weights = Weights::init(seed, &Device::Cpu);
        let values = names.iter().map(|n| {
            weights
                .get_with(4, n, Init::Normal(1.0))
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        });
        values.collect::<Vec<_>>()
    };
    let a_and_b = draw(1, &["a", "b"]);
    assert_eq!(draw(1, &["b"])[0], a_and_b[1]);
    assert_ne!(a_and_b[0], a_and_b[1]);
    assert_ne!(draw(2, &["a"])[0], a_and_b[0]);
    let weights = Weights::init(3, &Device::Cpu);
    let normal = weights.get_with(10_000, "n", Init::Normal(2.0)).unwrap();
    let variance = normal.sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
    assert!((variance - 4.0).abs() < 0.2, "{variance}");
    let uniform = weights
        .get_with(10_000, "u", Init::Uniform(0.5))
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    assert!(uniform.iter().all(|v| v.abs() <= 0.5) && uniform.iter().any(|v| v.abs() > 0.45));
    assert_eq!(
        weights.vars().iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["n", "u"]
    );
}

/// Rows of weights that are quantised in their files (`tests/reference/make_prequantised.py`, whose expected values the tests of
/// Stable Diffusion compare) are the rows of the dequantised weight, and stay quantised.
#[test]
fn rows_of_a_quantised_weight_are_read_without_dequantising_it() {
    let folder = crate::testing::fixtures().join("prequantised");
    let mut generator = crate::rng::TorchGenerator::manual_seed(5);
    let mut random = |below: usize| (generator.next_u64() % below as u64) as usize;
    let mut kinds = std::collections::BTreeSet::new();
    for file in [
        "checkpoint.gguf",
        "checkpoint_float8.safetensors",
        "unet_float8.safetensors",
        "unet_bitsandbytes.safetensors",
        "text_bitsandbytes.safetensors",
    ] {
        let index = Index::open(folder.join(file)).unwrap();
        for (name, shape) in index.tensors().filter(|(_, shape)| shape.first() > Some(&1)) {
            let rows = shape[0];
            let whole = index.read(name, DType::F32, &Device::Cpu).unwrap();
            let start = random(rows);
            let count = 1 + random(rows - start);
            let swapped = rows.is_multiple_of(2).then_some(View::HalvesSwapped);
            for view in [Some(View::Rows { start, count }), swapped].into_iter().flatten() {
                let views = index.views(|other, _| match other == name {
                    true => vec![("part".to_owned(), view)],
                    false => Vec::new(),
                });
                let expected = view.apply(&whole).unwrap();
                let read = views.read("part", DType::F32, &Device::Cpu).unwrap();
                assert_eq!(crate::testing::gap(&read, &expected), 0.0, "{file}: {name} {view:?}");
                let stored = views.read_quantized("part", DType::F32, &Device::Cpu).unwrap();
                let half = views.read_half("part", DType::F32, &Device::Cpu).unwrap();
                if let Some(quantized) = stored.or(half) {
                    kinds.insert(quantized.kind());
                    let dense = quantized.dequantize().unwrap();
                    assert_eq!(crate::testing::gap(&dense, &expected), 0.0, "{file}: {name} {view:?}");
                }
                if let Some(streamed) = views.stream("part", DType::F32, &Device::Cpu).unwrap() {
                    let dense = streamed.read().unwrap();
                    assert_eq!(crate::testing::gap(&dense, &expected), 0.0, "{file}: {name} {view:?}");
                }
            }
        }
    }
    let found: Vec<&str> = kinds.into_iter().collect();
    println!("{found:?}");
    for kind in [
        "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "float8", "nf4", "fp4", "int8",
    ] {
        assert!(found.contains(&kind), "{kind} in {found:?}");
    }
}

crate::testing::in_portable_mode! {
    rows_of_a_quantised_weight_are_read_without_dequantising_it,
}

/// A streamed weight that its file has in bfloat16 is multiplied as it is, with the bits of one that is resident; one in float32 and one in float16
/// are read as float32.
#[test]
fn streamed_16_bit_weights_give_the_bits_of_resident_ones() {
    use crate::autograd::gradients;
    use candle_core::Var;
    let folder = tempfile::tempdir().unwrap();
    let (inputs, outputs) = (70, 90);
    for (dtype, is_half) in [(DType::BF16, true), (DType::F16, false), (DType::F32, false)] {
        let file = folder.path().join("a.safetensors");
        write(
            &file,
            &[("a.weight", &[outputs, inputs], dtype), ("a.bias", &[outputs], dtype)],
        );
        let layer = |share: f64| {
            let weights = open(&file).unwrap().streamed(share).pp("a");
            crate::nn::Linear::new(&weights, inputs, outputs, true).unwrap()
        };
        let (resident, streamed) = (layer(0.0), layer(1.0));
        assert!(matches!(streamed.weight, Weight::Streamed(_)));
        let halves = streamed.weight.half_bytes().unwrap();
        assert_eq!(
            halves.map(|(_, bytes)| bytes.len()),
            is_half.then_some(2 * inputs * outputs)
        );
        // The products of few and of many rows differ.
        for rows in [1, 40, 200] {
            let x = Tensor::arange(0f32, (rows * inputs) as f32, &Device::Cpu).unwrap();
            let x = Var::from_tensor(&(x.reshape((rows, inputs)).unwrap() * 1e-4).unwrap()).unwrap();
            let results = [&resident, &streamed].map(|layer| {
                let loss = || layer.forward(x.as_tensor())?.sqr()?.sum_all();
                let (_, found) = gradients(loss).unwrap();
                let y = layer.forward(x.as_tensor()).unwrap();
                let dx = found.get(x.as_tensor()).unwrap();
                [&y, dx].map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap())
            });
            assert_eq!(results[0], results[1], "{dtype:?}, {rows} rows");
        }
    }
}
