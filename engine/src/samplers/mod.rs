//! Noise schedules and samplers, named and parameterised as in diffusers 0.42.1 (which calls them schedulers).
//!
//! A sampler goes through a list of time steps; at each it computes a less noisy sample from what the model predicted.
//! All samplers compute in f32, whatever the model computes in. CONTRIBUTING.md lists what a new one touches.

mod beta_quantile;
mod ddim;
mod ddpm;
mod discrete;
mod dpm_multistep;
mod euler;
mod euler_ancestral;
mod flow_match_euler;
mod flow_match_heun;
mod flow_sigmas;
mod lcm;
mod lms;
mod noise;
mod noise_level;
mod params;
mod pndm;
mod sampler;
mod schedule;
mod sigma_sampler;
mod sigmas;
mod spacing;
#[cfg(test)]
mod tests;
mod unipc;

pub use flow_sigmas::{dynamic_mu, shifted_timesteps};
pub use noise::NoiseSource;
pub use params::{BetaSchedule, PredictionType, SamplerParams, Spacing, parse_scheduler_config};
pub use sampler::{Sampler, SamplerError, SamplerOptions, SamplerStep};
pub use schedule::NoiseSchedule;

/// The constructor of a sampler.
type Constructor = fn(SamplerParams, SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError>;

/// Name, aliases, constructor.
type Entry = (&'static str, &'static [&'static str], Constructor);

/// Other names of `dpmsolver++`.
const DPM_PLUS_PLUS_ALIASES: &[&str] = &["dpm++_2m", "dpmpp_2m", "dpm++2m", "dpmsolver_multistep"];

/// The samplers for diffusion models.
fn registry() -> &'static [Entry] {
    &[
        ("ddim", &[], ddim::make),
        ("ddpm", &[], ddpm::make),
        ("pndm", &["plms"], pndm::make),
        ("euler", &["euler_discrete"], euler::make),
        ("euler_a", &["euler_ancestral", "k_euler_a"], euler_ancestral::make),
        ("lms", &[], lms::make),
        ("lcm", &[], lcm::make),
        ("dpmsolver++", DPM_PLUS_PLUS_ALIASES, dpm_multistep::make_plus_plus),
        ("dpmsolver", &[], dpm_multistep::make_plain),
    ]
}

/// The samplers for models that were trained by flow matching.
fn flow_registry() -> &'static [Entry] {
    &[
        (
            "flowmatch",
            // `ddpm` is what a config without a sampler has.
            &["euler", "euler_discrete", "flow_match_euler", "ddpm"],
            flow_match_euler::make,
        ),
        ("heun", &["flow_match_heun"], flow_match_heun::make),
        ("dpmsolver++", DPM_PLUS_PLUS_ALIASES, dpm_multistep::make_flow),
        ("unipc", &["uni_pc", "unipc_multistep"], unipc::make),
    ]
}

/// Names that ai-toolkit or diffusers have, and that aitk does not implement yet for diffusion models.
const NOT_IMPLEMENTED: &[&str] = &[
    "dpmsingle",
    "heun",
    "dpm_2",
    "dpm_2_a",
    "custom_lcm",
    "mean_flow",
    "unipc",
];

/// Names and aliases of the samplers that have no form with Karras noise levels.
const WITHOUT_KARRAS: [&str; 7] = ["ddim", "ddpm", "pndm", "plms", "euler_a", "euler_ancestral", "lcm"];

/// The names of the samplers for models of a kind, without aliases. A `k_` prefix turns on Karras noise levels for euler, lms,
/// dpmsolver, flowmatch, heun and unipc.
#[must_use]
pub fn names(is_flow: bool) -> Vec<&'static str> {
    entries(is_flow).iter().map(|(name, _, _)| *name).collect()
}

fn entries(is_flow: bool) -> &'static [Entry] {
    if is_flow { flow_registry() } else { registry() }
}

/// Checks that [`build`] knows the name, for models of some kind.
///
/// # Errors
/// [`SamplerError::Unknown`] or [`SamplerError::NotImplemented`], which list the names that exist.
pub fn check_name(name: &str) -> Result<(), SamplerError> {
    find(name, true).or_else(|_| find(name, false)).map(|_| ())
}

/// The constructor of the sampler of that name, and whether the name asks for Karras noise levels.
fn find(name: &str, is_flow: bool) -> Result<(Constructor, bool), SamplerError> {
    let normalized = name.trim().to_lowercase().replace([' ', '-'], "_");
    let lookup = |name: &str| {
        entries(is_flow)
            .iter()
            .find(|(n, aliases, _)| *n == name || aliases.contains(&name))
            .map(|(_, _, make)| *make)
    };
    if let Some(make) = lookup(&normalized) {
        return Ok((make, false));
    }
    let without_karras = normalized
        .strip_prefix("k_")
        .or_else(|| normalized.strip_suffix("_karras"));
    if let Some(without_karras) = without_karras
        && let Some(make) = lookup(without_karras)
        && !WITHOUT_KARRAS.contains(&without_karras)
    {
        return Ok((make, true));
    }
    let (name, known) = (name.to_owned(), names(is_flow).join(", "));
    let is_missing = NOT_IMPLEMENTED.contains(&without_karras.unwrap_or(&normalized));
    if find_other_kind(&normalized, is_flow) && !is_missing {
        return Err(SamplerError::OtherKind { name, known });
    }
    Err(if is_missing {
        SamplerError::NotImplemented { name, known }
    } else {
        SamplerError::Unknown { name, known }
    })
}

/// Whether there is a sampler of that name for the other kind of models.
fn find_other_kind(normalized: &str, is_flow: bool) -> bool {
    let mut others = entries(!is_flow).iter();
    others.any(|(name, aliases, _)| *name == normalized || aliases.contains(&normalized))
}

/// Builds the sampler of that name.
///
/// # Errors
/// An unknown name, parameters that are wrong or unsupported, or an invalid number of steps.
pub fn build(name: &str, params: &SamplerParams, options: SamplerOptions) -> Result<Box<dyn Sampler>, SamplerError> {
    let (make, karras) = find(name, params.is_flow)?;
    let mut params = params.clone();
    if karras {
        params.use_karras_sigmas = Some(true);
    }
    params.check_supported()?;
    let train_steps = params
        .trained_betas
        .as_ref()
        .map_or(params.num_train_timesteps.unwrap_or(1000), Vec::len);
    if options.steps == 0 || options.steps > train_steps {
        return Err(SamplerError::Steps {
            steps: options.steps,
            train_steps,
        });
    }
    make(params, options)
}
