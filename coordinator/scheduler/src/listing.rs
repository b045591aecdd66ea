//! Lists of jobs in pages. A page begins after a place in the list, which stays where it is while jobs come and go; only its
//! rows are sorted and described, however many jobs there are.

use super::model::Job;
use super::state::State;
use super::view::{LAST_ENDED, most_shown};
use aitk_common::control::{JobState, JobView, UnixMillis};
use aitk_common::id::{JobId, UserName};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// The most rows of a page.
const PAGE_MOST: usize = 1_000;
/// Devices that are looked at to say why a job waits, for which as much time passes as for another row.
const DEVICES_PER_ROW: usize = 8;

/// Where a row stands in the list: running jobs, then waiting ones in queue order, then ended ones, the newest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A member of the array that is listed, by its index.
    Member(u32),
    /// Runs; by the order of submission.
    Running(u64),
    /// Waits: priority, whether it yields, and the order of submission.
    Waiting(Reverse<i64>, bool, u64),
    /// Has ended: when, and the order of submission.
    Ended(Reverse<(u64, u64)>),
}

impl Place {
    fn of(job: &Job) -> Self {
        match job.state {
            JobState::Running | JobState::Stopping => Self::Running(job.order),
            JobState::Queued => Self::Waiting(Reverse(job.wants.priority), job.wants.yields, job.order),
            JobState::Stopped | JobState::Completed | JobState::Failed => {
                Self::Ended(Reverse((job.ended.map_or(0, |time| time.0), job.order)))
            }
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Member(index) => write!(f, "m.{index}"),
            Self::Running(order) => write!(f, "r.{order}"),
            Self::Waiting(Reverse(priority), yields, order) => write!(f, "w.{priority}.{yields}.{order}"),
            Self::Ended(Reverse((time, order))) => write!(f, "e.{time}.{order}"),
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('.').collect();
        let number = |text: &str| text.parse::<u64>().ok();
        let place = match parts.as_slice() {
            ["m", index] => index.parse().ok().map(Self::Member),
            ["r", order] => number(order).map(Self::Running),
            ["w", priority, yields, order] => (|| {
                let (priority, yields) = (priority.parse().ok()?, yields.parse().ok()?);
                Some(Self::Waiting(Reverse(priority), yields, number(order)?))
            })(),
            ["e", time, order] => number(time).zip(number(order)).map(|pair| Self::Ended(Reverse(pair))),
            _ => None,
        };
        place.ok_or_else(|| "expected the `next_page_token` of an earlier answer".to_owned())
    }
}

/// What to list.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// Also ended jobs beyond the last few.
    pub all: bool,
    /// At most so many ended jobs; 0: a few, or with `all` every one.
    pub limit: usize,
    /// Members of arrays instead of the arrays.
    pub members: bool,
    /// Only the members of this array, by index.
    pub array: Option<JobId>,
    /// Only jobs in one of these states; empty: in any.
    pub states: Vec<JobState>,
    /// Only this user's.
    pub owner: Option<UserName>,
    /// Only those with this name, or in an array with this name.
    pub name: Option<String>,
    /// Only those in whose name, or in whose array's name, this occurs.
    pub name_part: Option<String>,
    /// Only those submitted since then.
    pub since: Option<UnixMillis>,
    /// After this place.
    pub after: Option<Place>,
    /// At most so many rows; 0: as many as a page has.
    pub page: usize,
}

/// A page of a list.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Its rows.
    pub jobs: Vec<JobView>,
    /// Where the next page begins; none: this is the last one.
    pub next: Option<Place>,
    /// Rows that fit, on all pages together, and ended ones beyond `limit`.
    pub total: u64,
}

impl Listing {
    fn fits(&self, job: &Job) -> bool {
        let array = job.array.as_deref();
        let named = |fits: &dyn Fn(&str) -> bool| fits(&job.name) || array.is_some_and(|array| fits(&array.name));
        self.array
            .as_ref()
            .is_none_or(|id| array.is_some_and(|array| array.id == *id))
            && (self.states.is_empty() || self.states.contains(&job.state))
            && self.owner.as_ref().is_none_or(|owner| job.wants.owner == *owner)
            && self.name.as_ref().is_none_or(|name| named(&|text| text == name))
            && self
                .name_part
                .as_ref()
                .is_none_or(|part| named(&|text| text.contains(part)))
            && self.since.is_none_or(|since| job.created >= since)
    }
}

impl State {
    /// A page of the jobs that somebody sees. Ends where `is_full` says so, after the row that it is asked about.
    #[must_use]
    pub fn list(
        &self,
        now: UnixMillis,
        listing: &Listing,
        sees: impl Fn(&Job) -> bool,
        mut is_full: impl FnMut(&JobView) -> bool,
    ) -> Page {
        let mut rows = self.rows(listing, sees);
        let total = rows.len() as u64;
        let ended = |place: &Place| matches!(place, Place::Ended(_));
        let active = rows.iter().filter(|(place, _)| !ended(place)).count();
        let most = active.saturating_add(most_shown(listing.all, listing.limit, LAST_ENDED));
        if listing.array.is_none() {
            keep_least(&mut rows, most);
        }
        if let Some(after) = listing.after {
            rows.retain(|(place, _)| *place > after);
        }
        let page = match listing.page {
            0 => PAGE_MOST,
            page => page.min(PAGE_MOST),
        };
        let left = rows.len();
        keep_least(&mut rows, page);
        rows.sort_unstable_by_key(|(place, _)| *place);
        let (mut jobs, mut last, mut cost) = (Vec::with_capacity(rows.len()), None, 0);
        for (place, id) in rows {
            // To say why a job waits, every device is looked at.
            cost += match place {
                Place::Ended(_) | Place::Running(_) => 1,
                Place::Waiting(..) | Place::Member(_) => 1 + self.slots.iter().count() / DEVICES_PER_ROW,
            };
            if cost > PAGE_MOST && !jobs.is_empty() {
                break;
            }
            last = Some(place);
            let Some(view) = self.job_view(now, id) else { continue };
            let full = is_full(&view);
            jobs.push(view);
            if full {
                break;
            }
        }
        let next = last.filter(|_| jobs.len() < left);
        Page { jobs, next, total }
    }

    /// Every row with its place, in no order. An array stands where the first of its members does.
    fn rows(&self, listing: &Listing, sees: impl Fn(&Job) -> bool) -> Vec<(Place, &JobId)> {
        let mut rows: Vec<(Place, &JobId)> = Vec::new();
        let mut arrays: BTreeMap<&JobId, usize> = BTreeMap::new();
        for job in self.jobs.values().filter(|job| listing.fits(job) && sees(job)) {
            let mut place = Place::of(job);
            let array = job.array.as_deref();
            if let (Some(_), Some(array)) = (&listing.array, array) {
                place = Place::Member(array.index);
            } else if let (false, Some(array)) = (listing.members, array) {
                let at = *arrays.entry(&array.id).or_insert(rows.len());
                match rows.get_mut(at) {
                    Some(row) => row.0 = row.0.min(place),
                    None => rows.push((place, &array.id)),
                }
                continue;
            }
            rows.push((place, &job.id));
        }
        rows
    }
}

#[cfg(test)]
impl State {
    /// The members of an array, by index.
    pub(super) fn members_listed(&self, now: UnixMillis, id: &JobId) -> Vec<JobView> {
        let listing = Listing {
            array: Some(id.clone()),
            ..Listing::default()
        };
        self.list(now, &listing, |_| true, |_| false).jobs
    }
}

/// Keeps the rows that come first, in no order.
fn keep_least(rows: &mut Vec<(Place, &JobId)>, most: usize) {
    if rows.len() > most {
        rows.select_nth_unstable_by_key(most, |(place, _)| *place);
        rows.truncate(most);
    }
}

#[cfg(test)]
impl State {
    /// Everything that a plain list shows, on one page; arrays, or their members.
    pub(super) fn all_listed(&self, now: UnixMillis, all: bool, members: bool) -> Vec<JobView> {
        let listing = Listing {
            all,
            members,
            ..Listing::default()
        };
        self.list(now, &listing, |_| true, |_| false).jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_the_same_as_text() {
        for place in [
            Place::Member(7),
            Place::Running(3),
            Place::Waiting(Reverse(-5), true, 12),
            Place::Ended(Reverse((1_700_000_000_000, u64::MAX))),
        ] {
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        for bad in ["", "x.1", "w.1.2", "r.-1", "e.1", "m.99999999999", "w.1.yes.2", "r.1.2"] {
            assert!(bad.parse::<Place>().is_err(), "{bad}");
        }
    }
}
