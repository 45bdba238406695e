//! Pool of RMBs of one side of a link.
//!
//! Chunks are memfds of 4 MiB, each cut into rings of one size class. They belong to one link and are
//! never unmapped while it lives, so a new connection on a known link usually maps nothing. Engine only.

use super::{CHUNK, Ring, budget, class_size};
use crate::fabric::mapping;
use crate::{fds, sys};

/// Names a ring within a link's chunk list: what RDMA calls an RToken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    /// Index in the owner's chunk list.
    pub chunk: u32,
    /// Byte offset in the chunk.
    pub offset: u32,
    /// Bytes; a power of two.
    pub size: u32,
}

/// A ring with its name.
#[derive(Clone, Copy)]
pub struct Rmb {
    /// The mapped ring.
    pub ring: Ring,
    /// Its name for the peer.
    pub token: Token,
}

struct Chunk {
    base: *mut u8,
    class: u8,
    /// Bit i set: ring i is free. 4 MiB / 16 KiB = 256 rings at most.
    free: [u64; 4],
}

/// See the module comment.
#[derive(Default)]
pub struct RmbPool {
    chunks: Vec<Chunk>,
}

/// A chunk that has just been made and whose descriptor must go to the peer, then be closed.
pub struct NewChunk {
    /// Index in our chunk list.
    pub index: u32,
    /// The memfd.
    pub fd: i32,
}

impl RmbPool {
    /// Takes a ring of size class `class`; also returns a new chunk if one had to be made. `ENOMEM` if RMBs may take no
    /// more memory.
    pub fn alloc(&mut self, class: u8) -> sys::Result<(Rmb, Option<NewChunk>)> {
        if let Some(rmb) = self.take(class) {
            return Ok((rmb, None));
        }
        let (fd, base) = fds::make_private(|keep| {
            budget::take()?;
            make_chunk(keep).inspect_err(|_| budget::give_back())
        })?;
        let mut free = [0u64; 4];
        for i in 0..(CHUNK / class_size(class)) as usize {
            free[i / 64] |= 1 << (i % 64);
        }
        let index = self.chunks.len() as u32;
        self.chunks.push(Chunk { base, class, free });
        let rmb = self.take(class).ok_or(sys::Errno::ENOMEM)?;
        Ok((rmb, Some(NewChunk { index, fd })))
    }

    fn take(&mut self, class: u8) -> Option<Rmb> {
        let size = class_size(class);
        for (c, chunk) in self
            .chunks
            .iter_mut()
            .enumerate()
            .filter(|(_, c)| c.class == class)
        {
            for (w, word) in chunk.free.iter_mut().enumerate() {
                if *word != 0 {
                    let i = w as u32 * 64 + word.trailing_zeros();
                    *word &= *word - 1;
                    let offset = i * size;
                    // SAFETY: within the 4 MiB mapping, which lives as long as the link's owner
                    // keeps the pool, i.e. longer than any connection on it.
                    let ring = unsafe { Ring::new(chunk.base.add(offset as usize), size) };
                    return Some(Rmb {
                        ring,
                        token: Token {
                            chunk: c as u32,
                            offset,
                            size,
                        },
                    });
                }
            }
        }
        None
    }

    /// The ring that a token of ours names.
    pub fn ring(&self, t: Token) -> Option<Ring> {
        let c = self.chunks.get(t.chunk as usize)?;
        // SAFETY: tokens are made by `take`, within the mapping.
        Some(unsafe { Ring::new(c.base.add(t.offset as usize), t.size) })
    }

    /// Gives a ring back.
    pub fn free(&mut self, t: Token) {
        if let Some(c) = self.chunks.get_mut(t.chunk as usize) {
            let i = (t.offset / class_size(c.class)) as usize;
            if i < 256 {
                c.free[i / 64] |= 1 << (i % 64);
            }
        }
    }

    /// Chunks made so far.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Gives all memory up.
    pub fn retire(&mut self) {
        for c in self.chunks.drain(..) {
            mapping::retire(c.base, CHUNK as usize);
            budget::give_back();
        }
    }
}

/// A memfd of a chunk's size, and where it is mapped.
fn make_chunk(keep: &dyn Fn(i32) -> i32) -> sys::Result<(i32, *mut u8)> {
    let fd = sys::memfd_sealed(c"xsmc-rmb", CHUNK as usize).map(keep)?;
    match mapping::map(fd, CHUNK as usize) {
        Ok(base) => Ok((fd, base)),
        Err(e) => {
            fds::close_private(fd);
            Err(e)
        }
    }
}

// SAFETY: the raw pointers are addresses of shared mappings, not thread-bound.
unsafe impl Send for RmbPool {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_distinct_and_reused() {
        let mut p = RmbPool::default();
        let mut seen = std::collections::HashSet::new();
        let mut made = Vec::new();
        for _ in 0..40 {
            let (r, new) = p.alloc(4).unwrap();
            if let Some(n) = new {
                fds::close_private(n.fd);
            }
            assert_eq!(r.token.size, 256 << 10);
            assert!(r.token.offset + r.token.size <= CHUNK);
            assert!(seen.insert((r.token.chunk, r.token.offset)));
            made.push(r.token);
        }
        assert_eq!(p.chunks(), 3);
        for t in made {
            p.free(t);
        }
        for _ in 0..40 {
            assert!(p.alloc(4).unwrap().1.is_none());
        }
        p.retire();
    }
}
