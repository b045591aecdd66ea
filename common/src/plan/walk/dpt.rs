//! The heads of TIPSv2 for depth, normals and classes, as `engine/src/models/feature_extractor/tips`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::tape::Walk;
use super::tensors::Activation;
use std::rc::Rc;

/// Channels of a head.
const CHANNELS: f64 = 256.0;

/// The channels of the scales, and the factors of their sizes.
const SCALES: [(f64, f64); 4] = [(96.0, 4.0), (192.0, 2.0), (384.0, 1.0), (768.0, 0.5)];

/// What the heads find at each pixel before the last step: depths, coordinates of normals, classes. And what they return.
const OUTPUTS: [[f64; 2]; 3] = [[256.0, 1.0], [3.0, 3.0], [150.0, 150.0]];

struct Scale {
    readout: Layer,
    projection: Layer,
    /// Of single pixels that become squares, or of every second pixel.
    resizing: Option<Layer>,
    factor: f64,
    conv: Layer,
}

struct Fusion {
    /// The convolutions of the scale that is added, and those of the sum.
    units: Vec<[Layer; 2]>,
    out: Layer,
}

/// A head.
pub(in crate::plan) struct DptHead {
    scales: Vec<Rc<Scale>>,
    fusions: Vec<Rc<Fusion>>,
    output: Rc<[Layer; 2]>,
    returned: f64,
}

impl DptHead {
    /// The three heads for tokens of this width.
    pub(super) fn all(b: &mut Builder, width: f64) -> Vec<Self> {
        OUTPUTS.map(|outputs| Self::new(b, width, outputs)).into()
    }

    fn new(b: &mut Builder, width: f64, [outputs, returned]: [f64; 2]) -> Self {
        let mut conv = |inputs: f64, outputs: f64, kernel: f64, stride: f64| {
            let sizes = LayerSizes {
                stride,
                ..LayerSizes::conv(inputs, outputs, kernel)
            };
            b.layer("head", sizes)
        };
        let scales = SCALES.map(|(channels, factor)| {
            Rc::new(Scale {
                readout: conv(2.0 * width, width, 1.0, 1.0),
                projection: conv(width, channels, 1.0, 1.0),
                resizing: match factor {
                    factor if factor > 1.0 => Some(conv(channels, channels * factor * factor, 1.0, 1.0)),
                    factor if factor < 1.0 => Some(conv(channels, channels, 3.0, 2.0)),
                    _ => None,
                },
                factor,
                conv: conv(channels, CHANNELS, 3.0, 1.0),
            })
        });
        let fusions = (0..SCALES.len()).map(|i| {
            let mut unit = |_| [0; 2].map(|_| conv(CHANNELS, CHANNELS, 3.0, 1.0));
            let units = (0..=usize::from(i > 0)).map(&mut unit).collect();
            Rc::new(Fusion {
                units,
                out: conv(CHANNELS, CHANNELS, 1.0, 1.0),
            })
        });
        Self {
            scales: scales.into(),
            fusions: fusions.collect(),
            output: Rc::new([conv(CHANNELS, CHANNELS, 3.0, 1.0), conv(CHANNELS, outputs, 1.0, 1.0)]),
            returned,
        }
    }

    /// What the head finds in the tokens [b, patches, width] of the four scales, for images of this height and width.
    pub(super) fn forward(
        &self,
        walk: &Walk,
        taken: &[MetaTensor],
        [height, width]: [f64; 2],
        checkpointed: bool,
    ) -> Option<MetaTensor> {
        let mut sequence = BlockSequence::default();
        let mut scales = Vec::new();
        for (scale, tokens) in self.scales.iter().zip(taken) {
            let (scale, input) = (Rc::clone(scale), sequence.input(tokens.clone()));
            let grid = [height, width];
            scales.push(sequence.add(&[input], move |walk, inputs| scale.forward(walk, &inputs[0], grid)));
        }
        let mut sum = None;
        for (fusion, scale) in self.fusions.iter().zip(scales.into_iter().rev()) {
            let fusion = Rc::clone(fusion);
            let inputs: Vec<_> = sum.into_iter().chain([scale]).collect();
            sum = Some(sequence.add(&inputs, move |walk, inputs| fusion.forward(walk, inputs)));
        }
        let (output, returned) = (Rc::clone(&self.output), self.returned);
        let result = sequence.add(&[sum?], move |walk, inputs| {
            let [project, last] = &*output;
            let x = walk.conv(last, &walk.conv(project, &inputs[0]));
            let [batch, channels, rows, columns] = x.dims;
            // In float32.
            let mut x = walk.rearranged(&x, [batch * 4.0 / walk.backend.width, channels, rows, columns]);
            if returned < channels {
                // The depths: the activation, the sum with the least depth, and the products.
                for _ in 0..3 {
                    x = walk.activation(&x, Activation::Silu);
                }
            }
            walk.rearranged(&x, [x.dims[0], returned, height, width])
        });
        sequence.run(walk, checkpointed, result)
    }
}

impl Scale {
    /// tokens [b, patches, width] -> [b, channels, rows, columns].
    fn forward(&self, walk: &Walk, tokens: &MetaTensor, [height, width]: [f64; 2]) -> MetaTensor {
        let [batch, patches, features, _] = tokens.dims;
        let beside = walk.joined_features(tokens, tokens);
        let read = walk.linear(&self.readout, &beside);
        drop(beside);
        let read = walk.activation(&read, Activation::QuickGelu);
        let rows = (patches * height / width).sqrt();
        let columns = patches / rows;
        let x = walk.conv(
            &self.projection,
            &walk.rearranged(&read, [batch, features, rows, columns]),
        );
        let channels = x.dims[1];
        let x = match &self.resizing {
            Some(layer) if self.factor > 1.0 => {
                let size = [batch, channels, rows * self.factor, columns * self.factor];
                walk.rearranged(&walk.conv(layer, &x), size)
            }
            Some(layer) => walk.conv(layer, &x),
            None => x,
        };
        walk.conv(&self.conv, &x)
    }
}

impl Fusion {
    /// The sum of the scales before, and a scale; of the first block the scale alone.
    fn forward(&self, walk: &Walk, inputs: &[MetaTensor]) -> MetaTensor {
        let unit = |x: &MetaTensor, [first, second]: &[Layer; 2]| {
            let h = walk.conv(first, &walk.activation(x, Activation::Silu));
            walk.add(&walk.conv(second, &walk.activation(&h, Activation::Silu)), x)
        };
        let mut x = inputs[0].clone();
        if let (Some(scale), [of_scale, _]) = (inputs.get(1), self.units.as_slice()) {
            let [batch, channels, ..] = scale.dims;
            let scale = walk.rearranged(scale, [batch, channels, x.dims[2], x.dims[3]]);
            x = walk.add(&unit(&scale, of_scale), &x);
        }
        if let Some(main) = self.units.last() {
            x = unit(&x, main);
        }
        let [batch, channels, rows, columns] = x.dims;
        walk.conv(
            &self.out,
            &walk.rearranged(&x, [batch, channels, 2.0 * rows, 2.0 * columns]),
        )
    }
}
