//! A client and a server back to back: two byte queues for TCP, flags for LLC, and a clock of their own.

use std::collections::VecDeque;

use super::*;

/// What a driver does with a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    /// Its best.
    Do,
    /// It declines.
    Decline,
    /// Nothing. In a `Prepare` task: it waits for CONFIRM RKEY, which never comes.
    Stall,
}

/// How the drivers behave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) first_contact: bool,
    pub(super) client_links: u8,
    pub(super) server_links: u8,
    /// Tasks of the client, in order.
    pub(super) client: [Deed; 3],
    /// Tasks of the server, in order.
    pub(super) server: [Deed; 3],
}

/// What has been said on the link.
#[derive(Default)]
struct Llc {
    confirm_link: bool,
    confirm_link_answer: bool,
    add_link: bool,
    add_link_answer: bool,
}

pub(super) struct Sim {
    pub(super) now: Instant,
    plan: Plan,
    client: Client,
    server: Server,
    to_client: VecDeque<u8>,
    to_server: VecDeque<u8>,
    llc: Llc,
    /// What each side waits for on the link.
    client_waits: Option<ClientTask>,
    server_waits: Option<ServerTask>,
    pub(super) client_end: Option<Outcome>,
    pub(super) server_end: Option<Outcome>,
}

pub(super) const CLIENT_PAYLOAD: &[u8] = b"payload of the client";
pub(super) const SERVER_PAYLOAD: &[u8] = b"payload of the server";

/// Takes `n` bytes, or as many as there are.
fn take(queue: &mut VecDeque<u8>, n: usize) -> Vec<u8> {
    let n = n.min(queue.len());
    queue.drain(..n).collect()
}

impl Sim {
    pub(super) fn new(plan: Plan) -> Sim {
        let now = Instant::now();
        let mut client_local = local(2);
        client_local.max_links = plan.client_links;
        let mut server_local = local(1);
        server_local.max_links = plan.server_links;
        Sim {
            now,
            plan,
            client: Client::new(client_local, gid(2), List::new(), now),
            server: Server::new(server_local, now),
            to_client: VecDeque::new(),
            to_server: VecDeque::new(),
            llc: Llc::default(),
            client_waits: None,
            server_waits: None,
            client_end: None,
            server_end: None,
        }
    }

    /// Runs until both are through. `cuts` are the sizes of the pieces in which bytes arrive.
    pub(super) fn run(&mut self, cuts: &[usize]) {
        let mut cuts = cuts.iter().copied().cycle();
        for _ in 0..10_000 {
            if self.client_end.is_some() && self.server_end.is_some() {
                return;
            }
            let mut cut = || cuts.next().unwrap_or(1);
            let (to_client, to_server) = (cut(), cut());
            let progress = self.client_turn(to_client) | self.server_turn(to_server);
            if !progress {
                let timeouts = [self.client.poll_timeout(), self.server.poll_timeout()];
                let Some(next) = timeouts.into_iter().flatten().min() else {
                    panic!("stuck: {:?} {:?}", self.client_end, self.server_end);
                };
                self.now = self.now.max(next);
                self.client.timeout(self.now);
                self.server.timeout(self.now);
            }
        }
        panic!("endless");
    }

    /// What the sides' programs find on TCP.
    pub(super) fn leftovers(mut self) -> (Vec<u8>, Vec<u8>) {
        (
            take(&mut self.to_client, usize::MAX),
            take(&mut self.to_server, usize::MAX),
        )
    }

    fn client_turn(&mut self, cut: usize) -> bool {
        let mut progress = false;
        let wanted = self.client.want().min(cut);
        let bytes = take(&mut self.to_client, wanted);
        if !bytes.is_empty() {
            assert_eq!(self.client.read(&bytes), bytes.len());
            progress = true;
        }
        match self.client_waits {
            Some(ClientTask::AwaitConfirmLink) if self.llc.confirm_link => {
                self.client_waits = None;
                self.llc.confirm_link_answer = true;
                self.client.link_ready(self.now);
            }
            Some(ClientTask::AwaitAddLink) if self.llc.add_link => {
                self.client_waits = None;
                self.llc.add_link_answer = true;
                self.client.add_link_done(self.now);
            }
            _ => {}
        }
        while let Some(action) = self.client.poll() {
            progress = true;
            match action {
                Action::Send(bytes) => self.to_server.extend(bytes),
                Action::Task(task) => self.client_task(task),
                Action::Done(outcome) => {
                    assert_eq!(self.client_end, None);
                    self.client_end = Some(outcome);
                    match outcome {
                        Outcome::Fallback(_) => self.to_server.extend(CLIENT_PAYLOAD),
                        Outcome::Fail(_) => self.server.eof(),
                        Outcome::Established(_) => {}
                    }
                }
            }
        }
        progress
    }

    fn client_task(&mut self, task: ClientTask) {
        let (index, prepare) = match task {
            ClientTask::PrepareFirst(_) | ClientTask::PrepareSubsequent(_) => (0, true),
            ClientTask::AwaitConfirmLink => (1, false),
            ClientTask::AwaitAddLink => (2, false),
        };
        match self.plan.client[index] {
            Deed::Do if prepare => self.client.prepared(prepared(2), self.now),
            Deed::Do => self.client_waits = Some(task),
            Deed::Decline => self.client.decline(Diagnosis::IntErr, self.now),
            Deed::Stall if prepare => self.client.confirm_rkey_sent(self.now),
            Deed::Stall => {}
        }
    }

    fn server_turn(&mut self, cut: usize) -> bool {
        let mut progress = false;
        let wanted = self.server.want().min(cut);
        let bytes = take(&mut self.to_server, wanted);
        if !bytes.is_empty() {
            assert_eq!(self.server.read(&bytes, self.now), bytes.len());
            progress = true;
        }
        match self.server_waits {
            Some(ServerTask::Connect { .. }) if self.llc.confirm_link_answer => {
                self.server_waits = None;
                self.server.link_ready(self.now);
            }
            Some(ServerTask::AddLink) if self.llc.add_link_answer => {
                self.server_waits = None;
                self.server.add_link_done(self.now);
            }
            _ => {}
        }
        while let Some(action) = self.server.poll() {
            progress = true;
            match action {
                Action::Send(bytes) => self.to_client.extend(bytes),
                Action::Task(task) => self.server_task(task),
                Action::Done(outcome) => {
                    assert_eq!(self.server_end, None);
                    self.server_end = Some(outcome);
                    match outcome {
                        Outcome::Fallback(_) => self.to_client.extend(SERVER_PAYLOAD),
                        Outcome::Fail(_) => self.client.eof(),
                        Outcome::Established(_) => {}
                    }
                }
            }
        }
        progress
    }

    fn server_task(&mut self, task: ServerTask) {
        let index = match task {
            ServerTask::Prepare(_) => 0,
            ServerTask::Connect { .. } => 1,
            ServerTask::AddLink => 2,
        };
        match (self.plan.server[index], task) {
            (Deed::Do, ServerTask::Prepare(_)) => {
                self.server
                    .prepared(prepared(1), self.plan.first_contact, self.now);
            }
            (Deed::Do, ServerTask::Connect { first_contact, .. }) => {
                if first_contact {
                    self.llc.confirm_link = true;
                    self.server_waits = Some(task);
                } else {
                    self.server.link_ready(self.now);
                }
            }
            (Deed::Do, ServerTask::AddLink) => {
                self.llc.add_link = true;
                self.server_waits = Some(task);
            }
            (Deed::Decline, _) => self.server.decline(Diagnosis::IntErr, self.now),
            (Deed::Stall, ServerTask::Prepare(_)) => self.server.confirm_rkey_sent(self.now),
            // Nobody else watches over this one.
            (Deed::Stall, ServerTask::Connect { first_contact, .. }) if !first_contact => {
                self.server.link_ready(self.now);
            }
            (Deed::Stall, _) => {}
        }
    }
}
