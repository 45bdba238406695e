//! Own CONFIRM RKEY and DELETE RKEY requests: one after the other, each with a time limit.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{Action, RESPONSE_TIME};
use crate::link::rtoken::Rtokens;

/// How long a request may wait for those before it.
const QUEUE_TIME: Duration = Duration::from_secs(20);
/// Most requests that wait: two for each connection that a group can have.
const MAX_REQUESTS: usize = 2 * 255;

/// Why the peer may not know an RMB. CLC: decline with ERR_REGBUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RkeyError {
    /// The peer has no room for the RToken.
    #[error("the peer refused the RToken")]
    Refused,
    /// No answer in 2 s, or no chance to ask in 20 s.
    #[error("no answer to CONFIRM RKEY in time")]
    Timeout,
    /// Too many requests wait.
    #[error("too many RTokens at once")]
    Busy,
    /// A link was added meanwhile, for which the RMB has no RToken.
    #[error("the RMB is not known on a new link")]
    NewLink,
    /// The group is ending.
    #[error("the link group is ending")]
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Confirm(Rtokens),
    Delete(Rtokens),
}

impl Request {
    /// What the driver is told at the end. How DELETE RKEY ended makes no difference.
    pub(super) fn done(self, result: Result<(), RkeyError>) -> Action {
        match self {
            Request::Confirm(tokens) => Action::ConfirmRkeyDone { tokens, result },
            Request::Delete(tokens) => Action::DeleteRkeyDone { tokens },
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct RkeyFlows {
    /// The request that was sent, and until when it has to be answered.
    running: Option<(Request, Instant)>,
    /// Those that wait, and until when.
    waiting: VecDeque<(Request, Instant)>,
}

impl RkeyFlows {
    pub(super) fn push(&mut self, request: Request, now: Instant) -> Result<(), RkeyError> {
        if self.waiting.len() >= MAX_REQUESTS {
            return Err(RkeyError::Busy);
        }
        self.waiting.push_back((request, now + QUEUE_TIME));
        Ok(())
    }

    /// Whether a request has not been sent yet.
    pub(super) fn waits(&self, request: Request) -> bool {
        self.waiting.iter().any(|(r, _)| *r == request)
    }

    pub(super) fn running(&self) -> Option<Request> {
        self.running.map(|(request, _)| request)
    }

    /// The next request, to be sent now. Only when none is running.
    pub(super) fn start(&mut self, now: Instant) -> Option<Request> {
        let (request, _) = self.waiting.pop_front()?;
        self.running = Some((request, now + RESPONSE_TIME));
        Some(request)
    }

    /// Ends the running request if `answered` says that the answer is its own.
    pub(super) fn finish(&mut self, answered: impl FnOnce(&Request) -> bool) -> Option<Request> {
        self.running
            .take_if(|(request, _)| answered(request))
            .map(|(request, _)| request)
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let requests = self.running.iter().chain(self.waiting.front());
        requests.map(|(_, until)| *until).min()
    }

    /// Gives up what has waited too long; whether the running request was among it.
    pub(super) fn expire(&mut self, now: Instant, actions: &mut VecDeque<Action>) -> bool {
        let expired = self.running.take_if(|(_, until)| now >= *until);
        let ended = expired.is_some();
        let waiting = core::iter::from_fn(|| {
            let (_, until) = self.waiting.front()?;
            (now >= *until).then(|| self.waiting.pop_front())?
        });
        let expired = expired.into_iter().chain(waiting);
        actions.extend(expired.map(|(request, _)| request.done(Err(RkeyError::Timeout))));
        ended
    }

    /// Gives up everything.
    pub(super) fn fail(&mut self, actions: &mut VecDeque<Action>) {
        let requests = self
            .running
            .take()
            .into_iter()
            .chain(self.waiting.drain(..));
        actions.extend(requests.map(|(request, _)| request.done(Err(RkeyError::Down))));
    }
}
