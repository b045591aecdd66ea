//! The image: machines above, jobs in the middle, the chosen job below.

use super::state::{State, waits};
use crate::output::format::printable;
use crate::views::{job_detail, jobs_table, workers_table};
use jiff::Timestamp;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Wrap};

/// Lines of the panel about the chosen job.
const PANEL: u16 = 7;

/// Draws everything.
pub(super) fn draw(frame: &mut Frame, state: &State, now: Timestamp) {
    let machines = workers_table(&state.seen.workers, now);
    let jobs = jobs_table(&state.seen.jobs, now, false);
    let width = usize::from(frame.area().width);
    let machines = machines.blocks(width);
    // Machines take what they need, but leave jobs half of the rest.
    let room = frame.area().height.saturating_sub(PANEL + 4);
    let needed = u16::try_from(machines.len()).unwrap_or(u16::MAX);
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(needed.min(room.div_ceil(2).max(2))),
        Constraint::Length(1),
        Constraint::Min(2),
        Constraint::Length(PANEL),
        Constraint::Length(1),
    ])
    .split(frame.area());
    frame.render_widget(head(state), areas[0]);
    rows(frame, state, areas[2], &machines, None);
    rows(frame, state, areas[4], &jobs.blocks(width), state.row());
    frame.render_widget(Paragraph::new(panel(state)).wrap(Wrap { trim: false }), areas[5]);
    let help = "q leave   ↑↓ choose a job   aitk explain, logs, stop JOB: more of it";
    frame.render_widget(Paragraph::new(help).style(faint(state)), areas[6]);
}

fn head(state: &State) -> Paragraph<'_> {
    match &state.problem {
        Some(problem) => Paragraph::new(format!("{}: {}; trying again", state.server, printable(problem)))
            .style(paint(state, Color::Red)),
        None => Paragraph::new(format!("aitk  {}  {}", state.server, state.counts()))
            .style(Style::new().add_modifier(Modifier::BOLD)),
    }
}

/// Titles, then as many rows as there is room for, among them the chosen one. A row may have several lines.
fn rows(frame: &mut Frame, state: &State, area: Rect, blocks: &[Vec<String>], chosen: Option<usize>) {
    let Some((titles, rows)) = blocks.split_first() else {
        return;
    };
    let room = usize::from(area.height.saturating_sub(1));
    // Where not all of them fit, a line says how many are left.
    let all: usize = rows.iter().map(Vec::len).sum();
    let room = if all > room && room > 1 { room - 1 } else { room };
    let first = first_row(rows, room, chosen.unwrap_or(0));
    let mut text: Vec<Line<'_>> = titles
        .iter()
        .map(|line| Line::styled(line.as_str(), faint(state)))
        .collect();
    let (mut used, mut shown) = (0, first);
    for (row, lines) in rows.iter().enumerate().skip(first) {
        // The last one is cut only when it is the only one.
        if used + lines.len() > room && used > 0 {
            break;
        }
        let style = if Some(row) == chosen {
            Style::new().add_modifier(Modifier::REVERSED)
        } else {
            Style::new()
        };
        text.extend(
            lines
                .iter()
                .take(room - used)
                .map(|line| Line::styled(line.as_str(), style)),
        );
        used += lines.len().min(room - used);
        shown = row + 1;
    }
    let left = rows.len().saturating_sub(shown);
    if left > 0 {
        text.push(Line::styled(format!("… {left} more"), faint(state)));
    }
    frame.render_widget(Paragraph::new(Text::from(text)), area);
}

/// The first row that is shown, so that the chosen one is seen whole.
fn first_row(rows: &[Vec<String>], room: usize, chosen: usize) -> usize {
    let upto = rows.len().min(chosen + 1);
    let mut used = 0;
    let fits = rows[..upto].iter().rev().take_while(|lines| {
        used += lines.len();
        used <= room
    });
    upto.saturating_sub(fits.count().max(1))
}

fn panel(state: &State) -> Text<'_> {
    let Some(job) = state.chosen() else {
        return Text::styled("no jobs; `aitk submit CONFIG` adds one", faint(state));
    };
    let mut text = Text::from(Line::styled(
        printable(&format!("{}  {}", job.name, job.id)),
        Style::new().add_modifier(Modifier::BOLD),
    ));
    let owner = format!("of {}, priority {}", job.owner, job.priority);
    match state
        .seen
        .forecast
        .as_ref()
        .filter(|(id, _)| *id == job.id && waits(job))
    {
        Some((_, forecast)) => {
            text.push_line(printable(&format!("waits: {} ({owner})", forecast.summary)));
            for device in &forecast.devices {
                let sign = match (device.fits, device.ready) {
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

fn faint(state: &State) -> Style {
    paint(state, Color::DarkGray)
}

fn paint(state: &State, color: Color) -> Style {
    if state.color {
        Style::new().fg(color)
    } else {
        Style::new()
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::{Key, Seen};
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control::{Forecast, JobState};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    /// The screen as text, and the row that is marked.
    fn shown(state: &State, width: u16, height: u16) -> (Vec<String>, Option<usize>) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal
            .draw(|frame| draw(frame, state, Timestamp::UNIX_EPOCH))
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
        state.see(Seen {
            jobs,
            ..Seen::default()
        });
        state
    }

    #[test]
    fn the_chosen_job_is_on_the_screen_wherever_it_stands_in_the_list() {
        let mut state = state();
        for (key, number) in [(Key::First, 0), (Key::Down, 1), (Key::Last, 39), (Key::Up, 38)] {
            state.press(key);
            let (lines, marked) = shown(&state, 80, 24);
            let id = format!("0193aa{number:03}");
            assert!(lines[marked.unwrap()].starts_with(&id), "{key:?}\n{}", lines.join("\n"));
            // In the panel as well, whole.
            assert!(lines.iter().any(|line| line.contains(&format!("{id}-0000"))), "{key:?}");
        }
    }

    #[test]
    fn it_says_why_the_chosen_job_waits() {
        let mut state = state();
        state.press(Key::Last);
        let chosen = state.chosen_id().unwrap();
        let forecast = Forecast {
            summary: "no connected device has 24 GiB".to_owned(),
            devices: Vec::new(),
        };
        state.seen.forecast = Some((chosen, forecast));
        let (lines, _) = shown(&state, 80, 24);
        assert!(
            lines
                .iter()
                .any(|line| line.contains("waits: no connected device has 24 GiB"))
        );
        // The reason belongs to that job only.
        state.press(Key::First);
        let (lines, _) = shown(&state, 80, 24);
        assert!(!lines.iter().any(|line| line.contains("24 GiB")));
    }

    #[test]
    fn tiny_terminals_and_lost_connections_are_survived() {
        let mut state = state();
        state.lost("no coordinator answers\u{1b}[2J at https://box:7420");
        for (width, height) in [(1, 1), (10, 3), (20, 8), (80, 24), (200, 60)] {
            let (lines, _) = shown(&state, width, height);
            assert!(!lines.concat().contains('\u{1b}'));
        }
        let (lines, _) = shown(&state, 80, 24);
        assert!(lines[0].contains("no coordinator answers"), "{}", lines[0]);
        // The old image stays.
        assert!(lines.iter().any(|line| line.contains("0193aa000")));
    }

    #[test]
    fn a_choice_stays_with_its_job_and_moves_on_when_the_job_is_gone() {
        let mut state = state();
        state.press(Key::Down);
        let mut jobs = state.seen.jobs.clone();
        jobs.swap(1, 5);
        let see = |state: &mut State, jobs| {
            state.see(Seen {
                jobs,
                ..Seen::default()
            })
        };
        see(&mut state, jobs.clone());
        assert_eq!(state.row(), Some(5));
        jobs.remove(5);
        see(&mut state, jobs);
        assert_eq!(state.row(), Some(5));
        see(&mut state, Vec::new());
        assert_eq!(state.row(), None);
    }
}
