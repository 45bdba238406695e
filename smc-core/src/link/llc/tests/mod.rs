//! The state machine without sockets and without sleeping: captured exchanges, time limits, two of them against each
//! other, and peers that send anything.

mod hostile;
mod links;
mod pair;
mod scenario;
mod timers;

use std::time::{Duration, Instant};

use super::*;
use crate::wire::llc::LEN;
use crate::wire::{Gid, Mac, Mtu, Psn, Qpn, Rtoken, vectors};

/// A state machine, and the time that the test lets pass.
pub(super) struct Rig {
    pub(super) llc: Llc,
    pub(super) now: Instant,
}

pub(super) fn config(role: Role) -> Config {
    let d = match role {
        Role::Server => 1,
        Role::Client => 2,
    };
    Config {
        role,
        version: Version::V2,
        end: End {
            mac: Mac([0x52, 0x54, 0, 0, 0, d]),
            gid: Gid::from_ipv4([10, 9, 0, d].into()),
            qpn: Qpn::new(17).unwrap(),
        },
        link_uid: 0x101,
        max_links: 2,
        max_conns: 255,
        keepalive: Some(KEEPALIVE),
        idle: role.idle_time(),
    }
}

impl Rig {
    pub(super) fn new(role: Role) -> Rig {
        Rig::with(config(role))
    }

    pub(super) fn with(config: Config) -> Rig {
        let now = Instant::now();
        Rig {
            llc: Llc::new(config, now),
            now,
        }
    }

    /// One that has done first contact with the captured messages, and has no second link.
    pub(super) fn up(role: Role) -> Rig {
        let mut rig = Rig::new(role);
        rig.receive(match role {
            Role::Server => "confirm-link-resp",
            Role::Client => "confirm-link-req",
        });
        assert!(rig.actions().contains(&Action::Established));
        assert!(rig.llc.is_up());
        rig.llc.refuse_link(rig.now);
        rig
    }

    /// Lets the captured message with this name arrive.
    pub(super) fn receive(&mut self, name: &str) {
        self.receive_bytes(&vectors::get(name));
    }

    pub(super) fn receive_bytes(&mut self, bytes: &[u8]) {
        self.llc.receive(0, bytes, self.now).unwrap();
    }

    /// Lets a message arrive that is given by hex digits at its beginning, the rest being zeros.
    pub(super) fn receive_hex(&mut self, hex: &str) {
        self.receive_bytes(&padded(hex));
    }

    pub(super) fn actions(&mut self) -> Vec<Action> {
        core::iter::from_fn(|| self.llc.poll()).collect()
    }

    /// Lets time pass up to the next time limit, which must be `after` from now, and handles it.
    pub(super) fn expire(&mut self, after: Duration) {
        let at = self.llc.next_timeout().expect("a time limit");
        assert_eq!(at - self.now, after);
        self.llc.handle_timeout(at - Duration::from_millis(1));
        assert_eq!(self.actions(), [], "too early");
        self.now = at;
        self.llc.handle_timeout(at);
    }
}

/// The action of sending a captured message.
pub(super) fn sends(name: &str) -> Action {
    Action::Send(0, vectors::get(name))
}

/// The action of sending what begins with these hex digits and goes on with zeros.
pub(super) fn sends_hex(hex: &str) -> Action {
    Action::Send(0, padded(hex))
}

pub(super) fn padded(hex: &str) -> Vec<u8> {
    let mut bytes = vectors::from_hex(hex);
    bytes.resize(LEN, 0);
    bytes
}

/// The RTokens of an RMB on the first link only.
pub(super) fn own(rkey: u32, addr: u64) -> Rtokens {
    [Some(token(rkey, addr)), None]
}

pub(super) fn token(rkey: u32, addr: u64) -> Rtoken {
    Rtoken { rkey, addr }
}

pub(super) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}
