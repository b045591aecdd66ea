//! Tables that fit a terminal: plain columns, two spaces apart; wide text columns give way first.

use super::format::printable;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// On which side a column is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// One column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    align: Align,
    /// The width it may shrink to when the terminal is narrow; `None`: it never shrinks.
    min: Option<usize>,
}

impl Column {
    /// A column of text that is always shown in full (ids, states).
    #[must_use]
    pub const fn fixed(title: &'static str) -> Self {
        Self {
            title,
            align: Align::Left,
            min: None,
        }
    }

    /// A column of numbers.
    #[must_use]
    pub const fn number(title: &'static str) -> Self {
        Self {
            title,
            align: Align::Right,
            min: None,
        }
    }

    /// A column of text that may be shortened to this many characters.
    #[must_use]
    pub const fn text(title: &'static str, min: usize) -> Self {
        Self {
            title,
            align: Align::Left,
            min: Some(min),
        }
    }
}

/// Rows under column titles.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(columns: &[Column]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row. Missing cells are empty, surplus ones are dropped.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut cells: Vec<String> = cells.into_iter().map(|cell| printable(&cell)).collect();
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }

    /// For a terminal of this width: aligned, titles first, every line at most `width` columns where
    /// the shrinkable columns allow it.
    #[must_use]
    pub fn aligned(&self, width: usize) -> Vec<String> {
        let mut widths: Vec<usize> = (0..self.columns.len())
            .map(|i| {
                let cells = self.rows.iter().map(|row| row[i].width());
                cells.chain([self.columns[i].title.width()]).max().unwrap_or(0)
            })
            .collect();
        let gaps = 2 * self.columns.len().saturating_sub(1);
        let mut surplus = (widths.iter().sum::<usize>() + gaps).saturating_sub(width);
        // The widest shrinkable column gives one character at a time, so that long ones meet in the middle.
        while surplus > 0 {
            let widest = (0..widths.len())
                .filter(|&i| {
                    self.columns[i]
                        .min
                        .is_some_and(|min| widths[i] > min.max(self.columns[i].title.width()))
                })
                .max_by_key(|&i| widths[i]);
            let Some(i) = widest else { break };
            widths[i] -= 1;
            surplus -= 1;
        }
        let titles: Vec<String> = self.columns.iter().map(|column| column.title.to_owned()).collect();
        std::iter::once(&titles)
            .chain(&self.rows)
            .map(|cells| self.line(cells, &widths))
            .collect()
    }

    /// For a script: tab between cells, titles first, nothing shortened.
    #[must_use]
    pub fn tabbed(&self) -> Vec<String> {
        let titles: Vec<&str> = self.columns.iter().map(|column| column.title).collect();
        std::iter::once(titles.join("\t"))
            .chain(self.rows.iter().map(|row| row.join("\t")))
            .collect()
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for (i, (cell, &width)) in cells.iter().zip(widths).enumerate() {
            if i > 0 {
                line.push_str("  ");
            }
            let cell = shorten(cell, width);
            let pad = " ".repeat(width.saturating_sub(cell.width()));
            match self.columns[i].align {
                Align::Left => line.extend([cell.as_str(), &pad]),
                Align::Right => line.extend([pad.as_str(), &cell]),
            }
        }
        line.truncate(line.trim_end().len());
        line
    }
}

/// Cuts text to a width in columns; `…` says that something is missing.
#[must_use]
pub fn shorten(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut short = String::new();
    let mut used = 0;
    for character in text.chars() {
        let w = character.width().unwrap_or(0);
        if used + w + 1 > width {
            break;
        }
        used += w;
        short.push(character);
    }
    if width > 0 {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&[Column::fixed("ID"), Column::text("NAME", 8), Column::number("STEP")]);
        table.row(["j1".to_owned(), "short".to_owned(), "5".to_owned()]);
        table.row([
            "j2".to_owned(),
            "a very long name that nobody wants to read".to_owned(),
            "1200".to_owned(),
        ]);
        table
    }

    #[test]
    fn long_names_give_way_and_numbers_line_up() {
        let lines = table().aligned(24);
        // Two fixed columns and two gaps take 10 of the 24.
        assert_eq!(
            lines,
            [
                "ID  NAME            STEP",
                "j1  short              5",
                "j2  a very long n…  1200"
            ]
        );
    }

    #[test]
    fn every_line_fits_and_scripts_get_everything() {
        for width in [20, 40, 80] {
            for line in table().aligned(width) {
                assert!(line.width() <= width, "{width}: {line}");
            }
        }
        assert_eq!(
            table().tabbed()[2],
            "j2\ta very long name that nobody wants to read\t1200"
        );
    }

    #[test]
    fn wide_characters_count_twice() {
        assert_eq!(shorten("日本語です", 7), "日本語…");
        assert_eq!(shorten("abc", 3), "abc");
        assert_eq!(shorten("abcd", 3), "ab…");
        assert_eq!(shorten("abcd", 0), "");
    }
}
