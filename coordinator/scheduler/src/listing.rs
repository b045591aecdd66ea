//! Lists of jobs in pages. A page starts after a position that stays valid while jobs come and go. Only the rows of the page are
//! sorted and rendered, however many jobs there are.

use super::model::Job;
use super::state::State;
use super::view::{ENDED_SHOWN, max_ended_shown};
use aitk_common::control_plane::{JobState, JobView, UnixMillis};
use aitk_common::id::{JobId, UserName};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// The most rows on a page.
const MAX_PAGE_ROWS: usize = 1_000;
/// How many devices can be checked, to say why a job waits, in the time that another row takes.
const DEVICES_PER_ROW: usize = 8;

/// The position of a row in the list: running jobs, then waiting ones in queue order, then ended ones, the newest first. Its
/// text is the page token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ListPosition {
    /// A member of the listed array, by its index.
    Member(u32),
    /// A running job, by order of submission.
    Running(u64),
    /// A waiting job: priority, whether it yields, and order of submission.
    Waiting(Reverse<i64>, bool, u64),
    /// An ended job: when it ended, and order of submission.
    Ended(Reverse<(u64, u64)>),
}

impl ListPosition {
    fn of(job: &Job) -> Self {
        match job.state {
            JobState::Running | JobState::Stopping => Self::Running(job.order),
            JobState::Queued => Self::Waiting(Reverse(job.requirements.priority), job.requirements.yields, job.order),
            JobState::Stopped | JobState::Completed | JobState::Failed => {
                Self::Ended(Reverse((job.ended.map_or(0, |time| time.0), job.order)))
            }
        }
    }
}

impl fmt::Display for ListPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Member(index) => write!(f, "m.{index}"),
            Self::Running(order) => write!(f, "r.{order}"),
            Self::Waiting(Reverse(priority), yields, order) => write!(f, "w.{priority}.{yields}.{order}"),
            Self::Ended(Reverse((time, order))) => write!(f, "e.{time}.{order}"),
        }
    }
}

impl FromStr for ListPosition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('.').collect();
        let number = |text: &str| text.parse::<u64>().ok();
        let position = match parts.as_slice() {
            ["m", index] => index.parse().ok().map(Self::Member),
            ["r", order] => number(order).map(Self::Running),
            ["w", priority, yields, order] => (|| {
                let (priority, yields) = (priority.parse().ok()?, yields.parse().ok()?);
                Some(Self::Waiting(Reverse(priority), yields, number(order)?))
            })(),
            ["e", time, order] => number(time).zip(number(order)).map(|pair| Self::Ended(Reverse(pair))),
            _ => None,
        };
        position.ok_or_else(|| "expected the `next_page_token` of an earlier answer".to_owned())
    }
}

/// Which jobs to list.
#[derive(Clone, Debug, Default)]
pub struct ListQuery {
    /// All ended jobs, not only the last few.
    pub all: bool,
    /// The largest number of ended jobs to list; 0: the default, or with `all` no limit.
    pub limit: usize,
    /// List the members of arrays instead of the arrays.
    pub members: bool,
    /// Only the members of this array, by index.
    pub array: Option<JobId>,
    /// Only jobs in one of these states; empty: in any.
    pub states: Vec<JobState>,
    /// Only jobs of this user.
    pub owner: Option<UserName>,
    /// Only jobs with this name, or in an array with this name.
    pub name: Option<String>,
    /// Only jobs whose name, or whose array's name, contains this.
    pub name_part: Option<String>,
    /// Only jobs submitted at this time or later.
    pub since: Option<UnixMillis>,
    /// Only rows after this position.
    pub after: Option<ListPosition>,
    /// The most rows; 0: as many as a page may have.
    pub page: usize,
}

/// A page of a list.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Its rows.
    pub jobs: Vec<JobView>,
    /// The position after which the next page starts; none: this is the last page.
    pub next: Option<ListPosition>,
    /// The number of rows on all pages, including the ended jobs beyond `limit`.
    pub total: u64,
}

impl ListQuery {
    fn matches(&self, job: &Job) -> bool {
        let array = job.array.as_deref();
        let name_matches =
            |matches: &dyn Fn(&str) -> bool| matches(&job.name) || array.is_some_and(|array| matches(&array.name));
        self.array
            .as_ref()
            .is_none_or(|id| array.is_some_and(|array| array.id == *id))
            && (self.states.is_empty() || self.states.contains(&job.state))
            && self.owner.as_ref().is_none_or(|owner| job.requirements.owner == *owner)
            && self.name.as_ref().is_none_or(|name| name_matches(&|text| text == name))
            && self
                .name_part
                .as_ref()
                .is_none_or(|part| name_matches(&|text| text.contains(part)))
            && self.since.is_none_or(|since| job.created >= since)
    }
}

impl State {
    /// A page of the jobs for which `is_visible` is true. The page ends after the row for which `is_full` returns true.
    #[must_use]
    pub fn list(
        &self,
        now: UnixMillis,
        query: &ListQuery,
        is_visible: impl Fn(&Job) -> bool,
        mut is_full: impl FnMut(&JobView) -> bool,
    ) -> Page {
        let mut rows = self.rows(query, is_visible);
        let total = rows.len() as u64;
        let is_ended = |position: &ListPosition| matches!(position, ListPosition::Ended(_));
        let active = rows.iter().filter(|(position, _)| !is_ended(position)).count();
        let max = active.saturating_add(max_ended_shown(query.all, query.limit, ENDED_SHOWN));
        if query.array.is_none() {
            keep_first_rows(&mut rows, max);
        }
        if let Some(after) = query.after {
            rows.retain(|(position, _)| *position > after);
        }
        let page = match query.page {
            0 => MAX_PAGE_ROWS,
            page => page.min(MAX_PAGE_ROWS),
        };
        let left = rows.len();
        keep_first_rows(&mut rows, page);
        rows.sort_unstable_by_key(|(position, _)| *position);
        let (mut jobs, mut last, mut cost) = (Vec::with_capacity(rows.len()), None, 0);
        for (position, id) in rows {
            // To say why a job waits, every device is checked.
            cost += match position {
                ListPosition::Ended(_) | ListPosition::Running(_) => 1,
                ListPosition::Waiting(..) | ListPosition::Member(_) => 1 + self.slots.iter().count() / DEVICES_PER_ROW,
            };
            if cost > MAX_PAGE_ROWS && !jobs.is_empty() {
                break;
            }
            last = Some(position);
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

    /// All rows with their positions, unsorted. An array has the position of its first member.
    fn rows(&self, query: &ListQuery, is_visible: impl Fn(&Job) -> bool) -> Vec<(ListPosition, &JobId)> {
        let mut rows: Vec<(ListPosition, &JobId)> = Vec::new();
        let mut arrays: BTreeMap<&JobId, usize> = BTreeMap::new();
        for job in self.jobs.values().filter(|job| query.matches(job) && is_visible(job)) {
            let mut position = ListPosition::of(job);
            let array = job.array.as_deref();
            if let (Some(_), Some(array)) = (&query.array, array) {
                position = ListPosition::Member(array.index);
            } else if let (false, Some(array)) = (query.members, array) {
                let at = *arrays.entry(&array.id).or_insert(rows.len());
                match rows.get_mut(at) {
                    Some(row) => row.0 = row.0.min(position),
                    None => rows.push((position, &array.id)),
                }
                continue;
            }
            rows.push((position, &job.id));
        }
        rows
    }
}

#[cfg(test)]
impl State {
    /// The members of an array, by index.
    pub(super) fn list_members(&self, now: UnixMillis, id: &JobId) -> Vec<JobView> {
        let query = ListQuery {
            array: Some(id.clone()),
            ..ListQuery::default()
        };
        self.list(now, &query, |_| true, |_| false).jobs
    }
}

/// Keeps the first `max` rows, unsorted.
fn keep_first_rows(rows: &mut Vec<(ListPosition, &JobId)>, max: usize) {
    if rows.len() > max {
        rows.select_nth_unstable_by_key(max, |(position, _)| *position);
        rows.truncate(max);
    }
}

#[cfg(test)]
impl State {
    /// Everything that a plain list shows, on one page; arrays, or their members.
    pub(super) fn list_all_jobs(&self, now: UnixMillis, all: bool, members: bool) -> Vec<JobView> {
        let query = ListQuery {
            all,
            members,
            ..ListQuery::default()
        };
        self.list(now, &query, |_| true, |_| false).jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_position_round_trips_through_text() {
        for position in [
            ListPosition::Member(7),
            ListPosition::Running(3),
            ListPosition::Waiting(Reverse(-5), true, 12),
            ListPosition::Ended(Reverse((1_700_000_000_000, u64::MAX))),
        ] {
            assert_eq!(position.to_string().parse(), Ok(position));
        }
        for bad in ["", "x.1", "w.1.2", "r.-1", "e.1", "m.99999999999", "w.1.yes.2", "r.1.2"] {
            assert!(bad.parse::<ListPosition>().is_err(), "{bad}");
        }
    }
}
