//! Formats numbers, sizes and times for people, and parses durations and times that people write.

use jiff::{SignedDuration, Timestamp};
use std::path::Path;
use std::time::Duration;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

const KIB: f64 = 1024.0;

/// Returns a count with its noun: `1 image`, `3 images`.
#[must_use]
pub fn plural(count: u64, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

/// Formats memory, always in GiB: `23.6 GiB`.
#[must_use]
pub fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (KIB * KIB * KIB))
}

/// Formats the size of a file in a suitable unit: `812 B`, `4.0 KiB`, `37.2 MiB`, `1.9 GiB`.
#[must_use]
pub fn size(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..=1023 => format!("{bytes} B"),
        1024..=1_048_063 => format!("{:.1} KiB", value / KIB),
        1_048_064..=1_073_217_535 => format!("{:.1} MiB", value / (KIB * KIB)),
        _ => gib(bytes),
    }
}

/// Formats a duration in at most two units: `42s`, `3m 05s`, `2h 10m`, `5d 03h`.
#[must_use]
pub fn duration(length: Duration) -> String {
    let s = length.as_secs();
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h {:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d {:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Formats how long ago a time was, in one unit: `now`, `12s ago`, `3m ago`, `2h ago`, `5d ago`. A time in the future
/// is `now`.
#[must_use]
pub fn ago(timestamp: Timestamp, now: Timestamp) -> String {
    let s = now.duration_since(timestamp).as_secs();
    match s {
        i64::MIN..=0 => "now".to_owned(),
        1..60 => format!("{s}s ago"),
        60..3600 => format!("{}m ago", s / 60),
        3600..86_400 => format!("{}h ago", s / 3600),
        _ => format!("{}d ago", s / 86_400),
    }
}

/// Formats a time for JSON: RFC 3339 with milliseconds, UTC.
#[must_use]
pub fn rfc3339(timestamp: Timestamp) -> String {
    format!("{timestamp:.3}")
}

/// Formats a loss or another number of unknown magnitude with four significant digits; below 0.001 and from 10,000 on with two.
#[must_use]
pub fn number(value: f64) -> String {
    // Rounding may add a digit: 9.9996 is 10.00.
    let size: f64 = format!("{:.3e}", value.abs()).parse().unwrap_or(value);
    if !value.is_finite() {
        format!("{value}")
    } else if size == 0.0 {
        "0".to_owned()
    } else if (0.001..10_000.0).contains(&size) {
        let digits_before_point = size.log10().floor() as i32 + 1;
        let decimals = usize::try_from(4 - digits_before_point).unwrap_or(0);
        format!("{value:.decimals$}")
    } else {
        format!("{value:.1e}")
    }
}

/// Formats the speed of steps: `2.31 it/s`, or `4.20 s/it` when one takes longer than a second.
#[must_use]
pub fn rate(seconds_per_step: f64) -> String {
    if seconds_per_step.is_finite() && seconds_per_step > 0.0 {
        if seconds_per_step > 1.0 {
            format!("{seconds_per_step:.2} s/it")
        } else {
            format!("{:.2} it/s", 1.0 / seconds_per_step)
        }
    } else {
        "-".to_owned()
    }
}

/// Parses a duration: `90`, `90s`, `10m`, `2h`, `1d`, `1h30m`.
///
/// # Errors
/// A sentence that says what is expected.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is not a duration; expected something like 90s, 10m, 2h or 1d");
    let mut total = 0_u64;
    let mut digits = String::new();
    let mut last_unit = u64::MAX;
    for character in text.trim().chars() {
        if character.is_ascii_digit() {
            digits.push(character);
            continue;
        }
        let unit = match character {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 86_400,
            _ => return Err(wrong()),
        };
        let value: u64 = digits.parse().map_err(|_| wrong())?;
        if unit >= last_unit {
            return Err(wrong());
        }
        last_unit = unit;
        digits.clear();
        total = value
            .checked_mul(unit)
            .and_then(|add| total.checked_add(add))
            .ok_or_else(wrong)?;
    }
    if !digits.is_empty() {
        if last_unit != u64::MAX {
            return Err(wrong());
        }
        total = digits.parse().map_err(|_| wrong())?;
    } else if last_unit == u64::MAX {
        return Err(wrong());
    }
    // The limit of ten years avoids overflows in computations with times.
    if total > 315_360_000 {
        Err(wrong())
    } else {
        Ok(Duration::from_secs(total))
    }
}

/// Parses a time: RFC 3339, or a duration before now (`10m`).
///
/// # Errors
/// A sentence that says what is expected.
pub fn parse_since(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    if let Ok(length) = parse_duration(text) {
        let seconds = i64::try_from(length.as_secs()).unwrap_or(i64::MAX);
        return now
            .checked_sub(SignedDuration::from_secs(seconds))
            .map_err(|_| format!("'{text}' is too far in the past"));
    }
    text.parse()
        .map_err(|_| format!("'{text}' is not a time; expected 10m, 2h, … or RFC 3339 like 2026-05-01T12:00:00Z"))
}

/// A word of a command line for a POSIX shell: in single quotes if it has characters that the shell reads otherwise.
#[must_use]
pub fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+:,@%=".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// A path as a word of a command line ([`shell_word`]), without a `./` at its beginning.
#[must_use]
pub fn shell_path(path: &Path) -> String {
    shell_word(&path.strip_prefix("./").unwrap_or(path).display().to_string())
}

/// Removes control characters from text of other origin (job names, log lines), so that it cannot send escape sequences
/// to the terminal. Tabs become spaces.
#[must_use]
pub fn printable(text: &str) -> String {
    // Fast path for text without such characters.
    if !text.chars().any(|c| c.is_control() || is_bidi(c)) {
        return text.to_owned();
    }
    text.chars()
        .map(|c| match c {
            '\t' => ' ',
            c if c.is_control() || is_bidi(c) => '\u{fffd}',
            c => c,
        })
        .collect()
}

/// As [`printable`], but keeps line breaks.
#[must_use]
pub fn printable_lines(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(printable).collect();
    lines.join("\n")
}

/// Whether a character changes the text direction, which could make one name look like another.
pub(super) fn is_bidi(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Splits a line into pieces of at most `width` columns, between words if possible.
#[must_use]
pub fn fold(line: &str, width: usize) -> Vec<String> {
    let mut out = Vec::new();
    let mut piece = String::new();
    for word in line.split_inclusive(' ') {
        if !piece.is_empty() && piece.width() + word.trim_end().width() > width {
            out.push(std::mem::take(&mut piece).trim_end().to_owned());
        }
        piece.push_str(word);
        // A word that is longer than a line.
        while piece.trim_end().width() > width {
            let mut display_width = 0;
            let fits = piece
                .char_indices()
                .find(|(_, c)| {
                    display_width += c.width().unwrap_or(0);
                    display_width > width
                })
                .map_or(piece.len(), |(at, _)| at);
            let first = piece.chars().next().map_or(0, char::len_utf8);
            let rest = piece.split_off(fits.max(first));
            out.push(std::mem::replace(&mut piece, rest));
        }
    }
    if !piece.trim_end().is_empty() || out.is_empty() {
        out.push(piece.trim_end().to_owned());
    }
    out
}

/// Wraps text to lines of at most `width` columns, between words. A word that is longer than a line, such as a path, is
/// not split, and a line that fits is not changed. Continuation lines are indented by two more columns. Colour
/// sequences count as no columns.
#[must_use]
pub fn wrap(text: &str, width: usize) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| wrap_line(line, width)).collect();
    lines.join("\n")
}

/// As [`wrap`], but a line that begins with two spaces is not wrapped: it is a command to copy.
#[must_use]
pub fn wrap_sentences(text: &str, width: usize) -> String {
    let wrapped = text.split('\n').map(|line| match line.starts_with("  ") {
        true => line.to_owned(),
        false => wrap_line(line, width),
    });
    wrapped.collect::<Vec<_>>().join("\n")
}

fn wrap_line(line: &str, width: usize) -> String {
    if display_width(line) <= width {
        return line.to_owned();
    }
    let indent = line.len() - line.trim_start_matches(' ').len() + 2;
    let mut out = String::new();
    let (mut used, mut blanks) = (0, 0);
    for word in line.split(' ') {
        if word.is_empty() {
            blanks += 1;
            continue;
        }
        let size = display_width(word);
        if used > 0 && used + blanks + size > width && indent < width {
            out.push('\n');
            (used, blanks) = (0, indent);
        }
        out.extend(std::iter::repeat_n(' ', blanks));
        out.push_str(word);
        used += blanks + size;
        blanks = 1;
    }
    out
}

/// Returns the columns of a text, without its colour sequences.
fn display_width(text: &str) -> usize {
    let mut bare = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\x1b[") {
        bare.push_str(before);
        rest = after.split_once('m').map_or("", |(_, rest)| rest);
    }
    bare.push_str(rest);
    bare.width()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapping_keeps_words_whole_and_short_lines_unchanged() {
        let text = "error: no coordinator answers at https://gpu.lab:7420 (Connection refused)";
        assert_eq!(
            wrap(text, 40),
            "error: no coordinator answers at\n  https://gpu.lab:7420 (Connection\n  refused)"
        );
        for width in [20, 33, 60, 80] {
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(words(&wrap(text, width)), words(text), "{width}");
            for line in wrap(text, width).lines() {
                assert!(line.width() <= width || !line.trim().contains(' '), "{width}: {line}");
            }
        }
        let laid_out = "step 3/5   loss  0.1\n    a.yaml:3:  wrong";
        assert_eq!(wrap(laid_out, 21), laid_out);
        assert_eq!(wrap("  a bb  ccc", 8), "  a bb\n    ccc");
        assert_eq!(
            wrap("a/path/that/is/too/long for it", 10),
            "a/path/that/is/too/long\n  for it"
        );
        // Colour sequences count as no columns.
        assert_eq!(wrap("\x1b[1;31merror:\x1b[0m abc", 10), "\x1b[1;31merror:\x1b[0m abc");
        assert_eq!(wrap("日本語 日本語", 8), "日本語\n  日本語");
        // A command is not wrapped.
        let with_command = "Then, on the other machine:\n  aitk-worker --server https://gpu.lab:7420";
        assert_eq!(
            wrap_sentences(with_command, 20),
            "Then, on the other\n  machine:\n  aitk-worker --server https://gpu.lab:7420"
        );
    }

    #[test]
    fn sizes_and_times_are_formatted() {
        assert_eq!(gib(25_769_803_776), "24.0 GiB");
        assert_eq!(size(812), "812 B");
        assert_eq!(size(4096), "4.0 KiB");
        assert_eq!(size(1_048_575), "1.0 MiB");
        assert_eq!(size(39_000_000), "37.2 MiB");
        assert_eq!(size(2_040_109_466), "1.9 GiB");
        assert_eq!(duration(Duration::from_secs(42)), "42s");
        assert_eq!(duration(Duration::from_secs(185)), "3m 05s");
        assert_eq!(duration(Duration::from_secs(7800)), "2h 10m");
        assert_eq!(duration(Duration::from_secs(443_000)), "5d 03h");
        let now: Timestamp = "2026-05-01T12:00:00Z".parse().unwrap();
        assert_eq!(ago("2026-05-01T11:59:48Z".parse().unwrap(), now), "12s ago");
        assert_eq!(ago("2026-05-01T09:59:48Z".parse().unwrap(), now), "2h ago");
        assert_eq!(ago("2026-05-01T12:00:09Z".parse().unwrap(), now), "now");
        assert_eq!(rfc3339(now), "2026-05-01T12:00:00.000Z");
    }

    #[test]
    fn numbers_keep_four_digits() {
        assert_eq!(number(0.123_456), "0.1235");
        assert_eq!(number(0.001_234_6), "0.001235");
        assert_eq!(number(-0.25), "-0.2500");
        assert_eq!(number(1.0), "1.000");
        assert_eq!(number(0.999_96), "1.000");
        assert_eq!(number(9.999_6), "10.00");
        assert_eq!(number(9_999.96), "1.0e4");
        assert_eq!(number(12.345_6), "12.35");
        assert_eq!(number(1_234.567_8), "1235");
        assert_eq!(number(12_345.0), "1.2e4");
        assert_eq!(number(0.000_1), "1.0e-4");
        assert_eq!(number(0.0), "0");
        assert_eq!(number(f64::NAN), "NaN");
        assert_eq!(rate(0.4), "2.50 it/s");
        assert_eq!(rate(4.2), "4.20 s/it");
        assert_eq!(rate(0.0), "-");
    }

    #[test]
    fn durations_parse_or_say_what_is_expected() {
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("1h30m"), Ok(Duration::from_secs(5400)));
        for bad in [
            "",
            "m",
            "10x",
            "-5s",
            "1m1h",
            "1m1m",
            "10m5",
            "99999999999999999999s",
            "400000d",
        ] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        let now: Timestamp = "2026-05-01T12:00:00Z".parse().unwrap();
        assert_eq!(rfc3339(parse_since("10m", now).unwrap()), "2026-05-01T11:50:00.000Z");
        assert_eq!(
            parse_since("2026-05-01T12:00:00+02:00", now).unwrap().to_string(),
            "2026-05-01T10:00:00Z"
        );
        assert!(parse_since("yesterday", now).is_err());
    }

    #[test]
    fn words_of_command_lines_are_quoted_where_the_shell_needs_it() {
        assert_eq!(shell_word("output/cat-1.5_x"), "output/cat-1.5_x");
        assert_eq!(shell_word("my lora"), "'my lora'");
        assert_eq!(shell_word("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(shell_word("~x"), "'~x'");
        assert_eq!(shell_word(""), "''");
        assert_eq!(shell_path(Path::new("./my job.yaml")), "'my job.yaml'");
    }

    #[test]
    fn control_characters_are_removed() {
        assert_eq!(printable("a\x1b[2Jb\tc"), "a\u{fffd}[2Jb c");
        assert_eq!(printable("x\u{202e}y"), "x\u{fffd}y");
        assert_eq!(printable("日本 ok"), "日本 ok");
        assert_eq!(printable_lines("a\x1b\nb\r\n"), "a\u{fffd}\nb");
    }
}
