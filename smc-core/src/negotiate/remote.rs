//! What this process offers to other hosts: SMC-R, on connections that a rule of the policy names.
//!
//! Before `connect` and `listen` a socket is marked ([`super::option`]), so that SYN or SYN-ACK carry the SMC
//! option. That is a promise to speak CLC, so it is only made where RDMA would be possible on this connection at this
//! moment: a device with a RoCEv2 GID for the local address, and permission to use it. Without a policy file that
//! names a UEID nothing is offered, and this module costs one load.
//!
//! A connection whose other end is on this host is never offered: shared memory is better.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr};
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::option::{self, OptionError};
use crate::fabric::verbs::{Choice, Survey, Unusable};
use crate::observe::Reason;
use crate::policy::{self, Identity, Policy, Role, SmcR, Tunables};
use crate::stream::Sock;
use crate::wire::Gid;

/// For how long a look at the host's RDMA devices holds.
const SURVEY_TIME: Duration = Duration::from_secs(2);

/// The policy as far as it concerns other hosts.
pub struct Remote {
    policy: Policy,
    identity: Identity,
    survey: Mutex<Option<(Instant, Survey)>>,
}

static REMOTE: AtomicPtr<Remote> = AtomicPtr::new(core::ptr::null_mut());
/// Nothing is offered.
static OFF: AtomicBool = AtomicBool::new(false);

/// The policy for other hosts, read on first use. `None`: nothing is offered.
pub fn remote() -> Option<&'static Remote> {
    if OFF.load(Relaxed) {
        return None;
    }
    // SAFETY: null or a leaked box.
    if let Some(r) = unsafe { REMOTE.load(Acquire).as_ref() } {
        return Some(r);
    }
    let loaded = load();
    match loaded {
        Some(r) => {
            let r = Box::leak(Box::new(r));
            REMOTE.store(r, Release);
            Some(r)
        }
        None => {
            OFF.store(true, Relaxed);
            None
        }
    }
}

/// The child of a fork may run as another user, whom other rules concern.
pub fn after_fork_child() {
    REMOTE.store(core::ptr::null_mut(), Relaxed);
    OFF.store(false, Relaxed);
}

fn load() -> Option<Remote> {
    // What keeps connections from SMC-R is often found before there is an engine.
    crate::observe::log::init();
    let config = crate::env::get("XSMC_CONFIG");
    // A file that can't be used is the engine's to complain of.
    let policy = Policy::read(config.as_deref()).ok()?;
    if policy.smc_r().ueids.is_empty() {
        return None;
    }
    let identity = Identity::current();
    let policy = policy
        .with_upgrade(policy::Upgrade::from_env())
        .narrow(&identity);
    (!policy.rules().is_empty()).then_some(Remote {
        policy,
        identity,
        survey: Mutex::new(None),
    })
}

impl Remote {
    /// What the policy says of SMC-R.
    pub fn smc_r(&self) -> &SmcR {
        self.policy.smc_r()
    }

    /// Tunables of a connection that may be SMC-R; `None`: it may not.
    pub fn offers(&self, local: SocketAddr, peer: SocketAddr, role: Role) -> Option<Tunables> {
        let at = policy::Endpoint { local, peer, role };
        let decision = self.policy.decide(&self.identity, &at);
        self.policy.offers(&decision).then_some(decision.tunables)
    }

    /// The device, port and GID for a connection with this local address.
    pub fn device(&self, local: IpAddr) -> Result<Choice, Unusable> {
        let Ok(mut known) = self.survey.lock() else {
            return Err(Unusable::NoDevices);
        };
        let fresh = |at: &Instant| at.elapsed() < SURVEY_TIME;
        if !known.as_ref().is_some_and(|(at, _)| fresh(at)) {
            let mut survey = Survey::take();
            if let Some(name) = &self.smc_r().device {
                survey.devices.retain(|d| d.name == *name);
            }
            *known = Some((Instant::now(), survey));
        }
        match known.as_ref() {
            Some((_, survey)) => survey.choose(local, None),
            None => Err(Unusable::NoDevices),
        }
    }

    /// The device, port and GID from which the kernel's routes lead to a peer's GID.
    pub fn device_towards(&self, peer: Gid) -> Result<Choice, Unusable> {
        // Any port does.
        let to = SocketAddr::new(peer.ip(), 9);
        let source = crate::fds::make_private(|_| super::endpoint::route_source(to));
        self.device(source.ok_or(Unusable::NoGidFor(peer.ip()))?)
    }

    /// Other ports of this host, for further links beside one at `first`: with a GID of the same address family.
    pub fn others(&self, first: &Choice) -> Vec<Choice> {
        // Fills the survey.
        let _ = self.device(first.gid.ip());
        let known = self.survey.lock().ok();
        let survey = known.as_ref().and_then(|known| known.as_ref());
        survey.map_or_else(Vec::new, |(_, survey)| survey.others(first))
    }

    fn any_device(&self) -> Result<(), Unusable> {
        // Fills the survey; no GID is the wildcard.
        let found = self.device(IpAddr::from([0, 0, 0, 0]));
        let Ok(known) = self.survey.lock() else {
            return Err(Unusable::NoDevices);
        };
        match known.as_ref() {
            Some((_, survey)) if survey.usable() => Ok(()),
            _ => found.map(drop),
        }
    }
}

/// Marks the socket; `end` is what it connects to or listens on.
fn mark(s: &Sock, fd: i32, end: SocketAddr) -> bool {
    let Err(why) = option::want(fd) else {
        return true;
    };
    log::info!("{end}: not offered SMC-R: {why}");
    match why {
        OptionError::NotEnabled => s.note(Reason::OptionDisabled),
        OptionError::FastOpen => s.note(Reason::FastOpen),
        OptionError::TooLate | OptionError::Kernel(_) => {}
    }
    false
}

/// Before connect(2): has the SYN to `peer` carry the SMC option, where that can be.
pub fn offer_connect(s: &Sock, fd: i32, peer: SocketAddr) -> bool {
    if peer.ip().is_loopback() {
        return false;
    }
    let Some(r) = remote() else { return false };
    if !r.policy.offers_connect(&r.identity, peer) {
        return false;
    }
    let Some(local) = local_address(fd, peer) else {
        return false;
    };
    if local == peer.ip() {
        return false;
    }
    if let Err(why) = r.device(local) {
        log::info!("{peer}: not offered SMC-R: {why}");
        s.note(Reason::NoRdmaDevice);
        return false;
    }
    mark(s, fd, peer)
}

/// Before listen(2): has SYN-ACKs to clients that can do SMC-R say the same.
pub fn offer_listen(s: &Sock, fd: i32) -> bool {
    let Some(r) = remote() else { return false };
    let Ok(local) = super::endpoint::local_of(fd) else {
        return false;
    };
    let ip = local.ip();
    if ip.is_loopback() || !r.policy.offers_listen(&r.identity, local) {
        return false;
    }
    let usable = if ip.is_unspecified() {
        r.any_device()
    } else {
        r.device(ip).map(drop)
    };
    if let Err(why) = usable {
        log::info!("{local}: not offered SMC-R: {why}");
        s.note(Reason::NoRdmaDevice);
        return false;
    }
    mark(s, fd, local)
}

/// The address from which a connection to `peer` will come: the socket's own if it is bound, else what the
/// kernel's routes say.
fn local_address(fd: i32, peer: SocketAddr) -> Option<IpAddr> {
    if let Ok(bound) = super::endpoint::local_of(fd)
        && !bound.ip().is_unspecified()
    {
        return Some(bound.ip());
    }
    crate::fds::make_private(|_| super::endpoint::route_source(peer))
}
