//! Tables that fit a terminal: columns two spaces apart; wide text columns are shortened first.

use super::format::{fold, printable};
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
    /// The smallest width on a narrow terminal; `None`: it is never shortened.
    min: Option<usize>,
}

impl Column {
    /// Creates a column of text that is never shortened (ids, states).
    #[must_use]
    pub const fn fixed(title: &'static str) -> Self {
        Self {
            title,
            align: Align::Left,
            min: None,
        }
    }

    /// Creates a column of numbers.
    #[must_use]
    pub const fn number(title: &'static str) -> Self {
        Self {
            title,
            align: Align::Right,
            min: None,
        }
    }

    /// Creates a column of text that may be shortened to `min` columns.
    #[must_use]
    pub const fn text(title: &'static str, min: usize) -> Self {
        Self {
            title,
            align: Align::Left,
            min: Some(min),
        }
    }
}

/// The indentation of a note below its row.
const NOTE_INDENT: usize = 2;
/// The smallest width that a note is folded to.
const MIN_NOTE_WIDTH: usize = 20;

/// Rows under column titles.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
    /// The title of the column of notes; empty without notes.
    note_title: &'static str,
    /// The note of each row; empty for rows without one.
    notes: Vec<String>,
}

impl Table {
    /// Creates an empty table.
    #[must_use]
    pub fn new(columns: &[Column]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
            note_title: "",
            notes: Vec::new(),
        }
    }

    /// Creates a table whose rows may have a note, a sentence that is never cut. The notes are the last column if all
    /// of them fit, otherwise each is below its row, on as many lines as it needs.
    #[must_use]
    pub fn with_notes(columns: &[Column], title: &'static str) -> Self {
        Self {
            note_title: title,
            ..Self::new(columns)
        }
    }

    /// Sets the note of the last row.
    pub fn note(&mut self, text: &str) {
        self.notes.resize(self.rows.len(), String::new());
        if let Some(note) = self.notes.last_mut() {
            *note = printable(text);
        }
    }

    /// Adds a row. Missing cells are empty, extra cells are dropped.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut cells: Vec<String> = cells.into_iter().map(|cell| printable(&cell)).collect();
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }

    /// Returns the lines for a terminal: aligned, titles first, at most `width` columns if the columns can be shortened
    /// so far.
    #[must_use]
    pub fn aligned(&self, width: usize) -> Vec<String> {
        self.blocks(width).concat()
    }

    /// As [`Self::aligned`], grouped: the titles, then the lines of each row.
    #[must_use]
    pub fn blocks(&self, width: usize) -> Vec<Vec<String>> {
        let notes = |row: usize| self.notes.get(row).map_or("", String::as_str);
        let longest = self.notes.iter().map(|note| note.width()).max().unwrap_or(0);
        let beside = longest.max(self.note_title.width()) + 2;
        // Below its row if other columns would have to be shortened for it.
        let natural = self
            .lines(usize::MAX)
            .iter()
            .map(|line| line.width())
            .max()
            .unwrap_or(0);
        if longest == 0 || natural + beside > width {
            let columns = width.saturating_sub(NOTE_INDENT).max(MIN_NOTE_WIDTH);
            let mut lines = self.lines(width).into_iter();
            let titles = lines.next().map(|line| vec![line]);
            let rows = lines.enumerate().map(|(row, line)| {
                let below = Some(notes(row)).filter(|note| !note.is_empty());
                let below = below.into_iter().flat_map(|note| fold(note, columns));
                std::iter::once(line)
                    .chain(below.map(|line| format!("{:NOTE_INDENT$}{line}", "")))
                    .collect()
            });
            return titles.into_iter().chain(rows).collect();
        }
        let lines = self.lines(usize::MAX).into_iter().enumerate();
        let noted = lines.map(|(row, line)| {
            let note = if row == 0 { self.note_title } else { notes(row - 1) };
            let pad = " ".repeat(natural.saturating_sub(line.width()) + 2);
            vec![format!("{line}{pad}{note}").trim_end().to_owned()]
        });
        noted.collect()
    }

    fn lines(&self, width: usize) -> Vec<String> {
        let mut widths: Vec<usize> = (0..self.columns.len())
            .map(|i| {
                let cells = self.rows.iter().map(|row| row[i].width());
                cells.chain([self.columns[i].title.width()]).max().unwrap_or(0)
            })
            .collect();
        let gaps = 2 * self.columns.len().saturating_sub(1);
        let mut surplus = (widths.iter().sum::<usize>() + gaps).saturating_sub(width);
        // Shorten the widest column by one character at a time, so that long columns end up equally wide.
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

    /// Returns the lines for a script: tab-separated cells, titles first, nothing shortened.
    #[must_use]
    pub fn tabbed(&self) -> Vec<String> {
        let mut titles: Vec<&str> = self.columns.iter().map(|column| column.title).collect();
        titles.extend(Some(self.note_title).filter(|title| !title.is_empty()));
        let noted = |(row, cells): (usize, &Vec<String>)| {
            let note = self.notes.get(row).map_or("", String::as_str);
            let note = (!self.note_title.is_empty()).then_some(note);
            let cells = cells.iter().map(String::as_str).chain(note);
            cells.collect::<Vec<_>>().join("\t")
        };
        std::iter::once(titles.join("\t"))
            .chain(self.rows.iter().enumerate().map(noted))
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

/// Cuts text to a width in columns, and ends it with `…` if something was cut.
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
    fn long_names_are_shortened_and_numbers_aligned() {
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
    fn every_line_fits_and_scripts_get_full_text() {
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
    fn notes_that_do_not_fit_beside_their_rows_are_below_them() {
        let mut table = Table::with_notes(&[Column::fixed("ID"), Column::text("NAME", 8)], "DETAIL");
        table.row(["j1".to_owned(), "ada".to_owned()]);
        table.note("runs on the box cuda:0");
        table.row(["j2".to_owned(), "bob".to_owned()]);
        assert_eq!(
            table.aligned(40),
            ["ID  NAME  DETAIL", "j1  ada   runs on the box cuda:0", "j2  bob"]
        );
        assert_eq!(
            table.blocks(22),
            [
                vec!["ID  NAME"],
                vec!["j1  ada", "  runs on the box", "  cuda:0"],
                vec!["j2  bob"]
            ]
        );
        assert_eq!(
            table.tabbed(),
            ["ID\tNAME\tDETAIL", "j1\tada\truns on the box cuda:0", "j2\tbob\t"]
        );
    }

    #[test]
    fn wide_characters_take_two_columns() {
        assert_eq!(shorten("日本語です", 7), "日本語…");
        assert_eq!(shorten("abc", 3), "abc");
        assert_eq!(shorten("abcd", 3), "ab…");
        assert_eq!(shorten("abcd", 0), "");
    }
}
