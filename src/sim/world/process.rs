//! A process in its seat: alive or dead, running, paused or slow.

use std::collections::VecDeque;
use std::time::Duration;

use super::SimEvent;
use kvferry_types::Time;

#[derive(Debug)]
pub(super) struct SimProcess<S> {
    pub(super) incarnation: u32,
    pub(super) state: Option<S>,
    /// Whether the process is paused. `pauses` counts its pauses so far.
    pub(super) paused: bool,
    pub(super) pauses: u32,
    pub(super) inbox: VecDeque<SimEvent>,
    /// Time to read one message, and until when the process is that slow.
    pub(super) slow: Option<(Duration, Time)>,
    pub(super) reading: bool,
    pub(super) armed: Time,
}

impl<S> SimProcess<S> {
    pub(super) fn new() -> Self {
        Self {
            incarnation: 0,
            state: None,
            paused: false,
            pauses: 0,
            inbox: VecDeque::new(),
            slow: None,
            reading: false,
            armed: Time::NEVER,
        }
    }
}

/// Delivery state of a process, independent of its kind.
pub(super) struct Delivery<'a> {
    pub(super) paused: &'a mut bool,
    pub(super) inbox: &'a mut VecDeque<SimEvent>,
    pub(super) slow: Option<(Duration, Time)>,
    pub(super) reading: &'a mut bool,
}

impl<S> SimProcess<S> {
    pub(super) fn delivery(&mut self) -> Delivery<'_> {
        Delivery {
            paused: &mut self.paused,
            inbox: &mut self.inbox,
            slow: self.slow,
            reading: &mut self.reading,
        }
    }
}
