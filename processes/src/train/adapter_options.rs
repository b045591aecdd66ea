//! Converts the `network` section of the config to the engine's types.

use crate::adapters::{
    AdapterConfig, AdapterType, Difference, Dora, Dropout, LayerRank, Locon, Loha, Lokr, Lora, Rank, WeightDecomposed,
};
use crate::error::{EngineError, Result};
use aitk_common::job::lokr::LokrSplits;
use aitk_common::job::network::{LOKR_FULL_RANK, NetworkConfig, NetworkType};

/// The effective alpha: 0 means the rank, as in ai-toolkit (`toolkit/lora_special.py`) and kohya's scripts.
fn effective_alpha(configured: f64, rank: u32) -> f64 {
    match configured == 0.0 {
        true => f64::from(rank),
        false => configured,
    }
}

/// The type of adapter that is trained.
pub(super) fn adapter_type(network: &NetworkConfig) -> Result<Box<dyn AdapterType>> {
    let is_lora = !matches!(network.kind, NetworkType::Lokr | NetworkType::Loha);
    let inner: Box<dyn AdapterType> = match network.kind {
        NetworkType::Lora | NetworkType::Lierla => Box::new(Lora),
        NetworkType::Locon | NetworkType::Lycoris => Box::new(Locon),
        NetworkType::Lokr => Box::new(Lokr {
            factor: usize::try_from(*network.lokr_factor).ok(),
            old_names: network.old_lokr_format,
            splits: LokrSplits {
                smaller_first: network.network_kwargs.smaller_factor_first,
                unbalanced: network.network_kwargs.unbalanced_factorization,
                decompose_both: network.network_kwargs.decompose_both,
            },
        }),
        NetworkType::Loha => Box::new(Loha),
        NetworkType::Dora => Box::new(Dora),
        NetworkType::Fullrank => Box::new(Difference),
        NetworkType::Lorm => {
            return Err(EngineError::Unsupported(format!(
                "network.type: `{}` is not trained yet",
                network.kind
            )));
        }
    };
    let kwargs = &network.network_kwargs;
    if !kwargs.dora_wd {
        return Ok(inner);
    }
    Ok(Box::new(WeightDecomposed {
        inner,
        is_lora,
        on_outputs: kwargs.wd_on_out,
    }))
}

/// Converts the `network` section.
pub(super) fn adapter_config(network: &NetworkConfig) -> AdapterConfig {
    let kwargs = &network.network_kwargs;
    let of_rank = kwargs.rank_dropout.unwrap_or(0.0);
    // As in LyCORIS.
    let drops_outputs = matches!(network.kind, NetworkType::Lokr | NetworkType::Loha);
    let config = AdapterConfig {
        rank: network.linear as usize,
        alpha: effective_alpha(network.linear_alpha, network.linear),
        conv_rank: network.conv.map(|r| r as usize),
        conv_alpha: effective_alpha(network.conv_alpha.unwrap_or(0.0), network.conv.unwrap_or(1)),
        layer_ranks: layer_ranks(network),
        dropout: Dropout {
            input: 0.0,
            element: network.dropout.unwrap_or(0.0),
            rank: if drops_outputs { 0.0 } else { of_rank },
            output: if drops_outputs {
                of_rank
            } else {
                kwargs.output_dropout.unwrap_or(0.0)
            },
            module: kwargs.module_dropout.unwrap_or(0.0),
        },
        tucker: kwargs.use_cp,
        rank_stabilised: kwargs.rs_lora,
        scalar: kwargs.use_scalar,
        only_if_contains: kwargs
            .only_if_contains
            .as_ref()
            .map(|l| l.0.clone())
            .unwrap_or_default(),
        ignore_if_contains: kwargs.ignore_if_contains.0.clone(),
        full_if_contains: kwargs.full_if_contains.0.clone(),
        norms: network.all_layers || kwargs.train_norm,
        lycoris_norms: kwargs.train_norm,
        containers: network.target_classes(),
        whole_in_out: kwargs.full_train_in_out,
        parameter_threshold: kwargs.parameter_threshold,
        blocks_only: network.transformer_only,
        alpha_in_config: false,
    };
    if network.kind != NetworkType::Lokr || !network.lokr_full_rank {
        return config;
    }
    let (rank, alpha) = (LOKR_FULL_RANK as usize, LOKR_FULL_RANK as f64);
    AdapterConfig {
        rank,
        alpha,
        conv_rank: Some(rank),
        conv_alpha: alpha,
        rank_stabilised: false,
        ..config
    }
}

/// Converts `network.layer_ranks`: what an entry does not set is that of the network.
fn layer_ranks(network: &NetworkConfig) -> Vec<LayerRank> {
    let rank = |rank: u32, alpha: Option<f64>| Rank {
        rank: rank as usize,
        alpha: effective_alpha(alpha.unwrap_or(0.0), rank),
    };
    let entries = network.layer_ranks.iter().map(|entry| LayerRank {
        contains: entry.contains.clone(),
        linear: rank(
            entry.linear.unwrap_or(network.linear),
            entry.linear_alpha.or(Some(network.linear_alpha)),
        ),
        conv: rank(
            entry.conv.or(network.conv).unwrap_or(0),
            entry.conv_alpha.or(network.conv_alpha),
        ),
    });
    entries.collect()
}
