//! Noise schedules and samplers, named and parameterised as in diffusers 0.42.1 (which calls them schedulers).
//!
//! A sampler goes through a list of timesteps; at each it computes a less noisy sample from what the model predicted.
//! All samplers compute in f32, whatever the model computes in. CONTRIBUTING.md lists what a new one touches.

mod beta_quantile;
mod ddim;
mod ddpm;
mod discrete;
mod dpm_2;
mod dpm_2_ancestral;
mod dpm_multistep;
mod dpm_singlestep;
mod dpm_solver;
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

/// Name, constructor.
type Entry = (&'static str, Constructor);

/// The samplers for diffusion models, by the names of `SamplerName` in `aitk-common`, which also knows their aliases.
fn diffusion_registry() -> &'static [Entry] {
    &[
        ("ddim", ddim::make),
        ("ddpm", ddpm::make),
        ("pndm", pndm::make),
        ("euler", euler::make),
        ("euler_a", euler_ancestral::make),
        ("lms", lms::make),
        ("lcm", lcm::make),
        ("dpmsolver++", dpm_multistep::make_plus_plus),
        ("dpmsolver", dpm_multistep::make_plain),
        ("dpmsingle", dpm_singlestep::make),
        ("dpm_2", dpm_2::make),
        ("dpm_2_a", dpm_2_ancestral::make),
    ]
}

/// The samplers for models that were trained by flow matching.
fn flow_registry() -> &'static [Entry] {
    &[
        ("flowmatch", flow_match_euler::make),
        // Two more names of `flowmatch`. `ddpm` is what a config without a sampler has.
        ("euler", flow_match_euler::make),
        ("ddpm", flow_match_euler::make),
        ("heun", flow_match_heun::make),
        ("dpmsolver++", dpm_multistep::make_flow),
        ("unipc", unipc::make),
    ]
}

/// Names that ai-toolkit or diffusers have, and that aitk does not implement yet for diffusion models.
const NOT_IMPLEMENTED: &[&str] = &["heun", "custom_lcm", "mean_flow", "unipc"];

/// The samplers that have a second name with the prefix `k_`, as in ai-toolkit: the same with Karras noise levels.
/// `use_karras_sigmas` of `scheduler_config.json` also works with others.
const WITH_KARRAS_NAME: [&str; 4] = ["euler", "lms", "dpmsolver", "dpmsolver++"];

/// The names of the samplers for models of a kind. Those of [`WITH_KARRAS_NAME`] also have a name with the prefix `k_`.
#[must_use]
pub fn names(is_flow: bool) -> Vec<&'static str> {
    entries(is_flow).iter().map(|(name, _)| *name).collect()
}

fn entries(is_flow: bool) -> &'static [Entry] {
    if is_flow { flow_registry() } else { diffusion_registry() }
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
    let lookup = |name: &str, is_flow: bool| {
        let entry = entries(is_flow).iter().find(|(known, _)| *known == name);
        entry.map(|(_, make)| *make)
    };
    if let Some(make) = lookup(name, is_flow) {
        return Ok((make, false));
    }
    if let Some(plain) = name.strip_prefix("k_").filter(|plain| WITH_KARRAS_NAME.contains(plain))
        && let Some(make) = lookup(plain, is_flow)
    {
        return Ok((make, true));
    }
    let is_missing = NOT_IMPLEMENTED.contains(&name);
    let is_other_kind = lookup(name, !is_flow).is_some();
    let (name, known) = (name.to_owned(), names(is_flow).join(", "));
    Err(if is_missing {
        SamplerError::NotImplemented { name, known }
    } else if is_other_kind {
        SamplerError::OtherKind { name, known }
    } else {
        SamplerError::Unknown { name, known }
    })
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
