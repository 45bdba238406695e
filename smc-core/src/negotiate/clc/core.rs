//! What client and server have in common: reading, declining, deadlines, and the part after the Confirm, when the
//! link is being made and CLC only has an ear open for a Decline.

use std::collections::VecDeque;
use std::time::Instant;

use super::inbox::Inbox;
use super::{
    ADD_LINK_WAIT, Action, CLC_WAIT, CLIENT_CONFIRM_LINK_WAIT, CONFIRM_RKEY_WAIT, DECLINE_WAIT,
    Established, Fallback, Local, Outcome, SERVER_CONFIRM_LINK_WAIT, Side, Terms,
};
use crate::wire::Error;
use crate::wire::clc::{
    Decline, Diagnosis, FirstContact, List, MAX_EMIT, Message, OS_LINUX, Version,
};

/// Who we are on this connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

pub(super) struct Core<T> {
    pub(super) local: Local,
    role: Role,
    phase: Phase<T>,
    inbox: Inbox,
    actions: VecDeque<Action<T>>,
    deadline: Option<Instant>,
    /// Form that a Decline of ours has to have.
    pub(super) form: Version,
    /// An Accept has named an existing link.
    pub(super) subsequent: bool,
    /// Why the driver wants to decline. It has to wait until the peer's message has been read, or the program would
    /// find that in its stream.
    refusal: Option<Diagnosis>,
}

enum Phase<T> {
    /// Waiting for the peer's next message.
    Await,
    /// The driver prepares its end.
    Prepare,
    /// The driver makes the link work; the peer may still decline.
    Link(Link<T>),
    Done,
}

struct Link<T> {
    step: Step,
    established: Established,
    /// What follows when the link is ready.
    add_link: Option<T>,
    /// The peer has ended its direction. Its data may nevertheless come, over the link.
    eof: bool,
}

#[derive(Clone, Copy)]
enum Step {
    /// Waiting for the link.
    Confirm,
    /// The link isn't ready in time: the peer may say so first.
    LastDecline,
    /// Waiting for the driver to finish ADD LINK.
    AddLink,
    /// There was no ADD LINK. Perhaps the peer has found the first link bad.
    AddLinkDecline,
    /// We are through, but half a Decline has come.
    HalfDecline,
}

impl<T> Core<T> {
    pub(super) fn new(local: Local, role: Role) -> Core<T> {
        Core {
            local,
            role,
            phase: Phase::Prepare,
            inbox: Inbox::default(),
            actions: VecDeque::new(),
            deadline: None,
            form: Version::V1,
            subsequent: false,
            refusal: None,
        }
    }

    pub(super) fn poll(&mut self) -> Option<Action<T>> {
        self.actions.pop_front()
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    pub(super) fn want(&self) -> usize {
        match &self.phase {
            Phase::Await => self.inbox.want(),
            Phase::Link(link) if !link.eof => self.inbox.want(),
            _ => 0,
        }
    }

    /// Takes bytes from the peer. Returns how many, and a message for the side to judge. In the latter case the
    /// phase is [`Phase::Prepare`], without a deadline.
    pub(super) fn read(&mut self, bytes: &[u8]) -> (usize, Option<Message>) {
        if self.want() == 0 {
            return (0, None);
        }
        let (taken, result) = self.inbox.push(bytes);
        let message = match result {
            None => None,
            Some(Ok(Message::Decline(decline))) => {
                self.peer_declined(decline);
                None
            }
            Some(_) if matches!(self.phase, Phase::Link(_)) => {
                self.fail(libc::EPROTO);
                None
            }
            Some(Ok(message)) => {
                self.phase = Phase::Prepare;
                self.deadline = None;
                Some(message)
            }
            // Read to its end, but not to be worked with.
            Some(Err(Error::Field(_))) => {
                self.decline(Diagnosis::CnfErr);
                None
            }
            Some(Err(_)) => {
                self.fail(libc::EPROTO);
                None
            }
        };
        (taken, message)
    }

    pub(super) fn eof(&mut self) {
        match &mut self.phase {
            Phase::Await => self.fail(libc::ECONNRESET),
            Phase::Link(_) if !self.inbox.is_empty() => self.fail(libc::ECONNRESET),
            Phase::Link(link) => link.eof = true,
            Phase::Prepare | Phase::Done => {}
        }
    }

    pub(super) fn timeout(&mut self, now: Instant) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        self.deadline = None;
        let step = match &self.phase {
            Phase::Await => return self.fail(libc::ETIMEDOUT),
            Phase::Prepare => return self.decline(Diagnosis::ErrRegBuf),
            Phase::Link(link) => link.step,
            Phase::Done => return,
        };
        match step {
            Step::Confirm => self.step(Step::LastDecline, now),
            Step::LastDecline if self.inbox.is_empty() => self.decline(Diagnosis::TimeoutCl),
            Step::LastDecline | Step::HalfDecline => self.fail(libc::ETIMEDOUT),
            Step::AddLink if self.role == Role::Client => self.step(Step::AddLinkDecline, now),
            Step::AddLink | Step::AddLinkDecline => self.establish(now),
        }
    }

    /// Goes on to a step that lasts as long as a Decline may take.
    fn step(&mut self, step: Step, now: Instant) {
        if let Phase::Link(link) = &mut self.phase {
            link.step = step;
            self.deadline = Some(now + DECLINE_WAIT);
        }
    }

    pub(super) fn send(&mut self, message: &Message) {
        let mut bytes = [0; MAX_EMIT];
        let len = message.emit(&mut bytes);
        // Every message that we send fits.
        if let Some(bytes) = len.and_then(|len| bytes.get(..len)) {
            self.actions.push_back(Action::Send(bytes.to_vec()));
        }
    }

    pub(super) fn task(&mut self, task: T) {
        self.actions.push_back(Action::Task(task));
    }

    /// From here on the peer's next message is awaited.
    pub(super) fn await_message(&mut self, now: Instant) {
        self.phase = Phase::Await;
        self.deadline = Some(now + CLC_WAIT);
    }

    /// The driver has asked the peer to confirm an rkey.
    pub(super) fn confirm_rkey_sent(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Prepare) {
            self.deadline = Some(now + CONFIRM_RKEY_WAIT);
        }
    }

    /// Declines now if the driver has said so before; returns whether it has.
    pub(super) fn refuse(&mut self) -> bool {
        let refusal = self.refusal.take();
        if let Some(diagnosis) = refusal {
            self.decline(diagnosis);
        }
        refusal.is_some()
    }

    /// The driver wants to decline.
    pub(super) fn declined_by_driver(&mut self, diagnosis: Diagnosis, now: Instant) {
        match &self.phase {
            Phase::Await => self.refusal = Some(diagnosis),
            Phase::Prepare => self.decline(diagnosis),
            Phase::Link(link) => match link.step {
                // LLC has a clock of its own. The peer's is as old, so it may be about to decline.
                Step::Confirm if diagnosis == Diagnosis::TimeoutCl => {
                    self.step(Step::LastDecline, now);
                }
                Step::LastDecline if diagnosis == Diagnosis::TimeoutCl => {}
                Step::HalfDecline => {}
                // The peer has declined itself, and would take ours for its program's.
                _ if !self.inbox.is_empty() => self.step(Step::HalfDecline, now),
                _ => self.decline(diagnosis),
            },
            Phase::Done => {}
        }
    }

    /// Sends a Decline and ends the handshake.
    pub(super) fn decline(&mut self, diagnosis: Diagnosis) {
        let out_of_sync =
            self.role == Role::Client && self.subsequent && diagnosis == Diagnosis::SyncErr;
        self.send(&Message::Decline(Decline {
            version: self.form,
            out_of_sync,
            system_id: self.local.system_id,
            diagnosis,
            os: OS_LINUX,
        }));
        self.finish(Outcome::Fallback(Fallback {
            diagnosis,
            by: Side::Local,
            end_link_group: false,
        }));
    }

    fn peer_declined(&mut self, decline: Decline) {
        // What hasn't been sent would be found by the peer's program.
        self.actions.clear();
        self.finish(Outcome::Fallback(Fallback {
            diagnosis: decline.diagnosis,
            by: Side::Peer,
            end_link_group: decline.out_of_sync && self.subsequent,
        }));
    }

    /// The connection can't go on.
    pub(super) fn fail(&mut self, errno: i32) {
        if !matches!(self.phase, Phase::Done) {
            self.actions.clear();
            self.finish(Outcome::Fail(errno));
        }
    }

    fn finish(&mut self, outcome: Outcome) {
        self.phase = Phase::Done;
        self.deadline = None;
        // What nobody has begun with is not wanted any more.
        self.actions
            .retain(|action| matches!(action, Action::Send(_)));
        self.actions.push_back(Action::Done(outcome));
    }

    /// The Confirm is sent or read, and the driver has been asked to make the link work. `add_link` follows if the
    /// connection is the first of a link group that may have two links.
    pub(super) fn start_link(&mut self, established: Established, add_link: T, now: Instant) {
        let wait = match self.role {
            Role::Client => CLIENT_CONFIRM_LINK_WAIT,
            Role::Server => SERVER_CONFIRM_LINK_WAIT,
        };
        self.deadline = established.first_contact.then(|| now + wait);
        self.phase = Phase::Link(Link {
            step: Step::Confirm,
            add_link: established
                .terms
                .filter(|terms| terms.max_links > 1)
                .map(|_| add_link),
            established,
            eof: false,
        });
    }

    /// The link works.
    pub(super) fn link_ready(&mut self, now: Instant) {
        let Phase::Link(link) = &mut self.phase else {
            return;
        };
        if !matches!(link.step, Step::Confirm) {
            return;
        }
        match link.add_link.take() {
            Some(task) => {
                link.step = Step::AddLink;
                self.deadline = Some(now + ADD_LINK_WAIT);
                self.task(task);
            }
            None => self.establish(now),
        }
    }

    /// ADD LINK is over, with a second link or without.
    pub(super) fn add_link_done(&mut self, now: Instant) {
        let Phase::Link(link) = &self.phase else {
            return;
        };
        if matches!(link.step, Step::AddLink | Step::AddLinkDecline) {
            self.establish(now);
        }
    }

    /// The connection is on SMC-R, unless a Decline is on its way.
    fn establish(&mut self, now: Instant) {
        let Phase::Link(link) = &self.phase else {
            return;
        };
        if self.inbox.is_empty() {
            let established = link.established;
            self.established(established);
        } else {
            self.step(Step::HalfDecline, now);
        }
    }

    /// The connection is on SMC-R.
    pub(super) fn established(&mut self, established: Established) {
        self.finish(Outcome::Established(established));
    }

    /// Whether the driver prepares its end.
    pub(super) fn is_preparing(&self) -> bool {
        matches!(self.phase, Phase::Prepare)
    }

    /// The first-contact extension that says `terms`.
    pub(super) fn extension(&self, terms: &Terms, direct: bool) -> FirstContact {
        FirstContact {
            direct,
            os: OS_LINUX,
            release: terms.release,
            hostname: self.local.hostname,
            max_conns: terms.max_conns,
            max_links: terms.max_links,
            features: terms.features,
            vendor: 0,
            gids: List::new(),
        }
    }
}
