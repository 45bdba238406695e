//! The eBPF programs of bpf/option.bpf.c: embedded here, loaded by aya.

use super::error::EnableError;
use super::link::Hook;
use aya::programs::{Program, ProgramError, ProgramFd};
use aya::{Ebpf, EbpfError};
use std::error::Error;
use std::io;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/option.bpf.o"));

/// One program of the object: its name there, the name of its link's file, and its hook.
#[derive(Debug)]
pub(super) struct Part {
    program: &'static str,
    pub(super) file: &'static str,
    pub(super) hook: Hook,
}

/// The programs, in the order of attaching. The one that takes marks comes last, so that a socket
/// can be marked only once everything else is in place.
pub(super) static PARTS: [Part; 3] = [
    Part {
        program: "xsmc_handshake",
        file: "handshake",
        hook: Hook::SockOps,
    },
    Part {
        program: "xsmc_getsockopt",
        file: "getsockopt",
        hook: Hook::GetSockOpt,
    },
    Part {
        program: "xsmc_setsockopt",
        file: "setsockopt",
        hook: Hook::SetSockOpt,
    },
];

/// The object with its maps made; dropping it unloads programs that no link holds.
pub(super) struct Object(Ebpf);

impl Object {
    /// Makes the maps.
    pub(super) fn load() -> Result<Object, EnableError> {
        Ebpf::load(OBJECT)
            .map(Object)
            .map_err(|e| refused("the maps of the eBPF programs", &e))
    }

    /// Has the kernel check and load one program.
    pub(super) fn program(&mut self, part: &Part) -> Result<ProgramFd, EnableError> {
        self.load_program(part)
            .map_err(|e| refused(&format!("the eBPF program {}", part.program), &e))
    }

    fn load_program(&mut self, part: &Part) -> Result<ProgramFd, EbpfError> {
        let program = self.0.program_mut(part.program);
        let program = program.ok_or(ProgramError::NotLoaded)?;
        match program {
            Program::SockOps(program) => program.load()?,
            Program::CgroupSockopt(program) => program.load()?,
            _ => return Err(ProgramError::UnexpectedProgramType.into()),
        }
        Ok(program.fd()?.try_clone().map_err(ProgramError::from)?)
    }
}

/// Says why the kernel took no map or program: by permission, or else in its own words.
fn refused(what: &str, error: &EbpfError) -> EnableError {
    let mut source: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            // The verifier's refusals are EACCES; it is EPERM that means the caller.
            if io.raw_os_error() == Some(libc::EPERM) {
                return EnableError::NotPermitted {
                    doing: format!("load {what}"),
                };
            }
        }
        source = error.source();
    }
    EnableError::Refused {
        what: what.into(),
        why: chain(error),
        kernel: kernel_release(),
    }
}

/// An error and its causes in one line, without the causes that it already repeats.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    // A verifier's log goes on for pages, and its end has the reason.
    match lines.as_slice() {
        [first, .., before, last] if lines.len() > 4 => format!("{first} … {before} {last}"),
        _ => lines.join(" "),
    }
}

fn kernel_release() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
    release.map_or_else(|_| "unknown".into(), |text| text.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use aya::sys::SyscallError;

    #[test]
    fn the_object_has_every_part() {
        let names = String::from_utf8_lossy(OBJECT);
        for part in &PARTS {
            assert!(names.contains(part.program), "{}", part.program);
        }
    }

    #[test]
    fn a_refusal_for_permission_is_told_apart() {
        let denied = |errno| {
            EbpfError::from(ProgramError::from(SyscallError {
                call: "bpf",
                io_error: io::Error::from_raw_os_error(errno),
            }))
        };
        assert!(matches!(
            refused("x", &denied(libc::EPERM)),
            EnableError::NotPermitted { .. }
        ));
        let other = refused("the map y", &denied(libc::EINVAL)).to_string();
        assert!(other.contains("the map y: "), "{other}");
        assert!(other.contains("Invalid argument"), "{other}");
        assert!(other.contains("Linux 5.15"), "{other}");
    }

    #[test]
    fn long_logs_are_shortened() {
        let log = "first\n\n1: mov\n2: mov\n3: mov\nwhy\nprocessed 3\n";
        let error = EbpfError::from(ProgramError::from(io::Error::other(log)));
        let text = chain(&error);
        assert!(text.ends_with("first … why processed 3"), "{text}");
    }
}
