//! Noise schedules and samplers, named as in diffusers.
