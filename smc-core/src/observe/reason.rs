//! Why a connection stays on TCP, went back to it, or was reset.
//!
//! Codes are stable: they appear in status documents, in counters and in decline messages between
//! processes that may run different versions. New reasons get new codes, old ones are never reused.

use crate::wire::clc::Diagnosis;

/// Declares the enum and everything that must stay in step with it.
macro_rules! reasons {
    ($($code:literal $variant:ident $name:literal $sentence:literal;)*) => {
        /// A fallback reason. See [`Reason::sentence`] for what each one means.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum Reason {
            $(#[doc = $sentence] $variant = $code,)*
        }

        impl Reason {
            /// All reasons, in the order of their codes.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant),*];

            /// Short kebab-case name, unique and stable.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Reason::$variant => $name,)*
                }
            }

            /// One sentence for people: what it means and, where that helps, what to do.
            pub const fn sentence(self) -> &'static str {
                match self {
                    $(Reason::$variant => $sentence,)*
                }
            }

            /// The reason with this code; `None` for 0 and for codes of a later version.
            pub const fn from_code(code: u8) -> Option<Reason> {
                match code {
                    $($code => Some(Reason::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

reasons! {
    1 NoPeer "no-peer"
        "The other end does not run under xsmc, or has not used this connection through it yet.";
    2 PolicyTcp "policy-tcp"
        "A policy rule keeps this connection on TCP; 'smctl config explain' shows which one.";
    3 UpgradeNever "upgrade-never"
        "Upgrades are switched off for this process by XSMC_UPGRADE=never.";
    4 BehindOurBack "behind-our-back"
        "The kernel counted other bytes than the calls we saw, so something (io_uring, a static \
         program, a raw system call) uses the socket unseen, and it stays on TCP.";
    5 SharedEnd "shared-end"
        "Two processes use the same end of the connection, which only TCP can serve.";
    6 PassedFd "passed-fd"
        "The socket was sent to another process over a Unix socket (SCM_RIGHTS).";
    7 Inherited "inherited"
        "The socket was inherited through fork or exec; the process that goes on using it may earn \
         a new upgrade.";
    8 UnsupportedOption "unsupported-option"
        "The program set a socket option that only TCP can honour, such as SO_RCVLOWAT, \
         SO_ZEROCOPY or TCP_ULP.";
    9 Urgent "urgent"
        "The program uses urgent data (MSG_OOB), which only TCP carries.";
    10 SignalIo "signal-io"
        "The program asked for signals on I/O (O_ASYNC), which only the kernel can send.";
    11 Stdio "stdio"
        "The socket was opened as a stdio stream (fdopen), whose reads and writes we can't see.";
    12 NoMemory "no-memory"
        "Shared memory could not be had (memfd or mmap failed): check memory limits and cgroup \
         limits of the process.";
    13 NoFd "no-fd"
        "The process has no file descriptor left for a link: raise RLIMIT_NOFILE.";
    14 NoThread "no-thread"
        "The background thread could not be started: check RLIMIT_NPROC and the cgroup's pids.max.";
    15 RuntimeDir "runtime-dir"
        "The runtime directory could not be used: check that XSMC_RUNTIME_DIR, /run/xsmc or \
         /dev/shm is writable by this user.";
    16 DirectoryFull "directory-full"
        "The host's table of endpoints is full, so the peer can't find this connection.";
    17 LinkFull "link-full"
        "The link to the peer has no free slot for one more connection.";
    18 LinkLost "link-lost"
        "The link to the peer broke, usually because the peer process ended.";
    19 PeerDeclined "peer-declined"
        "The peer declined the upgrade; its own status shows why.";
    20 PeerViolation "peer-violation"
        "The peer wrote nonsense into shared memory, and the connection was reset to protect this \
         process.";
    21 Namespace "namespace"
        "The peer is in another network namespace, where addresses don't name the same connection.";
    22 Exclusive "exclusive"
        "The socket is in an epoll set with EPOLLEXCLUSIVE, which only the kernel can honour.";
    23 TooManyWaiters "too-many-waiters"
        "The socket is in more epoll sets than a connection on RMBs can wake.";
    24 AddressFamily "address-family"
        "The socket is neither IPv4 nor IPv6 TCP.";
    25 Closed "closed"
        "The connection ended, or one direction was shut down, before it could be upgraded.";
    26 Timeout "timeout"
        "The peer's engine did not answer in time; the peer may be stopped or overloaded.";
    27 PeerUid "peer-uid"
        "The peer runs as another user, and shared memory is only used between processes of one \
         user.";
    28 Spilled "spilled"
        "The receiver did not read, so bytes went over TCP for a while; no action is needed.";
    29 TestFlip "test-flip"
        "The test hook XSMC_TEST_FLIP_US forced a change of carrier.";
    30 PolicyBroken "policy-broken"
        "The policy file could not be used, so everything stays on TCP: run 'smctl config check'.";
    31 UnsupportedCall "unsupported-call"
        "The program used a call on the socket that can't be carried out on RMBs, such as splice.";
    32 SyscallRefused "syscall-refused"
        "The kernel or a seccomp filter refused a system call that an upgrade needs.";
    33 Version "version"
        "The peer runs a version of xsmc with another link protocol: restart it with the installed \
         one.";
    34 PeerRequest "peer-request"
        "The peer asked for this connection to go back to TCP; its own status shows why.";
    35 Idle "idle"
        "The connection was idle and gave its buffers back; traffic earns a new upgrade.";
    36 NoCounters "no-counters"
        "The kernel's TCP_INFO lacks the byte counters that an upgrade depends on.";
    37 Pending "pending"
        "The program has yet to arm its one-shot epoll registration; the upgrade follows that.";
    38 NoSmcOption "no-smc-option"
        "The other host did not answer with the SMC option of TCP: there, the program runs without \
         SMC-R or xsmc, a policy rule keeps it on TCP, or 'smctl enable' has yet to be run.";
    39 OptionDisabled "option-disabled"
        "The SMC option of TCP is not enabled for this process's control group: run 'smctl enable'.";
    40 NoRdmaDevice "no-rdma-device"
        "No RDMA device can serve this connection's local address: 'smctl device' shows why.";
    41 FastOpen "fast-open"
        "The program uses TCP Fast Open, which excludes SMC-R.";
    42 SmcDeclined "smc-declined"
        "The other host declined SMC-R; 'smctl status' shows its diagnosis.";
    43 ClcTimeout "clc-timeout"
        "The other host did not answer in the SMC-R handshake (CLC), which cost the connection: it \
         may be stopped or overloaded.";
    44 ClcProtocol "clc-protocol"
        "The SMC-R handshake (CLC) was broken off or made no sense, which cost the connection: check \
         for something in between that alters TCP streams.";
    45 NoCommonEid "no-common-eid"
        "The two hosts have no enterprise id in common: list one and the same in ueid of [smc-r] in \
         the policy file here, and in the other host's set-up.";
    46 SmcVersion "smc-version"
        "The other host speaks SMC version 1 or SMC-D only; SMC-R of version 2 is needed.";
    47 ClcTerms "clc-terms"
        "What the other host proposed for SMC-R can't be worked with, such as its number of \
         connections or links in a link group.";
    48 RdmaRoute "rdma-route"
        "The other host's RDMA address can't be reached from ours: check routes and gateways between \
         the two networks.";
    49 RdmaTimeout "rdma-timeout"
        "The two hosts agreed on SMC-R, but no RDMA message came through: check that UDP port 4791 \
         and the MTU are let through between them.";
    50 RdmaSetup "rdma-setup"
        "An RDMA call failed while the connection was set up; XSMC_LOG=warn shows which, and often \
         RLIMIT_MEMLOCK is too low.";
    51 OutOfSync "out-of-sync"
        "The other host continued a link group that this process no longer has; it makes a new one \
         for the next connection.";
    52 Confined "confined"
        "The process put itself under a seccomp filter, which could end it for system calls of xsmc, so \
         xsmc has left it.";
    53 UnseenWait "unseen-wait"
        "The socket is non-blocking, and the program has not been seen to wait for it: if it does so by \
         io_uring or raw system calls, it would not notice bytes in an RMB.";
}

impl Reason {
    /// Size of a table indexed by [`Reason::code`] (the highest code plus one).
    pub const SLOTS: usize = {
        let mut max = 0;
        let mut i = 0;
        while i < Reason::ALL.len() {
            if Reason::ALL[i] as usize > max {
                max = Reason::ALL[i] as usize;
            }
            i += 1;
        }
        max + 1
    };

    /// Stable numeric code, 1 or more.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Why a connection is on TCP that this process declined to put on SMC-R with this diagnosis. One that the peer
    /// declined has [`Reason::SmcDeclined`].
    pub const fn of_own_decline(diagnosis: Diagnosis) -> Reason {
        use Diagnosis::*;
        match diagnosis {
            Mem => Reason::NoMemory,
            TimeoutCl | TimeoutAl => Reason::RdmaTimeout,
            PeerNoSmc => Reason::NoSmcOption,
            NoSmcDev | NoUeid | NoSeid => Reason::NoCommonEid,
            NoSmcRDev => Reason::NoRdmaDevice,
            VersMismat | ModeUnsupp | NoV2Ext | NoV2DExt | NoSmcDDev | NoSmcD2Dev | NoIsm2Supp => {
                Reason::SmcVersion
            }
            CnfErr | ReleaseErr | MaxConnErr | MaxLinkErr | RmbeEc => Reason::ClcTerms,
            OptUnsupp | Ipsec => Reason::UnsupportedOption,
            NoRoute | NoIndirect | DiffPrefix => Reason::RdmaRoute,
            SyncErr | NoSrvLink => Reason::OutOfSync,
            PeerDecl | Unknown(_) => Reason::SmcDeclined,
            GetVlanErr | IsmVlanErr | NoActLink | MaxDmb | IntErr | ErrRtok | ErrRdyLnk
            | ErrRegBuf => Reason::RdmaSetup,
        }
    }

    /// Whether it says why a connection was not offered to another host, or that the other host didn't take it up.
    pub const fn is_not_offered(self) -> bool {
        matches!(
            self,
            Reason::NoSmcOption | Reason::OptionDisabled | Reason::NoRdmaDevice | Reason::FastOpen
        )
    }

    /// Why a connection was reset whose SMC-R handshake ended with this errno.
    pub const fn of_failed_handshake(errno: i32) -> Reason {
        match errno {
            libc::ETIMEDOUT => Reason::ClcTimeout,
            _ => Reason::ClcProtocol,
        }
    }

    /// The reason with this [`Reason::name`].
    pub fn from_name(name: &str) -> Option<Reason> {
        Reason::ALL.iter().copied().find(|r| r.name() == name)
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn codes_are_unique_and_round_trip() {
        let mut seen = HashSet::new();
        for &reason in Reason::ALL {
            assert_ne!(reason.code(), 0);
            assert!(seen.insert(reason.code()), "code {} twice", reason.code());
            assert_eq!(Reason::from_code(reason.code()), Some(reason));
            assert!((reason.code() as usize) < Reason::SLOTS);
        }
        for code in 0..=u8::MAX {
            assert_eq!(Reason::from_code(code).is_some(), seen.contains(&code));
        }
    }

    #[test]
    fn names_are_unique_kebab_case_and_round_trip() {
        let mut seen = HashSet::new();
        for &reason in Reason::ALL {
            let name = reason.name();
            assert!(seen.insert(name), "name {name} twice");
            assert!(name.len() <= 20, "{name} is not short");
            assert!(
                name.split('-').all(|word| {
                    !word.is_empty()
                        && word
                            .bytes()
                            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
                }),
                "{name} is not kebab-case"
            );
            assert_eq!(Reason::from_name(name), Some(reason));
        }
        assert_eq!(Reason::from_name("nonsense"), None);
    }

    #[test]
    fn sentences_are_sentences() {
        for &reason in Reason::ALL {
            let s = reason.sentence();
            assert!(
                s.ends_with('.') && !s.contains("  ") && !s.contains('\n'),
                "{s}"
            );
            assert!(s.starts_with(|c: char| c.is_ascii_uppercase()), "{s}");
        }
    }

    /// Codes that are out in the world: this table only ever grows.
    #[test]
    fn published_codes_stay() {
        assert_eq!(Reason::NoPeer.code(), 1);
        assert_eq!(Reason::LinkLost.code(), 18);
        assert_eq!(Reason::TestFlip.code(), 29);
        assert_eq!(Reason::NoCounters.code(), 36);
        assert_eq!(Reason::NoSmcOption.code(), 38);
        assert_eq!(Reason::OutOfSync.code(), 51);
        assert_eq!(Reason::UnseenWait.code(), 53);
    }

    /// What an operator is told of our own Declines.
    #[test]
    fn declines_have_reasons() {
        for (diagnosis, reason) in [
            (Diagnosis::NoUeid, "no-common-eid"),
            (Diagnosis::NoSmcDev, "no-common-eid"),
            (Diagnosis::NoSmcRDev, "no-rdma-device"),
            (Diagnosis::VersMismat, "smc-version"),
            (Diagnosis::ModeUnsupp, "smc-version"),
            (Diagnosis::NoSmcDDev, "smc-version"),
            (Diagnosis::CnfErr, "clc-terms"),
            (Diagnosis::ReleaseErr, "clc-terms"),
            (Diagnosis::MaxConnErr, "clc-terms"),
            (Diagnosis::MaxLinkErr, "clc-terms"),
            (Diagnosis::RmbeEc, "clc-terms"),
            (Diagnosis::NoRoute, "rdma-route"),
            (Diagnosis::NoIndirect, "rdma-route"),
            (Diagnosis::TimeoutCl, "rdma-timeout"),
            (Diagnosis::ErrRdyLnk, "rdma-setup"),
            (Diagnosis::ErrRegBuf, "rdma-setup"),
            (Diagnosis::ErrRtok, "rdma-setup"),
            (Diagnosis::IntErr, "rdma-setup"),
            (Diagnosis::SyncErr, "out-of-sync"),
            (Diagnosis::NoSrvLink, "out-of-sync"),
            (Diagnosis::Mem, "no-memory"),
            (Diagnosis::OptUnsupp, "unsupported-option"),
        ] {
            assert_eq!(
                Reason::of_own_decline(diagnosis).name(),
                reason,
                "{diagnosis}"
            );
        }
        for (errno, reason) in [
            (libc::ETIMEDOUT, Reason::ClcTimeout),
            (libc::EPROTO, Reason::ClcProtocol),
            (libc::ECONNRESET, Reason::ClcProtocol),
        ] {
            assert_eq!(Reason::of_failed_handshake(errno), reason);
        }
    }
}
