//! Values that belong to one forward pass: the strength of an adapter, the seed of its dropout masks.
//!
//! A loss may run a model several times with other values (a preservation loss runs it with and without the adapter). With
//! gradient checkpointing the backward pass runs blocks again, when the values of another pass may be set.
//! [`checkpoint`](super::checkpoint) therefore keeps the values of its forward pass and sets them again.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

type Values = Arc<BTreeMap<u64, Arc<dyn Any + Send + Sync>>>;

thread_local! {
    static VALUES: RefCell<Values> = RefCell::new(Values::default());
}

/// Names one value. Each key is another one.
#[derive(Debug)]
pub struct PassKey(u64);

impl PassKey {
    /// A new key.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs `f` with this value, on this thread. Calls may be nested.
    pub fn with<T: Send + Sync + 'static, R>(&self, value: T, f: impl FnOnce() -> R) -> R {
        let mut values = PassValues::current().0;
        Arc::make_mut(&mut values).insert(self.0, Arc::new(value));
        PassValues(values).run(f)
    }

    /// The value of the current pass; `None` outside [`PassKey::with`].
    pub fn get<T: Send + Sync + 'static>(&self) -> Option<Arc<T>> {
        let value = VALUES.with_borrow(|values| values.get(&self.0).cloned())?;
        value.downcast().ok()
    }
}

/// All values of a pass.
#[derive(Clone, Debug)]
pub(super) struct PassValues(Values);

impl PassValues {
    /// Those of the current pass of this thread.
    pub(super) fn current() -> Self {
        Self(VALUES.with_borrow(Clone::clone))
    }

    /// Runs `f` with these values.
    pub(super) fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        /// Sets the earlier values again, also after a panic.
        struct Restore(Option<Values>);
        impl Drop for Restore {
            fn drop(&mut self) {
                if let Some(values) = self.0.take() {
                    VALUES.set(values);
                }
            }
        }
        let _restore = Restore(Some(VALUES.replace(Arc::clone(&self.0))));
        f()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_belong_to_their_pass() {
        let (one, other) = (PassKey::unique(), PassKey::unique());
        assert_eq!(one.get::<f64>(), None);
        let inner = one.with(1.0, || {
            assert_eq!(other.get::<f64>(), None);
            let kept = other.with("x", || one.with(2.0, PassValues::current));
            assert_eq!(one.get::<f64>().as_deref(), Some(&1.0));
            kept
        });
        assert_eq!(one.get::<f64>(), None);
        inner.run(|| {
            assert_eq!(one.get::<f64>().as_deref(), Some(&2.0));
            assert_eq!(other.get::<&str>().as_deref(), Some(&"x"));
        });
        let panicked = std::panic::catch_unwind(|| one.with(3.0, || panic!("on purpose")));
        assert!(panicked.is_err() && one.get::<f64>().is_none());
    }
}
