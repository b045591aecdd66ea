//! Records the scheduler's events in a life as a script, which can be shortened and replayed without the rest of the
//! simulation.

use super::rules::check_step;
use super::store::MemoryStore;
use crate::{Effect, Event, PlacedAttempt, Settings, State, check};
use aitk_common::control_plane::UnixMillis;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// The most replays for shortening one script.
const MAX_REPLAYS: usize = 5_000;
/// The characters of a message that two failures must have in common to count as the same, digits left out.
const SAME_CHARS: usize = 60;

/// Something that happened to the scheduler.
#[derive(Clone, Debug)]
pub(super) enum ScriptEvent {
    /// It handled an event.
    Event(Event),
    /// It was restored from its store.
    Restart,
}

/// A step of a script, with its number in the life that was recorded.
#[derive(Clone, Debug)]
pub(super) struct ScriptStep {
    pub(super) number: usize,
    pub(super) time: UnixMillis,
    pub(super) what: ScriptEvent,
}

/// A recording of a life. Clones record into the same script.
#[derive(Clone)]
pub(super) struct Script {
    settings: Settings,
    steps: Rc<RefCell<Vec<ScriptStep>>>,
}

impl Script {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            steps: Rc::default(),
        }
    }

    fn push(&self, time: UnixMillis, what: ScriptEvent) {
        let mut steps = self.steps.borrow_mut();
        let number = steps.len();
        steps.push(ScriptStep { number, time, what });
    }

    pub(super) fn record(&self, time: UnixMillis, event: Event) {
        self.push(time, ScriptEvent::Event(event));
    }

    pub(super) fn record_restart(&self, time: UnixMillis) {
        self.push(time, ScriptEvent::Restart);
    }

    /// Forgets the last event: the coordinator died before anything of it was stored.
    pub(super) fn forget_last(&self) {
        self.steps.borrow_mut().pop();
    }

    /// The steps with these numbers; all of them if `numbers` is `None`.
    pub(super) fn steps(&self, numbers: Option<&[usize]>) -> Vec<ScriptStep> {
        let steps = self.steps.borrow();
        let chosen = |step: &&ScriptStep| numbers.is_none_or(|numbers| numbers.contains(&step.number));
        steps.iter().filter(chosen).cloned().collect()
    }

    /// Replays steps from an empty scheduler, checks the invariants, the rules of placement and `rule` after each, and prints
    /// each step if `trace` is set.
    ///
    /// # Errors
    /// The first thing that does not hold or that panicked, as text, and the index of its step.
    pub(super) fn replay(&self, steps: &[ScriptStep], rule: Rule, trace: bool) -> Result<(), (usize, String)> {
        let mut at = 0;
        let run = AssertUnwindSafe(|| {
            let mut state = State::new(self.settings.clone());
            let mut store = MemoryStore::default();
            for (index, step) in steps.iter().enumerate() {
                at = index;
                if trace {
                    println!("step {} at {}: {:?}", step.number, step.time.0, step.what);
                }
                let effects = match &step.what {
                    ScriptEvent::Event(event) => state.handle(step.time, event.clone()),
                    ScriptEvent::Restart => {
                        state = store.load(&self.settings, step.time);
                        Vec::new()
                    }
                };
                check(&state)?;
                rule(&state)?;
                if matches!(step.what, ScriptEvent::Event(_)) {
                    check_step(&state, step.time, &placed_by(&effects));
                }
                for effect in effects {
                    if let Effect::Persist(record) = effect {
                        store.apply(record);
                    }
                }
            }
            Ok(())
        });
        let outcome: Result<(), String> = catch_unwind(run).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            Err(text.unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap_or(&"a panic").to_string()))
        });
        outcome.map_err(|message| (at, message))
    }

    /// The shortest part of the script that was found in which `rule` or an invariant fails as in the whole script, and the
    /// message. None: replaying the whole script breaks nothing.
    pub(super) fn shorten(&self, rule: Rule) -> Option<(Vec<ScriptStep>, String)> {
        let mut steps = self.steps(None);
        let (at, message) = self.replay(&steps, rule, false).err()?;
        steps.truncate(at + 1);
        let mut replays = 0;
        let mut chunk = steps.len().div_ceil(2);
        // Delta debugging (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, 2002): leaves out ever
        // smaller parts as long as what is left fails in the same way.
        loop {
            let (mut start, mut removed) = (0, false);
            while start < steps.len() && replays < MAX_REPLAYS {
                let mut fewer = steps.clone();
                fewer.drain(start..(start + chunk).min(steps.len()));
                replays += 1;
                match self.replay(&fewer, rule, false) {
                    Err((at, other)) if is_same(&message, &other) => {
                        fewer.truncate(at + 1);
                        steps = fewer;
                        removed = true;
                    }
                    _ => start += chunk,
                }
            }
            if replays >= MAX_REPLAYS || (chunk == 1 && !removed) {
                return Some((steps, message));
            }
            if !removed {
                chunk = chunk.div_ceil(2);
            }
        }
    }
}

/// A further invariant.
pub(super) type Rule = fn(&State) -> Result<(), String>;

/// The attempts that these effects hand to workers.
pub(super) fn placed_by(effects: &[Effect]) -> Vec<PlacedAttempt> {
    let placed = |effect: &Effect| match effect {
        Effect::Assign(_, placed) => Some((**placed).clone()),
        _ => None,
    };
    effects.iter().filter_map(placed).collect()
}

/// Whether two messages report the same failure, ignoring ids and numbers.
fn is_same(one: &str, other: &str) -> bool {
    let start = |text: &str| -> String { text.chars().filter(|c| !c.is_ascii_digit()).take(SAME_CHARS).collect() };
    start(one) == start(other)
}
