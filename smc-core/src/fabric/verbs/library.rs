//! libibverbs, opened at run time: programs on machines without it must start all the same.
//!
//! The layouts come from its own header through `rdma-sys`, but none of that crate's functions is
//! called, as a reference to one would make libibverbs a needed library of ours. Functions
//! of which the library keeps an old and a new version are asked for by version (`nm -D` shows them).
//! The calls of the data path are not here: they are function pointers in `ibv_context`.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use rdma_sys as sys;

use super::Unusable;
use crate::fds;

// The layouts that rdma-sys writes by hand, checked against `sizeof` on LP64 in C.
const _: () = {
    assert!(size_of::<sys::ibv_wc>() == 48);
    assert!(core::mem::offset_of!(sys::ibv_wc, qp_num) == 28);
    assert!(size_of::<sys::ibv_send_wr>() == 128);
    assert!(core::mem::offset_of!(sys::ibv_send_wr, wr) == 40);
    assert!(size_of::<sys::ibv_ah_attr>() == 32);
    assert!(size_of::<sys::ibv_qp_attr>() == 144);
    assert!(size_of::<sys::ibv_async_event>() == 16);
};

/// Loads one symbol as the function type of the field it goes to.
macro_rules! library {
    ($( $(#[$doc:meta])* $name:ident @ $version:literal: fn($($argument:ty),*) $(-> $result:ty)?; )*) => {
        /// The functions in use.
        pub(super) struct Library {
            $( $(#[$doc])* pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?, )*
        }

        impl Library {
            /// # Safety
            /// `handle` must be libibverbs.so.1.
            unsafe fn load(handle: *mut c_void) -> Result<Library, Unusable> {
                Ok(Library { $( $name: {
                    let symbol = concat!(stringify!($name), "\0");
                    let version = concat!($version, "\0");
                    // SAFETY: both texts end with NUL; the handle is valid.
                    let address = unsafe {
                        libc::dlvsym(handle, symbol.as_ptr().cast(), version.as_ptr().cast())
                    };
                    if address.is_null() {
                        return Err(Unusable::LibraryTooOld(stringify!($name)));
                    }
                    // SAFETY: the version of the symbol fixes its type, which is the field's: that of the
                    // library's manual page.
                    unsafe {
                        core::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?
                        >(address)
                    }
                }, )* })
            }
        }
    };
}

library! {
    ibv_get_device_list @ "IBVERBS_1.1": fn(*mut c_int) -> *mut *mut sys::ibv_device;
    ibv_free_device_list @ "IBVERBS_1.1": fn(*mut *mut sys::ibv_device);
    ibv_get_device_name @ "IBVERBS_1.1": fn(*mut sys::ibv_device) -> *const c_char;
    ibv_open_device @ "IBVERBS_1.1": fn(*mut sys::ibv_device) -> *mut sys::ibv_context;
    ibv_close_device @ "IBVERBS_1.1": fn(*mut sys::ibv_context) -> c_int;
    ibv_query_device @ "IBVERBS_1.1": fn(*mut sys::ibv_context, *mut sys::ibv_device_attr) -> c_int;
    /// Writes the leading part of the attributes only, up to `link_layer`.
    ibv_query_port @ "IBVERBS_1.1": fn(*mut sys::ibv_context, u8, *mut sys::ibv_port_attr) -> c_int;
    ibv_query_gid @ "IBVERBS_1.1": fn(*mut sys::ibv_context, u8, c_int, *mut sys::ibv_gid) -> c_int;
    ibv_get_async_event @ "IBVERBS_1.1": fn(*mut sys::ibv_context, *mut sys::ibv_async_event) -> c_int;
    ibv_ack_async_event @ "IBVERBS_1.1": fn(*mut sys::ibv_async_event);
    ibv_alloc_pd @ "IBVERBS_1.1": fn(*mut sys::ibv_context) -> *mut sys::ibv_pd;
    ibv_dealloc_pd @ "IBVERBS_1.1": fn(*mut sys::ibv_pd) -> c_int;
    ibv_reg_mr @ "IBVERBS_1.1": fn(*mut sys::ibv_pd, *mut c_void, usize, c_int) -> *mut sys::ibv_mr;
    ibv_dereg_mr @ "IBVERBS_1.1": fn(*mut sys::ibv_mr) -> c_int;
    ibv_create_comp_channel @ "IBVERBS_1.0": fn(*mut sys::ibv_context) -> *mut sys::ibv_comp_channel;
    ibv_destroy_comp_channel @ "IBVERBS_1.0": fn(*mut sys::ibv_comp_channel) -> c_int;
    ibv_create_cq @ "IBVERBS_1.1": fn(*mut sys::ibv_context, c_int, *mut c_void,
        *mut sys::ibv_comp_channel, c_int) -> *mut sys::ibv_cq;
    ibv_destroy_cq @ "IBVERBS_1.1": fn(*mut sys::ibv_cq) -> c_int;
    ibv_get_cq_event @ "IBVERBS_1.1": fn(*mut sys::ibv_comp_channel, *mut *mut sys::ibv_cq,
        *mut *mut c_void) -> c_int;
    ibv_ack_cq_events @ "IBVERBS_1.1": fn(*mut sys::ibv_cq, u32);
    ibv_create_qp @ "IBVERBS_1.1": fn(*mut sys::ibv_pd, *mut sys::ibv_qp_init_attr) -> *mut sys::ibv_qp;
    ibv_modify_qp @ "IBVERBS_1.1": fn(*mut sys::ibv_qp, *mut sys::ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp @ "IBVERBS_1.1": fn(*mut sys::ibv_qp) -> c_int;
    ibv_is_fork_initialized @ "IBVERBS_1.13": fn() -> sys::ibv_fork_status;
}

/// Opens the library, once in a process. It is never closed.
pub(super) fn library() -> Result<&'static Library, Unusable> {
    static LIBRARY: OnceLock<Result<Library, Unusable>> = OnceLock::new();
    // The files get numbers that a thread of the program might be closing.
    let library = LIBRARY.get_or_init(|| fds::make_private(|_| open()));
    library.as_ref().map_err(Clone::clone)
}

/// Whether libibverbs can be used here, devices or not.
pub fn check_library() -> Result<(), Unusable> {
    library().map(drop)
}

fn open() -> Result<Library, Unusable> {
    // SAFETY: the name ends with NUL. The library's constructors only set up its own tables.
    let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        return Err(Unusable::LibraryMissing(last_dl_error()));
    }
    // SAFETY: just opened by that name.
    unsafe { Library::load(handle) }
}

impl Library {
    /// Whether pages that a device uses stay with the parent at a fork. The kernel's RDMA module knows,
    /// so the answer has a meaning only where there is a device.
    pub(super) fn check_fork(&self) -> Result<(), Unusable> {
        // SAFETY: may be called at any time (ibv_is_fork_initialized(3)).
        match fds::trusted(|| unsafe { (self.ibv_is_fork_initialized)() }) {
            sys::IBV_FORK_UNNEEDED => Ok(()),
            _ => Err(Unusable::ForkUnsafe),
        }
    }
}

fn last_dl_error() -> String {
    // SAFETY: dlerror returns null or a text that lives until this thread's next call of it.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    text.unwrap_or_else(|| "unknown error".into())
}
