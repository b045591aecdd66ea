//! Drawn images of coloured shapes, and what they are called.

use aitk_engine::rng::TorchGenerator;

/// Pixels along an edge.
pub(crate) const SIZE: usize = 64;

/// Colours that the base model knows, for shapes.
pub(crate) const COLOURS: [(&str, [f32; 3]); 6] = [
    ("red", [0.85, 0.12, 0.12]),
    ("green", [0.10, 0.62, 0.20]),
    ("blue", [0.12, 0.25, 0.85]),
    ("yellow", [0.95, 0.85, 0.10]),
    ("purple", [0.55, 0.15, 0.70]),
    ("orange", [0.95, 0.52, 0.08]),
];

/// Backgrounds that the base model knows.
pub(crate) const BACKGROUNDS: [(&str, [f32; 3]); 3] = [
    ("white", [1.0, 1.0, 1.0]),
    ("black", [0.03, 0.03, 0.03]),
    ("gray", [0.55, 0.55, 0.55]),
];

/// What a shape looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Circle,
    Square,
    Triangle,
    /// Five points; only the autoencoder and the zorb see it.
    Star,
    /// A circle with a hole; only the autoencoder sees it.
    Ring,
}

impl Shape {
    /// The shapes that the base model learns to draw.
    pub(crate) const KNOWN: [(Self, &'static str); 3] = [
        (Self::Circle, "circle"),
        (Self::Square, "square"),
        (Self::Triangle, "triangle"),
    ];
    const ALL: [Self; 5] = [Self::Circle, Self::Square, Self::Triangle, Self::Star, Self::Ring];

    /// Whether a point is inside; the shape reaches to a distance of about 1 from the origin.
    fn contains(self, x: f32, y: f32) -> bool {
        let r = x.hypot(y);
        match self {
            Self::Circle => r < 0.95,
            Self::Square => x.abs().max(y.abs()) < 0.82,
            Self::Triangle => y < 0.62 && (y + 1.06) > 1.75 * x.abs(),
            Self::Ring => (0.55..1.0).contains(&r),
            Self::Star => {
                let wedge = std::f32::consts::TAU / 5.0;
                // The angle from the nearest point of the star, one of which points up.
                let angle = (x.atan2(-y) / wedge).round() * wedge - x.atan2(-y);
                let (px, py) = (r * angle.cos(), r * angle.sin().abs());
                // Between the tip (1.05, 0) and the notch.
                let (nx, ny) = (0.45 * (wedge / 2.0).cos(), 0.45 * (wedge / 2.0).sin());
                (px - 1.05) * ny - (nx - 1.05) * py < 0.0
            }
        }
    }
}

/// A shape in its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    pub(crate) shape: Shape,
    pub(crate) centre: [f32; 2],
    pub(crate) radius: f32,
    pub(crate) turn: f32,
    pub(crate) colour: [f32; 3],
    /// A second colour and the width of its stripes, as a part of the radius.
    pub(crate) stripes: Option<([f32; 3], f32)>,
}

/// Draws figures over a background: [3, SIZE, SIZE], values 0 ..= 1, edges smoothed.
pub(crate) fn draw(background: [f32; 3], figures: &[Figure]) -> Vec<f32> {
    const SUB: usize = 3;
    let mut planes = vec![0f32; 3 * SIZE * SIZE];
    for y in 0..SIZE {
        for x in 0..SIZE {
            let mut sum = [0f32; 3];
            for sub in 0..SUB * SUB {
                let px = x as f32 + ((sub % SUB) as f32 + 0.5) / SUB as f32;
                let py = y as f32 + ((sub / SUB) as f32 + 0.5) / SUB as f32;
                let colour = colour_at(background, figures, px, py);
                sum.iter_mut().zip(colour).for_each(|(sum, c)| *sum += c);
            }
            for (c, sum) in sum.iter().enumerate() {
                planes[(c * SIZE + y) * SIZE + x] = sum / (SUB * SUB) as f32;
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
        let (sin, cos) = figure.turn.sin_cos();
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

/// Draws at random.
pub(crate) struct Artist {
    random: TorchGenerator,
}

impl Artist {
    /// The same seed gives the same images.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: TorchGenerator::manual_seed(seed),
        }
    }

    fn between(&mut self, from: f32, to: f32) -> f32 {
        from + (to - from) * self.random.rand(1)[0]
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.random.next_u32() as usize % of.len()]
    }

    fn colour(&mut self) -> [f32; 3] {
        [self.between(0.0, 1.0), self.between(0.0, 1.0), self.between(0.0, 1.0)]
    }

    fn figure(&mut self, shape: Shape, colour: [f32; 3]) -> Figure {
        let radius = self.between(16.0, 22.0);
        let room = (SIZE as f32 / 2.0 - radius - 2.0).min(6.0);
        let middle = SIZE as f32 / 2.0;
        let centre = [middle + self.between(-room, room), middle + self.between(-room, room)];
        let turn = self.between(-0.08, 0.08);
        let colour = colour.map(|c| (c + self.between(-0.03, 0.03)).clamp(0.0, 1.0));
        Figure {
            shape,
            centre,
            radius,
            turn,
            colour,
            stripes: None,
        }
    }

    /// An image for the U-Net and its caption: one known shape in one known colour.
    pub(crate) fn captioned(&mut self) -> (Vec<f32>, String) {
        let (shape, shape_name) = self.one_of(&Shape::KNOWN);
        let (colour_name, colour) = self.one_of(&COLOURS);
        let figure = self.figure(shape, colour);
        // A background that is not named is white.
        if self.between(0.0, 1.0) < 0.4 {
            return (
                draw(BACKGROUNDS[0].1, &[figure]),
                format!("a {colour_name} {shape_name}"),
            );
        }
        let (background_name, background) = self.one_of(&BACKGROUNDS);
        let caption = format!("a {colour_name} {shape_name} on a {background_name} background");
        (draw(background, &[figure]), caption)
    }

    /// An image for the autoencoder: mostly what the other images have, now and then any colour.
    pub(crate) fn anything(&mut self) -> Vec<f32> {
        let plain = self.between(0.0, 1.0) < 0.85;
        let background = if plain {
            self.one_of(&BACKGROUNDS).1
        } else {
            self.colour()
        };
        let shape = self.one_of(&Shape::ALL);
        let mut tint = || if plain { self.one_of(&COLOURS).1 } else { self.colour() };
        let (first, second) = (tint(), tint());
        let mut figure = self.figure(shape, first);
        if self.between(0.0, 1.0) < 0.35 {
            figure.stripes = Some((second, self.between(0.25, 0.4)));
        }
        draw(background, &[figure])
    }

    /// A zorb: a purple star with yellow stripes. The base model never sees one.
    pub(crate) fn zorb(&mut self, background: [f32; 3]) -> Vec<f32> {
        let mut figure = self.figure(Shape::Star, COLOURS[4].1);
        figure.radius = figure.radius.max(19.0);
        figure.stripes = Some((COLOURS[3].1, 0.3));
        draw(background, &[figure])
    }
}
