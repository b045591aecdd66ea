//! Reads the keyboard.

use super::state::Key;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::time::Duration;
use tokio::sync::mpsc;

/// How often the reader thread checks whether the receiver is closed.
const POLL_TIMEOUT: Duration = Duration::from_millis(200);

/// Sends keys until the receiver is closed.
fn read_loop(sender: &mpsc::Sender<Key>) {
    while !sender.is_closed() {
        match event::poll(POLL_TIMEOUT) {
            Ok(false) => {}
            Ok(true) => {
                let key = match event::read() {
                    Ok(event) => key_of(&event),
                    // The terminal was closed.
                    Err(_) => Some(Key::Quit),
                };
                if key.is_some_and(|key| sender.blocking_send(key).is_err()) {
                    return;
                }
            }
            Err(_) => {
                let _ = sender.blocking_send(Key::Quit);
                return;
            }
        }
    }
}

/// Starts a thread that sends keys until the receiver is closed.
pub(super) fn read(sender: mpsc::Sender<Key>) {
    std::thread::spawn(move || read_loop(&sender));
}

fn key_of(event: &Event) -> Option<Key> {
    let Event::Key(KeyEvent {
        code,
        modifiers,
        kind: KeyEventKind::Press | KeyEventKind::Repeat,
        ..
    }) = event
    else {
        // A resize or another event: render again.
        return Some(Key::Other);
    };
    let control = modifiers.contains(KeyModifiers::CONTROL);
    match code {
        KeyCode::Char('c') if control => Some(Key::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Key::Quit),
        KeyCode::Up | KeyCode::Char('k') => Some(Key::Up),
        KeyCode::Down | KeyCode::Char('j') => Some(Key::Down),
        KeyCode::Home | KeyCode::Char('g') => Some(Key::First),
        KeyCode::End | KeyCode::Char('G') => Some(Key::Last),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_quits_and_c_does_not() {
        let handle_key = |modifiers| Event::Key(KeyEvent::new(KeyCode::Char('c'), modifiers));
        assert_eq!(key_of(&handle_key(KeyModifiers::CONTROL)), Some(Key::Quit));
        assert_eq!(key_of(&handle_key(KeyModifiers::NONE)), None);
        assert_eq!(key_of(&Event::Resize(80, 24)), Some(Key::Other));
    }
}
