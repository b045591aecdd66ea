//! Makes `config/demo`: a tiny Stable Diffusion from drawn images of coloured shapes, and the data set of the demo.
//!
//!     cargo run --release -p aitk-engine --example make_demo_base -- config/demo [vae|diffusion|dataset|all [STEPS]]
//!
//! Everything is drawn here and nothing is downloaded. Steps, seeds and times stand in config/demo/README.md.

mod draw;
mod files;
mod train;

use aitk_engine::device::threads::on_pool;
use draw::{Artist, BACKGROUNDS, COLOURS, SIZE};
use std::path::{Path, PathBuf};

/// Anything can go wrong here and ends the program.
type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const SEED: u64 = 42;
const VAE_STEPS: u64 = 3000;
const DIFFUSION_STEPS: u64 = 5000;

fn say(line: &str) {
    eprintln!("{line}");
}

fn main() -> Fallible<()> {
    on_pool(make)
}

fn make() -> Fallible<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments
        .next()
        .map(PathBuf::from)
        .ok_or("usage: make_demo_base FOLDER [vae|diffusion|dataset|all [STEPS]]")?;
    let what = arguments.next().unwrap_or_else(|| "all".into());
    let steps = arguments.next().map(|steps| steps.parse::<u64>()).transpose()?;
    let base = folder.join("base");
    if matches!(what.as_str(), "dataset" | "all") {
        dataset(&folder.join("dataset"))?;
    }
    if matches!(what.as_str(), "vae" | "all") {
        train::autoencoder(&base, steps.unwrap_or(VAE_STEPS), SEED)?;
    }
    if matches!(what.as_str(), "diffusion" | "all") {
        train::diffusion(&base, steps.unwrap_or(DIFFUSION_STEPS), SEED)?;
    }
    Ok(())
}

/// Sixteen zorbs with captions.
fn dataset(folder: &Path) -> Fallible<()> {
    std::fs::create_dir_all(folder)?;
    let mut artist = Artist::new(7);
    for i in 0..16 {
        // As in the captions of the base model: a background that is not named is white.
        let (name, colour) = if i % 2 == 0 {
            BACKGROUNDS[0]
        } else {
            BACKGROUNDS[1 + i / 2 % 2]
        };
        let caption = if i % 2 == 0 {
            "a zorb".to_owned()
        } else {
            format!("a zorb on a {name} background")
        };
        save(&folder.join(format!("zorb_{i:02}.png")), &artist.zorb(colour))?;
        std::fs::write(folder.join(format!("zorb_{i:02}.txt")), caption + "\n")?;
    }
    let shapes: Vec<&str> = COLOURS.iter().map(|(name, _)| *name).collect();
    say(&format!(
        "data set written; the base model's colours are {}",
        shapes.join(", ")
    ));
    Ok(())
}

fn save(file: &Path, planes: &[f32]) -> Fallible<()> {
    let at = |c: usize, x: u32, y: u32| (planes[(c * SIZE + y as usize) * SIZE + x as usize] * 255.0).round() as u8;
    let image = image::RgbImage::from_fn(SIZE as u32, SIZE as u32, |x, y| {
        image::Rgb([0, 1, 2].map(|c| at(c, x, y)))
    });
    image.save(file)?;
    Ok(())
}
