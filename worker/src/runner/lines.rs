//! Lines of a pipe with a bound on their length, so that a child cannot fill the daemon's memory.

use std::io;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, BufReader};

/// One line of a child's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Line {
    /// A line within the bound, without its line end. Bytes that are not UTF-8 are replaced.
    Text(String),
    /// A line longer than the bound: its beginning (as much as the bound) and how many bytes it had.
    TooLong {
        /// What was kept.
        beginning: String,
        /// How long the whole line was.
        bytes: u64,
    },
}

/// Reads lines of at most `limit` bytes. Cancel-safe: what was read stays here.
#[derive(Debug)]
pub(super) struct BoundedLines<R> {
    reader: BufReader<R>,
    limit: usize,
    kept: Vec<u8>,
    seen: u64,
}

impl<R: AsyncRead + Unpin> BoundedLines<R> {
    /// Reads from `reader`.
    pub(super) fn new(reader: R, limit: usize) -> Self {
        Self {
            reader: BufReader::new(reader),
            limit,
            kept: Vec::new(),
            seen: 0,
        }
    }

    /// The next line; `None` at the end. A last line without a line end counts.
    ///
    /// # Errors
    /// Whatever the pipe fails with.
    pub(super) async fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let chunk = AsyncBufReadExt::fill_buf(&mut self.reader).await?;
            if chunk.is_empty() {
                return Ok(if self.seen == 0 { None } else { Some(self.take()) });
            }
            let (part, used, ended) = match chunk.iter().position(|&byte| byte == b'\n') {
                Some(at) => (&chunk[..at], at + 1, true),
                None => (chunk, chunk.len(), false),
            };
            let room = self.limit.saturating_sub(self.kept.len());
            self.kept.extend_from_slice(&part[..part.len().min(room)]);
            self.seen += part.len() as u64;
            // An empty line counts as seen only by its end, which the branch below returns at once.
            std::pin::Pin::new(&mut self.reader).consume(used);
            if ended {
                return Ok(Some(self.take()));
            }
        }
    }

    fn take(&mut self) -> Line {
        let bytes = std::mem::take(&mut self.seen);
        let mut kept = std::mem::take(&mut self.kept);
        if bytes > kept.len() as u64 {
            return Line::TooLong {
                beginning: String::from_utf8_lossy(&kept).into_owned(),
                bytes,
            };
        }
        if kept.last() == Some(&b'\r') {
            kept.pop();
        }
        Line::Text(String::from_utf8_lossy(&kept).into_owned())
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
    fn long_lines_are_cut_and_the_next_one_is_whole() {
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
        fn lines_within_the_bound_come_out_as_they_went_in(lines in prop::collection::vec("[a-z]{0,20}", 0..20)) {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let expected: Vec<Line> = lines.into_iter().map(Line::Text).collect();
            prop_assert_eq!(all(text.as_bytes(), 20), expected);
        }

        #[test]
        fn any_bytes_end_without_keeping_more_than_the_bound(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            for line in all(&bytes, 16) {
                let (Line::Text(text) | Line::TooLong { beginning: text, .. }) = line;
                prop_assert!(text.chars().count() <= 16);
            }
        }
    }
}
