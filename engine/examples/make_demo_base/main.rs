//! Makes `config/demo`: a tiny Stable Diffusion model trained on rendered images of coloured shapes, and the data set
//! of the demo.
//!
//!     cargo run --release -p aitk-engine --example make_demo_base -- config/demo [vae|diffusion|dataset|all [STEPS]]
//!
//! All images are rendered here and nothing is downloaded. Steps, seeds and times are in config/demo/README.md.

mod files;
mod shapes;
mod train;

use aitk_engine::device::threads::on_pool;
use shapes::{BACKGROUNDS, COLOURS, ImageGenerator, SIZE};
use std::path::{Path, PathBuf};

/// A result with any error, which ends the program.
type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const SEED: u64 = 42;
const VAE_STEPS: u64 = 3000;
const DIFFUSION_STEPS: u64 = 5000;

fn log(line: &str) {
    eprintln!("{line}");
}

fn main() -> Fallible<()> {
    on_pool(run)
}

fn run() -> Fallible<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments
        .next()
        .map(PathBuf::from)
        .ok_or("usage: make_demo_base FOLDER [vae|diffusion|dataset|all [STEPS]]")?;
    let stage = arguments.next().unwrap_or_else(|| "all".into());
    let steps = arguments.next().map(|steps| steps.parse::<u64>()).transpose()?;
    let base = folder.join("base");
    if matches!(stage.as_str(), "dataset" | "all") {
        write_dataset(&folder.join("dataset"))?;
    }
    if matches!(stage.as_str(), "vae" | "all") {
        train::autoencoder(&base, steps.unwrap_or(VAE_STEPS), SEED)?;
    }
    if matches!(stage.as_str(), "diffusion" | "all") {
        train::diffusion(&base, steps.unwrap_or(DIFFUSION_STEPS), SEED)?;
    }
    Ok(())
}

/// Writes sixteen images of zorbs with captions.
fn write_dataset(folder: &Path) -> Fallible<()> {
    std::fs::create_dir_all(folder)?;
    let mut generator = ImageGenerator::new(7);
    for i in 0..16 {
        // As in the captions of the base model, a background that is not named is white.
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
        save_png(&folder.join(format!("zorb_{i:02}.png")), &generator.zorb(colour))?;
        std::fs::write(folder.join(format!("zorb_{i:02}.txt")), caption + "\n")?;
    }
    let colours: Vec<&str> = COLOURS.iter().map(|(name, _)| *name).collect();
    log(&format!(
        "data set written; the base model's colours are {}",
        colours.join(", ")
    ));
    Ok(())
}

fn save_png(file: &Path, planes: &[f32]) -> Fallible<()> {
    let at = |c: usize, x: u32, y: u32| (planes[(c * SIZE + y as usize) * SIZE + x as usize] * 255.0).round() as u8;
    let image = image::RgbImage::from_fn(SIZE as u32, SIZE as u32, |x, y| {
        image::Rgb([0, 1, 2].map(|c| at(c, x, y)))
    });
    image.save(file)?;
    Ok(())
}
