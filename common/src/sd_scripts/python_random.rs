//! Python's `random.Random(seed).shuffle`: the Mersenne Twister MT19937, with the published constants of Matsumoto and Nishimura.

const WORDS: usize = 624;
const MIDDLE: usize = 397;

/// Random numbers as Python's.
pub(super) struct PythonRandom {
    state: [u32; WORDS],
    next: usize,
}

impl PythonRandom {
    /// `random.Random(seed)` for a whole number, whose sign Python ignores.
    pub(super) fn new(seed: i64) -> Self {
        let seed = seed.unsigned_abs();
        let key: Vec<u32> = match (seed as u32, (seed >> 32) as u32) {
            (low, 0) => vec![low],
            (low, high) => vec![low, high],
        };
        let mut state = [0_u32; WORDS];
        state[0] = 19_650_218;
        for place in 1..WORDS {
            state[place] = mix(state[place - 1], 1_812_433_253).wrapping_add(place as u32);
        }
        let mut place = 1;
        let step = |place: usize, state: &mut [u32; WORDS]| {
            if place + 1 < WORDS {
                return place + 1;
            }
            state[0] = state[WORDS - 1];
            1
        };
        for round in 0..WORDS.max(key.len()) {
            let index = round % key.len();
            state[place] = (state[place] ^ mix(state[place - 1], 1_664_525))
                .wrapping_add(key[index])
                .wrapping_add(index as u32);
            place = step(place, &mut state);
        }
        for _ in 1..WORDS {
            state[place] = (state[place] ^ mix(state[place - 1], 1_566_083_941)).wrapping_sub(place as u32);
            place = step(place, &mut state);
        }
        state[0] = 0x8000_0000;
        Self { state, next: WORDS }
    }

    fn word(&mut self) -> u32 {
        if self.next == WORDS {
            for place in 0..WORDS {
                let joined = (self.state[place] & 0x8000_0000) | (self.state[(place + 1) % WORDS] & 0x7fff_ffff);
                let twisted = (joined >> 1) ^ if joined & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[place] = self.state[(place + MIDDLE) % WORDS] ^ twisted;
            }
            self.next = 0;
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// A number below `end`: random bits until they are below it.
    fn below(&mut self, end: u32) -> u32 {
        let unused = end.leading_zeros();
        loop {
            let drawn = self.word().checked_shr(unused).unwrap_or(0);
            if drawn < end {
                return drawn;
            }
        }
    }

    /// Shuffles as `random.shuffle`.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(u32::try_from(last + 1).unwrap_or(u32::MAX));
            items.swap(last, other as usize);
        }
    }
}

/// Mixes the upper bits of a word of the state into its lower ones.
fn mix(word: u32, factor: u32) -> u32 {
    (word ^ (word >> 30)).wrapping_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_is_that_of_python() {
        // `random.seed(seed); x = list(range(n)); random.shuffle(x)` of Python 3.11.
        for (seed, expected) in CASES {
            let mut items: Vec<u32> = (0..expected.len() as u32).collect();
            PythonRandom::new(*seed).shuffle(&mut items);
            assert_eq!(items, *expected, "{seed}");
        }
        // The state is renewed after 624 words.
        let mut items: Vec<u32> = (0..2000).collect();
        PythonRandom::new(7).shuffle(&mut items);
        assert_eq!(items[..6], SIX_OF_2000);
    }

    const CASES: &[(i64, &[u32])] = &[
        (0, &[7, 8, 1, 5, 3, 4, 2, 0, 9, 6]),
        (42, &[7, 3, 2, 8, 5, 6, 9, 4, 0, 1]),
        (-1234567890123, &[4, 0, 2, 3, 1, 5, 6]),
        (9223372036854775807, &[0, 4, 3, 1, 2]),
        (4294967296, &[11, 10, 7, 3, 9, 2, 4, 8, 0, 6, 5, 1]),
    ];
    const SIX_OF_2000: [u32; 6] = [161, 562, 1877, 1034, 1575, 48];
}
