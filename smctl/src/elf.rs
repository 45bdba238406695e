//! Looks into an executable for what keeps the loader from preloading a library into it.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What kind of executable a file is, as far as preloading goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Not ELF: a script, whose interpreter decides, or something only the kernel knows.
    Other,
    /// Dynamically linked, for the same kind of machine as smctl.
    Dynamic,
    /// No dynamic loader: preloading has no effect.
    Static,
    /// For another machine or word size: the loader refuses our library.
    Foreign,
    /// Uses the loader of musl, which can't load a library made for glibc.
    Musl,
}

const PT_INTERP: u32 = 3;
/// Enough for the headers of any real executable.
const HEADERS_MAX: u64 = 64 << 10;

/// Inspects the file at `path`; whatever can't be read counts as [`Kind::Other`].
pub(crate) fn inspect(path: &Path) -> Kind {
    let Ok(file) = File::open(path) else {
        return Kind::Other;
    };
    let mut head = Vec::new();
    if (&file).take(HEADERS_MAX).read_to_end(&mut head).is_err() {
        return Kind::Other;
    }
    classify(&head, our_machine(), |offset, len| {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, offset).ok().map(|()| bytes)
    })
}

/// ELF class, byte order and machine of smctl itself, which are those of its library.
fn our_machine() -> Option<([u8; 2], [u8; 2])> {
    let mut head = [0; 20];
    File::open("/proc/self/exe")
        .ok()?
        .read_exact(&mut head)
        .ok()?;
    Some(([head[4], head[5]], [head[18], head[19]]))
}

/// Classifies by the first bytes of a file; `read` reads the name of its interpreter.
fn classify(
    head: &[u8],
    ours: Option<([u8; 2], [u8; 2])>,
    read: impl FnOnce(u64, usize) -> Option<Vec<u8>>,
) -> Kind {
    let field = |at: usize, len: usize| {
        let bytes = head.get(at..at.checked_add(len)?)?;
        let mut value = [0; 8];
        value.get_mut(..len)?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(value))
    };
    if !head.starts_with(b"\x7fELF") || head.len() < 64 {
        return Kind::Other;
    }
    if ours.is_some_and(|(ident, machine)| head[4..6] != ident || head[18..20] != machine) {
        return Kind::Foreign;
    }
    // From here on it is 64-bit little-endian, as we are on every platform that we build for.
    if head[4..6] != [2, 1] {
        return Kind::Other;
    }
    let interp = || {
        let (table, size, count) = (field(32, 8)?, field(54, 2)?, field(56, 2)?);
        (0..count).find_map(|index| {
            let at = usize::try_from(table.checked_add(index * size)?).ok()?;
            (field(at, 4)? == u64::from(PT_INTERP))
                .then(|| {
                    Some((
                        field(at.checked_add(8)?, 8)?,
                        field(at.checked_add(32)?, 8)?,
                    ))
                })
                .flatten()
        })
    };
    let Some((offset, len)) = interp() else {
        return Kind::Static;
    };
    let name = read(offset, len.min(4096) as usize).unwrap_or_default();
    if name.windows(4).any(|w| w == b"musl") {
        Kind::Musl
    } else {
        Kind::Dynamic
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Option<([u8; 2], [u8; 2])> = Some(([2, 1], [62, 0]));

    /// An ELF header with one program header of type `kind`.
    fn elf(kind: u8) -> Vec<u8> {
        let mut head = vec![0; 64 + 56];
        head[..6].copy_from_slice(b"\x7fELF\x02\x01");
        head[18] = 62;
        head[32] = 64;
        head[54] = 56;
        head[56] = 1;
        head[64] = kind;
        head[64 + 8] = 7;
        head[64 + 32] = 20;
        head
    }

    #[test]
    fn kinds() {
        let none = |_, _| None;
        let named = |name: &'static str| {
            move |offset, len| {
                assert_eq!((offset, len), (7, 20));
                Some(name.as_bytes().to_vec())
            }
        };
        assert_eq!(classify(b"#!/bin/sh\n", OURS, none), Kind::Other);
        assert_eq!(classify(b"\x7fELF", OURS, none), Kind::Other);
        assert_eq!(classify(&elf(1), OURS, none), Kind::Static);
        assert_eq!(
            classify(&elf(3), OURS, named("/lib64/ld-linux-x86-64.so.2")),
            Kind::Dynamic
        );
        assert_eq!(
            classify(&elf(3), OURS, named("/lib/ld-musl-x86_64.so.1")),
            Kind::Musl
        );
        assert_eq!(
            classify(&elf(3), Some(([1, 1], [62, 0])), none),
            Kind::Foreign
        );
        assert_eq!(
            classify(&elf(3), Some(([2, 1], [3, 0])), none),
            Kind::Foreign
        );
    }

    #[test]
    fn damaged_headers_do_no_harm() {
        for at in 0..64 {
            let mut head = elf(3);
            head[at] = 0xff;
            classify(&head, None, |_, _| None);
            for len in [0, 20, 63, 64, 65, 100] {
                classify(&head[..len], None, |_, _| None);
            }
        }
        let mut head = elf(3);
        head[32..64].fill(0xff);
        classify(&head, None, |_, _| None);
    }

    #[test]
    fn real_files() {
        let me = std::env::current_exe().unwrap();
        assert_eq!(inspect(&me), Kind::Dynamic);
        assert_eq!(inspect(Path::new("/proc/self/status")), Kind::Other);
        assert_eq!(inspect(Path::new("/nonexistent")), Kind::Other);
    }
}
