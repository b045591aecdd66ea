//! The layers of a component and the memory of their weights, as `kernels/src/weights` and `kernels/src/quant` choose it.

use super::layers::{Adapter, AdapterForm, KronSizes, Layer, Unpacking};
use super::norm::Norm;
use crate::job::lokr::{LokrSplits, lokr_is_full};
use crate::job::lora_containers::is_in_container;
use crate::plan::names::{LayerNames, NameFilter, matches_glob};
use crate::plan::qtype::QType;

/// The type of a job's adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::plan) enum AdapterKind {
    #[default]
    Lora,
    /// A LoRA with a trained number for each layer in the blocks of a U-Net.
    Locon,
    Lokr {
        /// `None`: as square as possible.
        factor: Option<usize>,
        splits: LokrSplits,
    },
    Dora,
    Loha,
    /// A whole difference of each layer (`fullrank`).
    Difference,
}

/// The sides of layers that have a magnitude for each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::plan) enum MagnitudeSide {
    Outputs,
    Inputs,
}

/// The blocks of a U-Net whose layers get a LoCon (`engine/src/adapters/locon.rs`).
const LOCON_BLOCKS: [&str; 4] = ["attentions", "resnets", "downsamplers", "upsamplers"];

/// The layers of a U-Net that `full_train_in_out` trains (`engine/src/adapters/whole_layer.rs`).
const WHOLE_LAYERS: [&str; 2] = ["conv_in", "conv_out"];

/// The beginning of the names of a U-Net's layers in LoRA files.
const UNET_PREFIX: &str = "lora_unet";

/// The adapter (LoRA) of a job.
#[derive(Clone, Debug, Default)]
pub(in crate::plan) struct AdapterOptions {
    pub(in crate::plan) kind: AdapterKind,
    pub(in crate::plan) rank: f64,
    /// The rank of convolutions with a kernel above 1 x 1.
    pub(in crate::plan) conv_rank: Option<f64>,
    /// Other ranks for some of the layers; the first entry whose text is in a name is used.
    pub(in crate::plan) layer_ranks: Vec<LayerRankOptions>,
    pub(in crate::plan) dropout: bool,
    /// Whether larger convolutions have a Tucker decomposition.
    pub(in crate::plan) tucker: bool,
    /// Whether a trained number multiplies the change of each layer (`use_scalar`).
    pub(in crate::plan) scalar: bool,
    /// The magnitudes of weights that are decomposed (`dora_wd`).
    pub(in crate::plan) magnitudes: Option<MagnitudeSide>,
    /// Whether inputs of the down projections are dropped.
    pub(in crate::plan) drops_inputs: bool,
    pub(in crate::plan) filter: NameFilter,
    /// Layers whose name contains one of these are trained as whole differences.
    pub(in crate::plan) full_if_contains: Vec<String>,
    /// The class names of the modules of a U-Net in which layers get an adapter; empty: all do.
    pub(in crate::plan) containers: Vec<String>,
    /// All norms are trained as whole differences.
    pub(in crate::plan) norms: bool,
    /// The first and the last convolution of a U-Net are trained themselves.
    pub(in crate::plan) whole_in_out: bool,
    /// Layers with fewer weights and biases have no adapter.
    pub(in crate::plan) parameter_threshold: f64,
}

/// The ranks of the layers whose name contains a text; 0: no adapter.
#[derive(Clone, Debug)]
pub(in crate::plan) struct LayerRankOptions {
    pub(in crate::plan) contains: String,
    pub(in crate::plan) rank: f64,
    /// Of convolutions with a kernel above 1 x 1.
    pub(in crate::plan) conv_rank: f64,
}

/// What a job does with the weights of a component.
#[derive(Clone, Debug, Default)]
pub(in crate::plan) struct ComponentOptions {
    /// The fraction of the layers' weights that is streamed; on a GPU, quantised layers of it are offloaded instead.
    pub(in crate::plan) streamed: f64,
    pub(in crate::plan) qtype: Option<QType>,
    /// Names of layers that are not quantised.
    pub(in crate::plan) exclude: Vec<String>,
    /// The component's own tensors that are trained.
    pub(in crate::plan) trained: Option<NameFilter>,
    /// Vectors of a textual inversion that are trained.
    pub(in crate::plan) learned_vectors: f64,
    pub(in crate::plan) adapter: Option<AdapterOptions>,
    /// The beginning of the names of its layers in LoRA files.
    pub(in crate::plan) lora_prefix: &'static str,
    /// The layers that get an adapter if the job's filter selects them.
    pub(in crate::plan) lora_layers: LoraLayers,
    /// Bytes per number of the compute dtype.
    pub(in crate::plan) width: f64,
    /// Whether the operations are the engine's kernels for CPUs.
    pub(in crate::plan) cpu: bool,
    /// The weights that the files store in fewer bits.
    pub(in crate::plan) stored: StoredFractions,
}

/// The layers of a component that get an adapter.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::plan) enum LoraLayers {
    #[default]
    All,
    /// Those of text encoders.
    AttentionAndMlp,
    /// Those below these names: the repeated blocks of a transformer.
    Blocks(&'static [&'static str]),
}

impl LoraLayers {
    fn include(self, name: &str) -> bool {
        let is_in = |block: &&str| name.strip_prefix(*block).is_some_and(|rest| rest.starts_with('.'));
        match self {
            Self::All => true,
            Self::AttentionAndMlp => name.contains("self_attn.") || name.contains("mlp."),
            Self::Blocks(blocks) => blocks.iter().any(is_in),
        }
    }
}

/// The fractions of the layers' weights that are quantised or 16-bit in their files.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::plan) struct StoredFractions {
    pub(in crate::plan) quantised: f64,
    /// Bytes per quantised weight.
    pub(in crate::plan) bytes: f64,
    pub(in crate::plan) halves: f64,
}

/// A trained tensor.
#[derive(Clone, Copy, Debug)]
pub(in crate::plan) struct TrainedTensor {
    pub(in crate::plan) elements: f64,
    /// Elements of its factored second moments (means of rows and of columns); `None` for a tensor of one dimension.
    pub(in crate::plan) factored: Option<f64>,
}

/// Totals over a component's weights: bytes, and numbers of elements.
#[derive(Clone, Debug, Default)]
pub(in crate::plan) struct WeightTotals {
    /// Bytes in the compute dtype or as they are stored.
    pub(in crate::plan) resident: f64,
    /// Bytes of those that are quantised when they are loaded.
    pub(in crate::plan) quantised: f64,
    /// The dense size in bytes of the largest weight that is quantised when it is loaded.
    pub(in crate::plan) largest_quantised: f64,
    /// The elements of the largest tensor that is not trained.
    pub(in crate::plan) largest_frozen: f64,
    /// All elements: parameters, and buffers that are in the files.
    pub(in crate::plan) parameters: f64,
    /// The adapter's tensors, or the component's own that are trained.
    pub(in crate::plan) trained: Vec<TrainedTensor>,
}

/// Makes the layers of a component in the order in which the engine requests their weights.
pub(in crate::plan) struct Builder {
    options: ComponentOptions,
    /// The elements that should have been streamed so far, minus those that are.
    deficit: f64,
    count: u64,
    pub(in crate::plan) weights: WeightTotals,
}

/// The sizes of a layer.
#[derive(Clone, Copy)]
pub(super) struct LayerSizes {
    pub(super) inputs: f64,
    pub(super) outputs: f64,
    pub(super) kernel: f64,
    pub(super) stride: f64,
    pub(super) padding: f64,
    pub(super) bias: bool,
}

impl LayerSizes {
    pub(super) fn linear(inputs: f64, outputs: f64, bias: bool) -> Self {
        Self {
            inputs,
            outputs,
            kernel: 1.0,
            stride: 1.0,
            padding: 0.0,
            bias,
        }
    }

    pub(super) fn conv(inputs: f64, outputs: f64, kernel: f64) -> Self {
        Self {
            kernel,
            padding: (kernel / 2.0).floor(),
            ..Self::linear(inputs, outputs, true)
        }
    }
}

impl Builder {
    /// `first_index` numbers the layers, so that those of several components differ.
    pub(in crate::plan) fn new(options: ComponentOptions, first_index: u64) -> Self {
        Self {
            options,
            deficit: 0.0,
            count: first_index,
            weights: WeightTotals::default(),
        }
    }

    /// The index of the last layer; those of the next builder follow it.
    pub(in crate::plan) fn last_index(&self) -> u64 {
        self.count
    }

    fn is_trained(&self, name: &str) -> bool {
        self.options.trained.as_ref().is_some_and(|filter| filter.selects(name))
    }

    fn streams_next(&mut self, elements: f64) -> bool {
        self.deficit += elements * self.options.streamed;
        let is_streamed = self.options.streamed > 0.0 && 2.0 * self.deficit >= elements;
        if is_streamed {
            self.deficit -= elements;
        }
        is_streamed
    }

    fn index(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    /// A linear layer or a convolution.
    pub(super) fn layer(&mut self, name: &str, sizes: LayerSizes) -> Layer {
        let mut layer = Layer {
            inputs: sizes.inputs,
            outputs: sizes.outputs,
            kernel: sizes.kernel,
            stride: sizes.stride,
            padding: sizes.padding,
            index: self.index(),
            bias: sizes.bias,
            unpacking: Unpacking::None,
            unpacking_bytes: 0.0,
            is_trained: self.is_trained(&format!("{name}.weight")),
            adapter: self.adapter(name, sizes),
        };
        let elements = layer.elements();
        self.weights.parameters += elements;
        if layer.is_trained {
            self.weights.resident += elements * self.options.width;
            let columns = if sizes.kernel > 1.0 {
                2.0 * elements / sizes.kernel
            } else {
                sizes.inputs + sizes.outputs
            };
            self.trained(elements, Some(columns));
        } else {
            (layer.unpacking, layer.unpacking_bytes) = self.weight(name, elements, layer.fan_in());
        }
        if let Some(adapter) = layer.adapter {
            self.count_adapter(adapter, sizes, layer.fan_in());
        }
        if sizes.bias {
            self.vector(&format!("{name}.bias"), sizes.outputs);
        }
        layer
    }

    /// Counts a frozen weight. Returns how much of it is unpacked for each use, and the bytes per weight that candle's
    /// operations need for that.
    fn weight(&mut self, name: &str, elements: f64, fan_in: f64) -> (Unpacking, f64) {
        self.weights.largest_frozen = self.weights.largest_frozen.max(elements);
        let stored = self.options.stored;
        let in_file = elements * stored.quantised;
        let others = elements - in_file;
        let is_selected =
            self.options.qtype.is_some() && !self.options.exclude.iter().any(|pattern| matches_glob(pattern, name));
        // On a GPU, a share of the quantised layers is in host memory.
        let is_quantised = is_selected || stored.quantised > 0.5;
        if !self.options.cpu && is_quantised && self.streams_next(elements) {
            let qtype = self.options.qtype.filter(|_| is_selected).unwrap_or(QType::Int8);
            let bytes = quantised_bytes(qtype, elements, fan_in).unwrap_or(elements * self.options.width);
            return (Unpacking::Whole, unpacking_bytes(qtype) + bytes / elements.max(1.0));
        }
        self.weights.resident += in_file * stored.bytes;
        let (stored_unpacking, stored_bytes) = match stored.quantised > 0.5 {
            true => (Unpacking::Whole, unpacking_bytes(QType::Int8)),
            false => (Unpacking::None, 0.0),
        };
        let quantised = self
            .options
            .qtype
            .filter(|_| is_selected)
            .map(|qtype| (qtype, quantised_bytes(qtype, elements, fan_in)));
        match quantised {
            Some((qtype, Some(bytes))) => {
                self.weights.quantised += bytes * others / elements.max(1.0);
                self.weights.largest_quantised = self.weights.largest_quantised.max(others * self.options.width);
                return (Unpacking::Whole, unpacking_bytes(qtype));
            }
            // It is selected, but the length of its rows is not a multiple of the type's blocks.
            Some((_, None)) => {
                self.weights.resident += others * self.options.width;
                return (stored_unpacking, stored_bytes);
            }
            None => {}
        }
        let halves = if self.options.cpu {
            stored.halves.min(1.0 - stored.quantised) * elements
        } else {
            0.0
        };
        if (self.options.cpu || !is_quantised) && self.streams_next(others) {
            let unpacking = match stored_unpacking {
                Unpacking::None if halves > 0.5 * elements => Unpacking::StreamedHalves,
                _ => Unpacking::Whole,
            };
            return (unpacking, stored_bytes);
        }
        self.weights.resident += halves * 2.0 + (others - halves) * self.options.width;
        match stored_unpacking {
            Unpacking::None if halves > 0.5 * elements => (Unpacking::Blocks, 0.0),
            unpacking => (unpacking, stored_bytes),
        }
    }

    /// Counts the trained tensors of a layer's adapter.
    fn count_adapter(&mut self, adapter: Adapter, sizes: LayerSizes, fan_in: f64) {
        let (rank, kernel) = (adapter.rank, sizes.kernel);
        if adapter.magnitudes > 0.0 {
            self.trained(adapter.magnitudes, None);
        }
        if adapter.has_scalar {
            self.trained(1.0, None);
        }
        match adapter.form {
            AdapterForm::LowRank => {}
            AdapterForm::Magnitude => self.trained(sizes.outputs, None),
            AdapterForm::Kron(kron) => {
                match kron.first_rank {
                    None => self.trained(kron.a * kron.c, Some(kron.a + kron.c)),
                    Some(rank) => {
                        self.trained(kron.a * rank, Some(kron.a + rank));
                        self.trained(rank * kron.c, Some(rank + kron.c));
                    }
                }
                let width = kron.d * kernel * kernel;
                match kron.rank {
                    None if kernel > 1.0 => self.trained(kron.b * width, Some(2.0 * kron.b * width / kernel)),
                    None => self.trained(kron.b * width, Some(kron.b + width)),
                    Some(rank) if adapter.core => {
                        self.trained(kron.b * rank, Some(kron.b + rank));
                        self.trained(rank * kron.d, Some(rank + kron.d));
                        self.core(rank, kernel);
                    }
                    Some(rank) => {
                        self.trained(kron.b * rank, Some(kron.b + rank));
                        self.trained(rank * width, Some(rank + width));
                    }
                }
                return;
            }
            AdapterForm::Hadamard => {
                for _ in 0..2 {
                    self.trained(sizes.outputs * rank, Some(sizes.outputs + rank));
                    let columns = if adapter.core { sizes.inputs } else { fan_in };
                    self.trained(rank * columns, Some(rank + columns));
                    if adapter.core {
                        self.core(rank, kernel);
                    }
                }
                return;
            }
            AdapterForm::Difference => {
                let elements = sizes.outputs * fan_in;
                let means = match kernel > 1.0 {
                    true => 2.0 * elements / kernel,
                    false => sizes.outputs + fan_in,
                };
                self.trained(elements, Some(means));
                if sizes.bias {
                    self.trained(sizes.outputs, None);
                }
                return;
            }
        }
        if adapter.core {
            self.core(rank, kernel);
        }
        let columns = if adapter.core { sizes.inputs } else { fan_in };
        let (down, up) = (rank * columns, rank * sizes.outputs);
        let means = |elements: f64, other: f64| match kernel > 1.0 {
            true => 2.0 * elements / kernel,
            false => rank + other,
        };
        // That beside a core has a kernel of 1 x 1, as the up projection.
        self.trained(down, Some(if adapter.core { 2.0 * down } else { means(down, fan_in) }));
        // The up projection of a convolution has a kernel of 1 x 1: its means have as many elements as itself, twice.
        self.trained(up, Some(if kernel > 1.0 { 2.0 * up } else { rank + sizes.outputs }));
    }

    /// The adapter of the layer, if the job has one for it.
    fn adapter(&self, name: &str, sizes: LayerSizes) -> Option<Adapter> {
        let options = self.options.adapter.as_ref()?;
        // Two layers of a U-Net, whatever the filters say.
        if options.whole_in_out && WHOLE_LAYERS.contains(&name) {
            return Some(Adapter {
                rank: 1.0,
                dropout: false,
                drops_inputs: false,
                core: false,
                has_scalar: false,
                magnitudes: 0.0,
                form: AdapterForm::Difference,
            });
        }
        if !self.options.lora_layers.include(name) || !self.is_in_container(name) {
            return None;
        }
        let fan_in = sizes.inputs * sizes.kernel * sizes.kernel;
        let bias = if sizes.bias { sizes.outputs } else { 0.0 };
        let names = LayerNames::new(self.options.lora_prefix, name);
        if sizes.outputs * fan_in + bias < options.parameter_threshold || !options.filter.selects_layer(&names) {
            return None;
        }
        if options.full_if_contains.iter().any(|part| names.contain(part)) {
            return Some(Adapter {
                rank: 1.0,
                dropout: false,
                drops_inputs: false,
                core: false,
                has_scalar: false,
                magnitudes: 0.0,
                form: AdapterForm::Difference,
            });
        }
        let entry = options.layer_ranks.iter().find(|entry| names.contain(&entry.contains));
        let rank = match (entry, sizes.kernel > 1.0) {
            (Some(entry), true) => entry.conv_rank,
            (Some(entry), false) => entry.rank,
            (None, true) => options.conv_rank?,
            (None, false) => options.rank,
        };
        if rank <= 0.0 {
            return None;
        }
        let is_text = matches!(self.options.lora_layers, LoraLayers::AttentionAndMlp);
        let is_locon = options.kind == AdapterKind::Locon;
        if is_locon && !is_text && !name.split('.').any(|part| LOCON_BLOCKS.contains(&part)) {
            return None;
        }
        let form = match options.kind {
            AdapterKind::Lora | AdapterKind::Locon => AdapterForm::LowRank,
            AdapterKind::Lokr { factor, splits } => AdapterForm::Kron(kron_sizes(rank, factor, splits, sizes)),
            AdapterKind::Dora => AdapterForm::Magnitude,
            AdapterKind::Loha => AdapterForm::Hadamard,
            AdapterKind::Difference => AdapterForm::Difference,
        };
        let has_factors = !matches!(form, AdapterForm::Magnitude | AdapterForm::Difference);
        let has_core = match form {
            AdapterForm::LowRank | AdapterForm::Hadamard => true,
            AdapterForm::Kron(kron) => kron.rank.is_some(),
            AdapterForm::Magnitude | AdapterForm::Difference => false,
        };
        Some(Adapter {
            rank,
            dropout: options.dropout,
            drops_inputs: options.drops_inputs,
            core: options.tucker && sizes.kernel > 1.0 && has_core,
            has_scalar: is_locon || (options.scalar && has_factors),
            magnitudes: match (form, options.magnitudes) {
                (AdapterForm::Magnitude | AdapterForm::Difference, _) | (_, None) => 0.0,
                (_, Some(MagnitudeSide::Outputs)) => sizes.outputs,
                (_, Some(MagnitudeSide::Inputs)) => sizes.inputs,
            },
            form,
        })
    }

    /// Tucker's core [rank, rank, kernel, kernel].
    fn core(&mut self, rank: f64, kernel: f64) {
        let elements = rank * rank * kernel * kernel;
        self.trained(elements, Some(2.0 * elements / kernel));
    }

    fn trained(&mut self, elements: f64, factored: Option<f64>) {
        self.weights.trained.push(TrainedTensor { elements, factored });
    }

    /// A tensor of one dimension. Returns whether it is trained.
    fn vector(&mut self, name: &str, elements: f64) -> bool {
        self.weights.parameters += elements;
        self.weights.resident += elements * self.options.width;
        let is_trained = self.is_trained(name);
        if is_trained {
            self.trained(elements, None);
        }
        is_trained
    }

    /// A norm with a weight and a bias.
    pub(super) fn norm(&mut self, name: &str, channels: f64) -> Norm {
        let trained = ["weight", "bias"].map(|part| self.vector(&format!("{name}.{part}"), channels));
        self.norm_difference(name, channels, true);
        Norm {
            index: self.index(),
            trained_elements: channels * trained.into_iter().map(f64::from).sum::<f64>(),
            centres: true,
        }
    }

    /// An RMS norm, which has a weight alone.
    pub(super) fn rms_norm(&mut self, name: &str, channels: f64) -> Norm {
        let is_trained = self.vector(&format!("{name}.weight"), channels);
        self.norm_difference(name, channels, false);
        Norm {
            index: self.index(),
            trained_elements: channels * f64::from(is_trained),
            centres: false,
        }
    }

    /// Whether a layer of a U-Net is in a module whose layers get an adapter.
    fn is_in_container(&self, name: &str) -> bool {
        let is_unet = self.options.lora_prefix == UNET_PREFIX;
        let containers = self
            .options
            .adapter
            .as_ref()
            .map(|options| options.containers.as_slice());
        !is_unet || is_in_container(containers.unwrap_or_default(), name)
    }

    /// Counts the whole difference of a norm, if the job trains one.
    fn norm_difference(&mut self, name: &str, channels: f64, bias: bool) {
        let Some(options) = &self.options.adapter else { return };
        let parameters = if bias { 2.0 * channels } else { channels };
        let is_text = matches!(self.options.lora_layers, LoraLayers::AttentionAndMlp);
        if is_text
            || !self.options.lora_layers.include(name)
            || !self.is_in_container(name)
            || parameters < options.parameter_threshold
        {
            return;
        }
        let names = LayerNames::new(self.options.lora_prefix, name);
        let is_trained = options.norms || options.full_if_contains.iter().any(|part| names.contain(part));
        if is_trained && options.filter.selects_layer(&names) {
            self.trained(channels, None);
            if bias {
                self.trained(channels, None);
            }
        }
    }

    /// A tensor that is in the model's files and is not a parameter: it is never trained, quantised or streamed.
    pub(super) fn buffer(&mut self, elements: f64) {
        self.weights.parameters += elements;
        self.weights.resident += elements * self.options.width;
        self.weights.largest_frozen = self.weights.largest_frozen.max(elements);
    }

    /// Makes layers whose numbers have this many bytes.
    pub(super) fn with_width_of<R>(&mut self, width: Option<f64>, make: impl FnOnce(&mut Self) -> R) -> R {
        let usual = self.options.width;
        self.options.width = width.unwrap_or(usual);
        let made = make(self);
        self.options.width = usual;
        made
    }

    /// A tensor outside of layers and norms that is never streamed.
    pub(super) fn tensor(&mut self, name: &str, elements: f64) {
        self.vector(name, elements);
    }

    /// The elements of the vectors of a textual inversion, if there are some.
    pub(super) fn learned_vectors(&mut self, width: f64) -> Option<f64> {
        let elements = self.options.learned_vectors * width;
        if elements > 0.0 {
            self.trained(elements, Some(self.options.learned_vectors + width));
        }
        (elements > 0.0).then_some(elements)
    }

    /// The rank of the LoRA of a table of vectors, whose tensors it counts; `None`: it has none. As `AdapterConfig::embedding_target` in
    /// `engine/src/adapters/adapter_config.rs`.
    pub(super) fn table_adapter(&mut self, name: &str, rows: f64, width: f64) -> Option<f64> {
        let options = self.options.adapter.as_ref()?;
        let names = LayerNames::new(self.options.lora_prefix, name);
        let own_name = name.rsplit('.').next().unwrap_or(name);
        let mut only = options.filter.only_if_contains.iter();
        let is_named = only.any(|text| text.contains(own_name) && names.contain(text));
        let is_large = rows * width >= options.parameter_threshold;
        let is_lora = options.kind == AdapterKind::Lora;
        let has_one = is_lora && is_named && is_large && options.filter.selects_layer(&names);
        if !has_one {
            return None;
        }
        let rank = options.rank;
        self.trained(rank * rows, Some(rank + rows));
        self.trained(rank * width, Some(rank + width));
        Some(rank)
    }

    /// A table of vectors, which is never quantised. Returns its number of elements if it is trained.
    pub(super) fn table(&mut self, name: &str, rows: f64, width: f64, can_stream: bool) -> Option<f64> {
        let elements = rows * width;
        self.weights.parameters += elements;
        let is_trained = self.is_trained(name);
        if is_trained {
            self.trained(elements, Some(rows + width));
        } else {
            self.weights.largest_frozen = self.weights.largest_frozen.max(elements);
        }
        if !is_trained && can_stream && self.streams_next(elements) {
            return None;
        }
        self.weights.resident += elements * self.options.width;
        is_trained.then_some(elements)
    }
}

/// The sizes of a LoKr's matrices.
fn kron_sizes(rank: f64, factor: Option<usize>, splits: LokrSplits, sizes: LayerSizes) -> KronSizes {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let whole = |number: f64| number.clamp(0.0, 1e15) as usize;
    let [[a, b], [c, d]] = splits.factors([sizes.outputs, sizes.inputs].map(whole), factor);
    let is_full = lokr_is_full(whole(rank), [b, d]);
    let splits_first = splits.splits_first(whole(rank), [a, c]);
    let [a, b, c, d] = [a, b, c, d].map(|side| side as f64);
    KronSizes {
        a,
        b,
        c,
        d,
        rank: (!is_full).then_some(rank),
        first_rank: splits_first.then_some(rank),
    }
}

/// Bytes per weight of the indices and of the values before they are scaled, while candle's operations dequantise a weight
/// (`dequantize_with_candle` in `kernels/src/quant`). GGUF blocks have kernels of their own.
fn unpacking_bytes(qtype: QType) -> f64 {
    match qtype {
        QType::Float8 | QType::Int8 => 8.0,
        QType::Nf4 => 12.0,
        QType::Q8_0 | QType::Q4K => 1.0,
    }
}

/// The bytes of a quantised weight. `None`: the length of its rows is not a multiple of the type's blocks.
fn quantised_bytes(qtype: QType, elements: f64, fan_in: f64) -> Option<f64> {
    let outputs = elements / fan_in.max(1.0);
    match qtype {
        QType::Float8 | QType::Int8 => Some(elements + 4.0 * outputs),
        QType::Nf4 => Some(elements / 2.0 + 4.0 * elements / 64.0),
        QType::Q4K if fan_in % 256.0 == 0.0 => Some(elements / 256.0 * 144.0),
        QType::Q8_0 | QType::Q4K if fan_in % 32.0 == 0.0 => Some(elements / 32.0 * 34.0),
        QType::Q8_0 | QType::Q4K => None,
    }
}
