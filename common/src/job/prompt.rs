//! Prompts with flags (`a cat --n blurry --seed 7`), and the request for one image.

use super::generate::{GenerateConfig, numbered_prompt_lines};
use super::limits::{MAX_SAMPLE_STEPS, MAX_SIDE};
use super::node::shorten;
use super::sample::SampleConfig;
use serde::{Deserialize, Serialize};

/// A prompt split at `--` into text and flags. Flags override all other settings; unknown flags are dropped with their value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptFlags {
    /// The prompt without flags.
    pub prompt: String,
    /// `--p2`: prompt of the second text encoder.
    pub prompt_2: Option<String>,
    /// `--n`: negative prompt.
    pub negative_prompt: Option<String>,
    /// `--n2`: negative prompt of the second text encoder.
    pub negative_prompt_2: Option<String>,
    /// `--w`, floored to a multiple of 8 (of 16 for families with a transformer), at least 64.
    pub width: Option<u32>,
    /// `--h`, floored to a multiple of 8 (of 16 for families with a transformer), at least 64.
    pub height: Option<u32>,
    /// `--d`, `--seed`. Unlike a section's seed, -1 is not random here.
    pub seed: Option<i64>,
    /// `--l`, `--cfg`: guidance scale.
    pub guidance_scale: Option<f64>,
    /// `--s`, `--steps`.
    pub steps: Option<u32>,
    /// `--m`, `--network_multiplier`: LoRA strength.
    pub network_multiplier: Option<f64>,
    /// `--gr`: guidance rescale.
    pub guidance_rescale: Option<f64>,
    /// `--a`: adapter strength.
    pub adapter_conditioning_scale: Option<f64>,
    /// `--ref`: where the refiner takes over.
    pub refiner_start_at: Option<f64>,
    /// `--ev`, `--extra_values`.
    pub extra_values: Option<Vec<f64>>,
    /// `--frames`, `--num_frames`.
    pub num_frames: Option<u32>,
    /// `--fps`.
    pub fps: Option<u32>,
    /// `--ctrl_img`: control image.
    pub ctrl_img: Option<String>,
    /// `--ctrl_idx`.
    pub ctrl_idx: Option<u32>,
    /// Unknown flags, which were dropped.
    pub unknown: Vec<String>,
    /// Known flags that are given more than once, each by its last name in the prompt. The last value is used.
    #[serde(default)]
    pub repeated: Vec<String>,
    /// One message for each flag with an invalid value. These flags were dropped too.
    pub problems: Vec<String>,
}

impl PromptFlags {
    /// Parses a prompt. Never fails; [`PromptFlags::problems`] has the errors.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut parts = text.trim().split("--");
        let mut flags = Self {
            prompt: parts.next().unwrap_or("").trim().to_owned(),
            ..Self::default()
        };
        let mut given: Vec<&str> = Vec::new();
        for part in parts {
            let (flag, value) = part.split_once(char::is_whitespace).unwrap_or((part, ""));
            let unknown = flags.unknown.len();
            flags.set(flag, value.trim());
            if flags.unknown.len() > unknown {
                continue;
            }
            let short = short_name(flag);
            if given.contains(&short) {
                flags.repeated.retain(|repeated| short_name(repeated) != short);
                flags.repeated.push(flag.to_owned());
            } else {
                given.push(short);
            }
        }
        flags
    }

    /// A flag that no model of this release can follow.
    #[must_use]
    pub fn refused(&self) -> Option<&'static str> {
        let frames = self.num_frames.is_some_and(|frames| frames > 1);
        frames.then_some("the prompt's flag `--frames`: no video models yet")
    }

    /// One message for each known flag that has no effect. `has_adapter`: an `adapter` is trained, whose strength is `--a`.
    #[must_use]
    pub fn without_effect(&self, has_adapter: bool) -> Vec<String> {
        let flags = [
            ("a", self.adapter_conditioning_scale.is_some() && !has_adapter),
            ("ref", self.refiner_start_at.is_some()),
            ("ev", self.extra_values.is_some()),
            ("fps", self.fps.is_some()),
            ("ctrl_idx", self.ctrl_idx.is_some()),
        ];
        let set = flags.into_iter().filter(|(_, is_set)| *is_set);
        set.map(|(flag, _)| format!("the prompt's flag `--{flag}` has no effect with the models of this release"))
            .collect()
    }

    /// One message for each flag that is dropped: unknown ones, and those that are given again later in the prompt.
    #[must_use]
    pub fn dropped(&self) -> Vec<String> {
        let unknown = self.unknown.iter().map(|flag| {
            format!(
                "`--{}` is not a prompt flag; it and the text after it are dropped",
                shorten(flag)
            )
        });
        let repeated = self.repeated.iter().map(|flag| {
            let other = match short_name(flag) {
                short if short == flag => String::new(),
                short => format!(" (`--{short}` is the same flag)"),
            };
            format!("the prompt's flag `--{flag}` is given more than once{other}: only the last value is used; remove the others")
        });
        unknown.chain(repeated).collect()
    }

    fn set(&mut self, flag: &str, value: &str) {
        let problems = &mut self.problems;
        match flag {
            "n" => self.negative_prompt = Some(value.to_owned()),
            "p2" => self.prompt_2 = Some(value.to_owned()),
            "n2" => self.negative_prompt_2 = Some(value.to_owned()),
            "w" => set_if_some(
                &mut self.width,
                parse_at_most(MAX_SIDE, flag, value, problems).map(floor_size),
            ),
            "h" => set_if_some(
                &mut self.height,
                parse_at_most(MAX_SIDE, flag, value, problems).map(floor_size),
            ),
            "d" | "seed" => set_if_some(&mut self.seed, parse_value(flag, value, "a whole number", problems)),
            "l" | "cfg" => set_if_some(&mut self.guidance_scale, parse_finite(flag, value, problems)),
            "s" | "steps" => set_if_some(&mut self.steps, parse_at_most(MAX_SAMPLE_STEPS, flag, value, problems)),
            "m" | "network_multiplier" => {
                set_if_some(&mut self.network_multiplier, parse_finite(flag, value, problems))
            }
            "gr" => set_if_some(&mut self.guidance_rescale, parse_finite(flag, value, problems)),
            "a" => set_if_some(
                &mut self.adapter_conditioning_scale,
                parse_finite(flag, value, problems),
            ),
            "ref" => set_if_some(&mut self.refiner_start_at, parse_finite(flag, value, problems)),
            "ev" | "extra_values" => {
                let values: Option<Vec<f64>> = value
                    .split(',')
                    .map(|part| parse_finite(flag, part.trim(), problems))
                    .collect();
                set_if_some(&mut self.extra_values, values);
            }
            "frames" | "num_frames" => set_if_some(&mut self.num_frames, parse_u32(flag, value, problems)),
            "fps" => set_if_some(&mut self.fps, parse_u32(flag, value, problems)),
            "ctrl_img" => self.ctrl_img = Some(value.to_owned()),
            "ctrl_idx" => set_if_some(&mut self.ctrl_idx, parse_u32(flag, value, problems)),
            _ => self.unknown.push(flag.to_owned()),
        }
    }
}

/// What is wrong with the flags of the prompts in a file, each message after the number of its line: `3: the prompt's flag …`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptFileReport {
    /// Wrong values, and flags that no model can follow.
    pub errors: Vec<String>,
    /// Flags that have no effect.
    pub warnings: Vec<String>,
}

impl PromptFileReport {
    /// Checks a file with a prompt in each line.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let mut report = Self::default();
        for (number, line) in numbered_prompt_lines(text) {
            let flags = PromptFlags::parse(line);
            let at = |message: String| format!("{number}: {message}");
            let refused = flags.refused().map(str::to_owned);
            report
                .errors
                .extend(flags.problems.iter().cloned().chain(refused).map(at));
            let warnings = flags.dropped().into_iter().chain(flags.without_effect(false));
            report.warnings.extend(warnings.map(at));
        }
        report
    }
}

/// The short name of a flag that has two.
fn short_name(flag: &str) -> &str {
    match flag {
        "seed" => "d",
        "cfg" => "l",
        "steps" => "s",
        "network_multiplier" => "m",
        "extra_values" => "ev",
        "num_frames" => "frames",
        other => other,
    }
}

fn set_if_some<T>(slot: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *slot = value;
    }
}

fn parse_value<T: std::str::FromStr>(flag: &str, value: &str, expected: &str, problems: &mut Vec<String>) -> Option<T> {
    let parsed = value.parse().ok();
    if parsed.is_none() {
        problems.push(format!(
            "the prompt's flag `--{flag}` expects {expected}, found \"{value}\""
        ));
    }
    parsed
}

fn parse_u32(flag: &str, value: &str, problems: &mut Vec<String>) -> Option<u32> {
    parse_value(flag, value, "a whole number from 0", problems)
}

fn parse_at_most(max: u32, flag: &str, value: &str, problems: &mut Vec<String>) -> Option<u32> {
    parse_u32(flag, value, problems).filter(|number| {
        let fits = *number <= max;
        if !fits {
            problems.push(format!(
                "the prompt's flag `--{flag}` expects at most {max}, found {number}"
            ));
        }
        fits
    })
}

fn parse_finite(flag: &str, value: &str, problems: &mut Vec<String>) -> Option<f64> {
    parse_value::<f64>(flag, value, "a number", problems).filter(|value| {
        let finite = value.is_finite();
        if !finite {
            problems.push(format!("the prompt's flag `--{flag}` expects a finite number"));
        }
        finite
    })
}

/// Rounds a width or height down to a multiple of 8, at least 64.
#[must_use]
pub fn floor_size(pixels: u32) -> u32 {
    (pixels / 8 * 8).max(64)
}

/// Replaces `[trigger]` and `[name]` in a sample prompt; without a trigger word the text is unchanged.
#[must_use]
pub fn replace_trigger(prompt: &str, trigger: Option<&str>) -> String {
    match trigger {
        Some(trigger) => prompt.replace("[name]", trigger).replace("[trigger]", trigger),
        None => prompt.to_owned(),
    }
}

/// All settings of one image, after defaults, the item's own values and prompt flags are applied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageRequest {
    /// The prompt without flags.
    pub prompt: String,
    /// Prompt of the second text encoder.
    pub prompt_2: Option<String>,
    /// Negative prompt.
    pub negative_prompt: String,
    /// Negative prompt of the second text encoder.
    pub negative_prompt_2: Option<String>,
    /// Width in pixels, a multiple of 8, at least 64.
    pub width: u32,
    /// Height in pixels, a multiple of 8, at least 64.
    pub height: u32,
    /// Seed; `None` is random. Negative seeds count from 2^64 down, as in torch.
    pub seed: Option<i64>,
    /// Guidance scale.
    pub guidance_scale: f64,
    /// Guidance rescale.
    pub guidance_rescale: f64,
    /// Steps.
    pub steps: u32,
    /// LoRA strength.
    pub network_multiplier: f64,
    /// Adapter strength.
    pub adapter_conditioning_scale: f64,
    /// Where the refiner takes over.
    pub refiner_start_at: f64,
    /// Input of single-value adapters.
    pub extra_values: Vec<f64>,
    /// Video frames.
    pub num_frames: u32,
    /// Video frames per second.
    pub fps: u32,
    /// Control image.
    pub ctrl_img: Option<String>,
    /// First of several control images.
    pub ctrl_img_1: Option<String>,
    /// Second of several control images.
    pub ctrl_img_2: Option<String>,
    /// Third of several control images.
    pub ctrl_img_3: Option<String>,
    /// Index of the control.
    pub ctrl_idx: u32,
    /// CFG norm (Qwen edit).
    pub do_cfg_norm: bool,
}

impl ImageRequest {
    /// Applies the flags in the prompt and rounds the size.
    #[must_use]
    fn apply_flags(mut self) -> Self {
        let flags = PromptFlags::parse(&self.prompt);
        self.prompt = flags.prompt;
        self.prompt_2 = flags.prompt_2.or(self.prompt_2);
        self.negative_prompt = flags.negative_prompt.unwrap_or(self.negative_prompt);
        self.negative_prompt_2 = flags.negative_prompt_2.or(self.negative_prompt_2);
        self.width = floor_size(flags.width.unwrap_or(self.width));
        self.height = floor_size(flags.height.unwrap_or(self.height));
        self.seed = flags.seed.or(self.seed.filter(|&seed| seed != -1));
        self.guidance_scale = flags.guidance_scale.unwrap_or(self.guidance_scale);
        self.guidance_rescale = flags.guidance_rescale.unwrap_or(self.guidance_rescale);
        self.steps = flags.steps.unwrap_or(self.steps).max(1);
        self.network_multiplier = flags.network_multiplier.unwrap_or(self.network_multiplier);
        self.adapter_conditioning_scale = flags
            .adapter_conditioning_scale
            .unwrap_or(self.adapter_conditioning_scale);
        self.refiner_start_at = flags.refiner_start_at.unwrap_or(self.refiner_start_at);
        self.extra_values = flags.extra_values.unwrap_or(self.extra_values);
        self.num_frames = flags.num_frames.unwrap_or(self.num_frames);
        self.fps = flags.fps.unwrap_or(self.fps);
        // As in ai-toolkit, the flag does not set `ctrl_img_1`.
        self.ctrl_img = flags.ctrl_img.or(self.ctrl_img);
        self.ctrl_idx = flags.ctrl_idx.unwrap_or(self.ctrl_idx);
        self
    }
}

impl SampleConfig {
    /// Returns the image requests of this section. `trigger` is the process's trigger word. Unlike in ai-toolkit, an item's seed
    /// does not carry over: later items without one use the section's.
    #[must_use]
    pub fn requests(&self, trigger: Option<&str>) -> Vec<ImageRequest> {
        let to_request = |(index, item): (usize, &super::sample::SampleItem)| {
            let walk = if self.walk_seed {
                i64::try_from(index).unwrap_or(0)
            } else {
                0
            };
            ImageRequest {
                prompt: replace_trigger(&item.prompt, trigger),
                prompt_2: None,
                negative_prompt: item.neg.as_ref().unwrap_or(&self.neg).0.clone(),
                negative_prompt_2: None,
                width: item.width.unwrap_or(self.width),
                height: item.height.unwrap_or(self.height),
                seed: Some(item.seed.unwrap_or_else(|| self.seed.wrapping_add(walk))),
                guidance_scale: item.guidance_scale.unwrap_or(self.guidance_scale),
                guidance_rescale: self.guidance_rescale,
                steps: item.sample_steps.unwrap_or(self.sample_steps),
                network_multiplier: item.network_multiplier.map_or(self.network_multiplier, |m| *m),
                adapter_conditioning_scale: self.adapter_conditioning_scale,
                refiner_start_at: self.refiner_start_at,
                extra_values: Vec::new(),
                num_frames: item.num_frames.unwrap_or(self.num_frames),
                fps: item.fps.unwrap_or(self.fps),
                ctrl_img: item.ctrl_img.clone(),
                ctrl_img_1: item.ctrl_img_1.clone().or_else(|| item.ctrl_img.clone()),
                ctrl_img_2: item.ctrl_img_2.clone(),
                ctrl_img_3: item.ctrl_img_3.clone(),
                ctrl_idx: item.ctrl_idx,
                do_cfg_norm: self.do_cfg_norm,
            }
            .apply_flags()
        };
        self.samples.iter().enumerate().map(to_request).collect()
    }
}

impl GenerateConfig {
    /// Width and height of the largest image that these prompts may give, with their flags and the sizes of `size_list`.
    #[must_use]
    pub fn largest_size<'a>(&self, prompts: impl IntoIterator<Item = &'a str>) -> Option<(u32, u32)> {
        let sizes = prompts.into_iter().flat_map(|prompt| self.sizes(prompt));
        sizes.max_by_key(|(width, height)| u64::from(*width) * u64::from(*height))
    }

    /// The sizes that an image of this prompt may have: those of `size_list`, or `width` and `height`, with the prompt's flags.
    #[must_use]
    pub fn sizes(&self, prompt: &str) -> Vec<(u32, u32)> {
        let listed = self.size_list.iter().flatten().map(|size| (size.0, size.1));
        let mut sizes: Vec<(u32, u32)> = listed.collect();
        if sizes.is_empty() {
            sizes.push((self.width, self.height));
        }
        let flags = PromptFlags::parse(prompt);
        let side = |flag: Option<u32>, usual: u32| floor_size(flag.unwrap_or(usual));
        for (width, height) in &mut sizes {
            (*width, *height) = (side(flags.width, *width), side(flags.height, *height));
        }
        sizes
    }

    /// Returns the image request for one prompt with flags. `size` is the size that the caller drew from `size_list`, if any.
    #[must_use]
    pub fn request(&self, prompt: &str, size: Option<(u32, u32)>) -> ImageRequest {
        let (width, height) = size.unwrap_or((self.width, self.height));
        ImageRequest {
            prompt: prompt.to_owned(),
            prompt_2: self.prompt_2.clone(),
            negative_prompt: self.neg.clone(),
            negative_prompt_2: self.neg_2.clone(),
            width,
            height,
            seed: Some(self.seed),
            guidance_scale: self.guidance_scale,
            guidance_rescale: self.guidance_rescale,
            steps: self.sample_steps,
            network_multiplier: 1.0,
            adapter_conditioning_scale: 1.0,
            refiner_start_at: 0.5,
            extra_values: Vec::new(),
            num_frames: 1,
            fps: 15,
            ctrl_img: None,
            ctrl_img_1: None,
            ctrl_img_2: None,
            ctrl_img_3: None,
            ctrl_idx: 0,
            do_cfg_norm: false,
        }
        .apply_flags()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::sample::SampleItem;

    #[test]
    fn flags_are_parsed_and_unknown_ones_dropped() {
        let flags = PromptFlags::parse(
            " a cat, sitting --n blurry, dark --w 515 --h 10 --d 42 --l 6.5 --s 30 --m 0.8 --ev 1,2.5 --zoom in --seed -1",
        );
        assert_eq!(flags.prompt, "a cat, sitting");
        assert_eq!(flags.negative_prompt.as_deref(), Some("blurry, dark"));
        assert_eq!((flags.width, flags.height), (Some(512), Some(64)));
        assert_eq!((flags.seed, flags.steps), (Some(-1), Some(30)));
        assert_eq!((flags.guidance_scale, flags.network_multiplier), (Some(6.5), Some(0.8)));
        assert_eq!(flags.extra_values, Some(vec![1.0, 2.5]));
        assert_eq!(flags.unknown, ["zoom"]);
        assert_eq!(flags.problems, [""; 0]);
    }

    #[test]
    fn invalid_flag_values_are_reported_and_dropped() {
        let flags = PromptFlags::parse("x --w wide --cfg inf --steps");
        assert_eq!((flags.width, flags.guidance_scale, flags.steps), (None, None, None));
        assert_eq!(flags.problems.len(), 3);
        // Any literal `--` begins a flag, as in ai-toolkit.
        assert_eq!(PromptFlags::parse("a -- b").prompt, "a");
    }

    #[test]
    fn the_last_of_several_equal_flags_is_used_and_said() {
        let flags = PromptFlags::parse(
            "a --ctrl_img b.png --d 1 --w 64 --ctrl_img c.png --seed 2 --ctrl_img e.png --zoom --zoom",
        );
        assert_eq!((flags.ctrl_img.as_deref(), flags.seed), (Some("e.png"), Some(2)));
        assert_eq!(flags.repeated, ["seed", "ctrl_img"]);
        let said = flags.dropped();
        assert_eq!(said.len(), 4, "{said:?}");
        assert!(
            said[2].contains("`--seed` is given more than once (`--d` is the same flag): only the last"),
            "{said:?}"
        );
        assert!(
            said[3].contains("`--ctrl_img` is given more than once: only the last value is used"),
            "{said:?}"
        );
        assert!(PromptFlags::parse("a --ctrl_img b.png --d 1").dropped().is_empty());
    }

    #[test]
    fn the_largest_image_of_prompts_has_their_flags_and_a_listed_size() {
        let mut config = GenerateConfig::default();
        assert_eq!(config.largest_size(["a", "b --w 1030 --h 64"]), Some((512, 512)));
        assert_eq!(config.largest_size(["a", "b --w 1030"]), Some((1024, 512)));
        config.size_list = serde_json::from_str("[[512, 1024], [1024, 512]]").unwrap();
        assert_eq!(config.largest_size(["a --w 2048"]), Some((2048, 1024)));
        assert_eq!(config.largest_size([]), None);
        assert_eq!(config.sizes("a --h 70"), [(512, 64), (1024, 64)]);
    }

    #[test]
    fn flags_of_a_file_are_reported_with_their_lines() {
        let report =
            PromptFileReport::of("\u{feff}a --w 512\n\n  b --w wide --frames 9\r\nc --zoom in --fps 8 --frames 1\n");
        let starts = |messages: &[String], starts: &[&str]| {
            let are = messages
                .iter()
                .zip(starts)
                .all(|(message, start)| message.starts_with(start));
            are && messages.len() == starts.len()
        };
        let errors = ["3: the prompt's flag `--w` expects", "3: the prompt's flag `--frames`"];
        assert!(starts(&report.errors, &errors), "{report:?}");
        let warnings = [
            "4: `--zoom` is not a prompt flag",
            "4: the prompt's flag `--fps` has no effect",
        ];
        assert!(starts(&report.warnings, &warnings), "{report:?}");
        assert_eq!(PromptFileReport::of("a cat\n"), PromptFileReport::default());
    }

    #[test]
    fn items_without_a_value_use_the_section_s_value() {
        let item = |prompt: &str, seed| SampleItem {
            prompt: prompt.into(),
            seed,
            ..SampleItem::default()
        };
        let mut sample = SampleConfig {
            seed: 10,
            width: 517,
            samples: vec![
                item("a", None),
                item("b [trigger] [name]", Some(3)),
                item("c", None),
                item("d --seed 9", None),
            ],
            ..SampleConfig::default()
        };
        let seeds = |sample: &SampleConfig| sample.requests(Some("t0k")).iter().map(|r| r.seed).collect::<Vec<_>>();
        assert_eq!(seeds(&sample), [Some(10), Some(3), Some(10), Some(9)]);
        sample.walk_seed = true;
        assert_eq!(seeds(&sample), [Some(10), Some(3), Some(12), Some(9)]);
        let requests = sample.requests(Some("t0k"));
        assert_eq!((requests[1].prompt.as_str(), requests[1].width), ("b t0k t0k", 512));
        assert_eq!(sample.requests(None)[1].prompt, "b [trigger] [name]");
        sample.seed = -1;
        assert_eq!(seeds(&sample)[0], None, "-1 is random");
    }
}
