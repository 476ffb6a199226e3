//! The tasks of the disk threads: reads before writes.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::job::{Job, Part};

/// A task of a disk thread.
#[derive(Debug)]
pub(super) enum Task {
    /// What a write needs before its first part.
    Prepare(Arc<Job>),
    /// A part of a copy.
    Part(Arc<Job>, Part),
}

#[derive(Debug, Default)]
struct Tasks {
    reads: VecDeque<Task>,
    writes: VecDeque<Task>,
    closed: bool,
}

/// Tasks that wait. Their number is bounded by the leader's limit of running copies on each edge.
#[derive(Debug, Default)]
pub(super) struct Queue {
    tasks: Mutex<Tasks>,
    filled: Condvar,
}

impl Queue {
    /// Adds a task of a write.
    pub(super) fn push(&self, task: Task) {
        self.push_all(true, std::iter::once(task));
    }

    /// Adds tasks of a write or of a read.
    pub(super) fn push_all(&self, write: bool, tasks: impl Iterator<Item = Task>) {
        let mut held = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        match write {
            true => held.writes.extend(tasks),
            false => held.reads.extend(tasks),
        }
        self.filled.notify_all();
    }

    /// Takes the next task, if one waits.
    pub(super) fn try_pop(&self) -> Option<Task> {
        let mut held = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let reads = held.reads.pop_front();
        reads.or_else(|| held.writes.pop_front())
    }

    /// Takes the next task, and waits for one; `None` once the queue is closed and empty.
    pub(super) fn pop(&self) -> Option<Task> {
        let mut held = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let reads = held.reads.pop_front();
            if let Some(task) = reads.or_else(|| held.writes.pop_front()) {
                return Some(task);
            }
            if held.closed {
                return None;
            }
            let waited = self.filled.wait(held);
            held = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the threads once the waiting tasks have ended.
    pub(super) fn close(&self) {
        let mut held = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        held.closed = true;
        self.filled.notify_all();
    }
}
