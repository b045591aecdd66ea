//! Reads the parameters of an augmentation.

use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// The lowest and the highest value of a parameter that is drawn.
pub type Range = [f64; 2];

/// What is outside of an image that is rotated, as in OpenCV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Border {
    /// One colour: blue, green and red.
    Constant([u8; 3]),
    /// The pixels of the edge.
    Replicate,
    /// The mirrored image, with the pixels of the edge twice.
    Reflect,
    /// The opposite edge: the image is repeated.
    Wrap,
    /// The mirrored image.
    Reflect101,
}

/// OpenCV's names of the colours outside of an image, by number.
const BORDERS: [&str; 5] = [
    "BORDER_CONSTANT",
    "BORDER_REPLICATE",
    "BORDER_REFLECT",
    "BORDER_WRAP",
    "BORDER_REFLECT_101",
];

/// The parameters of one augmentation. Each mistake is added to a list, and a default is used instead.
pub(super) struct Params<'a> {
    method: &'a str,
    key: &'a str,
    values: Map<String, Value>,
    known: BTreeSet<&'static str>,
    mistakes: &'a mut Vec<(String, String)>,
}

impl<'a> Params<'a> {
    /// The parameters of `method`, whose key is `key`.
    pub(super) fn new(
        method: &'a str,
        key: &'a str,
        params: Option<&Value>,
        mistakes: &'a mut Vec<(String, String)>,
    ) -> Self {
        let values = match params {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(map)) => map.clone(),
            Some(_) => {
                mistakes.push((key.to_owned(), format!("expected the parameters of `{method}` by name")));
                Map::new()
            }
        };
        Self {
            method,
            key,
            values,
            known: BTreeSet::new(),
            mistakes,
        }
    }

    /// Reports the parameters that were not read.
    pub(super) fn finish(self) {
        for name in self.values.keys() {
            let known: Vec<&str> = self.known.iter().copied().collect();
            let message = format!(
                "`{}` has no parameter `{name}`, or only its default is supported; known: {}",
                self.method,
                known.join(", ")
            );
            self.mistakes.push((format!("{}.{name}", self.key), message));
        }
    }

    /// Reports a parameter unless `fits`.
    pub(super) fn check(&mut self, name: &str, fits: bool, expected: &str) {
        if !fits {
            self.mistakes
                .push((format!("{}.{name}", self.key), expected.to_owned()));
        }
    }

    fn take(&mut self, name: &'static str) -> Option<Value> {
        self.known.insert(name);
        self.values.remove(name).filter(|value| !value.is_null())
    }

    /// A number within bounds.
    pub(super) fn number(&mut self, name: &'static str, default: f64, bounds: RangeInclusive<f64>) -> f64 {
        let Some(value) = self.take(name) else { return default };
        match value.as_f64().filter(|number| bounds.contains(number)) {
            Some(number) => number,
            None => {
                let expected = format!(
                    "expected a number from {} to {}, found {value}",
                    bounds.start(),
                    bounds.end()
                );
                self.check(name, false, &expected);
                default
            }
        }
    }

    /// True or false.
    pub(super) fn flag(&mut self, name: &'static str, default: bool) -> bool {
        let Some(value) = self.take(name) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.check(name, false, &format!("expected true or false, found {value}"));
            default
        })
    }

    /// The two ends of a range, or one number, which `widened` makes a range; `None`: one number is not a range.
    fn range(
        &mut self,
        name: &'static str,
        default: Range,
        bounds: RangeInclusive<f64>,
        widened: Option<&dyn Fn(f64) -> Range>,
    ) -> Range {
        let Some(value) = self.take(name) else { return default };
        let range = match &value {
            Value::Array(ends) => match ends.as_slice() {
                [low, high] => low.as_f64().zip(high.as_f64()).map(|(low, high)| [low, high]),
                _ => None,
            },
            number => number.as_f64().and_then(|number| Some(widened?(number))),
        };
        match range.filter(|ends| ends.iter().all(|end| bounds.contains(end))) {
            Some(ends) => ends,
            None => {
                let form = if widened.is_some() {
                    "a number, or [low, high],"
                } else {
                    "two numbers, [low, high], each"
                };
                let expected = format!(
                    "expected {form} from {} to {}, found {value}",
                    bounds.start(),
                    bounds.end()
                );
                self.check(name, false, &expected);
                default
            }
        }
    }

    /// A range: one number means minus it to it. In albumentations too, its ends may be in any order.
    pub(super) fn symmetric(&mut self, name: &'static str, default: Range, largest: f64) -> Range {
        sorted(self.range(
            name,
            default,
            -largest..=largest,
            Some(&|value| [-value.abs(), value.abs()]),
        ))
    }

    /// A range of factors: one number means 1 minus it, at least 0, to 1 plus it.
    pub(super) fn around_one(&mut self, name: &'static str, default: Range) -> Range {
        let widened = |value: f64| match value < 0.0 {
            // It is refused.
            true => [value; 2],
            false => [(1.0 - value).max(0.0), 1.0 + value],
        };
        sorted(self.range(name, default, 0.0..=100.0, Some(&widened)))
    }

    /// A range: one number means 0 to it.
    pub(super) fn up_from_zero(&mut self, name: &'static str, default: Range, largest: f64) -> Range {
        sorted(self.range(name, default, 0.0..=largest, Some(&|value| [value.min(0.0), value])))
    }

    /// A range: one number means 1 to it.
    pub(super) fn up_from_one(&mut self, name: &'static str, default: Range, largest: f64) -> Range {
        sorted(self.range(name, default, 1.0..=largest, Some(&|value| [value.min(1.0), value])))
    }

    /// A range of two numbers.
    pub(super) fn pair(&mut self, name: &'static str, default: Range, bounds: RangeInclusive<f64>) -> Range {
        sorted(self.pair_in_order(name, default, bounds))
    }

    /// Two numbers.
    pub(super) fn pair_in_order(&mut self, name: &'static str, default: Range, bounds: RangeInclusive<f64>) -> Range {
        self.range(name, default, bounds, None)
    }

    /// `border_mode` and `value`.
    pub(super) fn border(&mut self) -> Border {
        let colour = self.colour();
        let Some(mode) = self.take("border_mode") else {
            return Border::Reflect101;
        };
        let name = mode.as_str().and_then(|name| name.strip_prefix("cv2."));
        let number = mode
            .as_u64()
            .or_else(|| Some(BORDERS.iter().position(|border| Some(*border) == name)? as u64));
        match number {
            Some(0) => Border::Constant(colour),
            Some(1) => Border::Replicate,
            Some(2) => Border::Reflect,
            Some(3) => Border::Wrap,
            Some(4) => Border::Reflect101,
            _ => {
                let names = BORDERS.map(|name| format!("cv2.{name}"));
                self.check(
                    "border_mode",
                    false,
                    &format!("expected one of {}, found {mode}", names.join(", ")),
                );
                Border::Reflect101
            }
        }
    }

    /// `value`: one number, or blue, green and red.
    fn colour(&mut self) -> [u8; 3] {
        let Some(value) = self.take("value") else { return [0; 3] };
        let byte = |value: &Value| value.as_u64().and_then(|byte| u8::try_from(byte).ok());
        let colour = match &value {
            Value::Array(channels) => {
                let bytes: Option<Vec<u8>> = channels.iter().map(byte).collect();
                bytes.and_then(|bytes| <[u8; 3]>::try_from(bytes).ok())
            }
            number => byte(number).map(|byte| [byte; 3]),
        };
        colour.unwrap_or_else(|| {
            let expected = format!("expected a whole number from 0 to 255, or three (blue, green, red), found {value}");
            self.check("value", false, &expected);
            [0; 3]
        })
    }
}

fn sorted([a, b]: Range) -> Range {
    [a.min(b), a.max(b)]
}
