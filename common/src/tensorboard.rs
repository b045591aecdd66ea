//! Event files of TensorBoard: the metrics of a training as scalars.
//!
//! A file is a sequence of records (TFRecord: length, checksum of the length, data, checksum of the data) that each hold one
//! message `tensorflow.Event`. Checksums are CRC-32C, rotated and shifted as TensorFlow masks them. Sources: `record_writer.cc`,
//! `event.proto` and `summary.proto` of TensorFlow.

use crate::step_metrics::StepMetrics;
use prost::Message;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The name of a file that is written again as a whole. TensorBoard reads every file with `tfevents` in its name.
pub const EVENT_FILE: &str = "events.out.tfevents.aitk";
/// The version of the format, which the first event of a file names.
const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.START`: TensorBoard forgets all values of the same folder from the event's step on.
const SESSION_START: i32 = 1;

/// The folder of a run that starts now, as ai-toolkit names it: `name_YYYYmmdd-HHMMSS`, in the local time.
#[must_use]
pub fn folder_name(name: &str) -> String {
    format!("{name}_{}", jiff::Zoned::now().strftime("%Y%m%d-%H%M%S"))
}

/// The newest folder of a run of this name in `log_dir`, by the time in the folder's name. `None` without one.
#[must_use]
pub fn newest_folder(log_dir: &Path, name: &str) -> Option<PathBuf> {
    let names = std::fs::read_dir(log_dir).ok()?.flatten().filter_map(|entry| {
        let folder = entry.file_name().into_string().ok()?;
        let (date, time) = folder.strip_prefix(name)?.strip_prefix('_')?.split_once('-')?;
        let is_number = |text: &str, digits| text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit());
        (is_number(date, 8) && is_number(time, 6) && entry.file_type().ok()?.is_dir()).then_some(folder)
    });
    names.max().map(|folder| log_dir.join(folder))
}

/// The name of a file that grows with the run: TensorBoard reads the files of a folder in the order of their names.
#[must_use]
pub fn growing_file_name(number: u32) -> String {
    let seconds = jiff::Timestamp::now().as_second();
    format!("events.out.tfevents.{seconds:010}.aitk.{number}")
}

/// A message `tensorflow.Event`.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "Content", tags = "3, 5, 7")]
    content: Option<Content>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Content {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// A member of a `oneof`, which is written also when it is 0.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// Writes the beginning of a file. TensorBoard forgets the values that older files in the same folder have.
///
/// # Errors
/// The errors of the writer.
pub fn write_start(out: &mut impl Write) -> io::Result<()> {
    let wall_time = seconds(jiff::Timestamp::now());
    for content in [
        Content::FileVersion(FILE_VERSION.to_owned()),
        Content::SessionLog(SessionLog { status: SESSION_START }),
    ] {
        write_event(
            out,
            &Event {
                wall_time,
                step: 0,
                content: Some(content),
            },
        )?;
    }
    Ok(())
}

/// Writes the metrics of steps, in one call of the writer for each step. A step without a time has that of the step before it.
///
/// # Errors
/// The errors of the writer.
pub fn write_steps<'a>(out: &mut impl Write, steps: impl IntoIterator<Item = &'a StepMetrics>) -> io::Result<()> {
    let mut wall_time = None;
    for step in steps {
        let time = step.time.parse::<jiff::Timestamp>().ok().map(seconds);
        wall_time = time.or(wall_time);
        let event = Event {
            wall_time: wall_time.unwrap_or_else(|| seconds(jiff::Timestamp::now())),
            step: i64::try_from(step.step).unwrap_or(i64::MAX),
            content: Some(Content::Summary(Summary {
                value: step.values.iter().map(scalar).collect(),
            })),
        };
        write_event(out, &event)?;
    }
    Ok(())
}

#[allow(clippy::cast_possible_truncation)]
fn scalar((name, value): (&String, &f64)) -> Scalar {
    Scalar {
        tag: name.clone(),
        simple_value: Some(*value as f32),
    }
}

fn seconds(time: jiff::Timestamp) -> f64 {
    time.as_duration().as_secs_f64()
}

/// Writes one record.
fn write_event(out: &mut impl Write, event: &Event) -> io::Result<()> {
    let data = event.encode_to_vec();
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_crc(&length).to_le_bytes());
    record.extend_from_slice(&data);
    record.extend_from_slice(&masked_crc(&data).to_le_bytes());
    out.write_all(&record)
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Reads the records of a file, and checks their checksums.
    fn events(mut file: &[u8]) -> Vec<Event> {
        let mut all = Vec::new();
        while !file.is_empty() {
            let (head, rest) = file.split_at(12);
            let length = u64::from_le_bytes(head[..8].try_into().unwrap());
            assert_eq!(head[8..], masked_crc(&head[..8]).to_le_bytes());
            let (data, rest) = rest.split_at(usize::try_from(length).unwrap());
            let (checksum, rest) = rest.split_at(4);
            assert_eq!(checksum, masked_crc(data).to_le_bytes());
            all.push(Event::decode(data).unwrap());
            file = rest;
        }
        all
    }

    /// Made by `tests/reference/make_event_file.py`.
    #[test]
    fn the_bytes_are_those_of_tensorboard() {
        let mut file = Vec::new();
        let event = Event {
            wall_time: 1_700_000_000.5,
            step: 3,
            content: Some(Content::Summary(Summary {
                value: vec![scalar((&"loss".to_owned(), &0.5))],
            })),
        };
        write_event(&mut file, &event).unwrap();
        assert_eq!(hex::encode(file), include_str!("testdata/tensorboard.hex").trim());
    }

    #[test]
    fn steps_become_scalars_in_their_order() {
        let step = |step, loss: f64, time: &str| StepMetrics {
            step,
            values: BTreeMap::from([("loss".to_owned(), loss), ("val/loss".to_owned(), 0.0)]),
            time: time.to_owned(),
            ..StepMetrics::default()
        };
        let steps = [
            step(1, 0.5, "2026-01-01T00:00:00.250Z"),
            step(2, f64::NAN, ""),
            step(3, 0.25, "2026-01-01T00:00:02.000Z"),
        ];
        let mut file = Vec::new();
        write_start(&mut file).unwrap();
        write_steps(&mut file, &steps).unwrap();
        let events = events(&file);
        assert_eq!(events[0].content, Some(Content::FileVersion("brain.Event:2".into())));
        assert_eq!(events[1].content, Some(Content::SessionLog(SessionLog { status: 1 })));
        let times: Vec<f64> = events[2..]
            .iter()
            .map(|event| event.wall_time - 1_767_225_600.0)
            .collect();
        assert_eq!(times, [0.25, 0.25, 2.0]);
        for (event, step) in events[2..].iter().zip(&steps) {
            assert_eq!(event.step, i64::try_from(step.step).unwrap());
            let Some(Content::Summary(summary)) = &event.content else {
                panic!("no summary: {event:?}");
            };
            let tags: Vec<&str> = summary.value.iter().map(|value| value.tag.as_str()).collect();
            assert_eq!(tags, ["loss", "val/loss"]);
            let loss = summary.value[0].simple_value.unwrap();
            let expected = step.loss().unwrap();
            assert!(f64::from(loss) == expected || (loss.is_nan() && expected.is_nan()));
            assert_eq!(summary.value[1].simple_value, Some(0.0));
        }
    }
}
