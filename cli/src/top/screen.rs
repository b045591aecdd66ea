//! Renders the screen: machines at the top, jobs in the middle, the selected job at the bottom.

use super::state::{State, is_waiting};
use crate::output::format::printable;
use crate::views::{job_detail, jobs_table, workers_table};
use jiff::Timestamp;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Wrap};

/// Number of lines of the panel about the selected job.
const PANEL: u16 = 7;

/// Renders the whole screen.
pub(super) fn render(frame: &mut Frame, state: &State, now: Timestamp) {
    let machines = workers_table(&state.snapshot.workers, now);
    let jobs = jobs_table(&state.snapshot.jobs, now, false);
    let width = usize::from(frame.area().width);
    let machines = machines.blocks(width);
    // Machines get the lines that they need, but at most half of the free lines.
    let free_lines = frame.area().height.saturating_sub(PANEL + 4);
    let needed = u16::try_from(machines.len()).unwrap_or(u16::MAX);
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(needed.min(free_lines.div_ceil(2).max(2))),
        Constraint::Length(1),
        Constraint::Min(2),
        Constraint::Length(PANEL),
        Constraint::Length(1),
    ])
    .split(frame.area());
    frame.render_widget(header(state), areas[0]);
    render_rows(frame, state, areas[2], &machines, None);
    render_rows(frame, state, areas[4], &jobs.blocks(width), state.row());
    frame.render_widget(Paragraph::new(panel(state)).wrap(Wrap { trim: false }), areas[5]);
    let help = "q quit   ↑↓ select a job   more: aitk explain, logs, stop JOB";
    frame.render_widget(Paragraph::new(help).style(dim(state)), areas[6]);
}

fn header(state: &State) -> Paragraph<'_> {
    match &state.problem {
        Some(problem) => Paragraph::new(format!("{}: {}; retrying", state.server, printable(problem)))
            .style(colored(state, Color::Red)),
        None => Paragraph::new(format!("aitk  {}  {}", state.server, state.counts()))
            .style(Style::new().add_modifier(Modifier::BOLD)),
    }
}

/// Renders the titles and as many rows as fit, including the selected one. A row may have several lines.
fn render_rows(frame: &mut Frame, state: &State, area: Rect, blocks: &[Vec<String>], selected: Option<usize>) {
    let Some((titles, rows)) = blocks.split_first() else {
        return;
    };
    let free_lines = usize::from(area.height.saturating_sub(1));
    // If not all rows fit, the last line says how many are missing.
    let all: usize = rows.iter().map(Vec::len).sum();
    let free_lines = if all > free_lines && free_lines > 1 {
        free_lines - 1
    } else {
        free_lines
    };
    let first = first_row(rows, free_lines, selected.unwrap_or(0));
    let mut text: Vec<Line<'_>> = titles
        .iter()
        .map(|line| Line::styled(line.as_str(), dim(state)))
        .collect();
    let (mut used, mut shown) = (0, first);
    for (row, lines) in rows.iter().enumerate().skip(first) {
        // A row is cut only if it is the only one that is shown.
        if used + lines.len() > free_lines && used > 0 {
            break;
        }
        let style = if Some(row) == selected {
            Style::new().add_modifier(Modifier::REVERSED)
        } else {
            Style::new()
        };
        text.extend(
            lines
                .iter()
                .take(free_lines - used)
                .map(|line| Line::styled(line.as_str(), style)),
        );
        used += lines.len().min(free_lines - used);
        shown = row + 1;
    }
    let left = rows.len().saturating_sub(shown);
    if left > 0 {
        text.push(Line::styled(format!("… {left} more"), dim(state)));
    }
    frame.render_widget(Paragraph::new(Text::from(text)), area);
}

/// Returns the first row to show, so that the selected one is shown completely.
fn first_row(rows: &[Vec<String>], free_lines: usize, selected: usize) -> usize {
    let end = rows.len().min(selected + 1);
    let mut used = 0;
    let fits = rows[..end].iter().rev().take_while(|lines| {
        used += lines.len();
        used <= free_lines
    });
    end.saturating_sub(fits.count().max(1))
}

fn panel(state: &State) -> Text<'_> {
    let Some(job) = state.selected() else {
        return Text::styled("no jobs; `aitk submit CONFIG` adds one", dim(state));
    };
    let mut text = Text::from(Line::styled(
        printable(&format!("{}  {}", job.name, job.id)),
        Style::new().add_modifier(Modifier::BOLD),
    ));
    let owner = format!("owner {}, priority {}", job.owner, job.priority);
    match state
        .snapshot
        .forecast
        .as_ref()
        .filter(|(id, _)| *id == job.id && is_waiting(job))
    {
        Some((_, forecast)) => {
            text.push_line(printable(&format!("waits: {} ({owner})", forecast.summary)));
            for device in &forecast.devices {
                let sign = match (device.fits, device.can_start_now) {
                    (true, true) => '+',
                    (true, false) => '~',
                    (false, _) => '-',
                };
                text.push_line(printable(&format!("{sign} {}", device.description)));
            }
        }
        None => text.push_line(printable(&format!("{}: {} ({owner})", job.status(), job_detail(job)))),
    }
    text
}

fn dim(state: &State) -> Style {
    colored(state, Color::DarkGray)
}

fn colored(state: &State, color: Color) -> Style {
    if state.color {
        Style::new().fg(color)
    } else {
        Style::new()
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::{Key, Snapshot};
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control_plane::{Forecast, JobState};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    /// Returns the screen as text, and the line that is highlighted.
    fn rendered(state: &State, width: u16, height: u16) -> (Vec<String>, Option<usize>) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal
            .draw(|frame| render(frame, state, Timestamp::UNIX_EPOCH))
            .unwrap();
        let buffer = terminal.backend().buffer();
        let cell = |x, y| &buffer[(x, y)];
        let lines = (0..height)
            .map(|y| {
                (0..width)
                    .map(|x| cell(x, y).symbol())
                    .collect::<String>()
                    .trim_end()
                    .to_owned()
            })
            .collect();
        let marked = (0..height).find(|y| cell(0, *y).modifier.contains(Modifier::REVERSED));
        (lines, marked.map(usize::from))
    }

    fn state() -> State {
        let mut state = State::new("https://box:7420", false);
        let jobs = (0..40)
            .map(|n| {
                let name = format!("a LoRA with a name that is rather long, number {n}");
                let kind = if n == 0 { JobState::Running } else { JobState::Queued };
                job(&format!("0193aa{n:03}-0000"), &name, kind, 0)
            })
            .collect();
        state.update(Snapshot {
            jobs,
            ..Snapshot::default()
        });
        state
    }

    #[test]
    fn the_selected_job_is_always_on_the_screen() {
        let mut state = state();
        for (key, number) in [(Key::First, 0), (Key::Down, 1), (Key::Last, 39), (Key::Up, 38)] {
            state.handle_key(key);
            let (lines, marked) = rendered(&state, 80, 24);
            let id = format!("0193aa{number:03}");
            assert!(lines[marked.unwrap()].starts_with(&id), "{key:?}\n{}", lines.join("\n"));
            // The panel shows the full id.
            assert!(lines.iter().any(|line| line.contains(&format!("{id}-0000"))), "{key:?}");
        }
    }

    #[test]
    fn the_panel_shows_why_the_selected_job_waits() {
        let mut state = state();
        state.handle_key(Key::Last);
        let selected = state.selected_id().unwrap();
        let forecast = Forecast {
            summary: "no connected device has 24 GiB".to_owned(),
            devices: Vec::new(),
        };
        state.snapshot.forecast = Some((selected, forecast));
        let (lines, _) = rendered(&state, 80, 24);
        assert!(
            lines
                .iter()
                .any(|line| line.contains("waits: no connected device has 24 GiB"))
        );
        // The reason belongs to that job only.
        state.handle_key(Key::First);
        let (lines, _) = rendered(&state, 80, 24);
        assert!(!lines.iter().any(|line| line.contains("24 GiB")));
    }

    #[test]
    fn tiny_terminals_and_lost_connections_do_not_panic() {
        let mut state = state();
        state.set_problem("no coordinator answers\u{1b}[2J at https://box:7420");
        for (width, height) in [(1, 1), (10, 3), (20, 8), (80, 24), (200, 60)] {
            let (lines, _) = rendered(&state, width, height);
            assert!(!lines.concat().contains('\u{1b}'));
        }
        let (lines, _) = rendered(&state, 80, 24);
        assert!(lines[0].contains("no coordinator answers"), "{}", lines[0]);
        // The last snapshot stays on the screen.
        assert!(lines.iter().any(|line| line.contains("0193aa000")));
    }

    #[test]
    fn the_selection_stays_with_its_job_until_the_job_is_removed() {
        let mut state = state();
        state.handle_key(Key::Down);
        let mut jobs = state.snapshot.jobs.clone();
        jobs.swap(1, 5);
        let update = |state: &mut State, jobs| {
            state.update(Snapshot {
                jobs,
                ..Snapshot::default()
            })
        };
        update(&mut state, jobs.clone());
        assert_eq!(state.row(), Some(5));
        jobs.remove(5);
        update(&mut state, jobs);
        assert_eq!(state.row(), Some(5));
        update(&mut state, Vec::new());
        assert_eq!(state.row(), None);
    }
}
