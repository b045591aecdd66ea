//! Reads lines from a pipe with a limit on their length, so that a child cannot fill the daemon's memory.

use std::io;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, BufReader};

/// One line of a child's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Line {
    /// A line within the limit, without its line end. Bytes that are not UTF-8 are replaced.
    Text(String),
    /// A line longer than the limit: its beginning, up to the limit, and its length in bytes.
    TooLong {
        /// The bytes within the limit.
        beginning: String,
        /// The length of the whole line.
        bytes: u64,
    },
}

/// Reads lines of at most `limit` bytes. Cancel-safe: a partial line stays in the buffer.
#[derive(Debug)]
pub(super) struct BoundedLines<R> {
    reader: BufReader<R>,
    limit: usize,
    buffer: Vec<u8>,
    line_bytes: u64,
}

impl<R: AsyncRead + Unpin> BoundedLines<R> {
    /// Reads from `reader`.
    pub(super) fn new(reader: R, limit: usize) -> Self {
        Self {
            reader: BufReader::new(reader),
            limit,
            buffer: Vec::new(),
            line_bytes: 0,
        }
    }

    /// The next line; `None` at the end. A last line without a line end counts.
    ///
    /// # Errors
    /// The error of the pipe.
    pub(super) async fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let chunk = AsyncBufReadExt::fill_buf(&mut self.reader).await?;
            if chunk.is_empty() {
                return Ok(if self.line_bytes == 0 {
                    None
                } else {
                    Some(self.take_line())
                });
            }
            let (part, used, ended) = match chunk.iter().position(|&byte| byte == b'\n') {
                Some(at) => (&chunk[..at], at + 1, true),
                None => (chunk, chunk.len(), false),
            };
            let room = self.limit.saturating_sub(self.buffer.len());
            self.buffer.extend_from_slice(&part[..part.len().min(room)]);
            self.line_bytes += part.len() as u64;
            // `line_bytes` stays 0 for an empty line, which the branch below returns at once.
            std::pin::Pin::new(&mut self.reader).consume(used);
            if ended {
                return Ok(Some(self.take_line()));
            }
        }
    }

    fn take_line(&mut self) -> Line {
        let bytes = std::mem::take(&mut self.line_bytes);
        let mut buffer = std::mem::take(&mut self.buffer);
        if bytes > buffer.len() as u64 {
            return Line::TooLong {
                beginning: String::from_utf8_lossy(&buffer).into_owned(),
                bytes,
            };
        }
        if buffer.last() == Some(&b'\r') {
            buffer.pop();
        }
        Line::Text(String::from_utf8_lossy(&buffer).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(bytes: &[u8], limit: usize) -> Vec<Line> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut lines = BoundedLines::new(bytes, limit);
            let mut out = Vec::new();
            while let Some(line) = lines.next().await.unwrap() {
                out.push(line);
            }
            out
        })
    }

    #[test]
    fn long_lines_are_truncated_and_the_next_one_is_complete() {
        let mut bytes = vec![b'x'; 100_000];
        bytes.extend_from_slice(b"\n\r\nok\r\nlast");
        let lines = all(&bytes, 10);
        assert_eq!(
            lines[0],
            Line::TooLong {
                beginning: "x".repeat(10),
                bytes: 100_000
            }
        );
        let rest = ["", "ok", "last"].map(|text| Line::Text(text.to_owned()));
        assert_eq!(lines[1..], rest);
    }

    proptest! {
        #[test]
        fn lines_within_the_limit_are_unchanged(lines in prop::collection::vec("[a-z]{0,20}", 0..20)) {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let expected: Vec<Line> = lines.into_iter().map(Line::Text).collect();
            prop_assert_eq!(all(text.as_bytes(), 20), expected);
        }

        #[test]
        fn any_bytes_are_read_within_the_limit(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            for line in all(&bytes, 16) {
                let (Line::Text(text) | Line::TooLong { beginning: text, .. }) = line;
                prop_assert!(text.chars().count() <= 16);
            }
        }
    }
}
