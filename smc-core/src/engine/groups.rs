//! What the engine does for all link groups and handshakes in turn.

use core::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::ENDING;
use super::handshake::Wait;
use super::machine::Task;
use super::run::Engine;
use crate::node;

impl Engine {
    /// Has completions reported to the engine again where program threads no longer look at them.
    pub(super) fn watch_groups(&self) {
        for (g, group) in self.groups.iter().enumerate() {
            if let Some(group) = group {
                group.watch(super::run::EV_CQ | g as u64);
            }
        }
    }

    /// Whether program threads have taken the watch of a group's completions over.
    pub(super) fn unwatched(&self) -> bool {
        self.groups.iter().flatten().any(|group| !group.watched())
    }

    /// Looks after link groups and handshakes. Returns when to look again, in milliseconds.
    pub(super) fn tend_rdma(&mut self) -> Option<i32> {
        if self.groups.is_empty() && self.handshakes.is_empty() {
            return None;
        }
        let mut next = self.tend_partings();
        let mut note = |at: Option<Instant>| {
            if let Some(at) = at {
                next = Some(next.map_or(at, |n| n.min(at)));
            }
        };
        let mut confirmed = Vec::new();
        let ending = ENDING.load(Relaxed);
        for g in 0..self.groups.len() {
            if let Some(group) = self.groups[g].as_deref_mut() {
                if ending && group.connections() == 0 {
                    group.terminate();
                }
                note(group.tend());
                confirmed.extend(group.confirmed.drain(..).map(|c| (g, c)));
                note(self.second_link(g));
            }
        }
        let now = Instant::now();
        for i in 0..self.handshakes.len() {
            let Some(mut h) = self.handshakes[i].take() else {
                continue;
            };
            match h.wait {
                Wait::Seen(task, until) => {
                    self.task(&mut h, task);
                    if matches!(h.wait, Wait::Seen(..)) {
                        note(Some(until));
                    }
                }
                Wait::Connect(message) => self.check_connected(&mut h, message),
                Wait::Link => self.check_link(&mut h),
                Wait::SecondLink => self.check_second_link(&mut h),
                Wait::Rkey(token) => {
                    let answer = confirmed
                        .iter()
                        .find(|(g, (t, _))| h.place.is_some_and(|p| p.0 == *g) && *t == token);
                    if let Some((_, (_, result))) = answer {
                        self.rkey_confirmed(&mut h, *result);
                    } else if let Some((g, _)) = h.place
                        && self.group(g).is_ok_and(|g| g.rkey_waits(token))
                    {
                        // The time for the answer begins when it is asked for.
                        h.machine.rkey_sent(now);
                    }
                }
                Wait::Group(g, request, until) => {
                    let over = self
                        .group(g)
                        .map_or(true, |g| g.is_up() && !g.is_changing() || g.down.is_some());
                    if over || now >= until {
                        self.task(&mut h, Task::Prepare(request));
                    } else {
                        note(Some(until));
                    }
                }
                Wait::Nothing => {}
            }
            if h.machine.deadline().is_some_and(|at| at <= now) {
                h.machine.timeout(now);
            }
            self.handshakes[i] = Some(h);
            self.advance(i);
            if let Some(h) = &self.handshakes[i] {
                note(h.machine.deadline());
            }
        }
        for g in 0..self.groups.len() {
            let used = self
                .handshakes
                .iter()
                .flatten()
                .any(|h| h.place.is_some_and(|p| p.0 == g));
            match self.groups[g].as_mut().filter(|_| !used).map(|g| g.over()) {
                Some(Ok(true)) => self.drop_group(g),
                Some(Err(again)) => next = Some(next.map_or(again, |n| n.min(again))),
                _ => {}
            }
        }
        let next = next?.saturating_duration_since(Instant::now());
        Some(i32::try_from(next.as_millis() + 1).unwrap_or(i32::MAX))
    }

    /// A link group's completion channel has something.
    pub(super) fn completions(&mut self, g: usize) {
        if let Ok(group) = self.group(g) {
            group.clear_events();
        }
        node::dispatch();
    }
}
