//! Renders images of coloured shapes with captions.

use aitk_engine::rng::TorchGenerator;

/// Width and height of an image in pixels.
pub(crate) const SIZE: usize = 64;

/// Colours of shapes that the base model is trained on.
pub(crate) const COLOURS: [(&str, [f32; 3]); 6] = [
    ("red", [0.85, 0.12, 0.12]),
    ("green", [0.10, 0.62, 0.20]),
    ("blue", [0.12, 0.25, 0.85]),
    ("yellow", [0.95, 0.85, 0.10]),
    ("purple", [0.55, 0.15, 0.70]),
    ("orange", [0.95, 0.52, 0.08]),
];

/// Backgrounds that the base model is trained on.
pub(crate) const BACKGROUNDS: [(&str, [f32; 3]); 3] = [
    ("white", [1.0, 1.0, 1.0]),
    ("black", [0.03, 0.03, 0.03]),
    ("gray", [0.55, 0.55, 0.55]),
];

/// The kind of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Circle,
    Square,
    Triangle,
    /// A star with five points; only in the images of the autoencoder and of zorbs.
    Star,
    /// A circle with a hole; only in the images of the autoencoder.
    Ring,
}

impl Shape {
    /// The shapes that the base model is trained on.
    pub(crate) const TRAINED: [(Self, &'static str); 3] = [
        (Self::Circle, "circle"),
        (Self::Square, "square"),
        (Self::Triangle, "triangle"),
    ];
    const ALL: [Self; 5] = [Self::Circle, Self::Square, Self::Triangle, Self::Star, Self::Ring];

    /// Whether a point is inside the shape, whose radius is about 1.
    fn contains(self, x: f32, y: f32) -> bool {
        let r = x.hypot(y);
        match self {
            Self::Circle => r < 0.95,
            Self::Square => x.abs().max(y.abs()) < 0.82,
            Self::Triangle => y < 0.62 && (y + 1.06) > 1.75 * x.abs(),
            Self::Ring => (0.55..1.0).contains(&r),
            Self::Star => {
                let wedge = std::f32::consts::TAU / 5.0;
                // The angle to the nearest tip of the star; one tip points up.
                let angle = (x.atan2(-y) / wedge).round() * wedge - x.atan2(-y);
                let (px, py) = (r * angle.cos(), r * angle.sin().abs());
                // Between the tip (1.05, 0) and the notch.
                let (nx, ny) = (0.45 * (wedge / 2.0).cos(), 0.45 * (wedge / 2.0).sin());
                (px - 1.05) * ny - (nx - 1.05) * py < 0.0
            }
        }
    }
}

/// A shape with its position, size, rotation and colour.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    pub(crate) shape: Shape,
    pub(crate) centre: [f32; 2],
    pub(crate) radius: f32,
    /// Rotation in radians.
    pub(crate) rotation: f32,
    pub(crate) colour: [f32; 3],
    /// A second colour and the width of its stripes, as a fraction of the radius.
    pub(crate) stripes: Option<([f32; 3], f32)>,
}

/// Renders figures over a background: [3, SIZE, SIZE], values 0 ..= 1, with antialiased edges.
pub(crate) fn render(background: [f32; 3], figures: &[Figure]) -> Vec<f32> {
    const SUBPIXELS: usize = 3;
    let mut planes = vec![0f32; 3 * SIZE * SIZE];
    for y in 0..SIZE {
        for x in 0..SIZE {
            let mut sum = [0f32; 3];
            for sub in 0..SUBPIXELS * SUBPIXELS {
                let px = x as f32 + ((sub % SUBPIXELS) as f32 + 0.5) / SUBPIXELS as f32;
                let py = y as f32 + ((sub / SUBPIXELS) as f32 + 0.5) / SUBPIXELS as f32;
                let colour = colour_at(background, figures, px, py);
                sum.iter_mut().zip(colour).for_each(|(sum, c)| *sum += c);
            }
            for (c, sum) in sum.iter().enumerate() {
                planes[(c * SIZE + y) * SIZE + x] = sum / (SUBPIXELS * SUBPIXELS) as f32;
            }
        }
    }
    planes
}

fn colour_at(background: [f32; 3], figures: &[Figure], x: f32, y: f32) -> [f32; 3] {
    let mut colour = background;
    for figure in figures {
        let (dx, dy) = (
            (x - figure.centre[0]) / figure.radius,
            (y - figure.centre[1]) / figure.radius,
        );
        let (sin, cos) = figure.rotation.sin_cos();
        let (u, v) = (dx * cos + dy * sin, dy * cos - dx * sin);
        if figure.shape.contains(u, v) {
            colour = match figure.stripes {
                Some((second, width)) if (v / width).rem_euclid(2.0) < 1.0 => second,
                _ => figure.colour,
            };
        }
    }
    colour
}

/// Generates random images.
pub(crate) struct ImageGenerator {
    random: TorchGenerator,
}

impl ImageGenerator {
    /// The same seed gives the same images.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: TorchGenerator::manual_seed(seed),
        }
    }

    fn uniform(&mut self, from: f32, to: f32) -> f32 {
        from + (to - from) * self.random.rand(1)[0]
    }

    /// A random element.
    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.random.next_u32() as usize % of.len()]
    }

    fn colour(&mut self) -> [f32; 3] {
        [self.uniform(0.0, 1.0), self.uniform(0.0, 1.0), self.uniform(0.0, 1.0)]
    }

    fn figure(&mut self, shape: Shape, colour: [f32; 3]) -> Figure {
        let radius = self.uniform(16.0, 22.0);
        let max_offset = (SIZE as f32 / 2.0 - radius - 2.0).min(6.0);
        let middle = SIZE as f32 / 2.0;
        let centre = [
            middle + self.uniform(-max_offset, max_offset),
            middle + self.uniform(-max_offset, max_offset),
        ];
        let rotation = self.uniform(-0.08, 0.08);
        let colour = colour.map(|c| (c + self.uniform(-0.03, 0.03)).clamp(0.0, 1.0));
        Figure {
            shape,
            centre,
            radius,
            rotation,
            colour,
            stripes: None,
        }
    }

    /// An image for the U-Net and its caption: one shape and colour that the base model is trained on.
    pub(crate) fn image_with_caption(&mut self) -> (Vec<f32>, String) {
        let (shape, shape_name) = self.one_of(&Shape::TRAINED);
        let (colour_name, colour) = self.one_of(&COLOURS);
        let figure = self.figure(shape, colour);
        // A background that the caption does not name is white.
        if self.uniform(0.0, 1.0) < 0.4 {
            return (
                render(BACKGROUNDS[0].1, &[figure]),
                format!("a {colour_name} {shape_name}"),
            );
        }
        let (background_name, background) = self.one_of(&BACKGROUNDS);
        let caption = format!("a {colour_name} {shape_name} on a {background_name} background");
        (render(background, &[figure]), caption)
    }

    /// An image for the autoencoder: mostly with the colours above, sometimes with arbitrary colours.
    pub(crate) fn autoencoder_image(&mut self) -> Vec<f32> {
        let plain = self.uniform(0.0, 1.0) < 0.85;
        let background = if plain {
            self.one_of(&BACKGROUNDS).1
        } else {
            self.colour()
        };
        let shape = self.one_of(&Shape::ALL);
        let mut tint = || if plain { self.one_of(&COLOURS).1 } else { self.colour() };
        let (first, second) = (tint(), tint());
        let mut figure = self.figure(shape, first);
        if self.uniform(0.0, 1.0) < 0.35 {
            figure.stripes = Some((second, self.uniform(0.25, 0.4)));
        }
        render(background, &[figure])
    }

    /// A zorb: a purple star with yellow stripes. The base model is not trained on zorbs.
    pub(crate) fn zorb(&mut self, background: [f32; 3]) -> Vec<f32> {
        let mut figure = self.figure(Shape::Star, COLOURS[4].1);
        figure.radius = figure.radius.max(19.0);
        figure.stripes = Some((COLOURS[3].1, 0.3));
        render(background, &[figure])
    }
}
