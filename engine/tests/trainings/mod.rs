//! Random trainings: what they train, and with which type of adapter.

use aitk_common::job::network::LOKR_FULL_RANK;
use aitk_engine::adapters::{AdapterConfig, AdapterNetwork, AdapterType, Difference, Dora, Dropout, Loha, Lokr, Lora};
use aitk_engine::families::Part;
use aitk_engine::rng::TorchGenerator;
use aitk_engine::weights::Weights;
use candle_core::{DType, Device};
use serde_json::{Value, json};

/// Random choices.
pub(crate) struct Random(pub(crate) TorchGenerator);

impl Random {
    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0.next_u64() as usize % count
    }

    pub(crate) fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    pub(crate) fn flip(&mut self) -> bool {
        self.below(2) == 0
    }
}

/// What a training trains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Training {
    Lora {
        rank: usize,
        conv: Option<usize>,
        dropout: bool,
    },
    Lokr {
        /// The rank of the second matrix; `None`: it is trained whole.
        rank: Option<usize>,
        factor: i64,
        /// Whether outputs are dropped.
        drops: bool,
    },
    /// Another type of adapter: `dora`, `loha` or `fullrank`.
    Other {
        kind: &'static str,
        rank: usize,
        conv: Option<usize>,
        dropout: bool,
    },
    Full {
        fused: bool,
    },
}

impl Training {
    /// Two types of adapters that are not LoRA, in a random form: four seeds in a row have each type twice.
    pub(crate) fn others(seed: u64) -> [Self; 2] {
        let r = &mut Random(TorchGenerator::manual_seed(1000 + seed));
        [seed, seed + 1].map(|number| {
            let (rank, has_conv, flag) = (1 + r.below(8), r.flip(), r.flip());
            let kind = match number % 4 {
                0 => {
                    return Self::Lokr {
                        rank: flag.then_some(2),
                        factor: r.choose(&[-1, 2, 4]),
                        drops: has_conv,
                    };
                }
                1 => "dora",
                2 => "loha",
                _ => "fullrank",
            };
            Self::Other {
                kind,
                rank,
                conv: has_conv.then_some(2),
                dropout: flag && kind == "dora",
            }
        })
    }

    /// The section of a config.
    pub(crate) fn network(self) -> Value {
        match self {
            Self::Full { .. } => Value::Null,
            Self::Lora { rank, conv, dropout } => json!({
                "type": "lora", "linear": rank, "conv": conv, "dropout": if dropout { 0.5 } else { 0.0 },
            }),
            Self::Other {
                kind,
                rank,
                conv,
                dropout,
            } => json!({
                "type": kind, "linear": rank, "conv": conv, "dropout": if dropout { 0.5 } else { 0.0 },
            }),
            Self::Lokr { rank, factor, drops } => json!({
                "type": "lokr", "linear": rank, "conv": rank, "lokr_full_rank": rank.is_none(), "lokr_factor": factor,
                "network_kwargs": {"rank_dropout": if drops { 0.5 } else { 0.0 }},
            }),
        }
    }
}

/// The name of a dtype in configs.
pub(crate) fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

pub(crate) fn weights(dtype: DType) -> Weights {
    Weights::init(1, &Device::Cpu).frozen().in_dtype(dtype)
}

/// The network of a training, attached to a part.
pub(crate) fn lora(training: Training, blocks_only: bool, part: Part<'_>) -> Option<AdapterNetwork> {
    let chance = |drops: bool| if drops { 0.5 } else { 0.0 };
    let (rank, conv_rank, dropout) = match training {
        Training::Full { .. } => return None,
        Training::Lora { rank, conv, dropout }
        | Training::Other {
            rank, conv, dropout, ..
        } => {
            let dropout = Dropout {
                element: chance(dropout),
                ..Dropout::default()
            };
            (rank, conv, dropout)
        }
        Training::Lokr { rank, drops, .. } => {
            let rank = rank.unwrap_or(LOKR_FULL_RANK as usize);
            let dropout = Dropout {
                output: chance(drops),
                ..Dropout::default()
            };
            (rank, Some(rank), dropout)
        }
    };
    let config = AdapterConfig {
        rank,
        alpha: rank as f64,
        conv_rank,
        conv_alpha: 1.0,
        dropout,
        blocks_only,
        ..AdapterConfig::default()
    };
    let adapter: Box<dyn AdapterType> = match training {
        Training::Lokr { factor, .. } => Box::new(Lokr {
            factor: usize::try_from(factor).ok(),
            ..Lokr::SQUARE
        }),
        Training::Other { kind: "dora", .. } => Box::new(Dora),
        Training::Other { kind: "loha", .. } => Box::new(Loha),
        Training::Other { .. } => Box::new(Difference),
        _ => Box::new(Lora),
    };
    let mut generator = TorchGenerator::manual_seed(1);
    let network = AdapterNetwork::attach_as(&*adapter, &config, None, &mut [part], &mut generator).unwrap();
    network.handle.set_training(Some("dropout"));
    Some(network)
}
