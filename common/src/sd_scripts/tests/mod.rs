//! Tests of the import.

mod examples;
mod held_out;
mod kinds;
mod mistakes;
mod options;
mod presets;
mod random;
mod ranks;
mod rates;
mod resumed;
mod samples;
mod scripts;
mod support;
