//! `execl`, `execlp` and `execle`, which take their argument strings one by one.
//!
//! Stable Rust can't define variadic functions, so these are a few instructions each: they lay the
//! argument registers down right below the arguments that came on the stack, which makes all of
//! them one array, and pass its address on. Nothing is copied or counted, and nothing allocates.
//!
//! These are naked functions because those are exported like any other function; the linker would
//! hide symbols that `global_asm!` defines.

use crate::process::{exec_list, exec_list_env, exec_list_search};

/// x86-64 System V: the path is in rdi, arguments 0 to 4 in rsi, rdx, rcx, r8 and r9, the others
/// above the return address. The return address gives up its place to r9 and moves below the array,
/// which also leaves the stack aligned to 16 bytes for the call.
#[cfg(target_arch = "x86_64")]
macro_rules! list_exec {
    ($($name:ident => $target:ident;)+) => {$(
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "pop rax",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_register rip, rax",
                "push r9",
                ".cfi_adjust_cfa_offset 8",
                "push r8",
                ".cfi_adjust_cfa_offset 8",
                "push rcx",
                ".cfi_adjust_cfa_offset 8",
                "push rdx",
                ".cfi_adjust_cfa_offset 8",
                "push rsi",
                ".cfi_adjust_cfa_offset 8",
                "mov rsi, rsp",
                "push rax",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset rip, 0",
                "call {target}",
                "pop rcx",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_register rip, rcx",
                "add rsp, 40",
                ".cfi_adjust_cfa_offset -40",
                "push rcx",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset rip, 0",
                "ret",
                ".cfi_endproc",
                target = sym $target,
            )
        }
    )+};
}

/// AArch64 Linux: the path is in x0, arguments 0 to 6 in x1 to x7, the others from sp upwards. The
/// 80 bytes are the frame record, 8 bytes to keep sp aligned, and the seven registers.
#[cfg(target_arch = "aarch64")]
macro_rules! list_exec {
    ($($name:ident => $target:ident;)+) => {$(
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "stp x29, x30, [sp, #-80]!",
                ".cfi_def_cfa_offset 80",
                ".cfi_offset x29, -80",
                ".cfi_offset x30, -72",
                "mov x29, sp",
                "str x1, [sp, #24]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "add x1, sp, #24",
                "bl {target}",
                "ldp x29, x30, [sp], #80",
                ".cfi_restore x29",
                ".cfi_restore x30",
                ".cfi_def_cfa_offset 0",
                "ret",
                ".cfi_endproc",
                target = sym $target,
            )
        }
    )+};
}

list_exec! {
    execl => exec_list;
    execlp => exec_list_search;
    execle => exec_list_env;
}
