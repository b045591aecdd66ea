//! What is trained: the LoRA of a `network` section, or the model itself.

use super::super::context::Context;
use super::super::language_model_part::{PEFT_PREFIX, language_model_part as part};
use crate::adapters::{AdapterConfig, AdapterHandle, AdapterNetwork, AdapterPass, Dropout, Lora};
use crate::error::{EngineError, Result};
use crate::models::causal_lm::CausalLm;
use crate::optim::Param;
use crate::rng::generator_for;
use aitk_common::job::lm_trainer::{LmNetworkConfig, LmTrainerProcess};
use std::sync::Arc;

/// What is trained.
pub(super) enum TrainedParameters {
    Lora(AdapterNetwork),
    Model(Vec<Param>),
}

fn adapter_config(network: &LmNetworkConfig) -> AdapterConfig {
    AdapterConfig {
        rank: network.linear as usize,
        alpha: network.alpha(),
        alpha_in_config: true,
        dropout: Dropout {
            input: network.dropout,
            ..Dropout::default()
        },
        only_if_contains: network.only_if_contains.0.clone(),
        ignore_if_contains: network.ignore_if_contains.0.clone(),
        ..AdapterConfig::default()
    }
}

fn network_error(error: EngineError) -> EngineError {
    match error {
        EngineError::BadInput(_) => EngineError::bad_input(
            "network: no layer is left to train; check `only_if_contains` and `ignore_if_contains`, which match names such as \
             `model.layers.0.self_attn.q_proj`",
        ),
        other => other,
    }
}

impl TrainedParameters {
    /// The parameters of a model that was just loaded. A LoRA is attached to its layers.
    pub(super) fn new(
        process: &LmTrainerProcess,
        model: &mut CausalLm,
        seed: u64,
        cx: &mut Context<'_>,
    ) -> Result<Self> {
        if let Some(network) = &process.network {
            let lora = Self::lora(network, model, seed)?;
            let weights: usize = lora.params().iter().map(|param| param.var.elem_count()).sum();
            cx.log(
                "info",
                format!(
                    "a LoRA of rank {} on {} layers: {:.2} million weights",
                    network.linear,
                    lora.layers(),
                    weights as f64 / 1e6
                ),
            );
            return Ok(Self::Lora(lora));
        }
        let params: Vec<Param> = model
            .trained_variables()
            .into_iter()
            .map(|(name, var)| Param { name, var })
            .collect();
        let weights: usize = params.iter().map(|param| param.var.elem_count()).sum();
        cx.log(
            "info",
            format!(
                "no `network` section: all {:.2} million weights of the model are trained, in {} tensors",
                weights as f64 / 1e6,
                params.len()
            ),
        );
        Ok(Self::Model(params))
    }

    fn lora(network: &LmNetworkConfig, model: &mut CausalLm, seed: u64) -> Result<AdapterNetwork> {
        let mut generator = generator_for(seed, "network", 0, 0);
        let config = adapter_config(network);
        AdapterNetwork::attach_as(&Lora, &config, None, &mut [part(model)], &mut generator).map_err(network_error)
    }

    /// Checks, with the names and shapes of a model alone, that the network has layers to train.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn check_network(network: &LmNetworkConfig, model: &mut CausalLm) -> Result<()> {
        AdapterNetwork::check(&Lora, &adapter_config(network), None, &mut [part(model)]).map_err(network_error)
    }

    /// The trained parameters, in a fixed order.
    pub(super) fn params(&self) -> Vec<Param> {
        match self {
            Self::Lora(network) => network.params(),
            Self::Model(params) => params.clone(),
        }
    }

    /// The names of the layers with a LoRA, in the model.
    pub(super) fn lora_layers(&self) -> Vec<String> {
        let Self::Lora(network) = self else {
            return Vec::new();
        };
        let prefix = format!("{PEFT_PREFIX}.");
        let mut names: Vec<String> = network
            .params()
            .iter()
            .filter_map(|param| {
                let name = param.name.strip_prefix(&prefix)?;
                let layer = [".lora_A", ".lora_embedding_A"]
                    .iter()
                    .find_map(|down| name.split_once(down));
                Some(layer?.0.to_owned())
            })
            .collect();
        names.sort();
        names
    }

    /// Runs a pass whose gradients are computed. What it drops follows from `seed`.
    pub(super) fn in_training<R>(&self, seed: &str, forward: impl FnOnce() -> R) -> R {
        let pass = AdapterPass {
            strength: 1.0,
            dropout_seed: Some(seed.into()),
        };
        match self.handle() {
            Some(handle) => handle.in_pass(pass, forward),
            None => forward(),
        }
    }

    /// Runs a pass of which nothing is kept.
    pub(super) fn in_inference<R>(&self, forward: impl FnOnce() -> R) -> R {
        match self.handle() {
            Some(handle) => handle.in_pass(AdapterPass::inference(1.0), forward),
            None => forward(),
        }
    }

    fn handle(&self) -> Option<&Arc<AdapterHandle>> {
        match self {
            Self::Lora(network) => Some(&network.handle),
            Self::Model(_) => None,
        }
    }
}
