//! The arguments of calls that move bytes, checked as the kernel checks them. Only for managed connections: on others
//! the kernel gets the call as it is.

use core::slice::from_raw_parts;

use libc::{
    MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, POLLOUT, c_int, c_void, iovec,
    msghdr, sockaddr, sockaddr_storage, socklen_t,
};

use crate::ring::iov_len;
use crate::stream::Sock;
use crate::sys::{self, Errno, MAX_RW_COUNT, Result};

/// The kernel's UIO_MAXIOV.
pub(super) const IOV_MAX: usize = 1024;

/// Addresses that can't be a buffer's: the page of the null pointer, and those behind a process's own.
const FIRST: usize = 4096;
const BEHIND: usize = 0x7fff_ffff_f000;

/// Bytes of one piece of a send (SKB_FRAG_PAGE_ORDER), of which TCP takes all or, where a buffer is bad, none.
const PIECE: usize = 32768;

/// RWF_NOSIGNAL of linux/fs.h (6.18).
const RWF_NOSIGNAL: c_int = 0x100;

/// What a call says instead of moving bytes.
pub(super) enum Instead {
    /// That it has moved none: the kernel doesn't ask the socket.
    Nothing,
    Error(Errno),
}

impl From<Errno> for Instead {
    fn from(e: Errno) -> Self {
        Instead::Error(e)
    }
}

impl Instead {
    /// As libc says it.
    pub(super) fn give(self) -> isize {
        match self {
            Instead::Nothing => 0,
            Instead::Error(e) => super::fail(e),
        }
    }
}

/// What the check of a list gives.
pub(super) type Checked<'a> = core::result::Result<List<'a>, Instead>;

/// A buffer or a list of buffers.
#[derive(Clone, Copy)]
pub(super) struct List<'a> {
    iov: &'a [iovec],
    /// So many elements have memory; the next has none.
    sound: usize,
}

impl<'a> List<'a> {
    /// The elements, if all of them have memory.
    #[inline]
    pub(super) fn all(&self) -> Option<&'a [iovec]> {
        (self.sound == self.iov.len()).then_some(self.iov)
    }

    /// Bytes that a call moves at most.
    pub(super) fn bytes(&self) -> usize {
        iov_len(self.iov).min(MAX_RW_COUNT)
    }

    /// The list, for calls to which an empty one means nothing.
    #[inline]
    pub(super) fn some(self) -> Checked<'a> {
        if iov_len(self.iov) == 0 {
            return Err(Instead::Nothing);
        }
        Ok(self)
    }

    /// The list for a receiving call with these flags, which may need no memory.
    #[inline]
    pub(super) fn receiving(self, flags: c_int) -> Self {
        if flags & MSG_TRUNC != 0 {
            return List {
                sound: self.iov.len(),
                ..self
            };
        }
        self
    }
}

#[inline]
fn has_memory(v: &iovec) -> bool {
    (FIRST..BEHIND).contains(&(v.iov_base as usize)) || v.iov_len == 0
}

/// The buffer of a call with only one.
#[inline]
pub(super) fn buffer(buf: *const c_void, len: usize) -> [iovec; 1] {
    [iovec {
        iov_base: buf.cast_mut(),
        iov_len: len.min(MAX_RW_COUNT),
    }]
}

/// That buffer as a list.
#[inline]
pub(super) fn one(v: &[iovec; 1]) -> List<'_> {
    List {
        iov: v,
        sound: usize::from(has_memory(&v[0])),
    }
}

/// A list of `n` buffers.
///
/// # Safety
/// Null, or the caller's list, as for readv(2).
#[inline]
pub(super) unsafe fn many<'a>(iov: *const iovec, n: usize, too_many: Errno) -> Result<List<'a>> {
    if n > IOV_MAX {
        return Err(too_many);
    }
    if n == 0 {
        return Ok(List { iov: &[], sound: 0 });
    }
    if (iov as usize) < FIRST {
        return Err(Errno::EFAULT);
    }
    // SAFETY: not null, and promised by the caller.
    let iov = unsafe { from_raw_parts(iov, n) };
    let (mut sound, mut outside) = (n, false);
    for (i, v) in iov.iter().enumerate() {
        if v.iov_len > isize::MAX as usize {
            return Err(Errno::EINVAL);
        }
        outside |= (v.iov_base as usize).saturating_add(v.iov_len) > BEHIND;
        if !has_memory(v) {
            sound = sound.min(i);
        }
    }
    if outside {
        return Err(Errno::EFAULT);
    }
    Ok(List { iov, sound })
}

/// What recvfrom(2) stores about the sender: a stream gives no address. Returns what the call does, having got `n` bytes.
///
/// # Safety
/// `len` null or valid.
pub(super) unsafe fn no_source(len: *mut socklen_t, n: usize) -> Result<usize> {
    if (len as usize) < FIRST {
        return Err(Errno::EFAULT);
    }
    // SAFETY: not null, and promised by the caller.
    let len = unsafe { &mut *len };
    if (*len as c_int) < 0 {
        return Err(Errno::EINVAL);
    }
    *len = 0;
    Ok(n)
}

/// Checks the address that sendto(2) gets. A connected stream has no use for it.
pub(super) fn destination(addr: *const sockaddr, len: socklen_t) -> Result<()> {
    if !addr.is_null() && len as usize > size_of::<sockaddr_storage>() {
        return Err(Errno::EINVAL);
    }
    if !addr.is_null() && len > 0 && (addr as usize) < FIRST {
        return Err(Errno::EFAULT);
    }
    Ok(())
}

/// Checks the message of recvmsg(2).
///
/// # Safety
/// As recvmsg(2).
#[inline]
pub(super) unsafe fn received_message<'a>(m: &msghdr, flags: c_int) -> Result<List<'a>> {
    if !m.msg_name.is_null() && (m.msg_namelen as c_int) < 0 {
        return Err(Errno::EINVAL);
    }
    // SAFETY: promised by the caller.
    let list = unsafe { many(m.msg_iov, m.msg_iovlen, Errno::EMSGSIZE) }?;
    Ok(list.receiving(flags))
}

/// Checks the message of sendmsg(2).
///
/// # Safety
/// As sendmsg(2).
#[inline]
pub(super) unsafe fn sent_message<'a>(s: &Sock, fd: c_int, m: &msghdr) -> Result<List<'a>> {
    if !m.msg_name.is_null() {
        if (m.msg_namelen as c_int) < 0 {
            return Err(Errno::EINVAL);
        }
        // A longer one is cut.
        destination(m.msg_name.cast(), m.msg_namelen.min(1))?;
    }
    // SAFETY: promised by the caller.
    let list = unsafe { many(m.msg_iov, m.msg_iovlen, Errno::EMSGSIZE) }?;
    if m.msg_controllen != 0 {
        control(s, fd, m)?;
    }
    Ok(list)
}

/// Has the kernel check control messages: by a message of no bytes.
#[cold]
fn control(s: &Sock, fd: c_int, m: &msghdr) -> Result<()> {
    let probe = msghdr {
        msg_name: core::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: core::ptr::null_mut(),
        msg_iovlen: 0,
        ..*m
    };
    // SAFETY: it has no buffers, and the kernel checks the control data's address.
    match unsafe { sys::sendmsg(fd, &probe, MSG_DONTWAIT | MSG_NOSIGNAL) } {
        Err(e @ (Errno::EINVAL | Errno::EFAULT | Errno::ENOBUFS | Errno::ENOMEM)) => Err(e),
        // What there is to say of the connection is said where its bytes are.
        Err(e) => {
            s.keep_kernel_error(fd, true, e);
            Ok(())
        }
        Ok(_) => Ok(()),
    }
}

/// What the flags of preadv2(2) and pwritev2(2) mean to recv(2) and send(2).
#[inline]
pub(super) fn message_flags(rwf: c_int) -> c_int {
    let mut flags = 0;
    if rwf & libc::RWF_NOWAIT != 0 {
        flags |= MSG_DONTWAIT;
    }
    if rwf & RWF_NOSIGNAL != 0 {
        flags |= MSG_NOSIGNAL;
    }
    flags
}

/// Whether the kernel takes these flags of preadv2(2) or (`out`) pwritev2(2). It is asked by a call that moves nothing,
/// as its buffer is none.
#[inline]
pub(super) fn rwf(s: &Sock, fd: c_int, out: bool, rwf: c_int) -> Result<()> {
    if rwf & !libc::RWF_NOWAIT == 0 {
        return Ok(());
    }
    ask_kernel(s, fd, out, rwf)
}

#[cold]
fn ask_kernel(s: &Sock, fd: c_int, out: bool, rwf: c_int) -> Result<()> {
    match sys::try_vectors_2(fd, out, rwf | libc::RWF_NOWAIT) {
        Err(e @ (Errno::EOPNOTSUPP | Errno::EINVAL | Errno::EPIPE)) => Err(e),
        Err(e) => {
            s.keep_kernel_error(fd, out, e);
            Ok(())
        }
        Ok(_) => Ok(()),
    }
}

/// Receives into a list of which only the first elements have memory: these can be filled, and EFAULT is for bytes
/// that would go into the next. At the end of the stream there are none.
///
/// # Safety
/// The sound elements must describe writable memory.
#[cold]
pub(super) unsafe fn recv_partly(
    s: &Sock,
    fd: c_int,
    list: List<'_>,
    flags: c_int,
) -> Result<usize> {
    let good = &list.iov[..list.sound];
    let n = iov_len(good);
    let look = |len| {
        let (v, now) = (buffer(core::ptr::null(), len), flags & MSG_DONTWAIT);
        // SAFETY: nothing is written with MSG_TRUNC.
        unsafe { s.recv(fd, &v, MSG_PEEK | MSG_TRUNC | now) }
    };
    match look(n + 1)? {
        0 => return Ok(0),
        there if there > n => return Err(Errno::EFAULT),
        _ => {}
    }
    // SAFETY: promised by the caller.
    let got = unsafe { s.recv(fd, good, flags) }?;
    if got == n && flags & MSG_WAITALL != 0 && flags & MSG_PEEK == 0 {
        let _ = look(1);
    }
    Ok(got)
}

/// Sends from a list of which only the first elements have memory: EFAULT, unless there is something else to be said of the
/// connection, or these are more than TCP takes at a time.
///
/// # Safety
/// The sound elements must describe readable memory.
#[cold]
pub(super) unsafe fn send_partly(
    s: &Sock,
    fd: c_int,
    list: List<'_>,
    flags: c_int,
) -> Result<usize> {
    let good = &list.iov[..list.sound];
    // SAFETY: promised by the caller; the first has no bytes.
    unsafe {
        s.send(fd, &[], flags)?;
        if iov_len(good) > PIECE {
            return s.send(fd, good, flags);
        }
    }
    while s.mask(fd, true, false) & POLLOUT == 0 {
        if flags & MSG_DONTWAIT != 0 {
            return Err(Errno::EAGAIN);
        }
        s.block(fd, true)?;
    }
    Err(Errno::EFAULT)
}
