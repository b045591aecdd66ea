//! Predicts a job's memory need under each memory profile, its amount of work, and the size of its output.
//! Pure functions, used by the coordinator and the command line.

mod config_values;
pub mod demand;
pub mod device_factors;
mod families;
pub mod family;
mod headers;
pub mod image_batches;
mod job_memory;
mod json;
mod language_model;
mod lm_export;
pub mod memory_options;
mod names;
pub mod need;
pub mod optimizers;
pub mod output;
mod paired_images;
pub mod parameter_counts;
pub mod phases;
pub mod profile;
pub mod prompt_files;
pub mod qtype;
mod requests;
pub mod shapes;
mod slider;
mod text_generation;
pub mod training_fit;
pub mod training_memory;
mod transformer_shapes;
mod walk;
