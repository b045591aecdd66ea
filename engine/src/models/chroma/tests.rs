//! Compares Chroma's transformer with diffusers (`tests/reference/make_models_chroma.py`), whose names and shapes it has.

use super::{ChromaConfig, ChromaTransformer2DModel};
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::models::config;
use crate::nn::{LayerMut, VisitLayers};
use crate::testing::{chroma_folder, chroma_tensors, fixtures, formula, gap, largest};
use crate::weights::Weights;
use candle_core::{DType, Device, Tensor, Var, safetensors};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// The numbers of a tensor of `make_models_chroma.py`.
fn numbers(name: &str, shape: &[usize], scale: f32) -> Tensor {
    Tensor::from_vec(formula(name, shape.iter().product(), scale), shape, &Device::Cpu).unwrap()
}

/// A case: latents, text, the tokens of each text that others attend to, timesteps, as in `CASES` there.
struct Case {
    name: &'static str,
    latents: [usize; 4],
    places: usize,
    /// With one token of the padding, if there is one.
    lengths: &'static [usize],
    timesteps: &'static [f32],
}

const CASES: [Case; 3] = [
    Case {
        name: "square",
        latents: [1, 16, 4, 4],
        places: 9,
        lengths: &[9],
        timesteps: &[700.0],
    },
    Case {
        name: "wide",
        latents: [2, 16, 2, 6],
        places: 7,
        lengths: &[7, 4],
        timesteps: &[1000.0, 31.25],
    },
    Case {
        name: "shorter",
        latents: [1, 16, 6, 2],
        places: 11,
        lengths: &[5],
        timesteps: &[0.5],
    },
];

impl Case {
    fn latents(&self) -> Tensor {
        numbers(&format!("{}.latents", self.name), &self.latents, 1.7)
    }

    fn context(&self) -> Tensor {
        let shape = [self.latents[0], self.places, 24];
        numbers(&format!("{}.context", self.name), &shape, 1.7)
    }

    fn probe(&self) -> Tensor {
        numbers(&format!("{}.probe", self.name), &self.latents, 1.0)
    }

    fn timesteps(&self) -> Tensor {
        Tensor::new(self.timesteps, &Device::Cpu).unwrap()
    }
}

fn config_of(folder: &Path) -> ChromaConfig {
    config::read(&folder.join("transformer/config.json")).unwrap()
}

fn expected() -> HashMap<String, Tensor> {
    safetensors::load(fixtures().join("models/chroma.safetensors"), &Device::Cpu).unwrap()
}

fn close(found: &Tensor, expected: &Tensor, what: &str) {
    let error = gap(found, expected) / largest(expected);
    assert!(error < 1e-4, "{what}: {error}");
}

#[test]
fn it_has_the_tensors_of_diffusers() {
    let folder = chroma_folder();
    let weights = Weights::open(folder.path().join("transformer"), DType::F32, &Device::Cpu).unwrap();
    let mut model = ChromaTransformer2DModel::new(&weights, &config_of(folder.path())).unwrap();
    let read = weights.requested_tensors().unwrap();
    let found: BTreeMap<String, Vec<usize>> = read
        .tensors()
        .map(|(name, dims)| (name.to_owned(), dims.to_vec()))
        .collect();
    let known = chroma_tensors();
    assert!(found.keys().eq(known.keys()), "all tensors are used");
    // Every tensor belongs to a layer or a norm that a LoRA can change.
    let mut visited = BTreeSet::new();
    let mut visit = |name: &str, layer: LayerMut<'_>| -> crate::error::Result<()> {
        visited.insert(format!("{name}.weight"));
        if let LayerMut::Linear(_) = layer {
            visited.insert(format!("{name}.bias"));
        }
        Ok(())
    };
    model.visit_layers(&mut visit).unwrap();
    model.visit_norms(&mut visit).unwrap();
    assert!(visited.iter().eq(known.keys()));
}

#[test]
fn the_whole_transformer_gives_the_velocity_and_the_gradients_of_diffusers() {
    let (folder, expected) = (chroma_folder(), expected());
    let weights = Weights::open(folder.path().join("transformer"), DType::F32, &Device::Cpu).unwrap();
    let weights = weights.trainable();
    let mut model = ChromaTransformer2DModel::new(&weights, &config_of(folder.path())).unwrap();
    let vars: BTreeMap<String, Var> = weights.vars().into_iter().collect();
    for case in CASES {
        for checkpointing in [Checkpointing::Off, Checkpointing::Segments { blocks: 2 }] {
            model.checkpointing = checkpointing;
            let get = |what: &str| &expected[&format!("{}/{what}", case.name)];
            let latents = Var::from_tensor(&case.latents()).unwrap();
            let context = Var::from_tensor(&case.context()).unwrap();
            let (_, found) = gradients(|| {
                let y = model.forward(&latents, &case.timesteps(), &context, case.lengths)?;
                close(&y, get("y"), case.name);
                Ok::<_, crate::error::EngineError>((y * case.probe())?.sum_all()?)
            })
            .unwrap();
            if case.name != "wide" {
                continue;
            }
            close(found.get(&latents).unwrap(), get("d.latents"), "latents");
            close(found.get(&context).unwrap(), get("d.context"), "context");
            let mut of_weights = Vec::new();
            for (name, var) in vars.iter().filter(|(_, var)| var.dims().len() == 1) {
                let gradient = found.get(var).unwrap_or_else(|| panic!("no gradient of {name}"));
                of_weights.extend(gradient.to_vec1::<f32>().unwrap().into_iter().step_by(7));
            }
            let of_weights = Tensor::new(of_weights, &Device::Cpu).unwrap();
            close(&of_weights, get("d.weights"), "weights");
        }
    }
}

#[test]
fn half_precision_is_within_its_arithmetic_and_has_no_nan() {
    let (folder, expected) = (chroma_folder(), expected());
    for (dtype, tolerance) in [(DType::BF16, 0.06), (DType::F16, 0.01)] {
        let weights = Weights::open(folder.path().join("transformer"), dtype, &Device::Cpu).unwrap();
        let model = ChromaTransformer2DModel::new(&weights, &config_of(folder.path())).unwrap();
        for case in CASES {
            let (latents, context) = (case.latents().to_dtype(dtype), case.context().to_dtype(dtype));
            let y = model
                .forward(&latents.unwrap(), &case.timesteps(), &context.unwrap(), case.lengths)
                .unwrap();
            let y = y.to_dtype(DType::F32).unwrap();
            let expected = &expected[&format!("{}/y", case.name)];
            let error = gap(&y, expected) / largest(expected);
            // The error of half precision is not zero, and NaN is not an error below the tolerance.
            assert!(error > 1e-5 && error < tolerance, "{dtype:?}, {}: {error}", case.name);
        }
    }
}

#[test]
fn configs_of_no_model_are_errors() {
    let folder = chroma_folder();
    let weights = Weights::open(folder.path().join("transformer"), DType::F32, &Device::Cpu).unwrap();
    let error_of = |change: &dyn Fn(&mut ChromaConfig)| {
        let mut config = config_of(folder.path());
        change(&mut config);
        ChromaTransformer2DModel::new(&weights, &config)
            .unwrap_err()
            .to_string()
    };
    let error = error_of(&|config| config.axes_dims_rope = vec![4, 6]);
    assert!(error.contains("axes_dims_rope"), "{error}");
    let error = error_of(&|config| config.approximator_num_channels = 66);
    assert!(error.contains("approximator_num_channels 66"), "{error}");
    let error = error_of(&|config| config.approximator_hidden_dim = 0);
    assert!(error.contains("`approximator_hidden_dim` is 0"), "{error}");
    // Blocks that the file does not have, in numbers whose vectors would not fit into a number.
    let error = error_of(&|config| config.num_single_layers = usize::MAX / 2);
    assert!(error.contains("single_transformer_blocks.3."), "{error}");
    let error = error_of(&|config| config.num_layers = usize::MAX / 2);
    assert!(error.contains("transformer_blocks.2."), "{error}");
}

crate::testing::in_portable_mode! {
    half_precision_is_within_its_arithmetic_and_has_no_nan,
    the_whole_transformer_gives_the_velocity_and_the_gradients_of_diffusers,
}
