//! Protection domains, and memory that a device may reach.
//!
//! Fork. The library opens a device only where the kernel keeps pages that a device uses with
//! the parent (see [`super`]), so nothing is withheld from a child by `MADV_DONTFORK`: RMBs are shared mappings
//! which it may go on reading, and private memory such as [`Buffer`]'s becomes a copy there.

use core::ptr::NonNull;
use std::ffi::c_int;
use std::sync::Arc;

use rdma_sys as sys;
use syscalls::{Sysno, syscall};

use super::error::check;
use super::{Context, Error, Object, Result};
use crate::fds;

/// A protection domain: queue pairs reach the regions of their own domain only.
pub struct ProtectionDomain {
    raw: NonNull<sys::ibv_pd>,
    pub(super) context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as for `Context`.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// Makes one.
    pub fn new(context: &Arc<Context>) -> Result<Arc<ProtectionDomain>> {
        // SAFETY: the context is open.
        let raw = fds::trusted(|| unsafe { (context.library.ibv_alloc_pd)(context.raw()) });
        match NonNull::new(raw) {
            Some(raw) => Ok(Arc::new(ProtectionDomain {
                raw,
                context: context.clone(),
            })),
            None => Err(Error::last("ibv_alloc_pd", context.object())),
        }
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        if self.context.is_ours() {
            // SAFETY: made by ibv_alloc_pd; what was made in it holds an Arc of it, so is gone.
            fds::trusted(|| unsafe { (self.context.library.ibv_dealloc_pd)(self.raw()) });
        }
    }
}

/// Who may write a [`Region`] by RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// This side's device: receive buffers; also enough to send from it.
    Local,
    /// The peer, too: RMBs.
    Remote,
}

/// A registered memory range: its pages are pinned, and the device may reach them until it is dropped.
pub struct Region {
    raw: NonNull<sys::ibv_mr>,
    domain: Arc<ProtectionDomain>,
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: as for `Context`; the memory is only handed to the device, never dereferenced here.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Registers `len` bytes at `address`. The pages count against RLIMIT_MEMLOCK (ENOMEM).
    ///
    /// # Safety
    /// The range must stay mapped, readable and writable, until the region is dropped. The device, and for
    /// [`Access::Remote`] any peer that knows the key, writes it at any time: no references into it.
    pub unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        address: NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<Region> {
        let flags = match access {
            Access::Local => sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE,
            Access::Remote => {
                sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
                    | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
            }
        };
        let library = domain.context.library;
        // SAFETY: the domain exists; the rest is promised by the caller.
        let raw = fds::trusted(|| unsafe {
            (library.ibv_reg_mr)(domain.raw(), address.as_ptr().cast(), len, flags.0 as c_int)
        });
        match NonNull::new(raw) {
            Some(raw) => Ok(Region {
                raw,
                domain: domain.clone(),
                address,
                len,
            }),
            None => Err(Error::last("ibv_reg_mr", Object::Region(len))),
        }
    }

    /// Address of its first byte, as peers know it.
    pub fn address(&self) -> u64 {
        self.address.as_ptr() as u64
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Key by which peers write it.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region exists.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    fn lkey(&self) -> u32 {
        // SAFETY: the region exists.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// `len` bytes from `offset`, to be sent. `None`: they are not all within the region.
    pub fn piece(&self, offset: usize, len: usize) -> Option<Piece<'_>> {
        let end = offset.checked_add(len)?;
        let length = u32::try_from(len).ok().filter(|_| end <= self.len)?;
        Some(Piece {
            region: self,
            offset,
            length,
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let context = &self.domain.context;
        if context.is_ours() {
            // SAFETY: made by ibv_reg_mr. A work request that still names it ends with an error completion.
            let code =
                fds::trusted(|| unsafe { (context.library.ibv_dereg_mr)(self.raw.as_ptr()) });
            if let Err(error) = check(code, "ibv_dereg_mr", || Object::Region(self.len)) {
                log::warn!("{error}");
            }
        }
    }
}

/// A part of a [`Region`].
#[derive(Clone, Copy)]
pub struct Piece<'a> {
    region: &'a Region,
    offset: usize,
    length: u32,
}

impl Piece<'_> {
    /// Bytes.
    pub(super) fn length(&self) -> u32 {
        self.length
    }

    pub(super) fn sge(&self) -> sys::ibv_sge {
        sys::ibv_sge {
            addr: self.region.address() + self.offset as u64,
            length: self.length,
            lkey: self.region.lkey(),
        }
    }
}

/// Registered memory of a queue pair's own: receive buffers and messages to be sent.
pub(super) struct Buffer {
    region: Option<Region>,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns the mapping; who touches which part of it is for its user to order.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Maps and registers `len` bytes of zeros.
    pub(super) fn new(domain: &Arc<ProtectionDomain>, len: usize) -> Result<Buffer> {
        let error = |errno| Error::new("mmap", Object::Region(len), errno);
        let base = crate::sys::map(-1, len).map_err(error)?;
        let base = NonNull::new(base).ok_or_else(|| error(crate::sys::Errno::ENOMEM))?;
        let mut buffer = Buffer {
            region: None,
            base,
            len,
        };
        // SAFETY: the mapping is unmapped after the region is gone, in `drop`.
        buffer.region = Some(unsafe { Region::register(domain, base, len, Access::Local) }?);
        Ok(buffer)
    }

    /// `len` bytes from `offset`. `None`: not all within the buffer.
    pub(super) fn piece(&self, offset: usize, len: usize) -> Option<Piece<'_>> {
        self.region.as_ref()?.piece(offset, len)
    }

    /// Pointer to `len` bytes from `offset`. `None`: not all within the buffer.
    pub(super) fn pointer(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        // SAFETY: within the mapping.
        (end <= self.len).then(|| unsafe { self.base.as_ptr().add(offset) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.region = None;
        // SAFETY: mapped in `new`; the device doesn't know it any more.
        let _ = unsafe { syscall!(Sysno::munmap, self.base.as_ptr(), self.len) };
    }
}
