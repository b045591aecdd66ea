//! Fetching what is read next: while a layer computes, the system brings the weights of the next ones from the disk into
//! its page cache. What is there already costs a look; nothing is held in this process.

use super::streamed::Streamed;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How many weights are fetched before they are read.
const AHEAD: usize = 2;

/// The weights of layers that stay in files, in the order in which they were asked for: about the one in which they run.
#[derive(Debug, Default)]
pub(super) struct Order {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    weights: Vec<Weak<Streamed>>,
    /// The weight that was read last, and whether that was on the way back.
    last: usize,
    backwards: bool,
}

impl Order {
    /// The next weight, and its number.
    pub(super) fn add(&self, weight: &Arc<Streamed>) -> usize {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.weights.push(Arc::downgrade(weight));
        state.weights.len() - 1
    }

    /// Weight number `at` is about to be read: has those fetched that come after it.
    pub(super) fn reading(&self, at: usize) {
        let next: Vec<_> = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let numbers = state.next(at);
            numbers
                .into_iter()
                .filter_map(|i| state.weights.get(i)?.upgrade())
                .collect()
        };
        for weight in next {
            weight.soon();
        }
    }
}

impl State {
    /// Which weights to fetch when number `at` is read. Nearer ones were asked for before, unless the direction changed.
    fn next(&mut self, at: usize) -> Vec<usize> {
        let count = self.weights.len();
        // Forwards after the last one comes the first: the next step of a sampler.
        let began_again = at == 0 && self.last + 1 == count;
        let backwards = match at.cmp(&self.last) {
            std::cmp::Ordering::Less => !began_again,
            std::cmp::Ordering::Equal => self.backwards,
            std::cmp::Ordering::Greater => false,
        };
        let step = at.abs_diff(self.last);
        let steady = backwards == self.backwards && (step == 1 || began_again);
        (self.last, self.backwards) = (at, backwards);
        let nearest = if steady { AHEAD } else { 1 };
        (nearest..=AHEAD)
            .filter_map(|ahead| match backwards {
                true => at.checked_sub(ahead),
                false => (count > AHEAD).then(|| (at + ahead) % count),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(count: usize) -> State {
        State {
            weights: std::iter::repeat_with(Weak::new).take(count).collect(),
            ..State::default()
        }
    }

    #[test]
    fn what_comes_next_is_fetched_once_forwards_around_and_back() {
        let mut state = of(5);
        let mut asked = |order: &[usize]| order.iter().flat_map(|at| state.next(*at)).collect::<Vec<_>>();
        assert_eq!(asked(&[0, 1, 2]), [1, 2, 3, 4], "forwards");
        assert_eq!(asked(&[3, 4, 0, 1]), [0, 1, 2, 3], "and around");
        assert_eq!(asked(&[2, 3, 4]), [4, 0, 1]);
        assert_eq!(asked(&[3]), [2, 1], "the way back begins");
        assert_eq!(asked(&[2, 1, 0]), [0], "and ends at the first");
        assert_eq!(asked(&[0]), [] as [usize; 0], "the same again");
    }

    #[test]
    fn a_jump_fetches_all_that_follow_it() {
        let mut state = of(10);
        state.next(0);
        assert_eq!(state.next(6), [7, 8]);
        assert_eq!(state.next(3), [2, 1]);
        assert_eq!(of(0).next(0), [] as [usize; 0]);
        assert_eq!(of(2).next(1), [] as [usize; 0], "they are near anyway");
    }
}
