//! Compares FLUX blocks with diffusers (`tests/reference/make_ops.py`), with the gradients of all weights.

use super::{
    FluxConditions, FluxConfig, FluxSingleTransformerBlock, FluxSizes, FluxTransformer2DModel, FluxTransformerBlock,
    rotary,
};
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::models::config;
use crate::nn::cat_channels;
use crate::testing::{Reference, close};
use crate::testing::{fixtures, gap, largest};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Result, Tensor, Var, safetensors};

type Block = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// Checks the result of a block and the gradients of its inputs and of all its weights.
fn check_block(case: &str, make: impl Fn(&Weights) -> crate::error::Result<Block>) {
    let reference = Reference::open();
    let index = Index::open(fixtures().join("models/ops.safetensors")).unwrap();
    let prefix = format!("{case}/weights.");
    let index = index.renamed(|name, shape| Some((name.strip_prefix(&prefix)?.to_owned(), shape.to_vec())));
    for dtype in [DType::F32, DType::F64] {
        let weights = Weights::from_index(index.clone(), dtype, &Device::Cpu).trainable();
        let block = make(&weights).unwrap();
        let vars = weights.vars();
        assert_eq!(vars.len(), index.tensors().count(), "every weight is used");
        reference.check(case, &["x", "text", "temb"], |x| {
            // The inputs have the dtype of the check, the weights that of this iteration.
            let inputs: Vec<_> = x.iter().map(|x| x.to_dtype(dtype)).collect::<Result<_>>()?;
            block(&inputs)?.to_dtype(x[0].dtype())
        });
        let inputs = ["x", "text", "temb"].map(|name| reference.get(case, name, dtype));
        let probe = reference.get(case, "probe", dtype);
        let (_, found) = gradients(|| (block(&inputs)? * &probe)?.sum_all()).unwrap();
        for (name, var) in &vars {
            let expected = reference.get(case, &format!("d.weights.{name}"), dtype);
            close(
                found.get(var).unwrap(),
                &expected,
                &format!("{case}: gradient of {name}"),
            );
        }
    }
}

const SIZES: FluxSizes = FluxSizes {
    heads: 3,
    head_width: 8,
};

#[test]
fn flux_blocks_match_diffusers() {
    let positions = rotary(4, (2, 3), [2, 2, 4]).unwrap();
    check_block("flux_double", |weights| {
        let block = FluxTransformerBlock::new(weights, SIZES)?;
        let positions = positions.clone();
        Ok(Box::new(move |x| {
            let (image, text) = block.forward(&x[0], &x[1], &x[2], &positions, None)?;
            cat_channels(&text, &image)
        }))
    });
    check_block("flux_single", |weights| {
        let block = FluxSingleTransformerBlock::new(weights, SIZES)?;
        let positions = positions.clone();
        Ok(Box::new(move |x| {
            block.forward(&cat_channels(&x[1], &x[0])?, &x[2], &positions, None)
        }))
    });
}

crate::testing::in_portable_mode! {
    half_precision_is_within_its_arithmetic_and_has_no_nan,
    the_whole_transformer_gives_the_velocity_and_the_gradients_of_diffusers,
    flux_blocks_match_diffusers,
}

#[test]
fn the_whole_transformer_gives_the_velocity_and_the_gradients_of_diffusers() {
    let tensors = safetensors::load(fixtures().join("models/flux.safetensors"), &Device::Cpu).unwrap();
    for (name, folder) in [("dev", "tiny_flux"), ("schnell", "tiny_flux_schnell")] {
        let folder = fixtures().join(folder).join("transformer");
        let weights = Weights::open(&folder, DType::F32, &Device::Cpu).unwrap();
        let config = config::read(&folder.join("config.json")).unwrap();
        let mut model = FluxTransformer2DModel::new(&weights, &config).unwrap();
        assert_eq!(model.has_guidance(), name == "dev");
        for (case, checkpointing, lengths) in [
            ("square", Checkpointing::Off, &[][..]),
            ("tall", Checkpointing::Off, &[][..]),
            ("wide", Checkpointing::Segments { blocks: 1 }, &[][..]),
            ("one", Checkpointing::Segments { blocks: 2 }, &[][..]),
            // The padding of texts is masked: of one that is shorter than the other one of the batch, and of both.
            ("masked", Checkpointing::Off, &[4, 9][..]),
            ("masked", Checkpointing::Segments { blocks: 1 }, &[4, 9][..]),
            ("shorter", Checkpointing::Off, &[5][..]),
        ] {
            if name == "schnell" && !lengths.is_empty() {
                continue;
            }
            model.checkpointing = checkpointing;
            let get = |what: &str| tensors[&format!("{name}/{case}/{what}")].clone();
            let close = |found: &Tensor, what: &str| {
                let expected = get(what);
                let error = gap(found, &expected) / largest(&expected);
                assert!(error < 1e-4, "{name}/{case}/{what}: {error}");
            };
            let (latents, context) = (
                Var::from_tensor(&get("latents")).unwrap(),
                Var::from_tensor(&get("context")).unwrap(),
            );
            let (pooled, guidance) = (get("pooled"), get("guidance"));
            let (y, gradients) = gradients(|| {
                let conditions = FluxConditions {
                    text: &context,
                    text_lengths: Some(lengths).filter(|lengths| !lengths.is_empty()),
                    pooled: &pooled,
                    guidance: Some(&guidance),
                    control: None,
                };
                let y = model.forward(&latents, &get("timesteps"), &conditions)?;
                close(&y, "y");
                Ok::<_, crate::error::EngineError>((y * get("probe"))?.sum_all()?)
            })
            .unwrap();
            assert!(y.to_scalar::<f32>().unwrap().is_finite());
            close(gradients.get(&latents).unwrap(), "d.latents");
            close(gradients.get(&context).unwrap(), "d.context");
        }
    }
}

#[test]
fn half_precision_is_within_its_arithmetic_and_has_no_nan() {
    let tensors = safetensors::load(fixtures().join("models/flux.safetensors"), &Device::Cpu).unwrap();
    let folder = fixtures().join("tiny_flux/transformer");
    let config = config::read(&folder.join("config.json")).unwrap();
    for (dtype, tolerance) in [(DType::BF16, 0.06), (DType::F16, 0.01)] {
        let weights = Weights::open(&folder, dtype, &Device::Cpu).unwrap();
        let model = FluxTransformer2DModel::new(&weights, &config).unwrap();
        for case in ["square", "wide", "odd"] {
            let get = |what: &str| tensors[&format!("dev/{case}/{what}")].clone();
            let (text, pooled) = (
                get("context").to_dtype(dtype).unwrap(),
                get("pooled").to_dtype(dtype).unwrap(),
            );
            let conditions = FluxConditions {
                text: &text,
                text_lengths: None,
                pooled: &pooled,
                guidance: Some(&get("guidance")),
                control: None,
            };
            let latents = get("latents").to_dtype(dtype).unwrap();
            let y = model.forward(&latents, &get("timesteps"), &conditions).unwrap();
            let y = y.to_dtype(DType::F32).unwrap();
            let error = gap(&y, &get("y")) / largest(&get("y"));
            // The error of half precision is not zero, and NaN is not an error below the tolerance.
            assert!(error > 1e-5 && error < tolerance, "{dtype:?}, {case}: {error}");
        }
    }
}

#[test]
fn axes_that_are_not_those_of_a_head_are_errors() {
    let folder = fixtures().join("tiny_flux/transformer");
    let weights = Weights::open(&folder, DType::F32, &Device::Cpu).unwrap();
    // The last has a sum that would wrap around to the features of a head.
    let half = 1_usize << (usize::BITS - 1);
    for axes in [vec![4, 6], vec![4, 6, 4], vec![3, 7, 6], vec![half, half, 16]] {
        let mut config: FluxConfig = config::read(&folder.join("config.json")).unwrap();
        config.axes_dims_rope = axes;
        let error = FluxTransformer2DModel::new(&weights, &config).unwrap_err().to_string();
        assert!(error.contains("axes_dims_rope"), "{error}");
    }
}

#[test]
fn sizes_of_no_model_are_errors() {
    let folder = fixtures().join("tiny_flux/transformer");
    let weights = Weights::open(&folder, DType::F32, &Device::Cpu).unwrap();
    let mut config: FluxConfig = config::read(&folder.join("config.json")).unwrap();
    (config.in_channels, config.out_channels) = (0, None);
    let error = FluxTransformer2DModel::new(&weights, &config).unwrap_err().to_string();
    assert!(error.contains("`in_channels` is 0"), "{error}");
    let mut config: FluxConfig = config::read(&folder.join("config.json")).unwrap();
    config.num_attention_heads = usize::MAX / 2;
    let error = FluxTransformer2DModel::new(&weights, &config).unwrap_err().to_string();
    assert!(
        error.contains("`num_attention_heads times attention_head_dim` is 18446744073709551615"),
        "{error}"
    );
}
