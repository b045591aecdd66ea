//! Errors of the YAML parser: where they are, and what to do about them.

use super::error::Finding;
use super::limits::{finding, too_deep};
use super::node::Mark;

/// Converts a parser error to a finding with a hint. Tabs are the usual cause, so they are checked first. `parser_message` is compared with
/// texts of saphyr-parser 0.3.
pub(super) fn scan_error(text: &str, file: Option<&str>, at: Mark, parser_message: &str) -> Finding {
    if parser_message.contains("recursion limit") {
        return finding(file, at, "", too_deep());
    }
    let error_line = usize::try_from(at.line).unwrap_or(0);
    // For a tab the parser may name a line above it, with empty lines and comments between; look further down.
    let searched = error_line + if parser_message.contains("a tab") { 20 } else { 1 };
    for (index, line) in text.lines().enumerate().take(searched) {
        let indent = line.len() - line.trim_start_matches([' ', '\t']).len();
        if let Some(column) = line[..indent].find('\t')
            && indent < line.len()
            && index + 3 >= error_line
        {
            return finding(
                file,
                position(index, column),
                "",
                "a tab in the indentation; YAML needs spaces, so replace each tab by two spaces",
            );
        }
    }
    let is_in_brackets = parser_message.contains("flow") || parser_message.contains("illegal placement of ':'");
    if let Some((index, column, bracket)) = unclosed_bracket(text, error_line).filter(|_| is_in_brackets) {
        let message = format!("this is not valid YAML: the bracket `{bracket}` is not closed in this line");
        return finding(file, position(index, column), "", message);
    }
    let line = error_line
        .checked_sub(1)
        .and_then(|index| text.lines().nth(index))
        .unwrap_or("");
    let expects_key =
        parser_message.contains("simple key expect") || parser_message.contains("mapping values are not allowed");
    if let Some(index) = line_without_colon(text, error_line).filter(|_| expects_key) {
        let above = text.lines().nth(index).unwrap_or("");
        let indent = above.len() - above.trim_start().len();
        // A key without a colon is an error at the next line.
        let at = match parser_message.contains("simple key expect") {
            true => position(index, indent),
            false => at,
        };
        if above.trim_start().starts_with('-') && !above.trim_start().starts_with("- ") {
            let message = "this is not valid YAML: a dash that begins an item needs a space after it";
            return finding(file, position(index, indent), "", message);
        }
        let message = format!(
            "this is not valid YAML: line {} has no colon after its key (`key: value`); if it is not a key, check the indentation of the \
             lines around it",
            index + 1
        );
        return finding(file, at, "", message);
    }
    let column = usize::try_from(at.column).unwrap_or(1).saturating_sub(1);
    let before: String = line.chars().take(column).collect();
    let first = line.chars().nth(column);
    let begins_value = before.trim_end().ends_with(['-', ':']);
    let is_block = parser_message.contains("comment or line break");
    let needs_quotes = |first: char| "@`%*,]}".contains(first) || (is_block && "|>".contains(first));
    let hint = match first {
        Some(first) if begins_value && needs_quotes(first) => {
            format!("; text that begins with `{first}` needs quotes")
        }
        _ if parser_message.contains("expected ',' or") => "; a comma, or the closing bracket, is missing before this place".to_owned(),
        Some(_) if before.trim_end().ends_with([']', '}']) => {
            "; a value that begins with a bracket ends with it: put text such as `[trigger] in a park` into quotes"
                .to_owned()
        }
        _ if parser_message.contains("escape") => {
            "; in double quotes, a backslash begins an escape: write `/`, or use single quotes".to_owned()
        }
        _ if parser_message.contains("trailing content") => {
            "; the text goes on after its closing quote, or a quote is probably not closed above: quote the whole text; inside of single \
             quotes, `''` is a quote"
                .to_owned()
        }
        _ if parser_message.contains("quoted scalar") => {
            "; a quote is probably not closed, in this line or in those above".to_owned()
        }
        _ if parser_message.contains("unexpected end of stream") => "; a bracket or quote is probably not closed".to_owned(),
        _ if line.contains('\t') => "; there is a tab in this line, use spaces".to_owned(),
        _ => "; check the indentation, the space after each colon, and quotes and brackets that are not closed"
            .to_owned(),
    };
    finding(file, at, "", format!("this is not valid YAML: {parser_message}{hint}"))
}

/// The position of a line and a column, both counted from 0. The text before the column must be ASCII.
fn position(index: usize, column: usize) -> Mark {
    Mark {
        line: u32::try_from(index + 1).unwrap_or(u32::MAX),
        column: u32::try_from(column + 1).unwrap_or(u32::MAX),
    }
}

/// The line, counted from 0, that is above `error_line` (counted from 1) without empty lines and comments between, if it has no colon of a key.
fn line_without_colon(text: &str, error_line: usize) -> Option<usize> {
    let above = text.lines().enumerate().take(error_line.saturating_sub(1));
    let is_empty = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
    let (index, line) = above.filter(|(_, line)| !is_empty(line)).last()?;
    let code = line.split(" #").next().unwrap_or(line).trim_end();
    (!code.ends_with(':') && !code.contains(": ")).then_some(index)
}

/// Lines above and below an error in which brackets are looked for.
const MAX_FLOW_LINES: usize = 50;

/// The last bracket that is open at the beginning of `error_line` (counted from 1) and that no line below closes: its line and column,
/// counted from 0, and which one.
fn unclosed_bracket(text: &str, error_line: usize) -> Option<(usize, usize, char)> {
    let end = error_line.saturating_sub(1);
    let begin = end.saturating_sub(MAX_FLOW_LINES);
    let mut open: Vec<(usize, usize, char)> = Vec::new();
    let mut found = None;
    for (index, line) in text.lines().enumerate().take(end + MAX_FLOW_LINES).skip(begin) {
        if index == end {
            found = open.last().copied();
        }
        let mut quote: Option<char> = None;
        // The character before, and the last one that is not a space: a quote inside of a word is none.
        let (mut before, mut last) = (' ', ':');
        for (column, character) in line.chars().enumerate() {
            match character {
                _ if quote.is_some() => quote = quote.filter(|quote| *quote != character),
                '\'' | '"' if ":-,[{".contains(last) => quote = Some(character),
                '#' if before.is_whitespace() => break,
                '[' | '{' => open.push((index, column, character)),
                ']' | '}' => open.truncate(open.len().saturating_sub(1)),
                _ => {}
            }
            before = character;
            if !character.is_whitespace() {
                last = character;
            }
        }
    }
    // The error may be at the end of the text.
    let found = found.or_else(|| open.last().copied().filter(|(index, ..)| *index < end));
    found.filter(|bracket| open.contains(bracket))
}
